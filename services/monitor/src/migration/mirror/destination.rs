//! The destination's side of copying disks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use virtio_devices::block::{BlockError, Chunks, DiskContent};

use super::message::{Block, MirrorReply, MirrorRequest, RequestedDisk, parse};
use crate::migration::connection::Stop;
use crate::migration::error::{MigrationError, line};

/// Limit in bytes for data that is only in the host's page cache. Beyond it the thread waits for this host's storage, and so does the
/// source.
const MAX_UNSYNCED_BYTES: u64 = 64 << 20;
/// Interval at which a waiting thread checks whether it is to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// One disk.
struct IncomingDisk {
    content: DiskContent,
    unsynced: AtomicU64,
    /// Chunks of which any byte was received.
    touched: Mutex<Chunks>,
}

/// The disks of an incoming VM; `None` for one that is shared with the source. All streams' threads use it.
pub struct MirrorDestination {
    disks: Vec<Option<IncomingDisk>>,
    /// By stream: number of rounds whose share was received.
    settled: Mutex<Vec<u64>>,
    changed: Condvar,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write_failed(error: BlockError) -> MigrationError {
    MigrationError::MirrorWriteFailed(Box::new(error))
}

impl MirrorDestination {
    /// Answers the source's request for a number of streams, and prepares the images. The error says why a disk can't be copied.
    ///
    /// # Errors
    /// With the name of the disk that can't be filled.
    pub fn accept(
        request: &MirrorRequest,
        disks: &[DiskContent],
        streams: usize,
    ) -> Result<(Self, MirrorReply), MigrationError> {
        let (mut ours, mut shared): (Vec<Option<IncomingDisk>>, Vec<(u32, String)>) =
            (Vec::new(), Vec::new());
        let mut seen: Vec<&str> = Vec::new();
        for (number, requested) in (0..).zip(&request.disks) {
            let content = find(requested, disks)?;
            if seen.contains(&content.name()) {
                return Err(MigrationError::Protocol(format!("two disks {}", content.name())));
            }
            seen.push(content.name());
            match begin(requested, content)? {
                None => {
                    tracing::info!(
                        disk = requested.name,
                        path = %content.path().display(),
                        bytes = requested.bytes,
                        "The disk is filled from the source's"
                    );
                    ours.push(Some(IncomingDisk {
                        content: content.clone(),
                        unsynced: AtomicU64::new(0),
                        touched: Mutex::new(Chunks::none(content.bytes())),
                    }));
                }
                Some(reason) => {
                    tracing::info!(disk = requested.name, reason, "The disk is shared with the source");
                    shared.push((number, reason));
                    ours.push(None);
                }
            }
        }
        let settled = Mutex::new(vec![0; streams]);
        Ok((Self { disks: ours, settled, changed: Condvar::new() }, MirrorReply { shared }))
    }

    /// Writes a frame's bytes to the image.
    ///
    /// # Errors
    /// When the payload is invalid, or the image can't be written.
    pub fn apply(&self, payload: &[u8]) -> Result<(), MigrationError> {
        let Block { disk, offset, bytes, contents } = parse(payload)?;
        let number = usize::try_from(disk).unwrap_or(usize::MAX);
        let Some(Some(incoming)) = self.disks.get(number) else {
            return Err(MigrationError::Protocol(format!(
                "a piece of disk {disk}, which isn't to be filled"
            )));
        };
        let content = &incoming.content;
        if offset.checked_add(bytes).is_none_or(|end| end > content.bytes()) {
            let text =
                format!("{bytes} bytes at {offset} of {}, which has {}", content.name(), content.bytes());
            return Err(MigrationError::Protocol(text));
        }
        match contents {
            Some(contents) => content.fill(offset, contents).map_err(write_failed)?,
            None => content.fill_zeroes(offset, bytes).map_err(write_failed)?,
        }
        locked(&incoming.touched).insert(offset, bytes);
        if contents.is_some()
            && incoming.unsynced.fetch_add(bytes, Ordering::Relaxed) + bytes >= MAX_UNSYNCED_BYTES
        {
            incoming.unsynced.store(0, Ordering::Relaxed);
            content.sync().map_err(write_failed)?;
        }
        Ok(())
    }

