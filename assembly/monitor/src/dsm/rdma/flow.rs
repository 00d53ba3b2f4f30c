//! What goes over a queue pair when: a stream of bytes in messages that always find a receive buffer.
//!
//! A message is a header and a part of the stream:
//! ```text
//!  0 credits (2): receive buffers that the sender has posted again since it last said so   2 zero (2)   4 bytes that follow (4)
//! ```
//! **Credits** are the peer's receive buffers that are known to be free. The last one is kept for a message that does nothing but give
//! credits back, so that two sides that have sent each other all they may are never both mute: who used its last credit has given the
//! other at least one by that. Credits go back with what is sent anyway, and alone when half of the buffers are owed; such a message
//! owes one itself, so the answers to answers end.

/// Bytes of a message's header.
pub(super) const HEADER: usize = 8;
/// Fewest receive buffers that both sides can work with.
pub(super) const FEWEST: u16 = 4;
/// Bytes that have come and nobody has taken, at most; beyond that buffers aren't posted again, and the peer has to wait. (One message more may come.)
const MOST_ARRIVED: usize = 4 << 20;

/// Buffers of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// How many.
    pub(super) count: u16,
    /// Bytes of each.
    pub(super) size: u32,
}

impl Shape {
    fn bytes(self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }
}

/// What carries messages, and owns the buffers.
pub(super) trait Port {
    /// Copies a message into a send buffer and sends it. The buffer stays in use until [`Flow::sent`].
    fn send(&mut self, buffer: u16, header: [u8; HEADER], part: &[u8]) -> std::io::Result<()>;
    /// Lets a receive buffer take a message. It stays in use until [`Flow::received`].
    fn receive(&mut self, buffer: u16) -> std::io::Result<()>;
}

/// The peer, or the device, did what no correct one does.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("a message of {0} bytes, which says that it has {1}")]
    Length(usize, u32),
    #[error("a message that says nothing")]
    Empty,
    #[error("a message whose reserved bytes are used")]
    Reserved,
    #[error("{returned} credits for buffers that it has, where {held} of {all} weren't used")]
    Credits { returned: u16, held: u16, all: u16 },
    #[error("a completion for buffer {0}, which wasn't in use")]
    Buffer(u16),
}

/// One side.
#[derive(Debug)]
pub(super) struct Flow {
    peer: Shape,
    /// Bytes of a send buffer.
    size: usize,
    /// Free receive buffers of the peer.
    credits: u16,
    /// Own receive buffers that were posted again and that the peer hasn't been told of.
    owed: u16,
    /// Send buffers that aren't in use, and all of them: is it?
    free: Vec<u16>,
    sending: Vec<bool>,
    /// Receive buffers: are they posted?
    posted: Vec<bool>,
    /// What has come and nobody has taken.
    arrived: Vec<u8>,
    /// Something couldn't be sent.
    blocked: bool,
    /// Something couldn't be sent for want of a send buffer.
    starved: bool,
}

impl Flow {
    /// All buffers are free. `receives`, which must be posted (see [`Flow::begin`]), are its own, and the peer's were posted.
    pub(super) fn new(sends: Shape, receives: Shape, peer: Shape) -> Self {
        Self {
            peer,
            size: sends.bytes(),
            credits: peer.count,
            owed: 0,
            free: (0..sends.count).rev().collect(),
            sending: vec![false; sends.count.into()],
            posted: vec![true; receives.count.into()],
            arrived: Vec::new(),
            blocked: false,
            starved: false,
        }
    }

    /// Sends as much of this as can be sent now. Returns how many bytes that were.
    pub(super) fn offer(&mut self, bytes: &[u8], port: &mut impl Port) -> std::io::Result<usize> {
        let room = self.size.min(self.peer.bytes()).saturating_sub(HEADER);
        let mut left = bytes;
        while !left.is_empty() {
            // The last is for credits.
            if self.credits <= 1 {
                self.blocked = true;
                break;
            }
            let (part, rest) = left.split_at(left.len().min(room));
            if !self.post(part, port)? {
                break;
            }
            left = rest;
        }
        Ok(bytes.len() - left.len())
    }

