//! Flow control of a queue pair: a stream of bytes, cut into messages that always find a receive buffer.
//!
//! A message is a header and a part of the stream:
//! ```text
//!  0 credits (2): receive buffers that the sender has reposted since its last message   2 zero (2)   4 bytes that follow (4)
//! ```
//! **Credits** count the peer's receive buffers that are known to be free. The last credit is reserved for a message that only returns
//! credits. So two sides that have sent all they may are never both mute: a side that uses its last credit returns at least one. Credits
//! return with any message, or alone when half of the buffers are owed. A message that returns credits also consumes one, so answers to
//! answers end.

/// Bytes of a message's header.
pub(super) const HEADER: usize = 8;
/// Fewest receive buffers with which the flow control makes progress.
pub(super) const MIN_RECEIVE_BUFFERS: u16 = 4;
/// Limit of received bytes that the reader hasn't consumed. Above it buffers aren't reposted, and the peer has to wait. (One more message
/// may
/// exceed it.)
const MAX_ARRIVED_BYTES: usize = 4 << 20;

/// Number and size of the buffers of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Number of buffers.
    pub(super) count: u16,
    /// Bytes of each buffer.
    pub(super) size: u32,
}

impl Shape {
    fn bytes(self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }
}

/// The device that sends messages and owns the buffers.
pub(super) trait Port {
    /// Copies a message into a send buffer and posts it. The buffer stays in use until [`Flow::sent`].
    fn send(&mut self, buffer: u16, header: [u8; HEADER], part: &[u8]) -> std::io::Result<()>;
    /// Posts a receive buffer. It stays in use until [`Flow::received`].
    fn receive(&mut self, buffer: u16) -> std::io::Result<()>;
}

/// A violation of the message format or the flow control by the peer, or of the buffers' use by the device.
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

/// Flow control of one side.
#[derive(Debug)]
pub(super) struct Flow {
    peer: Shape,
    /// Bytes of a send buffer.
    size: usize,
    /// Free receive buffers of the peer.
    credits: u16,
    /// Own receive buffers that were reposted and not yet reported to the peer.
    owed: u16,
    /// Free send buffers; and for each send buffer, whether it is in use.
    free: Vec<u16>,
    sending: Vec<bool>,
    /// For each receive buffer, whether it is posted.
    posted: Vec<bool>,
    /// Received bytes that the reader hasn't consumed.
    arrived: Vec<u8>,
    /// Some bytes couldn't be sent.
    blocked: bool,
    /// Some bytes couldn't be sent, since no send buffer was free.
    starved: bool,
}

impl Flow {
    /// All buffers are free. The caller has posted all of `receives` (see [`Flow::begin`]), and the peer all of `peer`.
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

    /// Sends as many bytes as credits and send buffers allow. Returns their number.
    pub(super) fn offer(&mut self, bytes: &[u8], port: &mut impl Port) -> std::io::Result<usize> {
        let room = self.size.min(self.peer.bytes()).saturating_sub(HEADER);
        let mut left = bytes;
        while !left.is_empty() {
            // The last credit is reserved for a message that returns credits.
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

    /// Sends a message if a send buffer is free; returns whether. The caller has checked for a credit.
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

    /// The device has completed the send of a buffer.
    pub(super) fn sent(&mut self, buffer: u16) -> Result<(), Violation> {
        if self.sending.get_mut(usize::from(buffer)).is_none_or(|used| !std::mem::take(used)) {
            return Err(Violation::Buffer(buffer));
        }
        self.free.push(buffer);
        Ok(())
    }

    /// The device has received a message into a buffer.
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

    /// Returns credits to the peer in a message of their own, when due. To be called after messages were received, and after send buffers
    /// were freed.
    pub(super) fn settle(&mut self, port: &mut impl Port) -> std::io::Result<()> {
        if usize::from(self.owed) * 2 >= self.posted.len() && self.credits > 0 {
            self.post(&[], port)?;
        }
        Ok(())
    }

    /// Whether the reader may poll more messages from the device.
    pub(super) fn has_room(&self) -> bool {
        self.arrived.len() < MAX_ARRIVED_BYTES
    }

    /// Consumes received bytes, as many as fit. Returns their number.
    pub(super) fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.arrived.len());
        into[..count].copy_from_slice(&self.arrived[..count]);
        self.arrived.drain(..count);
        count
    }

    /// Returns true, once, when bytes that couldn't be sent now can be.
    pub(super) fn take_unblocked(&mut self) -> bool {
        let can = self.blocked && self.credits > 1 && !self.free.is_empty();
        if can {
            self.blocked = false;
        }
        can
    }

    /// Returns true, once, when bytes wait for a free send buffer: the caller must arm a wakeup.
    pub(super) fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved) && self.free.is_empty()
    }

    /// Whether the device has completed all sends, so that the peer's device has all bytes.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.sending.len()
    }
}

/// Why a message can't be accepted.
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
