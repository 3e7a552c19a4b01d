//! Many files, few of them open.
//!
//! A checkpoint has about a hundred shards and a process may be allowed sixteen descriptors. The
//! members of a set open when they are read and close when others need the place, least recently
//! read first. A file that is being read is never closed; if all places are being read from, the
//! next reader waits for one.
//!
//! A file that opens again must be the one it was: same length, and a [`Stamp`] of the
//! [same bytes](Stamp::same_bytes) where the source has them. A set can be told the stamps of files that
//! were read before it was made, so that what was checked in them still holds.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::clock::Clock;
use super::{MAX_ALIGNMENT, ReadAt, ReadError, ReadFault, Schedule, Source, Stamp};

/// How many files a set should keep open in this process: half of the soft limit on descriptors,
/// between 1 and 256. The other half is for whoever else opens files.
#[must_use]
pub fn open_limit() -> usize {
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(soft / 2).unwrap_or(usize::MAX).clamp(1, 256)
}

/// A file had another length or [`Stamp`] when it was opened again, so its bytes are not what they were. Comes
/// inside an [`io::Error`] of kind [`io::ErrorKind::InvalidData`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Length when first opened, in bytes.
    pub was: u64,
    /// Length now, in bytes.
    pub now: u64,
}

impl std::fmt::Display for Changed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { was, now } = self;
        f.write_str("the file changed while in use: ")?;
        if was == now {
            write!(f, "it was replaced or written to, though it has {now} bytes as before")
        } else {
            write!(f, "it had {was} bytes and now has {now}")
        }
    }
}

impl std::error::Error for Changed {}

/// How long a read may bring nothing, unless somebody says otherwise.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long to ask for a first descriptor again when the system has none.
const SCARCE: Duration = Duration::from_secs(1);

/// A list of files of which a bounded number is open. Clones are the same set.
#[derive(Clone)]
pub struct FileSet(Arc<Inner>, Duration);

struct Inner {
    source: Arc<dyn Source>,
    paths: Vec<PathBuf>,
    state: Mutex<State>,
    changed: Condvar,
    schedule: Option<Arc<dyn Schedule>>,
}

struct State {
    slots: Vec<Slot>,
    /// Length and alignment of each file that was ever open.
    facts: Vec<Option<(u64, usize)>>,
    /// What each file must be: what it was when it was first open, or when the maker of the set read it.
    stamps: Vec<Option<Stamp>>,
    /// Slots that are not `Closed`.
    open: usize,
    limit: usize,
    clock: u64,
}

enum Slot {
    Closed,
    Opening,
    Open { file: Arc<dyn ReadAt>, users: usize, used: u64 },
}

impl FileSet {
    /// A set of these files, none of them open yet. At most `limit` (at least one) will be open at a
    /// time; see [`open_limit`]. Should the system refuse a descriptor earlier, the set makes do with
    /// what it has.
    #[must_use]
    pub fn new(source: Arc<dyn Source>, paths: Vec<PathBuf>, limit: usize) -> Self {
        Self::with_stamps(source, paths.into_iter().map(|p| (p, None)).collect(), limit)
    }

    /// The same of files that were read before. Each is refused, by [`Changed`], if its stamp is not
    /// one of the [same bytes](Stamp::same_bytes) as the one given.
    #[must_use]
    pub fn with_stamps(source: Arc<dyn Source>, files: Vec<(PathBuf, Option<Stamp>)>, limit: usize) -> Self {
        let (paths, stamps): (Vec<_>, Vec<_>) = files.into_iter().unzip();
        let slots = paths.iter().map(|_| Slot::Closed).collect();
        let facts = vec![None; paths.len()];
        let schedule = source.schedule();
        let limit = schedule.as_ref().map_or(limit, |s| s.descriptors().min(limit));
        let state = State { slots, facts, stamps, open: 0, limit: limit.max(1), clock: 0 };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self(Arc::new(Inner { source, paths, state, changed, schedule }), PATIENCE)
    }

