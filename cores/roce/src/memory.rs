//! What the owner of memory and queues implements for a connection: a HCA, or a test.
//!
//! A connection keeps no payload. It gathers the bytes of a request by token and offset whenever it sends or retransmits them, and places
//! received bytes at once. All calls come from [`crate::Connection`]'s own functions, and must not call back into it.

pub use crate::status::{Event, NoReceive, Refusal, Status, Unmoved};

/// The remote side of a one-sided operation.
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
        /// The addend.
        add: u64,
    },
}

/// The operation that consumed a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceivedOperation {
    /// A SEND.
    Send,
    /// A WRITE with immediate data.
    WriteImmediate,
}

/// A successful receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The operation that consumed it.
    pub operation: ReceivedOperation,
    /// Bytes received, or written.
    pub length: u32,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// The key that [`Memory::invalidate`] was called with.
    pub invalidated: Option<u32>,
    /// Whether the sender requested a solicited event.
    pub solicited: bool,
}

/// Memory, receive queue and completions of a connection.
///
/// At most one receive is in use at a time: [`Memory::take_receive`] begins, and [`Memory::complete_receive`], [`Memory::fail_receive`] or
/// [`Memory::keep_receive`] ends it. The implementer owns and saves its state. When the connection fails for another reason, the
/// implementer flushes the receive in use with all others.
pub trait Memory {
    /// Copies bytes `offset..` of a request's message into `into`. Called again for retransmissions.
    ///
    /// # Errors
    /// The status with which the request completes, after all earlier requests.
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved>;

    /// Places bytes `offset..` of a READ response, or the 8 bytes of an atomic's result in native byte order. Each byte comes once, in
    /// order, except after a restore of an older state, and after [`Unmoved::NotHere`].
    ///
    /// # Errors
    /// The status with which the request completes.
    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved>;

    /// Executes a [`crate::Kind::Local`] request. Called exactly once for each that is reached.
    fn execute_local(&mut self, token: u64) -> Status;

    /// Completes a request, in posting order. `length` is that of the message (8 for atomics), 0 unless the status is [`Status::Success`].
    fn complete(&mut self, token: u64, status: Status, length: u32);

    /// Consumes a receive: for a SEND's first packet, or the last one of a WRITE with immediate. Returns its capacity in bytes.
    ///
    /// # Errors
    /// When none is posted (the responder sends an RNR NAK), or it is unusable (the implementer has completed it with its error).
    fn take_receive(&mut self) -> Result<u64, NoReceive>;

    /// Places bytes of a SEND into the receive in use, in order and each once.
    ///
    /// # Errors
    /// The status for [`Memory::fail_receive`]. With [`Status::Flushed`] the queue pair is gone ([`Refusal::Gone`]): the packet is dropped,
    /// and nothing is called.
    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved>;

    /// Completes the receive in use.
    fn complete_receive(&mut self, received: &Received);

    /// Completes the receive in use with an error; the connection fails afterwards.
    fn fail_receive(&mut self, status: Status);

    /// Returns the receive in use to the queue, for the next message: the unreliable message was lost.
    fn keep_receive(&mut self);

    /// Writes bytes `offset..` of a WRITE of `length` bytes to `remote`. Checks permission and range of the *whole* message each time. With
    /// no data and length 0 it only checks whether the queue pair permits writes; the key isn't checked.
    ///
    /// # Errors
    /// How the request is refused.
    fn write(&mut self, remote: Remote, length: u64, offset: u64, data: &[u8]) -> Result<(), Refusal>;

    /// Reads bytes `offset..` of a READ of `length` bytes from `remote`. Also called with an empty `into` when the request arrives, as a
    /// check only. Permissions are as for [`Memory::write`].
    ///
    /// # Errors
    /// How the request is refused.
    fn read(&mut self, remote: Remote, length: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal>;

    /// Executes an atomic and returns the previous value. The address is a multiple of 8.
    ///
    /// # Errors
    /// How the request is refused.
    fn atomic(&mut self, remote: Remote, operation: Atomic) -> Result<u64, Refusal>;

    /// Invalidates a key, for SEND with invalidate, before its receive completes.
    ///
    /// # Errors
    /// How the request is refused.
    fn invalidate(&mut self, rkey: u32) -> Result<(), Refusal>;

    /// Reports an asynchronous event.
    fn event(&mut self, event: Event);
}
