//! Constructors of requests.

use hca::names::{Gid, Qpn};
use hca::work::{Datagram, FastRegister, Operation, Remote, SendRequest, Sge};

/// A signaled request.
#[must_use]
pub fn request(wr_id: u64, operation: Operation, sges: &[Sge]) -> SendRequest {
    SendRequest {
        wr_id,
        operation,
        fence: false,
        signaled: true,
        solicited: false,
        sges: sges.iter().copied().collect(),
    }
}

/// A signaled SEND without immediate data, for a connected queue pair.
#[must_use]
pub fn send(wr_id: u64, sges: &[Sge]) -> SendRequest {
    request(wr_id, Operation::Send { immediate: None, invalidate: None, datagram: None }, sges)
}

/// A signaled WRITE without immediate data.
#[must_use]
pub fn write(wr_id: u64, address: u64, rkey: u32, sges: &[Sge]) -> SendRequest {
    request(wr_id, Operation::Write { remote: Remote { address, rkey }, immediate: None }, sges)
}

/// A signaled READ of the buffers' length.
#[must_use]
pub fn read(wr_id: u64, address: u64, rkey: u32, sges: &[Sge]) -> SendRequest {
    request(wr_id, Operation::Read { remote: Remote { address, rkey } }, sges)
}

/// Fetch and add.
#[must_use]
pub fn fetch_add(wr_id: u64, address: u64, rkey: u32, add: u64, sges: &[Sge]) -> SendRequest {
    request(wr_id, Operation::FetchAdd { remote: Remote { address, rkey }, add }, sges)
}

/// Compare and swap.
#[must_use]
pub fn compare_swap(wr_id: u64, at: Remote, compare: u64, swap: u64, sges: &[Sge]) -> SendRequest {
    request(wr_id, Operation::CompareSwap { remote: at, compare, swap }, sges)
}

/// Local invalidate.
#[must_use]
pub fn invalidate(wr_id: u64, rkey: u32) -> SendRequest {
    request(wr_id, Operation::LocalInvalidate { rkey }, &[])
}

/// Fast registration of whole pages.
#[must_use]
pub fn fast_register(wr_id: u64, rkey: u32, iova: u64, access: u32, pages: &[u64]) -> SendRequest {
    let length = pages.len() as u64 * 4096 - iova % 4096;
    let registration = FastRegister { iova, length, access, rkey, pages: pages.into() };
    request(wr_id, Operation::FastRegister(Box::new(registration)), &[])
}

/// A datagram from the sender's address 0.
#[must_use]
pub fn datagram(wr_id: u64, pd: u32, dgid: Gid, qpn: Qpn, qkey: u32, sges: &[Sge]) -> SendRequest {
    let to = Datagram {
        qpn,
        qkey,
        pd,
        dgid,
        sgid_index: 0,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        dmac: [0; 6],
    };
    request(wr_id, Operation::Send { immediate: None, invalidate: None, datagram: Some(to) }, sges)
}
