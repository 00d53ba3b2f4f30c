//! Decodes work queue elements into requests. Each byte of guest memory is read once; only the copy is used.

use dma::{Dma, DmaFault};
use hca::attributes::QpKind;
use hca::names::{Gid, Qpn};
use hca::provider::Fetched;
use hca::work::{
    Datagram, FastRegister, MAX_SGE, Malformed, Operation, ReceiveRequest, Remote, SendRequest, Sge, SgeList,
};
use zerocopy::{
    FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref,
};

use crate::abi::work::{
    AtomicOperands, DatagramOperands, FastRegisterOperands, ReceiveHeader, RemoteOperands, SendHeader,
    opcode, send_flags,
};
use crate::page_list::read_page_list;

/// Rules for a queue pair's send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendRules {
    pub kind: QpKind,
    /// Posted by the guest's kernel, whose opcodes differ from user space's from 7 on.
    pub kernel: bool,
    pub max_sge: u32,
}

/// Limit of pages that the driver allocates for a fast registration.
pub(crate) const MAX_FAST_REGISTER_PAGES: u32 = 128;

/// Limit of inline data of a request, bytes, whatever its queue pair was created with: `max_inline_data` of CREATE_QP's response.
pub(crate) const INLINE_CAPACITY: u64 = 0;

/// Bytes of a send slot that are read at once, which include three elements.
const SEND_READ: usize = 128;
/// Number of elements in those bytes.
const SEND_INLINE: usize = 3;
/// Bytes of a receive slot that are read at once, if slots are that large.
const RECEIVE_READ: usize = 64;
/// Number of elements in those bytes.
const RECEIVE_INLINE: usize = 3;

type AbiSge = crate::abi::work::Sge;

/// The first bytes of a send slot, copied out of guest memory at once.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SendSlot {
    header: SendHeader,
    sges: [AbiSge; SEND_INLINE],
}

const _: () = assert!(size_of::<SendSlot>() == SEND_READ);

/// Reads one send request. [`Fetched::Broken`] when the slot's memory is gone.
#[inline]
pub(crate) fn read_send(memory: &impl Dma, address: u64, rules: SendRules) -> Fetched<SendRequest> {
    let mut slot = SendSlot::new_zeroed();
    if memory.read(address, slot.as_mut_bytes()).is_err() {
        return Fetched::Broken;
    }
    let SendSlot { header, sges } = &slot;
    let wr_id = header.wr_id.get();
    let count = header.sge_count.get();
    if count > rules.max_sge || count as usize > MAX_SGE {
        return Fetched::Malformed { wr_id, reason: Malformed::SgeCount(count) };
    }
    let Ok(sges) = read_elements(memory, address + SEND_READ as u64, count as usize, sges) else {
        return Fetched::Broken;
    };
    match operation(memory, header, rules).and_then(|operation| refuse_inline(operation, header, &sges)) {
        Ok(operation) => {
            let flags = header.flags.get();
            Fetched::Request(SendRequest {
                wr_id,
                operation,
                fence: flags & send_flags::FENCE != 0,
                signaled: flags & send_flags::SIGNALED != 0,
                solicited: flags & send_flags::SOLICITED != 0,
                sges,
            })
        }
        Err(reason) => Fetched::Malformed { wr_id, reason },
    }
}

/// Refuses a request with more inline data than the capacity. Its program may overwrite the buffers at once, so their contents may not be
/// what it meant. Only SEND and RDMA WRITE have inline data (ibv_post_send(3)); other operations ignore the flag.
#[inline]
fn refuse_inline(operation: Operation, header: &SendHeader, sges: &[Sge]) -> Result<Operation, Malformed> {
    if header.flags.get() & send_flags::INLINE == 0
        || !matches!(operation, Operation::Send { .. } | Operation::Write { .. })
    {
        return Ok(operation);
    }
    let length = sges.iter().map(|sge| u64::from(sge.length)).sum();
    if length > INLINE_CAPACITY { Err(Malformed::Inline(length)) } else { Ok(operation) }
}

/// Returns the first elements from the copy, and reads the others from `rest` on.
#[inline]
fn read_elements(memory: &impl Dma, rest: u64, count: usize, inline: &[AbiSge]) -> Result<SgeList, DmaFault> {
    let mut sges = SgeList::new();
    sges.extend(inline.iter().take(count).map(element));
    if let Some(more) = count.checked_sub(inline.len()).filter(|more| *more > 0) {
        let mut bytes = [[0u8; 16]; MAX_SGE];
        let bytes = &mut bytes[..more.min(MAX_SGE - inline.len())];
        memory.read(rest, bytes.as_flattened_mut())?;
        sges.extend(bytes.iter().map(|bytes| element(&transmute!(*bytes))));
    }
    Ok(sges)
}

#[inline]
fn element(sge: &AbiSge) -> Sge {
    Sge { address: sge.address.get(), length: sge.length.get(), lkey: sge.lkey.get() }
}