    /// The same set with another [`PATIENCE`].
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self(self.0, patience)
    }

    /// How long a read may bring nothing before whoever waits for it gives up.
    #[must_use]
    pub const fn patience(&self) -> Duration {
        self.1
    }

    /// Who decides which reader goes on; see [`Source::schedule`].
    pub(crate) fn schedule(&self) -> Option<Arc<dyn Schedule>> {
        self.0.schedule.clone()
    }

    /// Number of files in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.paths.len()
    }

    /// Whether the set has no files.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.paths.is_empty()
    }

    /// Number of files that are open now.
    #[must_use]
    pub fn open_files(&self) -> usize {
        self.0.lock().open
    }

    /// Whether the files that are open are still what they were: of the same length, and not written to.
    /// Names and permissions may change, the bytes read so far may not.
    ///
    /// # Errors
    /// The first file that is not, with [`Changed`]; or what the system says instead.
    pub fn check(&self) -> Result<(), ReadError> {
        let open: Vec<_> = {
            let state = self.0.lock();
            let file = |slot: &Slot| match slot {
                Slot::Open { file, .. } => Some(Arc::clone(file)),
                Slot::Opening | Slot::Closed => None,
            };
            let files = state.slots.iter().enumerate();
            files.filter_map(|(i, slot)| Some((i, file(slot)?, state.stamps[i]?))).collect()
        };
        for (i, file, was) in open {
            let failed = |e| ReadError { path: self.0.paths[i].clone(), offset: 0, fault: ReadFault::System(e) };
            let Some(now) = file.stamp_now().map_err(failed)? else { continue };
            if !now.same_bytes(&was) {
                let changed = Changed { was: was.len, now: now.len };
                return Err(failed(io::Error::new(io::ErrorKind::InvalidData, changed)));
            }
        }
        Ok(())
    }

    /// The file at `index` of the list, which opens when it is first asked anything; `None` if the
    /// list is shorter. The handle costs no descriptor and may be kept.
    #[must_use]
    pub fn file(&self, index: usize) -> Option<Arc<dyn ReadAt>> {
        (index < self.len()).then(|| Arc::new(Member { set: Arc::clone(&self.0), index }) as Arc<dyn ReadAt>)
    }
}

impl std::fmt::Debug for FileSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSet").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Inner {
    /// State is consistent whenever the lock is free, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file, open, and kept open until the lease is dropped.
    fn lease(&self, index: usize) -> io::Result<Lease<'_>> {
        let mut refused = None;
        if let Some(schedule) = &self.schedule {
            schedule.asks();
        }
        let mut state = self.lock();
        loop {
            if let Some(file) = state.take_up(index) {
                return Ok(Lease { set: self, index, file: Some(file) });
            }
            let closed = matches!(state.slots[index], Slot::Closed);
            if closed && (state.open < state.limit || state.close_idle()) {
                state = match self.open(state, index) {
                    Ok(state) => state,
                    Err(e) => {
                        // Out of descriptors before the limit: live with fewer, if there are any.
                        let scarce = matches!(Errno::from_io_error(&e), Some(Errno::MFILE | Errno::NFILE));
                        let mut state = self.lock();
                        if !scarce {
                            return Err(e);
                        }
                        if state.open > 0 {
                            state.limit = state.open;
                        } else if refused.get_or_insert_with(Clock::new).look() < SCARCE {
                            // None of ours to close: whoever has them may be about to, such as an open
                            // of ours that failed at the same moment, or `check`.
                            drop(state);
                            std::thread::sleep(Duration::from_millis(2));
                            state = self.lock();
                        } else {
                            return Err(e);
                        }
                        state
                    }
                };
                continue;
            }
            state = self.sleep(state);
        }
    }

    /// Until something has changed.
    fn sleep<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if let Some(schedule) = &self.schedule {
            schedule.sleeps();
        }
        let state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        let Some(schedule) = &self.schedule else { return state };
        drop(state);
        schedule.asks();
        self.lock()
    }

    /// Wakes who sleeps. Takes the lock's guard to show that it is held.
    fn wake(&self, _: &MutexGuard<'_, State>) {
        if let Some(schedule) = &self.schedule {
            schedule.wakes();
        }
        self.changed.notify_all();
    }

    /// Opens a file in a place that is free, without the lock: a slow open delays nobody else.
    fn open<'a>(&'a self, mut state: MutexGuard<'a, State>, index: usize) -> io::Result<MutexGuard<'a, State>> {
        state.slots[index] = Slot::Opening;
        state.open += 1;
        drop(state);
        let place = Place { set: self, index };
        let file = self.source.open(&self.paths[index])?;
        let now = file.len()?;
        let align = file.alignment();
        let stamp = file.stamp();
        std::mem::forget(place);
        let mut state = self.lock();
        let known = state.stamps[index];
        let same = known.zip(stamp).is_none_or(|(was, now)| was.same_bytes(&now));
        let was = known.map(|s| s.len).or_else(|| state.facts[index].map(|f| f.0)).unwrap_or(now);
        if !same || was != now {
            drop(state);
            drop(file);
            drop(Place { set: self, index });
            return Err(io::Error::new(io::ErrorKind::InvalidData, Changed { was, now }));
        }
        state.facts[index] = Some((now, align));
        state.stamps[index] = known.or(stamp);
        let used = state.clock;
        state.slots[index] = Slot::Open { file, users: 0, used };
        self.wake(&state);
        Ok(state)
    }
}