    /// A further stream's share of a round was received.
    pub fn round_received(&self, stream: usize) {
        if let Some(count) = locked(&self.settled).get_mut(stream) {
            *count = count.saturating_add(1);
        }
        self.changed.notify_all();
    }

    /// A further stream has ended: later rounds don't wait for it.
    pub fn stream_ended(&self, stream: usize) {
        if let Some(count) = locked(&self.settled).get_mut(stream) {
            *count = u64::MAX;
        }
        self.changed.notify_all();
    }

    /// The first stream's share of a round was received: waits for the others', and makes the round durable.
    ///
    /// # Errors
    /// When another stream's thread has failed, or the host's storage fails.
    pub fn settle(&self, stop: &Stop) -> Result<(), MigrationError> {
        let mut settled = locked(&self.settled);
        let round = settled.first().copied().unwrap_or(0) + 1;
        if let Some(first) = settled.first_mut() {
            *first = round;
        }
        while settled.iter().any(|count| *count < round) {
            if stop.is_set() {
                let aborted = std::io::Error::from(std::io::ErrorKind::ConnectionAborted);
                return Err(MigrationError::stream("read to the end of a round")(aborted));
            }
            settled = self
                .changed
                .wait_timeout(settled, STOP_POLL_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        drop(settled);
        self.sync()
    }

    fn sync(&self) -> Result<(), MigrationError> {
        self.disks.iter().flatten().try_for_each(|disk| {
            disk.unsynced.store(0, Ordering::Relaxed);
            disk.content.sync().map_err(write_failed)
        })
    }

    /// All streams have ended: checks that every disk is complete, and makes it durable.
    ///
    /// # Errors
    /// With the disk that is incomplete.
    pub fn finish(&self) -> Result<(), MigrationError> {
        self.sync()?;
        for disk in self.disks.iter().flatten() {
            let here = locked(&disk.touched).covered();
            if here != disk.content.bytes() {
                return Err(MigrationError::Protocol(format!(
                    "{here} of the {} bytes of {} only",
                    disk.content.bytes(),
                    disk.content.name()
                )));
            }
            disk.content.filled();
        }
        Ok(())
    }

    /// Logs which images are incomplete, after a migration that failed.
    pub fn warn_incomplete(&self) {
        for disk in self.disks.iter().flatten() {
            tracing::warn!(
                disk = disk.content.name(),
                path = %disk.content.path().display(),
                "This image is incomplete: the migration that was to fill it has failed"
            );
        }
    }
}

/// Finds the disk for a request, and checks that it can be filled.
fn find<'a>(requested: &RequestedDisk, disks: &'a [DiskContent]) -> Result<&'a DiskContent, MigrationError> {
    let no = |text: String| Err(MigrationError::NoMirror(text));
    let name = crate::migration::message::sentence(requested.name.as_bytes());
    let Some(content) = disks.iter().find(|disk| disk.name() == requested.name) else {
        return no(format!("there is no disk {name} at the destination"));
    };
    if content.read_only() {
        return no(format!("{name} is read-only at the destination"));
    }
    if content.bytes() != requested.bytes {
        let path = content.path().display();
        return no(format!(
            "{name} has {} bytes at the source and its image {path} at the destination {}; they must be the same (for a file that is to be filled: truncate -s {} {path})",
            requested.bytes,
            content.bytes(),
            requested.bytes
        ));
    }
    Ok(content)
}

/// Locks an image and marks it as incomplete. Returns a reason if the image is the source's own. Such an image must not be written,
/// because the copied data is older than its content.
fn begin(requested: &RequestedDisk, content: &DiskContent) -> Result<Option<String>, MigrationError> {
    let unsure = |reason: &str| {
        let path = content.path().display();
        MigrationError::NoMirror(format!(
            "{} may be shared with the source: {reason} ({path}); if it is not, name it: --mirror {}",
            content.name(),
            content.name()
        ))
    };
    if requested.device && content.is_device() && !requested.named {
        return Err(unsure("it is a block device at both ends"));
    }
    match content.lock() {
        Ok(false) if !requested.named => {
            return Err(unsure("its file system has no locks that would show it"));
        }
        Ok(_) => {}
        Err(error @ BlockError::Locked { .. }) if !requested.named => return Ok(Some(line(&error))),
        Err(error) => return Err(write_failed(error)),
    }
    content.begin_filling().map_err(write_failed)?;
    Ok(None)
}
