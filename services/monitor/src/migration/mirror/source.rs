//! The source's side of copying disks: what is left to copy, and its frames.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use control_api::migration::MirroredDisk;
use virtio_devices::block::{BlockError, Buffer, CHUNK, Chunks, DiskContent};

use super::message::{MAX_CONTENTS_BYTES, MirrorReply, MirrorRequest, RequestedDisk, header};
use crate::migration::error::MigrationError;
use crate::migration::frame::{Kind, Sender};
use crate::migration::pages::{PAGE, is_zero};

/// Disks are distributed over the streams in pieces of this many bytes.
pub const PIECE_BYTES: u64 = 1 << 20;

fn read(error: BlockError) -> MigrationError {
    MigrationError::machine("read from its disks")(error)
}

/// One disk.
struct OutgoingDisk {
    /// Index in the request.
    number: u32,
    content: DiskContent,
    left: Chunks,
    /// Chunks with data, for the first round.
    present: Option<Chunks>,
    copied: u64,
}

/// The disks of one migration. Dropping it ends the logging of writes.
pub struct MirrorSource {
    disks: Vec<OutgoingDisk>,
    begun: bool,
}

impl MirrorSource {
    /// Selects the disks that the user requested: the named ones, or all that the guest may write.
    ///
    /// # Errors
    /// With the name of a disk that can't be copied.
    pub fn new(disks: &[DiskContent], names: &[String]) -> Result<Self, MigrationError> {
        let no = |text: String| Err(MigrationError::NoMirror(text));
        let mut chosen: Vec<&DiskContent> = Vec::new();
        for name in names {
            let Some(disk) = disks.iter().find(|disk| disk.name() == name) else {
                let all: Vec<&str> = disks.iter().map(DiskContent::name).collect();
                return no(format!("it has no disk {name}; its disks are: {}", all.join(", ")));
            };
            if disk.read_only() {
                return no(format!(
                    "{name} is read-only: nothing in it changes, so copy its image before and leave it out"
                ));
            }
            if !chosen.iter().any(|other| other.name() == name) {
                chosen.push(disk);
            }
        }
        if names.is_empty() {
            chosen = disks.iter().filter(|disk| !disk.read_only()).collect();
        }
        if chosen.is_empty() {
            return no("it has no disk that its guest may write".to_owned());
        }
        let disks = (0..).zip(chosen).map(|(number, content)| OutgoingDisk {
            number,
            content: content.clone(),
            left: Chunks::default(),
            present: None,
            copied: 0,
        });
        Ok(Self { disks: disks.collect(), begun: false })
    }

    /// The request to the destination.
    #[must_use]
    pub fn request(&self, named: bool) -> MirrorRequest {
        let disk = |disk: &OutgoingDisk| RequestedDisk {
            name: disk.content.name().to_owned(),
            bytes: disk.content.bytes(),
            device: disk.content.is_device(),
            named,
        };
        MirrorRequest { disks: self.disks.iter().map(disk).collect() }
    }

    /// Handles the destination's answer: removes shared disks.
    pub fn handle_reply(&mut self, answer: &MirrorReply) {
        for (number, reason) in &answer.shared {
            let reason = crate::migration::message::sentence(reason.as_bytes());
            if let Some(disk) = self.disks.iter().find(|disk| disk.number == *number) {
                tracing::info!(disk = disk.content.name(), reason, "This disk is shared, and isn't copied");
            }
        }
        self.disks.retain(|disk| answer.shared.iter().all(|(number, _)| *number != disk.number));
    }

    /// Whether no disk is left to copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// Starts to log writes, and marks all disks' content as left to copy.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn begin(&mut self) -> Result<(), MigrationError> {
        self.begun = true;
        for disk in &mut self.disks {
            disk.content.begin_noting();
            disk.present = Some(disk.content.present().map_err(read)?);
            disk.left = Chunks::all(disk.content.bytes());
        }
        Ok(())
    }

    /// Adds the chunks written since the last call.
    ///
    /// # Errors
    /// When the writes aren't known.
    pub fn collect_writes(&mut self) -> Result<(), MigrationError> {
        for disk in &mut self.disks {
            disk.left.add(&disk.content.take_written().map_err(read)?);
        }
        Ok(())
    }

    /// Bytes that are left to copy.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.disks.iter().map(|disk| disk.left.covered()).sum()
    }

    /// Makes a round of everything that is left. The caller must send it completely.
    pub fn round(&mut self) -> DiskRound {
        let part = |disk: &mut OutgoingDisk| {
            let bytes = disk.content.bytes();
            let chunks = std::mem::replace(&mut disk.left, Chunks::none(bytes));
            disk.copied += chunks.covered();
            let (number, content) = (disk.number, disk.content.clone());
            RoundPart { number, content, chunks, present: disk.present.take() }
        };
        let left = self.left();
        DiskRound { parts: self.disks.iter_mut().map(part).collect(), left: AtomicU64::new(left) }
    }

    /// Summary for the timeline.
    #[must_use]
    pub fn summary(&self) -> Vec<MirroredDisk> {
        let one = |disk: &OutgoingDisk| MirroredDisk {
            name: disk.content.name().to_owned(),
            bytes: disk.content.bytes(),
            copied: disk.copied,
        };
        self.disks.iter().map(one).collect()
    }
}

