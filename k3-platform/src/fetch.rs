//! Reads of segments, in the background, until somebody says stop.

use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::io::{Check, Done, Extent, FileSet, Job, ReadError, ReadFault, ReadPool, Schedule, Window};
use crate::segment::{Read, block};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

pub use crate::io::Priority;

/// How long a stop request can go unseen while a read is waited for.
const GLANCE: Duration = Duration::from_millis(50);

/// A segment that has arrived, or has not.
pub type Fetched = Done<u64>;

/// Reads pieces of a checkpoint's files.
pub struct Fetch {
    pool: ReadPool,
    files: FileSet,
    stop: Arc<AtomicBool>,
    schedule: Option<Arc<dyn Schedule>>,
}

impl std::fmt::Debug for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetch").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Fetch {
    /// Starts `readers` threads over `files`. Setting `stop` ends every wait with [`Error::Stopped`].
    ///
    /// # Errors
    /// [`Error::Threads`] if the system refuses a thread.
    pub fn new(files: FileSet, readers: usize, stop: Arc<AtomicBool>) -> Result<Self, Error> {
        let schedule = files.schedule();
        let pool = ReadPool::scheduled(readers, schedule.clone()).map_err(Error::Threads)?;
        Ok(Self { pool, files, stop, schedule })
    }

    /// As [`Fetch::new`], with fewer threads if the system refuses some of them.
    ///
    /// # Errors
    /// [`Error::Threads`] if it refuses all.
    pub fn with_at_most(files: &FileSet, readers: usize, stop: &Arc<AtomicBool>) -> Result<Self, Error> {
        let mut readers = readers.max(1);
        loop {
            match Self::new(files.clone(), readers, Arc::clone(stop)) {
                Err(Error::Threads(_)) if readers > 1 => readers /= 2,
                other => return other,
            }
        }
    }

    /// Bytes that came from files.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.pool.bytes_read()
    }

    /// Whether the open files are still what was checked.
    ///
    /// # Errors
    /// [`Error::Read`] with the file that is not.
    pub fn unchanged(&self) -> Result<(), Error> {
        Ok(self.files.check()?)
    }

    /// How long the disk had something to do.
    #[must_use]
    pub fn busy(&self) -> Duration {
        self.pool.busy()
    }

    /// Queues the reads of one segment; the answer goes to `reply`.
    pub fn submit(&self, reads: &[Read], buffer: AlignedBuf, tag: u64, priority: Priority, reply: &Sender<Fetched>) {
        self.submit_checked(reads, &[], buffer, tag, priority, reply);
    }

    /// The same; what then has another checksum than `checks` say is a failed read.
    pub fn submit_checked(
        &self,
        reads: &[Read],
        checks: &[Check],
        buffer: AlignedBuf,
        tag: u64,
        priority: Priority,
        reply: &Sender<Fetched>,
    ) {
        // Shard numbers come from the index this set was made of, and offsets were held against the
        // files' lengths when it was opened. Should one not fit all the same, it must not be left out:
        // its bytes would be whatever the buffer held.
        let extents: Option<Vec<Extent>> = reads
            .iter()
            .map(|read| {
                let file = self.files.file(usize::from(read.place.shard))?;
                let window = Window::new(read.place.offset, read.len, block())?;
                Some(Extent { file, window, at: read.at })
            })
            .collect();
        match extents {
            Some(extents) => self.pool.submit(priority, Job { tag, extents, checks: checks.to_vec(), buffer }, reply),
            None => {
                let offset = reads.first().map_or(0, |r| r.place.offset);
                let fault = ReadFault::Ended { end: offset };
                let result = Err(ReadError { path: "a shard that is not there".into(), offset, fault });
                let _nobody_listens = reply.send(Done { tag, buffer, result });
            }
        }
        self.pause(false);
    }

    /// A point at which readers may overtake the consumer; see [`Schedule`].
    fn pause(&self, waits: bool) {
        if let Some(schedule) = &self.schedule {
            schedule.pause(waits, &|| self.pool.readers());
        }
    }

    /// # Errors
    /// [`Error::Stopped`] once the stop flag is set.
    pub fn check(&self) -> Result<(), Error> {
        self.pause(false);
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// [`Error::Stopped`] once the stop flag is set; [`Error::Read`] if a read brings nothing for longer
    /// than the files' [patience](FileSet::patience).
    pub fn wait(&self, answers: &Receiver<Fetched>) -> Result<Fetched, Error> {
        loop {
            match self.glance(answers)? {
                Some(fetched) => return Ok(fetched),
                None => self.check()?,
            }
        }
    }

    /// Waits for an answer though the stop flag may be set: what is on its way has to be taken back.
    ///
    /// # Errors
    /// [`Error::Read`] if a read brings nothing for too long.
    pub fn outlast(&self, answers: &Receiver<Fetched>) -> Result<Fetched, Error> {
        loop {
            if let Some(fetched) = self.glance(answers)? {
                return Ok(fetched);
            }
        }
    }

    fn glance(&self, answers: &Receiver<Fetched>) -> Result<Option<Fetched>, Error> {
        if self.schedule.is_some() {
            // Its readers stand still while this thread waits for the clock, which it must not see.
            if let Ok(fetched) = answers.try_recv() {
                return Ok(Some(fetched));
            }
            self.pause(true);
            return Ok(answers.try_recv().ok());
        }
        match answers.recv_timeout(GLANCE) {
            Ok(fetched) => Ok(Some(fetched)),
            Err(RecvTimeoutError::Timeout) => match self.pool.stalled(self.files.patience()) {
                Some(stalled) => Err(stalled.into()),
                None => Ok(None),
            },
            Err(RecvTimeoutError::Disconnected) => Err(Error::Order),
        }
    }
}
