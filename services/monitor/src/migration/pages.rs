//! Contents of pages: how the source selects and encodes them, and how the destination writes them to memory.
//!
//! ```text
//! payload of a Pages frame: address u64, pages u32, what u32 (0 contents follow, 1 all zero), contents
//! ```
//!
//! Memory is distributed over the streams in pieces of 1 MiB. A page always goes over the same stream, so that a later copy never arrives
//! before an earlier one.

use std::io::Write;

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemorySpace};
use machine::slots::DirtyPages;

use super::error::MigrationError;
use super::frame::{Kind, MAX_PAGES_PER_FRAME, Sender};
use super::keepalive::Keepalive;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a run's header.
pub const RUN_HEADER: usize = 16;
/// Memory is distributed over the streams in pieces of two to this power bytes.
const PIECE: u32 = 20;

static ZEROES: [u8; PAGE] = [0; PAGE];

const CONTENTS: u32 = 0;
const ZERO: u32 = 1;

/// Counts of what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Pages that were read.
    pub pages: u64,
    /// Zero pages among them.
    pub zero: u64,
    /// Pages that frames were sent for.
    pub announced: u64,
    /// Bytes of disks that were sent in the same round.
    pub disk_bytes: u64,
}

/// Number of pages in the sets.
pub fn count(sets: &[DirtyPages]) -> u64 {
    sets.iter().map(DirtyPages::count).sum()
}

/// Whether at most a page's bytes are all zero.
pub(super) fn is_zero(page: &[u8]) -> bool {
    // A comparison of slices is one memcmp, in builds without optimization as well.
    ZEROES.get(..page.len()).is_some_and(|zeroes| page == zeroes)
}

fn header(address: u64, pages: usize, what: u32) -> [u8; RUN_HEADER] {
    let mut header = [0; RUN_HEADER];
    header[..8].copy_from_slice(&address.to_le_bytes());
    header[8..12].copy_from_slice(&u32::try_from(pages).unwrap_or(u32::MAX).to_le_bytes());
    header[12..].copy_from_slice(&what.to_le_bytes());
    header
}

/// Sends the contents of whole pages from an address on, at most [`MAX_PAGES_PER_FRAME`]. Omits zero pages if `without_zero`.
pub(super) fn send_run(
    run: &[u8],
    start: u64,
    without_zero: bool,
    sender: &mut Sender,
    to: &mut impl Write,
) -> Result<Sent, MigrationError> {
    let length = run.len() / PAGE;
    let mut sent = Sent { pages: length as u64, ..Sent::default() };
    // Alternating runs of zero pages and other pages.
    let mut at = 0;
    while at < length {
        let page = |index: usize| is_zero(&run[index * PAGE..(index + 1) * PAGE]);
        let zero = page(at);
        let end = (at + 1..length).find(|index| page(*index) != zero).unwrap_or(length);
        let address = start + (at * PAGE) as u64;
        sent.zero += if zero { (end - at) as u64 } else { 0 };
        if !(zero && without_zero) {
            let what = if zero { ZERO } else { CONTENTS };
            let contents = if zero { &[][..] } else { &run[at * PAGE..end * PAGE] };
            sender
                .send(to, Kind::Pages, &[&header(address, end - at, what), contents])
                .map_err(MigrationError::stream("written"))?;
            sent.announced += (end - at) as u64;
        }
        at = end;
    }
    Ok(sent)
}

/// A stream's share of the pages of a round.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// Pages of all streams.
    pub sets: &'a [DirtyPages],
    /// Memory with the pages' contents.
    pub memory: &'a GuestMemorySpace,
    /// Number of this stream.
    pub stream: u64,
    /// Number of streams.
    pub streams: u64,
    /// First round: zero pages needn't be sent, because the destination's memory is zero where nothing was sent before.
    pub first: bool,
    /// When the stream shows that its zero pages are being read.
    pub keepalive: Keepalive,
}