impl State {
    /// The file, with one more user, if it is open.
    fn take_up(&mut self, index: usize) -> Option<Arc<dyn ReadAt>> {
        self.clock += 1;
        let Slot::Open { file, users, used } = &mut self.slots[index] else { return None };
        *users += 1;
        *used = self.clock;
        Some(Arc::clone(file))
    }

    /// Closes the file that has not been read for longest; false if all are being read.
    fn close_idle(&mut self) -> bool {
        let idle = self.slots.iter().enumerate().filter_map(|(i, slot)| match slot {
            Slot::Open { users: 0, used, .. } => Some((*used, i)),
            Slot::Open { .. } | Slot::Opening | Slot::Closed => None,
        });
        let Some((_, oldest)) = idle.min() else { return false };
        self.slots[oldest] = Slot::Closed;
        self.open -= 1;
        true
    }
}

/// A place taken for a file that is being opened; dropped if that fails or panics.
struct Place<'a> {
    set: &'a Inner,
    index: usize,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.set.lock();
        state.slots[self.index] = Slot::Closed;
        state.open -= 1;
        self.set.wake(&state);
    }
}

/// The right to read from an open file.
struct Lease<'a> {
    set: &'a Inner,
    index: usize,
    /// `Some` until dropped.
    file: Option<Arc<dyn ReadAt>>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Before the slot is given up, so that closing the slot closes the descriptor.
        self.file = None;
        let mut state = self.set.lock();
        if let Slot::Open { users, .. } = &mut state.slots[self.index] {
            *users -= 1;
        }
        self.set.wake(&state);
    }
}

/// One file of a set.
struct Member {
    set: Arc<Inner>,
    index: usize,
}

impl Member {
    fn facts(&self) -> io::Result<(u64, usize)> {
        let known = self.set.lock().facts[self.index];
        if let Some(facts) = known {
            return Ok(facts);
        }
        let lease = self.set.lease(self.index)?;
        let known = self.set.lock().facts[self.index];
        drop(lease);
        known.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl ReadAt for Member {
    fn len(&self) -> io::Result<u64> {
        Ok(self.facts()?.0)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let lease = self.set.lease(self.index)?;
        match &lease.file {
            Some(file) => file.read_at(buf, offset),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// That of the file when it was last opened; the largest there is if it cannot be opened, so that
    /// the read tells why.
    fn alignment(&self) -> usize {
        self.facts().map_or(MAX_ALIGNMENT, |facts| facts.1)
    }

    fn path(&self) -> &Path {
        &self.set.paths[self.index]
    }

    fn stamp(&self) -> Option<Stamp> {
        self.facts().ok()?;
        self.set.lock().stamps[self.index]
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, write};
    use super::super::{Detour, Detoured, Disk, Mode, read_exact_at};
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Counts the files that are open, and refuses more than it has.
    struct Counting {
        open: Arc<AtomicUsize>,
        most: AtomicUsize,
        has: usize,
    }

    impl Counting {
        fn new(has: usize) -> Arc<Self> {
            Arc::new(Self { open: Arc::default(), most: AtomicUsize::new(0), has })
        }
    }

    /// A file that is open.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Detour for Counted {
        fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            file.read_at(buf, offset)
        }
    }

    impl Source for Counting {
        fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
            let file = Disk::new(Mode::Direct).open(path)?;
            let count = self.open.fetch_add(1, Ordering::SeqCst) + 1;
            let file = Arc::new(Detoured::new(file, Counted(Arc::clone(&self.open))));
            if count > self.has {
                return Err(Errno::MFILE.into());
            }
            self.most.fetch_max(count, Ordering::SeqCst);
            Ok(file)
        }
    }

    fn shards(dir: &tempfile::TempDir, count: usize) -> Vec<PathBuf> {
        (0..count).map(|i| write(dir, &format!("shard-{i}"), 5000 + i)).collect()
    }

    /// Reads all over the set from several threads.
    fn hammer(set: &FileSet, threads: usize) {
        std::thread::scope(|scope| {
            for t in 0..threads {
                scope.spawn(move || {
                    for i in 0..200 {
                        let shard = (t * 31 + i * 7) % set.len();
                        let file = set.file(shard).unwrap();
                        assert_eq!(file.len().unwrap(), 5000 + shard as u64);
                        let mut buf = [0; 900];
                        read_exact_at(&*file, &mut buf, 4100).unwrap();
                        assert_eq!(buf[..], bytes(4100, 900));
                    }
                });
            }
        });
    }

    #[test]
    fn no_more_files_are_open_than_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = shards(&dir, 24);
        for limit in [0, 1, 3, 100] {
            let source = Counting::new(usize::MAX);
            let set = FileSet::new(source.clone(), paths.clone(), limit);
            hammer(&set, 4);
            let most = source.most.load(Ordering::SeqCst);
            assert!(most <= limit.max(1), "limit {limit} open {most}");
            // The process itself may be allowed fewer than the set.
            assert!((1..=limit.clamp(1, 24)).contains(&set.open_files()));
            drop(set);
            assert_eq!(source.open.load(Ordering::SeqCst), 0);
        }
        assert!((1..=256).contains(&open_limit()));
    }

