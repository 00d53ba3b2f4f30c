//! What a connection asks of whoever owns the memory and the queues: a HCA, or a test.
//!
//! A connection keeps no payload. It asks for the bytes of a request by token and offset whenever it (re)transmits them, and hands
//! over what arrives at once. All calls come from within [`crate::Connection`]'s own functions; nothing here may call back into it.

pub use crate::status::{Event, NoReceive, Refusal, Status, Unmoved};

/// Where a one-sided operation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
pub struct Remote {
    /// Address of the operation's first byte in the remote region.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// An atomic operation on 8 aligned bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomic {
    /// Compare and swap.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add.
    FetchAdd {
        /// What is added.
        add: u64,
    },
}

/// What consumed a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceivedOperation {
    /// A SEND.
    Send,
    /// A WRITE with immediate data.
    WriteImmediate,
}

/// How a receive ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// What consumed it.
    pub operation: ReceivedOperation,
    /// Bytes received, or written.
    pub length: u32,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// The key that [`Memory::invalidate`] was called with.
    pub invalidated: Option<u32>,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
}

/// Memory, receive queue and completions of a connection.
///
/// At most one receive is in use at a time: [`Memory::take_receive`] begins, and [`Memory::complete_receive`],
/// [`Memory::fail_receive`] or [`Memory::keep_receive`] ends it. Its state is the implementer's (it saves it too); where the
/// connection fails for another reason, the receive in use is flushed by the implementer with all others.
pub trait Memory {
    /// Copies bytes `offset..` of a request's message into `into`. Called again for retransmissions.
    ///
    /// # Errors
    /// The status that the request completes with, once all requests before it are complete.
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved>;

    /// Places bytes `offset..` of a READ's answer, or the 8 bytes of an atomic's in native byte order. Each byte comes once, in
    /// order, except after a restore of an older state, and after [`Unmoved::NotHere`].
    ///
    /// # Errors
    /// The status that the request completes with.
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved>;

    /// Does a [`crate::Kind::Local`] request. Called exactly once for each that is reached.
    fn execute_local(&mut self, token: u64) -> Status;

    /// A request is complete. In the order in which they were posted; `length` is that of the message (8 for atomics), 0 unless the
    /// status is [`Status::Success`].
    fn complete(&mut self, token: u64, status: Status, length: u32);

    /// Takes a receive: for a SEND's first packet, or a WRITE with immediate's last. Returns how many bytes fit.
    ///
    /// # Errors
    /// When there is none (answered with RNR), or it can't be used (it was completed with its error, by the implementer).
    fn take_receive(&mut self) -> Result<u64, NoReceive>;

    /// Places bytes of a SEND into the receive in use. In order; each byte once.
    ///
    /// # Errors
    /// The status that [`Memory::fail_receive`] is called with. [`Status::Flushed`]: the queue pair is gone ([`Refusal::Gone`]); the packet
    /// is dropped, and nothing is called.
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved>;

    /// The message is complete.
    fn complete_receive(&mut self, received: &Received);

    /// The receive in use ends with an error; the connection fails afterwards.
    fn fail_receive(&mut self, status: Status);

    /// An unreliable message was lost: the receive in use is to be taken again by the next one.
    fn keep_receive(&mut self);

    /// Writes bytes `offset..` of a WRITE of `length` bytes to `remote`. Permission and range of the *whole* message are checked
    /// each time. With no data and length 0 only whether the queue pair permits writes; there is no key check.
    ///
    /// # Errors
    /// How the request is refused.
    fn write(&mut self, remote: Remote, length: u64, offset: u64, data: &[u8]) -> Result<(), Refusal>;

    /// Reads bytes `offset..` of a READ of `length` bytes from `remote`. Also called with an empty `into`, when the request
    /// arrives: a check only. As for permission, like [`Memory::write`].
    ///
    /// # Errors
    /// How the request is refused.
    fn read(&mut self, remote: Remote, length: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal>;

    /// Executes an atomic and returns the value before. The address is a multiple of 8.
    ///
    /// # Errors
    /// How the request is refused.
    fn atomic(&mut self, remote: Remote, operation: Atomic) -> Result<u64, Refusal>;

    /// Invalidates a key, for SEND with invalidate, before its receive completes.
    ///
    /// # Errors
    /// How the request is refused.
    fn invalidate(&mut self, rkey: u32) -> Result<(), Refusal>;

    /// Something happened that is no completion.
    fn event(&mut self, event: Event);
}
