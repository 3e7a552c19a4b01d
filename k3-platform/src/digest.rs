//! SHA-256 of whole files, several at a time, and a record of it that survives the process.
//!
//! Files are read like weights: past the page cache, with several reads in flight, so that hashing
//! 1.56 TB does not push everything else out of memory. Each thread digests one file; the digest of
//! one file cannot be divided.
//!
//! The record is a text file with a line for each file that was digested,
//!
//! ```text
//! SHA256 DEVICE INODE LENGTH MTIME.NANOSECONDS CTIME.NANOSECONDS NAME
//! ```
//!
//! appended when the digest is known. A line counts as long as the file has the same [`Stamp`]: nobody
//! can write to a file without changing it. A line that is broken off, or damaged, counts for nothing,
//! so whatever stops the process costs the files it was in the middle of.

use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::io::{FileSet, Stamp};
use crate::segment::{Place, Read, block};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A SHA-256.
pub type Sha = [u8; 32];

/// Bytes of one read, if there is memory for it.
const READ: usize = 4 << 20;

/// Bytes of one read at least.
const LEAST_READ: usize = 64 << 10;

/// Reads that each thread has in flight.
const AHEAD: usize = 4;

/// Reads in flight at most, and so threads that read.
pub const DEPTH: usize = 16;

/// Memory for buffers without which nothing is digested (bytes).
pub const LEAST_MEMORY: u64 = (AHEAD * LEAST_READ) as u64;

/// The hexadecimal digits of a digest.
#[must_use]
pub fn hex(sha: &Sha) -> String {
    sha.iter().map(|b| format!("{b:02x}")).collect()
}

/// A digest from its 64 hexadecimal digits.
#[must_use]
pub fn from_hex(text: &str) -> Option<Sha> {
    let mut sha = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in sha.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(sha)
}

/// The digest of bytes in memory.
#[must_use]
pub fn of(bytes: &[u8]) -> Sha {
    Sha256::digest(bytes).into()
}

/// What happens while files are digested.
#[derive(Debug)]
pub enum Event {
    /// Time has passed: bytes digested so far, of all files.
    Bytes(u64),
    /// A file is done: its number in the set, its digest and which file it was, or why it has none.
    Done(usize, Result<(Sha, Option<Stamp>), Error>),
}

enum Message {
    Bytes(u64),
    Done(usize, Result<(Sha, Option<Stamp>), Error>),
}

/// How files are read: on so many threads, in reads of so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    threads: usize,
    read: usize,
}

impl Way {
    /// For so many files, with buffers of `memory` bytes in all: fewer threads, then shorter reads.
    fn within(threads: usize, files: usize, memory: u64) -> Self {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        let threads = threads.min(files).min(memory / (AHEAD * READ)).max(1);
        let each = memory / (threads * AHEAD);
        Self { threads, read: READ.min(each / LEAST_READ * LEAST_READ).max(LEAST_READ) }
    }
}

/// Digests the files of a set in order, on `threads` threads or on as many as `memory` bytes of buffers are
/// enough for (each thread takes 16 MiB, one thread alone less, but no less than [`LEAST_MEMORY`]). Every
/// file gets its [`Event::Done`]; one that cannot be read does not keep the others from theirs.
///
/// # Errors
/// [`Error::Stopped`] once the flag is set; [`Error::Threads`] if the system refuses the first thread. With
/// fewer than wished for it takes longer.
pub fn sha256(
    files: &FileSet,
    threads: usize,
    memory: u64,
    stop: &Arc<AtomicBool>,
    event: impl FnMut(Event),
) -> Result<(), Error> {
    digest(files, Way::within(threads, files.len(), memory), usize::MAX, stop, event)
}

