//! A peer: its RAM, mapped read-only, and the rings of the pair.
#![allow(unsafe_code)] // Memory that other processes write: the segment's words, and addresses in a peer's RAM.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use machine::slots::HostMapping;
use neighbour::channel::{Message, Part, Receiver, Sender};
use neighbour::layout::{Layout, Side};
use neighbour::window::Window;

use super::super::mappings::Offer;
use super::super::opened::Terms;

type Problem = Box<dyn std::error::Error + Send + Sync>;

/// A connection to a peer.
pub(super) struct Peer {
    pub epoch: u32,
    pub vm: String,
    pub sender: Sender<Box<[u32]>>,
    pub receiver: Receiver,
    /// Both sides have made their rings.
    pub live: bool,
    /// The connection is to end: the peer violated the protocol, or doesn't complete frames.
    pub ended: bool,
    /// When it last completed a frame.
    pub last_completion: Instant,
    side: Side,
    window: Window,
    segment: Arc<HostMapping>,
    signal: OwnedFd,
    /// Start in the peer's guest-physical addresses, and mapping, of each range.
    ram: Vec<(u64, Arc<HostMapping>)>,
}

impl Peer {
    /// Maps an offered peer. `own` is this VM's window.
    pub(super) fn map(terms: &Terms, own: Window, offer: Offer) -> Result<Self, Problem> {
        let Offer { slot, epoch, vm, ram, mut fds } = offer;
        let (Some(signal), Some(segment)) = (fds.pop(), fds.pop()) else {
            return Err("descriptors are missing".into());
        };
        let extents: Vec<(u64, u64)> = ram.iter().map(|piece| (piece.address, piece.size)).collect();
        let window = terms.geometry.window(slot, &extents)?;
        let side = Side::of(own.slot(), slot).ok_or("it has this VM's own slot")?;
        let layout: Layout = terms.layout;
        let segment = HostMapping::new("segment", segment.as_fd(), 0, layout.size() as u64, true)?;
        let mut mapped = Vec::with_capacity(ram.len());
        for piece in &ram {
            let file = usize::try_from(piece.file).ok().and_then(|file| fds.get(file));
            let file = file.ok_or("a piece of RAM is in a file that didn't come")?;
            let name = format!("RAM of {vm}");
            mapped.push((
                piece.address,
                HostMapping::new(&name, file.as_fd(), piece.offset, piece.size, false)?,
            ));
        }
        let ids = vec![0; layout.entries() as usize].into_boxed_slice();
        let sender = Sender::new(words(&segment), &layout, epoch, side, own, ids)?;
        let receiver = Receiver::new(words(&segment), &layout, epoch, side.other(), window)?;
        let peer = Self {
            epoch,
            vm,
            sender,
            receiver,
            live: false,
            ended: false,
            last_completion: Instant::now(),
            side,
            window,
            segment,
            signal,
            ram: mapped,
        };
        neighbour::words::Words::store_release(peer.words(), Layout::ready(side), u64::from(epoch));
        // Wakes a peer that waits for these rings.
        peer.signal();
        Ok(peer)
    }

    /// Makes the connection live if the peer has made its rings. Returns true if it has just become live.
    pub(super) fn poll_ready(&mut self) -> bool {
        let ready = neighbour::words::Words::load_acquire(self.words(), Layout::ready(self.side.other()));
        let now = !self.live && !self.ended && ready == u64::from(self.epoch);
        self.live |= now;
        now
    }

    /// The pair's segment.
    pub(super) fn words(&self) -> &[AtomicU64] {
        words(&self.segment)
    }

    /// The segment, and the rings of both directions.
    pub(super) fn rings(&mut self) -> (&[AtomicU64], &mut Sender<Box<[u32]>>, &mut Receiver) {
        (words(&self.segment), &mut self.sender, &mut self.receiver)
    }

    /// Wakes the peer.
    pub(super) fn signal(&self) {
        // A full counter wakes as well, and no other failure is possible.
        let _ = rustix::io::write(&self.signal, &1_u64.to_ne_bytes());
    }

    /// Appends the mapped addresses of a message's parts, with lengths, in order. `None` if a part isn't mapped, which the ring's check
    /// excludes.
    pub(super) fn places(&self, message: &Message, out: &mut Vec<(*const u8, usize)>) -> Option<()> {
        out.clear();
        for part in message.parts() {
            self.place(*part, out)?;
        }
        Some(())
    }

    fn place(&self, part: Part, out: &mut Vec<(*const u8, usize)>) -> Option<()> {
        let mut at = self.window.local(part.address, part.length)?;
        let mut left = u64::from(part.length);
        // A range that the peer has in one piece may be mapped in two.
        while left > 0 {
            let (start, mapping) =
                self.ram.iter().find(|(start, mapping)| (*start..*start + mapping.len()).contains(&at))?;
            let from = at - start;
            let now = left.min(mapping.len() - from);
            let (offset, len) = (usize::try_from(from).ok()?, usize::try_from(now).ok()?);
            // SAFETY: `offset` is less than the mapping's length.
            out.push((unsafe { mapping.as_ptr().add(offset) }.cast_const(), len));
            (at, left) = (at + now, left - now);
        }
        Some(())
    }
}

/// A segment as words.
fn words(segment: &HostMapping) -> &[AtomicU64] {
    let count = usize::try_from(segment.len() / 8).unwrap_or(0);
    // SAFETY: the mapping begins at a page, is writable, has 8 bytes for each word, and lives as long as the reference. Both sides write
    // whole words, and all access here is atomic.
    unsafe { std::slice::from_raw_parts(segment.as_ptr().cast(), count) }
}
