//! What the transport needs of a host's RDMA device. Its numbers are its own: queue pairs and keys are called otherwise than in the
//! guest.

use std::os::fd::BorrowedFd;

use dma::Alias;
use hca::attributes::Access;
use hca::work::{SgeList, Status};

/// A host's RDMA device can't be used, or refuses.
#[derive(Debug, thiserror::Error)]
pub enum RnicError {
    /// It refused.
    #[error("The host's RDMA device refuses to {what}")]
    Refused {
        /// What was asked of it.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// An object that isn't there (any more).
    #[error("The host's RDMA device has no {0} of that name; this is a bug")]
    Gone(&'static str),
}

/// The device and how others reach it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RnicInfo {
    /// Its name, as `ibv_devices` has it.
    pub device: String,
    /// Its port, from 1 on.
    pub port: u8,
    /// The address others reach it at.
    pub address: std::net::Ipv6Addr,
    /// Code of its path MTU, 1 to 5 for 256 to 4096 bytes.
    pub mtu: u8,
    /// Send requests a queue pair may have.
    pub sends: u32,
    /// Receives a queue pair may have.
    pub receives: u32,
    /// Reads and atomics outstanding as initiator.
    pub reads: u8,
    /// Reads and atomics outstanding as responder.
    pub served_reads: u8,
}

/// A protection domain of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostPd(pub u32);
/// A registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostMr(pub u32);
/// A queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostQp(pub u32);

/// A registration and its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    pub mr: HostMr,
    pub lkey: u32,
    pub rkey: u32,
}

/// The other end of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Address of its device.
    pub gid: [u8; 16],
    /// Number there.
    pub number: u32,
    /// First PSN that it sends.
    pub psn: u32,
    /// Code of its path MTU.
    pub mtu: u8,
}

/// What a queue pair needs to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiving {
    pub end: End,
    /// Code of the path MTU: the smaller of both ends'.
    pub mtu: u8,
    /// What the other end may do.
    pub access: Access,
    pub served_reads: u8,
    pub min_rnr_timer: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
}

/// What it needs to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sending {
    /// Own first PSN.
    pub psn: u32,
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub reads: u8,
}

/// What a send request does, in the device's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Send { immediate: Option<[u8; 4]> },
    Write { address: u64, rkey: u32, immediate: Option<[u8; 4]> },
    Read { address: u64, rkey: u32 },
    CompareSwap { address: u64, rkey: u32, compare: u64, swap: u64 },
    FetchAdd { address: u64, rkey: u32, add: u64 },
}

/// A send request in the device's numbers. All of them complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRequest {
    pub wr_id: u64,
    pub operation: Operation,
    pub fence: bool,
    pub solicited: bool,
    /// With the device's keys.
    pub sges: SgeList,
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCompletion {
    pub wr_id: u64,
    pub status: Status,
    /// Of a receive: bytes of the message.
    pub length: u32,
    /// Of a receive: it was a WRITE's with immediate data.
    pub write: bool,
    pub immediate: Option<[u8; 4]>,
}

/// Why a queue pair failed without a completion that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostEvent {
    /// The other end sent a request that can't be.
    Request,
    /// The other end asked for what it may not.
    Access,
    /// For a reason of its own.
    Fatal,
}

/// A host's RDMA device. One thread uses it. Dropping it gives all of it back.
pub trait Rnic: Send {
    fn info(&self) -> RnicInfo;
    fn allocate_pd(&mut self) -> Result<HostPd, RnicError>;
    fn free_pd(&mut self, pd: HostPd);
    /// Registers memory; requests name its first byte by the address `start`. The device keeps the pages.
    fn register(
        &mut self,
        pd: HostPd,
        memory: Alias,
        start: u64,
        access: Access,
    ) -> Result<Registered, RnicError>;
    /// Nobody reaches the memory any more when this returns.
    fn deregister(&mut self, mr: HostMr);
    /// A reliable connection in INIT, and its number. It gets no more requests than [`RnicInfo`] says.
    fn create_qp(&mut self, pd: HostPd, access: Access) -> Result<(HostQp, u32), RnicError>;
    fn receive_from(&mut self, qp: HostQp, with: &Receiving) -> Result<(), RnicError>;
    fn send_to(&mut self, qp: HostQp, with: &Sending) -> Result<(), RnicError>;
    /// It touches no memory any more when this returns. Completions of it may still come.
    fn destroy_qp(&mut self, qp: HostQp);
    fn post_send(&mut self, qp: HostQp, request: &HostRequest) -> Result<(), RnicError>;
    fn post_receive(&mut self, qp: HostQp, wr_id: u64, sges: &SgeList) -> Result<(), RnicError>;
    /// Appends completions, a bounded number.
    fn poll(&mut self, into: &mut Vec<HostCompletion>);
    /// Appends what happened to queue pairs, a bounded number.
    fn events(&mut self, into: &mut Vec<(HostQp, HostEvent)>);
    /// From now on the next completion makes a descriptor readable. Completions before that may have been missed: poll again.
    fn arm(&mut self);
    /// Descriptors that become readable with completions, and with events.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}
