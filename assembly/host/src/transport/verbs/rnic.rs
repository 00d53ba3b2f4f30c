//! Interface of a host's RDMA device. Its numbers of queue pairs and keys differ from the guest's.

use std::os::fd::BorrowedFd;

use dma::Alias;
use hca::attributes::Access;
use hca::work::{SgeList, Status};

/// Why a host's RDMA device can't be used, or refuses.
#[derive(Debug, thiserror::Error)]
pub enum RnicError {
    /// The device refused an operation.
    #[error("The host's RDMA device refuses to {what}")]
    Refused {
        /// The operation.
        what: &'static str,
        /// The error.
        #[source]
        source: std::io::Error,
    },
    /// The object doesn't exist (any more).
    #[error("The host's RDMA device has no {0} of that name; this is a bug")]
    Gone(&'static str),
}

/// A device, and its address.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RnicInfo {
    /// The device's name, as `ibv_devices` prints it.
    pub device: String,
    /// Port number, from 1 on.
    pub port: u8,
    /// Address by which peers reach it.
    pub address: std::net::Ipv6Addr,
    /// Path MTU as its verbs code, 1 to 5 for 256 to 4096 bytes.
    pub mtu: u8,
    /// Limit of send requests of a queue pair.
    pub sends: u32,
    /// Limit of receives of a queue pair.
    pub receives: u32,
    /// Limit of READs and atomics outstanding as initiator.
    pub reads: u8,
    /// Limit of READs and atomics outstanding as responder.
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
    /// GID of its device.
    pub gid: [u8; 16],
    /// Number of its queue pair.
    pub number: u32,
    /// First PSN that it sends.
    pub psn: u32,
    /// Path MTU as a verbs code.
    pub mtu: u8,
}

/// Attributes of a queue pair that receives (RTR).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiving {
    pub end: End,
    /// Path MTU as a verbs code: the smaller of both ends'.
    pub mtu: u8,
    /// Access rights of the other end.
    pub access: Access,
    pub served_reads: u8,
    pub min_rnr_timer: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
}

/// Attributes of a queue pair that sends (RTS).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sending {
    /// First PSN of this end.
    pub psn: u32,
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub reads: u8,
}

/// Operation of a send request, in the device's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Send { immediate: Option<[u8; 4]> },
    Write { address: u64, rkey: u32, immediate: Option<[u8; 4]> },
    Read { address: u64, rkey: u32 },
    CompareSwap { address: u64, rkey: u32, compare: u64, swap: u64 },
    FetchAdd { address: u64, rkey: u32, add: u64 },
}

/// A send request in the device's numbers. Every one produces a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRequest {
    pub wr_id: u64,
    pub operation: Operation,
    pub fence: bool,
    pub solicited: bool,
    /// Scatter-gather elements with the device's keys.
    pub sges: SgeList,
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCompletion {
    pub wr_id: u64,
    pub status: Status,
    /// Length of the message, for a receive; bytes.
    pub length: u32,
    /// Whether a WRITE with immediate data consumed the receive.
    pub write: bool,
    pub immediate: Option<[u8; 4]>,
}

/// Why a queue pair failed, if no completion has the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostEvent {
    /// The other end sent an invalid request.
    Request,
    /// The other end sent a request without permission.
    Access,
    /// An error of the device itself.
    Fatal,
}

/// A host's RDMA device. One thread uses it. Dropping it releases all of its objects.
pub trait Rnic: Send {
    fn info(&self) -> RnicInfo;
    fn allocate_pd(&mut self) -> Result<HostPd, RnicError>;
    fn free_pd(&mut self, pd: HostPd);
    /// Registers memory, whose first byte has the address `start` in requests. The device pins the pages.
    fn register(
        &mut self,
        pd: HostPd,
        memory: Alias,
        start: u64,
        access: Access,
    ) -> Result<Registered, RnicError>;
    /// Deregisters memory. The device can't access it any more when this returns.
    fn deregister(&mut self, mr: HostMr);
    /// Creates a reliable connection in INIT; returns its handle and number. The caller posts no more requests than [`RnicInfo`] permits.
    fn create_qp(&mut self, pd: HostPd, access: Access) -> Result<(HostQp, u32), RnicError>;
    fn receive_from(&mut self, qp: HostQp, with: &Receiving) -> Result<(), RnicError>;
    fn send_to(&mut self, qp: HostQp, with: &Sending) -> Result<(), RnicError>;
    /// Destroys a queue pair. It accesses no memory any more when this returns, but completions of it may still come.
    fn destroy_qp(&mut self, qp: HostQp);
    fn post_send(&mut self, qp: HostQp, request: &HostRequest) -> Result<(), RnicError>;
    fn post_receive(&mut self, qp: HostQp, wr_id: u64, sges: &SgeList) -> Result<(), RnicError>;
    /// Appends completions, a bounded number.
    fn poll(&mut self, into: &mut Vec<HostCompletion>);
    /// Appends events of queue pairs, a bounded number.
    fn events(&mut self, into: &mut Vec<(HostQp, HostEvent)>);
    /// Arms the next completion to make a descriptor readable. Earlier completions may be missed: poll again afterwards.
    fn arm(&mut self);
    /// Descriptors that are readable on completions, and on events.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;
}