/// The same, where the system grants `granted` threads and no more.
fn digest(
    files: &FileSet,
    Way { threads, read }: Way,
    granted: usize,
    stop: &Arc<AtomicBool>,
    mut event: impl FnMut(Event),
) -> Result<(), Error> {
    let fetch = Fetch::new(files.clone(), (threads * AHEAD).min(DEPTH), Arc::clone(stop))?;
    let next = AtomicUsize::new(0);
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        for number in 0..threads {
            let (send, fetch, next) = (send.clone(), &fetch, &next);
            let work = move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= files.len() {
                        break;
                    }
                    let result = one(files, fetch, number, read, &send);
                    let stopped = matches!(result, Err(Error::Stopped));
                    if send.send(Message::Done(number, result)).is_err() || stopped {
                        break;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("k3-digest".to_owned());
            let started = match granted {
                most if number < most => thread.spawn_scoped(scope, work).map(drop),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            };
            match started {
                Ok(()) => {}
                // Those that work already would go on, unseen, until all files are done.
                Err(_) if number > 0 => break,
                Err(refused) => return Err(Error::Threads(refused)),
            }
        }
        drop(send);
        let (mut bytes, mut stopped) = (0, false);
        loop {
            match receive.recv_timeout(Duration::from_millis(200)) {
                Ok(Message::Bytes(more)) => bytes += more,
                Ok(Message::Done(_, Err(Error::Stopped))) => stopped = true,
                Ok(Message::Done(number, result)) => event(Event::Done(number, result)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            event(Event::Bytes(bytes));
        }
        if stopped { Err(Error::Stopped) } else { Ok(()) }
    })
}

/// Digests one file, in reads of `each` bytes.
fn one(
    files: &FileSet,
    fetch: &Fetch,
    number: usize,
    each: usize,
    send: &Sender<Message>,
) -> Result<(Sha, Option<Stamp>), Error> {
    let file = files.file(number).ok_or(Error::Order)?;
    let len = file.len().map_err(|source| Error::Open { path: file.path().to_owned(), source })?;
    let shard = u16::try_from(number).map_err(|_| Error::Order)?;
    let reads = (0..len).step_by(each).map(|offset| {
        let len = usize::try_from(len - offset).unwrap_or(each).min(each);
        Read { place: Place { shard, offset }, len, at: 0 }
    });
    let (answer, answers) = channel();
    let mut sha = Sha256::new();
    let mut waiting = reads.clone();
    let mut arrived: HashMap<u64, AlignedBuf> = HashMap::new();
    let mut free = Vec::new();
    for _ in waiting.clone().take(AHEAD) {
        free.push(AlignedBuf::zeroed(each.next_multiple_of(block()))?);
    }
    for read in reads {
        let data = loop {
            while let Some(buffer) = free.pop() {
                let Some(ahead) = waiting.next() else { break };
                fetch.submit(&[ahead], buffer, ahead.place.offset, Priority::Prefetch, &answer);
            }
            if let Some(data) = arrived.remove(&read.place.offset) {
                break data;
            }
            let fetched = fetch.wait(&answers)?;
            fetched.result?;
            arrived.insert(fetched.tag, fetched.buffer);
        };
        fetch.check()?;
        sha.update(&data[..read.len]);
        free.push(data);
        let _nobody_listens = send.send(Message::Bytes(read.len as u64));
    }
    Ok((sha.finalize().into(), file.stamp()))
}

/// Digests that are known from before.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    known: HashMap<String, (Stamp, Sha)>,
    file: File,
}

impl Record {
    /// Opens a record, or begins one. Folders on the way are made.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let text = match fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let known = text.lines().filter_map(parse).collect();
        let mut file = File::options().create(true).append(true).open(path)?;
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n")?;
        }
        Ok(Self { path: path.to_owned(), known, file })
    }

    /// The digest of a file, if it is known and the file is still that one.
    #[must_use]
    pub fn get(&self, name: &str, stamp: Stamp) -> Option<Sha> {
        self.known.get(name).filter(|(known, _)| *known == stamp).map(|&(_, sha)| sha)
    }

    /// Adds a digest.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&mut self, name: &str, stamp: Stamp, sha: Sha) -> io::Result<()> {
        self.known.insert(name.to_owned(), (stamp, sha));
        let Stamp { dev, ino, len, mtime, ctime } = stamp;
        let line = format!("{} {dev} {ino} {len} {}.{} {}.{} {name}\n", hex(&sha), mtime.0, mtime.1, ctime.0, ctime.1);
        self.file.write_all(line.as_bytes())
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it: nothing is left to be resumed.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