impl Drop for MirrorSource {
    fn drop(&mut self) {
        if self.begun {
            self.disks.iter().for_each(|disk| disk.content.end_noting());
        }
    }
}

/// One disk's part of a round.
struct RoundPart {
    number: u32,
    content: DiskContent,
    chunks: Chunks,
    present: Option<Chunks>,
}

/// A round, which all streams send in parallel.
pub struct DiskRound {
    parts: Vec<RoundPart>,
    left: AtomicU64,
}

impl DiskRound {
    /// Bytes that no stream has sent yet.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// Sends a stream's share of the round. Calls `after` after each piece.
    ///
    /// # Errors
    /// When the disk can't be read, or the stream fails.
    pub fn send(
        &self,
        stream: u64,
        streams: u64,
        sender: &mut Sender,
        to: &mut impl Write,
        after: &mut dyn FnMut(u64),
    ) -> Result<(), MigrationError> {
        let mut buffer = Buffer::new(MAX_CONTENTS_BYTES);
        for part in &self.parts {
            let mine =
                |chunk: &u64| (chunk * CHUNK / PIECE_BYTES + u64::from(part.number)) % streams == stream;
            let mut chunks = part.chunks.iter().filter(mine).peekable();
            while let Some(first) = chunks.next() {
                let hole = |chunk| part.present.as_ref().is_some_and(|present| !present.contains(chunk));
                let is_hole = hole(first);
                // At most a piece of hole or a buffer of data, and never beyond the piece's end.
                let most = if is_hole { PIECE_BYTES } else { MAX_CONTENTS_BYTES as u64 } / CHUNK;
                let mut end = first + 1;
                while end - first < most
                    && !(end * CHUNK).is_multiple_of(PIECE_BYTES)
                    && hole(end) == is_hole
                    && chunks.next_if_eq(&end).is_some()
                {
                    end += 1;
                }
                let start = first * CHUNK;
                let bytes = (end * CHUNK).min(part.content.bytes()) - start;
                if is_hole {
                    send_frame(part.number, start, bytes, None, sender, to)?;
                } else {
                    let run = buffer.first(usize::try_from(bytes).unwrap_or(MAX_CONTENTS_BYTES));
                    part.content.read(start, run).map_err(read)?;
                    send_blocks(part.number, start, run, sender, to)?;
                }
                self.left.fetch_sub(bytes, Ordering::Relaxed);
                after(sender.bytes());
            }
        }
        Ok(())
    }
}

fn send_frame(
    disk: u32,
    offset: u64,
    bytes: u64,
    contents: Option<&[u8]>,
    sender: &mut Sender,
    to: &mut impl Write,
) -> Result<(), MigrationError> {
    let header = header(disk, contents.is_none(), offset, bytes);
    let sent = sender.send(to, Kind::Block, &[&header, contents.unwrap_or_default()]);
    sent.map_err(MigrationError::stream("written"))
}

/// Sends bytes of a disk as runs of zero blocks and of data blocks, in units of 4 KiB.
fn send_blocks(
    disk: u32,
    start: u64,
    run: &[u8],
    sender: &mut Sender,
    to: &mut impl Write,
) -> Result<(), MigrationError> {
    let blocks: Vec<bool> = run.chunks(PAGE).map(is_zero).collect();
    let mut at = 0;
    for same in blocks.chunk_by(|a, b| a == b) {
        let end = (at + same.len() * PAGE).min(run.len());
        let bytes = &run[at..end];
        let contents = (same.first() == Some(&false)).then_some(bytes);
        send_frame(disk, start + at as u64, bytes.len() as u64, contents, sender, to)?;
        at = end;
    }
    Ok(())
}
