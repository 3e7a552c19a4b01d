//! Threads that wait for the disk, so that nobody else has to.
//!
//! A disk is fast when many reads are in flight. Each job is read by one thread, its extents in
//! order; jobs of a kind start in the order they were given, urgent ones first. A buffer travels
//! with its job and comes back with the answer, so no memory is ever shared with a read in flight.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::{ReadAt, ReadError, ReadFault, Schedule, Window, error, read_window};
use crate::aligned::AlignedBuf;

/// What is read first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for it: experts the router has chosen.
    Urgent,
    /// It will be needed later: the next layer's trunk.
    Prefetch,
}

/// A range of a file and the place of a buffer it goes to.
#[derive(Clone)]
pub struct Extent {
    /// The file.
    pub file: Arc<dyn ReadAt>,
    /// The range. No copy is made if it was built with the file's alignment.
    pub window: Window,
    /// Where in the buffer the window starts, in bytes. No copy is made if it is a multiple of the
    /// file's alignment.
    pub at: usize,
}

impl std::fmt::Debug for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.file.path();
        f.debug_struct("Extent").field("path", &path).field("window", &self.window).field("at", &self.at).finish()
    }
}

/// A part of a buffer whose bytes must have a checksum once they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// Where in the buffer it starts (bytes).
    pub at: usize,
    /// Its length (bytes).
    pub len: usize,
    /// XXH3, 64 bits.
    pub sum: u64,
    /// Which segment of the file it is, and where that begins (bytes), for messages.
    pub segment: usize,
    /// See [`Check::segment`].
    pub offset: u64,
}

/// Extents to read into a buffer.
#[derive(Debug)]
pub struct Job<T> {
    /// Comes back with the answer; means nothing to the pool.
    pub tag: T,
    /// What to read, in this order. Reading stops at the first that fails.
    pub extents: Vec<Extent>,
    /// What is checked by the reader, so that nobody else waits for it.
    pub checks: Vec<Check>,
    /// Where to. It comes back with the answer, whatever that is.
    pub buffer: AlignedBuf,
}

/// The answer to a [`Job`].
#[derive(Debug)]
pub struct Done<T> {
    /// The job's tag.
    pub tag: T,
    /// The job's buffer; its contents are unspecified if the result is an error.
    pub buffer: AlignedBuf,
    /// Whether all extents were read.
    pub result: Result<(), ReadError>,
}

type Answer = Box<dyn FnOnce(AlignedBuf, Result<(), ReadError>) + Send>;

struct Task {
    /// Jobs submitted before.
    number: u64,
    extents: Vec<Extent>,
    checks: Vec<Check>,
    buffer: AlignedBuf,
    answer: Answer,
}

#[derive(Default)]
struct Queue {
    urgent: VecDeque<Task>,
    prefetch: VecDeque<Task>,
    closed: bool,
    submitted: u64,
    /// Jobs that are being read, since when there has been one without a break, and how long there was
    /// before.
    active: usize,
    since: Option<Instant>,
    busy: Duration,
}

impl Queue {
    fn begin(&mut self) {
        self.active += 1;
        self.since.get_or_insert_with(Instant::now);
    }

    fn end(&mut self) {
        self.active -= 1;
        if self.active == 0
            && let Some(since) = self.since.take()
        {
            self.busy += since.elapsed();
        }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    ready: Condvar,
    /// Nothing is being read any more.
    idle: Condvar,
    bytes: AtomicU64,
    /// What each thread waits for the system to answer.
    waits: Vec<Mutex<Option<Wait>>>,
    /// The time that those who wait measure patience in.
    clock: Mutex<Clock>,
    schedule: Option<Arc<dyn Schedule>>,
}

/// A read the system has not answered.
struct Wait {
    file: Arc<dyn ReadAt>,
    offset: u64,
    /// When the last byte came, or the read began, by the pool's clock.
    since: Duration,
}

impl Shared {
    /// The queue is consistent whenever the lock is free, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner).look()
    }
}

/// How long a pool that is dropped waits for the reads in flight.
const GRACE: Duration = Duration::from_secs(2);