fn parse(line: &str) -> Option<(String, (Stamp, Sha))> {
    let mut parts = line.splitn(7, ' ');
    let sha = from_hex(parts.next()?)?;
    let mut number = || parts.next()?.parse().ok();
    let (dev, ino, len) = (number()?, number()?, number()?);
    let mut time = || {
        let (seconds, nanoseconds) = parts.next()?.split_once('.')?;
        Some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
    };
    let (mtime, ctime) = (time()?, time()?);
    Some((parts.next()?.to_owned(), (Stamp { dev, ino, len, mtime, ctime }, sha)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Disk, Faults, Faulty, Mode, Source};

    fn set(source: impl Source + 'static, dir: &Path, lens: &[usize]) -> (FileSet, Vec<Vec<u8>>) {
        let contents: Vec<Vec<u8>> =
            lens.iter().map(|&len| (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect()).collect();
        let paths: Vec<PathBuf> = (0..lens.len()).map(|i| dir.join(format!("f{i}"))).collect();
        paths.iter().zip(&contents).for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
        (FileSet::new(Arc::new(source), paths, 2), contents)
    }

    #[test]
    fn digests_are_those_of_the_bytes_whatever_the_disk_does() {
        let dir = tempfile::tempdir().unwrap();
        let lens = [0, 1, READ - 1, READ, READ + 1, 5 * READ + 4097, 3];
        for (threads, memory) in [(1, u64::MAX), (3, u64::MAX), (3, 1_000_000), (2, 0)] {
            let faults = Faults { seed: 3, short: 3, interrupt: 4, ..Faults::default() };
            let (files, contents) = set(Faulty::new(Disk::new(Mode::Direct), faults), dir.path(), &lens);
            let (mut seen, mut bytes) = (vec![None; lens.len()], 0);
            sha256(&files, threads, memory, &Arc::default(), |event| match event {
                Event::Bytes(so_far) => bytes = so_far,
                Event::Done(number, result) => {
                    let (sha, stamp) = result.unwrap();
                    assert!(seen[number].replace(sha).is_none() && stamp.is_some());
                }
            })
            .unwrap();
            assert_eq!(bytes, lens.iter().sum::<usize>() as u64);
            for (sha, content) in seen.iter().zip(&contents) {
                assert_eq!(*sha, Some(of(content)));
            }
        }
        assert_eq!(hex(&of(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(from_hex(&hex(&of(b"x")).to_uppercase()), Some(of(b"x")));
        assert!(from_hex("ab").is_none() && from_hex(&"+1".repeat(32)).is_none());
    }

    #[test]
    fn a_file_that_cannot_be_read_does_not_keep_the_others_from_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults { fail_read: Some(1), only: Some("f1".to_owned()), ..Faults::default() };
        let (files, _) = set(Faulty::new(Disk::new(Mode::Direct), faults), dir.path(), &[10, 2 * READ, 10]);
        let mut done = Vec::new();
        let note = |event| {
            if let Event::Done(number, result) = event {
                done.push((number, result.map_err(|e| e.to_string())));
            }
        };
        sha256(&files, 1, u64::MAX, &Arc::default(), note).unwrap();
        assert_eq!(done.iter().map(|d| d.1.is_ok()).collect::<Vec<_>>(), [true, false, true]);
        assert!(done[1].1.as_ref().unwrap_err().contains("f1: read at byte"), "{done:?}");
        let stop = Arc::new(AtomicBool::new(true));
        assert!(matches!(sha256(&files, 2, u64::MAX, &stop, |_| {}), Err(Error::Stopped)));
    }

    #[test]
    fn buffers_keep_within_their_memory() {
        let each = (AHEAD * READ) as u64;
        for (memory, threads, read) in [
            (u64::MAX, 8, READ),
            (8 * each, 8, READ),
            (8 * each - 1, 7, READ),
            (each, 1, READ),
            (each - 1, 1, READ - LEAST_READ),
            (6_000_000, 1, 22 * LEAST_READ),
            (LEAST_MEMORY, 1, LEAST_READ),
            (0, 1, LEAST_READ),
        ] {
            let way = Way::within(8, 100, memory);
            assert_eq!(way, Way { threads, read }, "{memory}");
            assert!((way.threads * AHEAD * way.read) as u64 <= memory.max(LEAST_MEMORY), "{memory}");
        }
        assert_eq!(Way::within(8, 3, u64::MAX).threads, 3);
        assert_eq!(Way::within(8, 0, u64::MAX).threads, 1);
    }

    /// The story: a second thread that the system refused left the first one to digest all of 1.56 TB without a
    /// word, and only then was the refusal told.
    #[test]
    fn a_thread_that_is_refused_leaves_the_work_to_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let (files, contents) = set(Disk::new(Mode::Direct), dir.path(), &[10, 20, 30, 40]);
        let way = Way { threads: 4, read: READ };
        let mut done = vec![None; 4];
        let note = |event| {
            if let Event::Done(number, result) = event {
                done[number] = result.ok().map(|(sha, _)| sha);
            }
        };
        digest(&files, way, 1, &Arc::default(), note).unwrap();
        assert_eq!(done, contents.iter().map(|bytes| Some(of(bytes))).collect::<Vec<_>>());
        let mut events = 0;
        let none = digest(&files, way, 0, &Arc::default(), |_| events += 1);
        assert!(matches!(none, Err(Error::Threads(_))) && events == 0, "{none:?}");
    }

    #[test]
    fn a_record_is_of_the_files_that_were_digested_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/record");
        let (files, _) = set(Disk::default(), dir.path(), &[10, 20]);
        let stamp = |i: usize| files.file(i).unwrap().stamp().unwrap();
        let mut record = Record::open(&path).unwrap();
        assert_eq!(record.get("f0", stamp(0)), None);
        record.add("f0", stamp(0), of(b"0")).unwrap();
        record.add("a name", stamp(1), of(b"1")).unwrap();
        drop(record);
        // A process was killed in the middle of a line.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str(&text.clone()[..80]);
        fs::write(&path, &text).unwrap();
        let mut record = Record::open(&path).unwrap();
        assert_eq!(record.get("f0", stamp(0)), Some(of(b"0")));
        assert_eq!(record.get("a name", stamp(1)), Some(of(b"1")));
        assert_eq!(record.get("f0", stamp(1)), None);
        record.add("f0", stamp(1), of(b"2")).unwrap();
        drop(record);
        let record = Record::open(&path).unwrap();
        assert_eq!((record.get("f0", stamp(1)), record.get("f0", stamp(0))), (Some(of(b"2")), None));
        record.remove().unwrap();
        assert!(!path.exists());
    }
}