    /// Sends a message if there is a buffer for it. Whoever calls this has looked for a credit.
    fn post(&mut self, part: &[u8], port: &mut impl Port) -> std::io::Result<bool> {
        let Some(buffer) = self.free.pop() else {
            (self.blocked, self.starved) = (true, true);
            return Ok(false);
        };
        let mut header = [0; HEADER];
        header[..2].copy_from_slice(&self.owed.to_le_bytes());
        header[4..].copy_from_slice(&u32::try_from(part.len()).unwrap_or(0).to_le_bytes());
        port.send(buffer, header, part)?;
        self.sending[usize::from(buffer)] = true;
        self.credits -= 1;
        self.owed = 0;
        Ok(true)
    }

    /// A send buffer isn't in use any more.
    pub(super) fn sent(&mut self, buffer: u16) -> Result<(), Violation> {
        if self.sending.get_mut(usize::from(buffer)).is_none_or(|used| !std::mem::take(used)) {
            return Err(Violation::Buffer(buffer));
        }
        self.free.push(buffer);
        Ok(())
    }

    /// A receive buffer has this message.
    pub(super) fn received(
        &mut self,
        buffer: u16,
        message: &[u8],
        port: &mut impl Port,
    ) -> Result<(), Failure> {
        if self.posted.get_mut(usize::from(buffer)).is_none_or(|posted| !std::mem::take(posted)) {
            return Err(Violation::Buffer(buffer).into());
        }
        let Some(([a, b, zero @ .., c, d, e, f], part)) = message.split_first_chunk::<HEADER>() else {
            return Err(Violation::Length(message.len(), 0).into());
        };
        let said = u32::from_le_bytes([*c, *d, *e, *f]);
        if usize::try_from(said) != Ok(part.len()) {
            return Err(Violation::Length(message.len(), said).into());
        }
        if zero != &[0, 0] {
            return Err(Violation::Reserved.into());
        }
        let returned = u16::from_le_bytes([*a, *b]);
        if returned == 0 && part.is_empty() {
            return Err(Violation::Empty.into());
        }
        let (held, all) = (self.credits, self.peer.count);
        self.credits = held
            .checked_add(returned)
            .filter(|credits| *credits <= all)
            .ok_or(Violation::Credits { returned, held, all })?;
        self.arrived.extend_from_slice(part);
        port.receive(buffer)?;
        self.posted[usize::from(buffer)] = true;
        self.owed += 1;
        Ok(())
    }

    /// Tells the peer of buffers that it may use again, when that is due. After messages were received, and after buffers were freed.
    pub(super) fn settle(&mut self, port: &mut impl Port) -> std::io::Result<()> {
        if usize::from(self.owed) * 2 >= self.posted.len() && self.credits > 0 {
            self.post(&[], port)?;
        }
        Ok(())
    }

    /// Whether more messages may be taken from the device.
    pub(super) fn has_room(&self) -> bool {
        self.arrived.len() < MOST_ARRIVED
    }

    /// Takes bytes that have come, as many as fit: how many.
    pub(super) fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.arrived.len());
        into[..count].copy_from_slice(&self.arrived[..count]);
        self.arrived.drain(..count);
        count
    }

    /// Something couldn't be sent, and now can; says so once.
    pub(super) fn take_unblocked(&mut self) -> bool {
        let can = self.blocked && self.credits > 1 && !self.free.is_empty();
        if can {
            self.blocked = false;
        }
        can
    }

    /// Something waits for a send buffer: somebody has to be woken when one is free. Says so once.
    pub(super) fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved) && self.free.is_empty()
    }

    /// All that was sent has reached the peer's device.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.sending.len()
    }
}

/// Why a message couldn't be taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Port(#[from] std::io::Error),
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