/// Reader threads with a queue in front of them.
///
/// Dropping the pool waits for the reads in flight and forgets the jobs that have not started; their
/// senders are dropped without an answer. A read that does not return within two seconds is left to
/// its thread, which ends when the system answers: nobody who gave up on a disk has to wait for it.
pub struct ReadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl ReadPool {
    /// Threads enough to keep an NVMe disk busy with reads of a few megabytes.
    pub const THREADS: usize = 8;
    /// Bytes of stack of each thread; only touched pages are resident.
    pub const STACK: usize = 256 << 10;

    /// Starts `threads` reader threads (at least one).
    ///
    /// # Errors
    /// The system's, if it refuses a thread.
    pub fn new(threads: usize) -> io::Result<Self> {
        Self::scheduled(threads, None)
    }

    /// The same with somebody who decides which thread goes on.
    pub(crate) fn scheduled(threads: usize, schedule: Option<Arc<dyn Schedule>>) -> io::Result<Self> {
        let threads = threads.max(1);
        let shared = Shared {
            queue: Mutex::default(),
            ready: Condvar::new(),
            idle: Condvar::new(),
            bytes: AtomicU64::new(0),
            waits: (0..threads).map(|_| Mutex::default()).collect(),
            clock: Mutex::new(Clock::new()),
            schedule,
        };
        let mut pool = Self { shared: Arc::new(shared), workers: Vec::new() };
        for i in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("k3-read-{i}")).stack_size(Self::STACK);
            pool.workers.push(builder.spawn(move || work(&shared, i))?);
        }
        Ok(pool)
    }

    /// Queues a job and returns at once. The answer goes to `reply`; if nobody listens there any more,
    /// it is dropped, and the buffer with it.
    pub fn submit<T: Send + 'static>(&self, priority: Priority, job: Job<T>, reply: &Sender<Done<T>>) {
        let Job { tag, extents, checks, buffer } = job;
        let reply = reply.clone();
        let answer = Box::new(move |buffer, result| {
            let _nobody_listens = reply.send(Done { tag, buffer, result });
        });
        let mut queue = self.shared.lock();
        let task = Task { number: queue.submitted, extents, checks, buffer, answer };
        queue.submitted += 1;
        match priority {
            Priority::Urgent => queue.urgent.push_back(task),
            Priority::Prefetch => queue.prefetch.push_back(task),
        }
        drop(queue);
        self.shared.ready.notify_one();
    }

    /// Bytes read from files so far, those over-read for alignment included. Jobs that failed count
    /// with the extents they finished.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// The read that has brought no byte for longest, if that is at least `limit`. Whoever waits asks again
    /// and again: between two times no more than a tenth of a second counts, so that a process that was
    /// stopped and continued does not blame the disk.
    #[must_use]
    pub fn stalled(&self, limit: Duration) -> Option<ReadError> {
        let now = self.shared.now();
        let waits = self.shared.waits.iter().map(|w| w.lock().unwrap_or_else(PoisonError::into_inner));
        let oldest = waits.filter(|w| w.is_some()).min_by_key(|w| w.as_ref().map(|w| w.since))?;
        let Wait { file, offset, since } = oldest.as_ref()?;
        let waited = now.saturating_sub(*since);
        (waited >= limit).then(|| error(&**file, *offset, ReadFault::Stalled { seconds: waited.as_secs() }))
    }

    /// Threads that have a job; `None` while one that has none is about to take one.
    pub(crate) fn readers(&self) -> Option<usize> {
        let queue = self.shared.lock();
        let queued = queue.urgent.len() + queue.prefetch.len();
        (queued == 0 || queue.active == self.workers.len()).then_some(queue.active)
    }

    /// How long there was at least one job being read.
    #[must_use]
    pub fn busy(&self) -> Duration {
        let queue = self.shared.lock();
        queue.busy + queue.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl std::fmt::Debug for ReadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadPool").field("threads", &self.workers.len()).finish_non_exhaustive()
    }
}

impl Drop for ReadPool {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        let forgotten = (std::mem::take(&mut queue.urgent), std::mem::take(&mut queue.prefetch));
        drop(queue);
        drop(forgotten);
        self.shared.ready.notify_all();
        let queue = self.shared.lock();
        let busy = |queue: &mut Queue| queue.active > 0;
        let (queue, left) =
            self.shared.idle.wait_timeout_while(queue, GRACE, busy).unwrap_or_else(PoisonError::into_inner);
        drop(queue);
        if left.timed_out() {
            return;
        }
        for worker in self.workers.drain(..) {
            // Panics of a read are caught and answered; there is nothing else to hear.
            let _ended = worker.join();
        }
    }
}