    #[test]
    fn a_system_with_fewer_descriptors_than_the_limit_is_enough() {
        let dir = tempfile::tempdir().unwrap();
        let source = Counting::new(2);
        let set = FileSet::new(source.clone(), shards(&dir, 9), 8);
        hammer(&set, 1);
        hammer(&set, 3);
        assert!(set.open_files() <= 2);
        let none = FileSet::new(Counting::new(0), shards(&dir, 2), 8);
        let error = read_exact_at(&*none.file(0).unwrap(), &mut [0; 4], 0).unwrap_err();
        assert!(matches!(error.fault, ReadFault::System(e) if e.raw_os_error() == Some(24)));
    }

    /// The story: two opens at once had the last descriptor refused to each other, or `check` held a file
    /// that had just been closed; a set with nothing left to close then gave up on the spot.
    #[test]
    fn a_descriptor_that_comes_free_a_moment_later_is_waited_for() {
        struct Later(AtomicUsize);
        impl Source for Later {
            fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
                if self.0.fetch_add(1, Ordering::SeqCst) < 3 {
                    return Err(Errno::MFILE.into());
                }
                Disk::default().open(path)
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let set = FileSet::new(Arc::new(Later(AtomicUsize::new(0))), shards(&dir, 1), 8);
        read_exact_at(&*set.file(0).unwrap(), &mut [0; 4], 0).unwrap();
        assert_eq!(set.open_files(), 1);
    }

    /// The story: bytes of the same length were written into a shard that stayed open, and one pass
    /// used some of each.
    #[test]
    fn a_file_that_is_written_to_while_open_is_found() {
        use std::os::unix::fs::FileExt as _;
        let dir = tempfile::tempdir().unwrap();
        let paths = shards(&dir, 2);
        let set = FileSet::new(Arc::new(Disk::default()), paths.clone(), 2);
        set.check().unwrap();
        read_exact_at(&*set.file(1).unwrap(), &mut [0; 4], 0).unwrap();
        set.check().unwrap();
        let write = |path: &PathBuf| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(b"other", 100).unwrap();
            // A clock of the file system may stand still between two writes.
            file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(1)).unwrap();
        };
        // A file that is not open is looked at when it opens.
        write(&paths[0]);
        set.check().unwrap();
        let permissions = std::fs::metadata(&paths[1]).unwrap().permissions();
        std::fs::set_permissions(&paths[1], permissions).unwrap();
        set.check().unwrap();
        write(&paths[1]);
        let error = set.check().unwrap_err();
        assert!(error.path == paths[1] && error.to_string().contains("written to"), "{error}");
    }

    #[test]
    fn a_file_replaced_behind_our_back_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let set = FileSet::new(Arc::new(Disk::default()), shards(&dir, 2), 1);
        let (a, b) = (set.file(0).unwrap(), set.file(1).unwrap());
        for file in [&a, &b] {
            read_exact_at(&**file, &mut [0; 4], 0).unwrap();
        }
        write(&dir, "shard-0", 4999);
        let error = read_exact_at(&*a, &mut [0; 4], 0).unwrap_err();
        assert!(error.to_string().contains("had 5000 bytes and now has 4999"), "{error}");
        read_exact_at(&*b, &mut [0; 4], 0).unwrap();
        assert!(set.file(2).is_none() && set.len() == 2 && !set.is_empty());
    }

    #[test]
    fn a_file_of_the_same_length_is_not_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let paths = shards(&dir, 3);
        let swap = |shard: &str| {
            let len = usize::try_from(std::fs::metadata(dir.path().join(shard)).unwrap().len()).unwrap();
            std::fs::rename(write(&dir, "other", len), dir.path().join(shard)).unwrap();
        };
        let changed = |file: &dyn ReadAt| {
            let error = read_exact_at(file, &mut [0; 4], 0).unwrap_err();
            assert!(error.to_string().contains("replaced or written to"), "{error}");
            assert_eq!(error.path, file.path());
        };
        // Between two reads, when it had to be closed.
        let set = FileSet::new(Arc::new(Disk::default()), paths.clone(), 1);
        let files: Vec<_> = (0..3).map(|i| set.file(i).unwrap()).collect();
        read_exact_at(&*files[0], &mut [0; 4], 0).unwrap();
        assert_eq!(files[0].stamp(), Disk::default().file(&paths[0]).unwrap().stamp());
        read_exact_at(&*files[1], &mut [0; 4], 0).unwrap();
        swap("shard-0");
        changed(&*files[0]);
        changed(&*files[0]);
        read_exact_at(&*files[1], &mut [0; 4], 0).unwrap();
        assert_eq!(set.open_files(), 1);
        // Before the first, when the set knows what was read before it was made.
        let stamp = |p: &PathBuf| Disk::default().file(p).unwrap().stamp();
        let known = paths.iter().map(|p| (p.clone(), stamp(p))).collect();
        swap("shard-2");
        let set = FileSet::with_stamps(Arc::new(Disk::default()), known, 8);
        let files: Vec<_> = (0..3).map(|i| set.file(i).unwrap()).collect();
        read_exact_at(&*files[0], &mut [0; 4], 0).unwrap();
        changed(&*files[2]);
        assert!(files[2].len().is_err() && files[2].stamp().is_none());
        assert_eq!(set.open_files(), 1);
        // A set that was told nothing has nothing to hold it against.
        let set = FileSet::new(Arc::new(Disk::default()), paths, 8);
        read_exact_at(&*set.file(2).unwrap(), &mut [0; 4], 0).unwrap();
    }

    /// The story: with few descriptors, a `chmod` ended the run as if somebody had written to the file.
    #[test]
    fn names_and_permissions_may_change() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let paths = shards(&dir, 2);
        let set = FileSet::new(Arc::new(Disk::default()), paths.clone(), 1);
        let files: Vec<_> = (0..2).map(|i| set.file(i).unwrap()).collect();
        for mode in [0o600, 0o640] {
            for (file, path) in files.iter().zip(&paths) {
                read_exact_at(&**file, &mut [0; 4], 0).unwrap();
                // Attributes change at times that a coarse clock can tell apart.
                std::thread::sleep(Duration::from_millis(20));
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
                std::fs::hard_link(path, path.with_extension(format!("{mode}"))).unwrap();
                set.check().unwrap();
            }
        }
    }

    #[test]
    fn failures_to_open_come_out_of_the_read_and_free_the_place() {
        struct Panics(AtomicBool);
        impl Source for Panics {
            fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
                assert!(self.0.swap(true, Ordering::SeqCst), "first open");
                Disk::default().open(path)
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let set = FileSet::new(Arc::new(Disk::default()), vec![missing.clone(), write(&dir, "f", 10)], 1);
        for _ in 0..2 {
            let file = set.file(0).unwrap();
            assert!(file.len().is_err());
            assert_eq!(read_exact_at(&*file, &mut [0; 1], 0).unwrap_err().path, missing);
            assert_eq!(set.open_files(), 0);
        }
        assert!(read_exact_at(&*set.file(1).unwrap(), &mut [0; 10], 0).is_ok());

        let set = FileSet::new(Arc::new(Panics(AtomicBool::new(false))), vec![write(&dir, "g", 10)], 1);
        let file = set.file(0).unwrap();
        assert!(std::thread::scope(|s| s.spawn(|| file.len()).join().is_err()));
        assert_eq!(file.len().unwrap(), 10);
    }
}