impl Share<'_> {
    fn mine(&self, address: u64) -> bool {
        (address >> PIECE) % self.streams == self.stream
    }

    /// Sends this stream's share. Calls `after` after each frame.
    pub fn send(
        &self,
        sender: &mut Sender,
        to: &mut impl Write,
        after: &mut dyn FnMut(u64),
    ) -> Result<Sent, MigrationError> {
        let memory = self.memory.memory();
        let mut buffer = vec![0; MAX_PAGES_PER_FRAME * PAGE];
        let mut sent = Sent::default();
        let mut pages =
            self.sets.iter().flat_map(DirtyPages::pages).filter(|page| self.mine(*page)).peekable();
        while let Some(start) = pages.next() {
            let mut length = 1;
            while length < MAX_PAGES_PER_FRAME
                && pages.next_if_eq(&(start + (length * PAGE) as u64)).is_some()
            {
                length += 1;
            }
            let run = &mut buffer[..length * PAGE];
            memory.read_slice(run, GuestAddress(start)).map_err(MigrationError::machine("read"))?;
            let one = send_run(run, start, self.first, sender, to)?;
            sent.pages += one.pages;
            sent.zero += one.zero;
            sent.announced += one.announced;
            self.keepalive.send_if_silent(sender, to)?;
            after(sender.bytes());
        }
        // A stream whose share is empty round after round is silent as well.
        self.keepalive.send_if_silent(sender, to)?;
        Ok(sent)
    }
}

/// The pages of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run<'a> {
    /// Guest-physical address of the first page; not checked.
    pub address: u64,
    /// Number of pages.
    pub pages: u32,
    /// Contents, page after page; `None` for zero pages.
    pub contents: Option<&'a [u8]>,
}

fn outside(address: u64, pages: u32) -> MigrationError {
    MigrationError::Protocol(format!("{pages} pages at {address:#x}, which isn't RAM"))
}

/// Decodes a frame of pages.
///
/// # Errors
/// When the payload is invalid.
pub fn parse(payload: &[u8]) -> Result<Run<'_>, MigrationError> {
    let bad = |what: String| MigrationError::Protocol(what);
    let Some((header, contents)) = payload.split_at_checked(RUN_HEADER) else {
        return Err(bad(format!("pages of {} bytes, without a header", payload.len())));
    };
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let address = u64::from(word(0)) | u64::from(word(4)) << 32;
    let (pages, what) = (word(8), word(12));
    if pages == 0 || !address.is_multiple_of(PAGE as u64) {
        return Err(bad(format!("{pages} pages at {address:#x}, which can't be")));
    }
    match what {
        CONTENTS if contents.len() == usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(PAGE) => {
            Ok(Run { address, pages, contents: Some(contents) })
        }
        ZERO if contents.is_empty() => Ok(Run { address, pages, contents: None }),
        _ => Err(bad(format!("{pages} pages as {what} with {} bytes", contents.len()))),
    }
}