#[inline]
fn operation(memory: &impl Dma, header: &SendHeader, rules: SendRules) -> Result<Operation, Malformed> {
    let code = header.opcode.get();
    let connected = matches!(rules.kind, QpKind::Rc | QpKind::Uc);
    let remote = || {
        let operands: &RemoteOperands = transmute_ref!(&header.operands);
        Remote { address: operands.address.get(), rkey: operands.rkey.get() }
    };
    let send = |immediate, invalidate| {
        let datagram = if connected { None } else { Some(datagram(header)?) };
        Ok(Operation::Send { immediate, invalidate, datagram })
    };
    match code {
        opcode::SEND => send(None, None),
        opcode::SEND_IMMEDIATE => send(Some(header.immediate), None),
        _ if !connected => Err(Malformed::Opcode(code)),
        opcode::WRITE => Ok(Operation::Write { remote: remote(), immediate: None }),
        opcode::WRITE_IMMEDIATE => {
            Ok(Operation::Write { remote: remote(), immediate: Some(header.immediate) })
        }
        opcode::READ => Ok(Operation::Read { remote: remote() }),
        opcode::COMPARE_SWAP | opcode::FETCH_ADD => {
            let operands: &AtomicOperands = transmute_ref!(&header.operands);
            let remote = Remote { address: operands.address.get(), rkey: operands.rkey.get() };
            let operand = operands.compare_or_add.get();
            Ok(if code == opcode::FETCH_ADD {
                Operation::FetchAdd { remote, add: operand }
            } else {
                Operation::CompareSwap { remote, compare: operand, swap: operands.swap.get() }
            })
        }
        _ if !rules.kernel => Err(Malformed::Opcode(code)),
        opcode::SEND_INVALIDATE => send(None, Some(u32::from_le_bytes(header.immediate))),
        opcode::LOCAL_INVALIDATE => {
            Ok(Operation::LocalInvalidate { rkey: u32::from_le_bytes(header.immediate) })
        }
        opcode::FAST_REGISTER => fast_register(memory, header),
        _ => Err(Malformed::Opcode(code)),
    }
}

fn datagram(header: &SendHeader) -> Result<Datagram, Malformed> {
    let operands: &DatagramOperands = transmute_ref!(&header.operands);
    let address = &operands.address;
    let (port_pd, traffic) = (address.port_pd.get(), address.traffic.get());
    if port_pd >> 24 != 1 {
        return Err(Malformed::Field("port number"));
    }
    // A packet carries 24 bits (IBTA 9.2.5). As in hardware, the bits above are dropped: the datagram goes to the queue pair with the
    // remaining number, if any.
    let qpn = operands.qpn.get() & 0x00FF_FFFF;
    Ok(Datagram {
        qpn: Qpn(qpn),
        qkey: operands.qkey.get(),
        pd: port_pd & 0x00FF_FFFF,
        dgid: Gid(address.dgid),
        sgid_index: address.gid_index,
        traffic_class: u8::try_from(traffic >> 20 & 0xFF).unwrap_or_default(),
        flow_label: traffic & 0x000F_FFFF,
        hop_limit: address.hop_limit,
        dmac: address.dmac,
    })
}

fn fast_register(memory: &impl Dma, header: &SendHeader) -> Result<Operation, Malformed> {
    let operands: &FastRegisterOperands = transmute_ref!(&header.operands);
    if operands.page_shift.get() != 12 {
        return Err(Malformed::Field("page size"));
    }
    let count = operands.page_count.get();
    if count > MAX_FAST_REGISTER_PAGES {
        return Err(Malformed::Field("number of pages"));
    }
    // Copied at once: the list belongs to the region, and the driver rewrites it for its next registration.
    let pages =
        read_page_list(memory, operands.directory.get(), count).map_err(|_| Malformed::Field("page list"))?;
    Ok(Operation::FastRegister(Box::new(FastRegister {
        iova: operands.iova.get(),
        length: u64::from(operands.length.get()),
        access: operands.access.get(),
        rkey: operands.rkey.get(),
        pages,
    })))
}

/// The first bytes of a receive slot.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ReceiveSlot {
    header: ReceiveHeader,
    sges: [AbiSge; RECEIVE_INLINE],
}

const _: () = assert!(size_of::<ReceiveSlot>() == RECEIVE_READ);

/// Reads one receive request from a slot of a queue with `max_sge` elements per request. [`Fetched::Broken`] when its memory is gone.
#[inline]
pub(crate) fn read_receive(memory: &impl Dma, address: u64, max_sge: u32) -> Fetched<ReceiveRequest> {
    let mut slot = ReceiveSlot::new_zeroed();
    // A slot for one element has 32 bytes.
    let inline = if max_sge <= 1 { 1 } else { RECEIVE_INLINE };
    let wanted = size_of::<ReceiveHeader>() + inline * size_of::<AbiSge>();
    if memory.read(address, &mut slot.as_mut_bytes()[..wanted]).is_err() {
        return Fetched::Broken;
    }
    let wr_id = slot.header.wr_id.get();
    let count = slot.header.sge_count.get();
    if count > max_sge || count as usize > MAX_SGE {
        return Fetched::Malformed { wr_id, reason: Malformed::SgeCount(count) };
    }
    match read_elements(memory, address + wanted as u64, count as usize, &slot.sges[..inline]) {
        Ok(sges) => Fetched::Request(ReceiveRequest { wr_id, sges }),
        Err(_) => Fetched::Broken,
    }
}

#[cfg(test)]
mod tests;