/// What a reader thread does.
fn work(shared: &Shared, number: usize) {
    loop {
        let mut queue = shared.lock();
        let Task { number: job, extents, checks, mut buffer, answer } = loop {
            if let Some(task) = queue.urgent.pop_front().or_else(|| queue.prefetch.pop_front()) {
                queue.begin();
                break task;
            }
            if queue.closed {
                return;
            }
            queue = shared.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        if let Some(schedule) = &shared.schedule {
            schedule.takes(job);
        }
        let result = extents.iter().try_for_each(|extent| {
            // The buffer's contents are unspecified after an error, so a broken-off write is fine.
            let read = catch_unwind(AssertUnwindSafe(|| {
                let watched = Watched { file: &extent.file, wait: &shared.waits[number], shared };
                watched.set(Some(extent.window.start()));
                read(extent, &watched, &mut buffer)
            }));
            *shared.waits[number].lock().unwrap_or_else(PoisonError::into_inner) = None;
            let panicked = |_| Err(error(&*extent.file, extent.window.start(), ReadFault::Panicked));
            shared.bytes.fetch_add(read.unwrap_or_else(panicked)?, Ordering::Relaxed);
            Ok(())
        });
        let result = result.and_then(|()| match checks.iter().find(|c| !holds(c, &buffer)) {
            None => Ok(()),
            Some(check) => {
                let path = extents.first().map(|e| e.file.path().to_owned()).unwrap_or_default();
                Err(ReadError { path, offset: check.offset, fault: ReadFault::Checksum { segment: check.segment } })
            }
        });
        answer(buffer, result);
        let mut queue = shared.lock();
        queue.end();
        if queue.active == 0 {
            shared.idle.notify_all();
        }
    }
}

fn holds(check: &Check, buffer: &AlignedBuf) -> bool {
    let bytes = buffer.get(check.at..).and_then(|rest| rest.get(..check.len));
    bytes.is_some_and(|bytes| xxhash_rust::xxh3::xxh3_64(bytes) == check.sum)
}

fn read(extent: &Extent, file: &dyn ReadAt, buffer: &mut AlignedBuf) -> Result<u64, ReadError> {
    let Extent { window, at, .. } = extent;
    let given = buffer.len();
    match buffer.get_mut(*at..).and_then(|rest| rest.get_mut(..window.len())) {
        Some(place) => read_window(file, place, *window),
        None => {
            let needed = at.saturating_add(window.len());
            Err(error(file, window.start(), ReadFault::Buffer { needed, given }))
        }
    }
}

/// A file whose reads can be seen waiting.
struct Watched<'a> {
    file: &'a Arc<dyn ReadAt>,
    wait: &'a Mutex<Option<Wait>>,
    shared: &'a Shared,
}

impl Watched<'_> {
    fn set(&self, offset: Option<u64>) {
        let wait = offset.map(|offset| Wait { file: Arc::clone(self.file), offset, since: self.shared.now() });
        *self.wait.lock().unwrap_or_else(PoisonError::into_inner) = wait;
    }
}