/// Writes the pages of a frame to memory; returns their number. Refuses addresses outside RAM.
pub fn apply(payload: &[u8], memory: &GuestMemory) -> Result<u64, MigrationError> {
    let Run { address, pages, contents } = parse(payload)?;
    let outside = || outside(address, pages);
    match contents {
        Some(contents) => {
            memory.write_slice(contents, GuestAddress(address)).map_err(|_| outside())?;
        }
        None => {
            for page in 0..u64::from(pages) {
                let at = address.checked_add(page * PAGE as u64).ok_or_else(outside)?;
                memory.write_slice(&[0; PAGE], GuestAddress(at)).map_err(|_| outside())?;
            }
        }
    }
    Ok(pages.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::migration::frame::Receiver;
    use machine::memory::{GuestRam, RamLayout, RamOptions};
    use proptest::prelude::*;

    /// RAM of `mib` MiB.
    pub fn ram(mib: u64) -> GuestRam {
        GuestRam::allocate(&RamLayout::new(&[mib << 20]).unwrap(), &RamOptions::default()).unwrap()
    }

    fn carry(from: &GuestRam, to: &GuestRam, sets: &[DirtyPages], first: bool, streams: u64) -> (Sent, u64) {
        let (mut total, mut applied) = (Sent::default(), 0);
        for stream in 0..streams {
            let (mut sender, mut bytes) = (Sender::new(), Vec::new());
            let share =
                Share { sets, memory: &from.memory(), stream, streams, first, keepalive: Keepalive::Unknown };
            let sent = share.send(&mut sender, &mut bytes, &mut |_| {}).unwrap();
            total.pages += sent.pages;
            total.zero += sent.zero;
            total.announced += sent.announced;
            let (mut receiver, mut rest) = (Receiver::new(), bytes.as_slice());
            while !rest.is_empty() {
                let (kind, payload) = receiver.receive(&mut rest).unwrap();
                assert_eq!(kind, Kind::Pages);
                applied += apply(payload, &to.memory().memory()).unwrap();
            }
        }
        (total, applied)
    }

    fn contents(ram: &GuestRam) -> Vec<u8> {
        let mut all = vec![0; usize::try_from(ram.layout().total()).unwrap()];
        ram.memory().memory().read_slice(&mut all, GuestAddress(0)).unwrap();
        all
    }

    /// The first round carries pages that aren't zero; a later one also those that have become zero. Holds for any number of streams.
    #[test]
    fn memory_arrives_over_any_number_of_streams() {
        for streams in [1, 2, 5] {
            let (from, to) = (ram(4), ram(4));
            let write = |at: u64, bytes: &[u8]| {
                from.memory().memory().write_slice(bytes, GuestAddress(at)).unwrap();
            };
            write(0, &[1; PAGE * 70]);
            write((1 << 20) - 5, b"over the edge");
            write(3 << 20, &[0; PAGE * 3]);
            write((4 << 20) - 1, &[9]);
            let (sent, applied) = carry(&from, &to, &from.present().unwrap(), true, streams);
            assert_eq!((sent.zero, sent.pages, applied), (3, 70 + 2 + 3 + 1, 73));
            assert_eq!(contents(&from), contents(&to));
            write(0x3000, &[0; PAGE * 2]);
            write(0x7000, &[7; 3]);
            let dirty = [DirtyPages { start: 0, bitmap: vec![0b1001_1000] }];
            let (sent, applied) = carry(&from, &to, &dirty, false, streams);
            assert_eq!((sent.pages, sent.zero, applied), (3, 2, 3));
            assert_eq!(contents(&from), contents(&to));
        }
    }

    /// A stream that reads zero pages only, or has none at all, isn't silent.
    #[test]
    fn zero_pages_show_that_the_stream_lives() {
        let from = ram(4);
        let all = [DirtyPages { start: 0, bitmap: vec![u64::MAX; 16] }];
        for (sets, signs) in [(&all[..], 1024 / MAX_PAGES_PER_FRAME + 1), (&[], 1)] {
            let (mut sender, mut bytes) = (Sender::new(), Vec::new());
            let keepalive = Keepalive::After(std::time::Duration::ZERO);
            let share = Share { sets, memory: &from.memory(), stream: 0, streams: 1, first: true, keepalive };
            let sent = share.send(&mut sender, &mut bytes, &mut |_| {}).unwrap();
            assert_eq!((sent.announced, sent.zero), (0, sent.pages));
            let (mut receiver, mut rest, mut received) = (Receiver::new(), bytes.as_slice(), 0);
            while !rest.is_empty() {
                assert_eq!(receiver.receive(&mut rest).unwrap().0, Kind::Keepalive);
                received += 1;
            }
            assert_eq!(received, signs);
        }
    }

    /// Refuses pages outside RAM, of no length, or with a wrong amount of contents.
    #[test]
    fn pages_that_cannot_be_are_refused() {
        let to = ram(4);
        let frame = |address, pages, what, contents: usize| {
            let mut payload = header(address, pages, what).to_vec();
            payload.resize(RUN_HEADER + contents, 1);
            apply(&payload, &to.memory().memory()).map_err(|error| error.to_string())
        };
        assert_eq!(frame(0x1000, 1, CONTENTS, PAGE), Ok(1));
        for (address, pages, what, contents, expected) in [
            (4 << 20, 1, CONTENTS, PAGE, "isn't RAM"),
            ((4 << 20) - 4096, 2, CONTENTS, 2 * PAGE, "isn't RAM"),
            (u64::MAX - 4095, 2, ZERO, 0, "isn't RAM"),
            (0, 1025, ZERO, 0, "isn't RAM"),
            (0x1001, 1, CONTENTS, PAGE, "can't be"),
            (0x1000, 0, CONTENTS, 0, "can't be"),
            (0x1000, 2, CONTENTS, PAGE, "with 4096 bytes"),
            (0x1000, 1, ZERO, PAGE, "with 4096 bytes"),
            (0x1000, 1, 2, 0, "as 2"),
        ] {
            let error = frame(address, pages, what, contents).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    proptest! {
        /// Any payload gives pages or an error, never a panic.
        #[test]
        fn any_payload_is_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = apply(&bytes, &ram(1).memory().memory());
        }
    }
}