impl ReadAt for Watched<'_> {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = self.file.read_at(buf, offset)?;
        // An interruption is no answer: it leaves the clock running.
        self.set(Some(offset.saturating_add(count as u64)));
        Ok(count)
    }

    fn alignment(&self) -> usize {
        self.file.alignment()
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn stamp(&self) -> Option<super::Stamp> {
        self.file.stamp()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, write};
    use super::super::{Disk, Faults, Faulty, FileSet, Mode, Source};
    use super::*;
    use std::sync::mpsc::channel;

    fn extent(file: &Arc<dyn ReadAt>, offset: u64, wanted: usize, at: usize) -> Extent {
        let window = Window::new(offset, wanted, file.alignment()).unwrap();
        Extent { file: Arc::clone(file), window, at }
    }

    #[test]
    fn many_jobs_over_few_descriptors_and_many_faults() {
        let dir = tempfile::tempdir().unwrap();
        let paths = (0..12).map(|i| write(&dir, &format!("s{i}"), 100_000)).collect();
        let late_by = Duration::from_micros(50);
        let faults = Faults { seed: 5, short: 3, interrupt: 4, late: 5, late_by, ..Faults::default() };
        let set = FileSet::new(Arc::new(Faulty::new(Disk::new(Mode::Direct), faults)), paths, 3);
        let pool = ReadPool::new(ReadPool::THREADS).unwrap();
        let (send, receive) = channel();
        let mut buffers: Vec<_> = (0..20).map(|_| AlignedBuf::zeroed(65_536).unwrap()).collect();
        let (mut started, mut seen) = (0, vec![false; 300]);
        let mut wanted = 0;
        while seen.iter().any(|&s| !s) {
            while started < seen.len()
                && let Some(buffer) = buffers.pop()
            {
                let file = |k| set.file((started + k) % 12).unwrap();
                let offset = started as u64 * 301;
                let extents = vec![extent(&file(0), offset, 9000, 0), extent(&file(5), offset + 70, 3000, 32_768)];
                let priority = if started % 2 == 0 { Priority::Urgent } else { Priority::Prefetch };
                pool.submit(priority, Job { tag: started, extents, checks: Vec::new(), buffer }, &send);
                started += 1;
                wanted += 12_000;
            }
            let Done { tag, buffer, result } = receive.recv_timeout(Duration::from_secs(60)).unwrap();
            result.unwrap();
            assert!(!std::mem::replace(&mut seen[tag], true));
            let (offset, align) = (tag as u64 * 301, set.file(0).unwrap().alignment());
            let skip = |o: u64| usize::try_from(o).unwrap() % align;
            assert_eq!(buffer[skip(offset)..][..9000], bytes(offset, 9000), "job {tag}");
            assert_eq!(buffer[32_768 + skip(offset + 70)..][..3000], bytes(offset + 70, 3000), "job {tag}");
            buffers.push(buffer);
        }
        assert!(pool.bytes_read() >= wanted);
        assert!(set.open_files() <= 3);
    }

    /// A file whose reads wait for a signal.
    struct Gate(Mutex<std::sync::mpsc::Receiver<()>>);

    impl ReadAt for Gate {
        fn len(&self) -> io::Result<u64> {
            Ok(1)
        }
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
            self.0.lock().unwrap().recv().unwrap();
            Ok(1)
        }
        fn alignment(&self) -> usize {
            1
        }
        fn path(&self) -> &Path {
            Path::new("gate")
        }
    }

    fn gate() -> (Sender<()>, Arc<dyn ReadAt>) {
        let (open, wait) = channel();
        (open, Arc::new(Gate(Mutex::new(wait))))
    }

    fn job<T>(tag: T, file: &Arc<dyn ReadAt>) -> Job<T> {
        let buffer = AlignedBuf::zeroed(4096).unwrap();
        Job { tag, extents: vec![extent(file, 0, 1, 0)], checks: Vec::new(), buffer }
    }

    #[test]
    fn urgent_jobs_overtake_and_the_rest_keep_their_order() {
        let (open, file) = gate();
        let pool = ReadPool::new(1).unwrap();
        let (send, receive) = channel();
        pool.submit(Priority::Prefetch, job("running", &file), &send);
        while !pool.shared.lock().prefetch.is_empty() {
            thread::yield_now();
        }
        for (priority, tag) in [
            (Priority::Prefetch, "later 1"),
            (Priority::Urgent, "now 1"),
            (Priority::Prefetch, "later 2"),
            (Priority::Urgent, "now 2"),
        ] {
            pool.submit(priority, job(tag, &file), &send);
        }
        for tag in ["running", "now 1", "now 2", "later 1", "later 2"] {
            open.send(()).unwrap();
            assert_eq!(receive.recv().unwrap().tag, tag);
        }
    }

    #[test]
    fn time_counts_while_anything_is_read() {
        let (open, file) = gate();
        let pool = ReadPool::new(2).unwrap();
        let (send, receive) = channel();
        assert_eq!(pool.busy(), Duration::ZERO);
        for tag in 0..2 {
            pool.submit(Priority::Urgent, job(tag, &file), &send);
        }
        while pool.shared.lock().active < 2 {
            thread::yield_now();
        }
        // In this order: what lies between the two clocks must not count against the pool.
        let (started, before) = (Instant::now(), pool.busy());
        thread::sleep(Duration::from_millis(2));
        let (after, passed) = (pool.busy(), started.elapsed());
        assert!(after > before && after - before <= passed, "two readers count once");
        for _ in 0..2 {
            open.send(()).unwrap();
            receive.recv().unwrap();
        }
        while pool.shared.lock().active > 0 {
            thread::yield_now();
        }
        let ended = pool.busy();
        assert!(ended >= after);
        assert_eq!(pool.busy(), ended, "and an idle one not at all");
    }

    #[test]
    fn dropping_the_pool_waits_for_running_reads_and_forgets_the_rest() {
        let (open, file) = gate();
        let pool = ReadPool::new(1).unwrap();
        let (send, receive) = channel();
        pool.submit(Priority::Urgent, job(1, &file), &send);
        while !pool.shared.lock().urgent.is_empty() {
            thread::yield_now();
        }
        pool.submit(Priority::Urgent, job(2, &file), &send);
        drop(send);
        let shared = Arc::clone(&pool.shared);
        let ender = thread::spawn(move || drop(pool));
        while !shared.lock().closed {
            thread::yield_now();
        }
        open.send(()).unwrap();
        ender.join().unwrap();
        assert_eq!(receive.iter().map(|done| done.tag).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_read_without_an_answer_is_named_and_left_behind() {
        let (open, file) = gate();
        let pool = ReadPool::new(2).unwrap();
        assert!(pool.stalled(Duration::ZERO).is_none());
        let (send, receive) = channel();
        let extents = vec![extent(&file, 7, 1, 0)];
        pool.submit(
            Priority::Urgent,
            Job { tag: 1, extents, checks: Vec::new(), buffer: AlignedBuf::zeroed(4096).unwrap() },
            &send,
        );
        let error = loop {
            match pool.stalled(Duration::from_millis(1)) {
                Some(error) => break error,
                None => thread::yield_now(),
            }
        };
        assert!(pool.stalled(Duration::from_secs(1000)).is_none());
        assert!(matches!(error.fault, ReadFault::Stalled { .. }) && error.offset == 7, "{error}");
        assert_eq!(error.path, Path::new("gate"));
        // It does not hold up whoever gives up, and its answer is still one.
        drop(pool);
        assert!(receive.try_recv().is_err());
        open.send(()).unwrap();
        assert_eq!(receive.recv_timeout(Duration::from_secs(60)).unwrap().tag, 1);
    }

    #[test]
    fn every_failure_is_an_answer_with_the_buffer() {
        struct Panics;
        impl ReadAt for Panics {
            fn len(&self) -> io::Result<u64> {
                Ok(100)
            }
            fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
                panic!("a bug in a reader")
            }
            fn alignment(&self) -> usize {
                1
            }
            fn path(&self) -> &Path {
                Path::new("panics")
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 5000);
        let good = Disk::default().open(&path).unwrap();
        let bad: Arc<dyn ReadAt> = Arc::new(Panics);
        let pool = ReadPool::new(1).unwrap();
        let (send, receive) = channel();
        let ask = |extents| {
            pool.submit(
                Priority::Urgent,
                Job { tag: (), extents, checks: Vec::new(), buffer: AlignedBuf::zeroed(8192).unwrap() },
                &send,
            );
            let done = receive.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(done.buffer.len(), 8192);
            done.result
        };
        let error = ask(vec![extent(&good, 0, 10, 0), extent(&bad, 7, 10, 4096)]).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Panicked) && error.offset == 7, "{error}");
        for at in [8192, 4097, usize::MAX] {
            let error = ask(vec![extent(&good, 0, 4096, at)]).unwrap_err();
            assert!(matches!(error.fault, ReadFault::Buffer { given: 8192, .. }), "{error}");
        }
        let error = ask(vec![extent(&good, 4000, 2000, 0)]).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Ended { end: 6000 }) && error.offset == 5000, "{error}");
        ask(vec![]).unwrap();
        ask(vec![extent(&good, 0, 5000, 0)]).unwrap();
    }

    #[test]
    fn an_answer_nobody_waits_for_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let file = Disk::default().open(&write(&dir, "f", 10)).unwrap();
        let pool = ReadPool::new(2).unwrap();
        let (send, receive) = channel();
        drop(receive);
        pool.submit(Priority::Urgent, job((), &file), &send);
        let (send, receive) = channel();
        pool.submit(Priority::Prefetch, job((), &file), &send);
        receive.recv_timeout(Duration::from_secs(60)).unwrap().result.unwrap();
    }
}
