//! Decoding returns the encoded requests, field by field; random bytes do no harm.

use dma::HeapMemory;
use proptest::prelude::*;

use super::*;
use crate::abi::work::AddressVector;

fn rules(kind: QpKind, kernel: bool, max_sge: u32) -> SendRules {
    SendRules { kind, kernel, max_sge }
}

fn any_sges() -> impl Strategy<Value = Vec<Sge>> {
    let one = (any::<u64>(), any::<u32>(), any::<u32>());
    prop::collection::vec(one.prop_map(|(address, length, lkey)| Sge { address, length, lkey }), 0..=MAX_SGE)
}

fn put_sges(memory: &HeapMemory, at: u64, sges: &[Sge]) {
    for (index, sge) in sges.iter().enumerate() {
        let raw = AbiSge { address: sge.address.into(), length: sge.length.into(), lkey: sge.lkey.into() };
        memory.write(at + 16 * index as u64, raw.as_bytes()).unwrap();
    }
}

fn header(code: u32, wr_id: u64, flags: u32, count: usize, immediate: [u8; 4]) -> SendHeader {
    let mut header = SendHeader::new_zeroed();
    header.wr_id = wr_id.into();
    header.sge_count = u32::try_from(count).unwrap().into();
    header.total_length = 0xFFFF_FFFF.into();
    header.opcode = code.into();
    header.flags = flags.into();
    header.immediate = immediate;
    header.operands = [0x99; 48];
    header
}

fn read(header: &SendHeader, sges: &[Sge], rules: SendRules) -> Fetched<SendRequest> {
    let memory = HeapMemory::new(4096);
    memory.write(512, header.as_bytes()).unwrap();
    put_sges(&memory, 512 + 80, sges);
    memory.record();
    let request = read_send(&memory, 512, rules);
    // Within the slot, and each byte at most once.
    let mut at = 512;
    for access in memory.take_record() {
        assert!(!access.write && access.address == at);
        at += access.len;
    }
    assert!(at <= 512 + crate::abi::work::send_slot(rules.max_sge));
    request
}

proptest! {
    #[test]
    fn connected_requests_round_trip(
        wr_id: u64, flags in 0u32..32, immediate: [u8; 4], sges in any_sges(), which in 0usize..9,
        address: u64, rkey: u32, operand: u64, swap: u64,
    ) {
        let codes = [0, 1, 2, 3, 4, 5, 6, 8, 10];
        let code = codes[which];
        let mut given = header(code, wr_id, flags, sges.len(), immediate);
        let remote = Remote { address, rkey };
        given.operands = match code {
            5 | 6 => transmute!(AtomicOperands {
                address: address.into(), compare_or_add: operand.into(), swap: swap.into(), rkey: rkey.into(),
                unused: [0x77; 20],
            }),
            _ => transmute!(RemoteOperands { address: address.into(), rkey: rkey.into(), unused: [0x77; 36] }),
        };
        let operation = match code {
            0 => Operation::Write { remote, immediate: None },
            1 => Operation::Write { remote, immediate: Some(immediate) },
            2 => Operation::Send { immediate: None, invalidate: None, datagram: None },
            3 => Operation::Send { immediate: Some(immediate), invalidate: None, datagram: None },
            4 => Operation::Read { remote },
            5 => Operation::CompareSwap { remote, compare: operand, swap },
            6 => Operation::FetchAdd { remote, add: operand },
            8 => Operation::Send { immediate: None, invalidate: Some(u32::from_le_bytes(immediate)), datagram: None },
            _ => Operation::LocalInvalidate { rkey: u32::from_le_bytes(immediate) },
        };
        let expected = SendRequest {
            wr_id,
            operation,
            fence: flags & 1 != 0,
            signaled: flags & 2 != 0,
            solicited: flags & 4 != 0,
            sges: sges.iter().copied().collect(),
        };
        let length: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        let expected = if flags & 8 != 0 && length > 0 && [0, 1, 2, 3, 8].contains(&code) {
            Fetched::Malformed { wr_id, reason: Malformed::Inline(length) }
        } else {
            Fetched::Request(expected)
        };
        prop_assert_eq!(read(&given, &sges, rules(QpKind::Rc, true, 16)), expected.clone());
        let user = read(&given, &sges, rules(QpKind::Rc, false, 16));
        if code >= 7 {
            prop_assert_eq!(user, Fetched::Malformed { wr_id, reason: Malformed::Opcode(code) });
        } else {
            prop_assert_eq!(user, expected);
        }
    }

    #[test]
    fn datagrams_round_trip(
        wr_id: u64, qpn: u32, qkey: u32, pd in 0u32..1 << 24, dgid: [u8; 16], sgid_index: u8,
        traffic_class: u8, flow_label in 0u32..1 << 20, hop_limit: u8, dmac: [u8; 6], sges in any_sges(), gsi: bool,
    ) {
        let mut given = header(2, wr_id, 0, sges.len(), [0; 4]);
        given.operands = transmute!(DatagramOperands {
            qpn: qpn.into(),
            qkey: qkey.into(),
            address: AddressVector {
                port_pd: (1 << 24 | pd).into(),
                traffic: (u32::from(traffic_class) << 20 | flow_label).into(),
                dgid, source_path: 0x80, gid_index: sgid_index, static_rate: 0, hop_limit, dmac, reserved: [1; 6],
            },
        });
        let kind = if gsi { QpKind::Gsi } else { QpKind::Ud };
        let Fetched::Request(request) = read(&given, &sges, rules(kind, true, 16)) else {
            return Err(TestCaseError::fail("refused"));
        };
        let datagram = Datagram {
            qpn: Qpn(qpn & 0xFF_FFFF), qkey, pd, dgid: Gid(dgid), sgid_index, traffic_class, flow_label, hop_limit, dmac,
        };
        prop_assert_eq!(request.operation, Operation::Send { immediate: None, invalidate: None, datagram: Some(datagram) });
        prop_assert_eq!(&request.sges[..], &sges[..]);
    }

    #[test]
    fn receives_round_trip(wr_id: u64, sges in any_sges(), more in 0u32..4) {
        let max_sge = (u32::try_from(sges.len()).unwrap() + more).clamp(1, 16);
        let size = crate::abi::work::receive_slot(max_sge);
        let memory = HeapMemory::new(4096);
        // The last slot of the page: no byte behind it may be read.
        let at = 4096 - size;
        let count = u32::try_from(sges.len()).unwrap();
        let head = ReceiveHeader { wr_id: wr_id.into(), sge_count: count.into(), total_length: 1.into() };
        memory.write(at, head.as_bytes()).unwrap();
        put_sges(&memory, at + 16, &sges);
        let request = ReceiveRequest { wr_id, sges: sges.iter().copied().collect() };
        prop_assert_eq!(read_receive(&memory, at, max_sge), Fetched::Request(request));
    }

    /// Random bytes decode to a request or an error, with no more elements than the limit.
    #[test]
    fn random_bytes(
        bytes in prop::collection::vec(any::<u8>(), 512), code in 0u32..20, count in 0u32..20, small: bool,
        kernel: bool, kind in 0usize..3, max_sge in 1u32..=16,
    ) {
        let memory = HeapMemory::new(8192);
        let mut bytes = bytes;
        if small {
            bytes[16..20].copy_from_slice(&code.to_le_bytes());
            bytes[8..12].copy_from_slice(&count.to_le_bytes());
        }
        let slot = usize::try_from(crate::abi::work::send_slot(max_sge)).unwrap();
        let at = 4096 - slot as u64;
        memory.write(at, &bytes[..slot]).unwrap();
        let kind = [QpKind::Rc, QpKind::Ud, QpKind::Gsi][kind];
        match read_send(&memory, at, rules(kind, kernel, max_sge)) {
            Fetched::Request(request) => {
                prop_assert!(request.sges.len() <= max_sge as usize);
                let allowed = match &request.operation {
                    Operation::Send { datagram, invalidate, .. } => {
                        datagram.is_some() == (kind != QpKind::Rc) && (invalidate.is_none() || kernel)
                    }
                    Operation::LocalInvalidate { .. } | Operation::FastRegister(_) => kernel && kind == QpKind::Rc,
                    _ => kind == QpKind::Rc,
                };
                prop_assert!(allowed);
            }
            Fetched::Malformed { .. } => {}
            other => prop_assert!(false, "{:?}", other),
        }
        let slot = usize::try_from(crate::abi::work::receive_slot(max_sge)).unwrap();
        let at = 4096 - slot as u64;
        memory.write(at, &bytes[..slot]).unwrap();
        if let Fetched::Request(request) = read_receive(&memory, at, max_sge) {
            prop_assert!(request.sges.len() <= max_sge as usize);
        }
    }
}

#[test]
fn fast_registrations_copy_their_page_list() {
    let memory = HeapMemory::new(0x1_0000);
    let (directory, table) = (0x2000u64, 0x3000u64);
    memory.write(directory, &table.to_le_bytes()).unwrap();
    for (index, page) in [0x5000u64, 0x4000, 0x6000].iter().enumerate() {
        memory.write(table + index as u64 * 8, &page.to_le_bytes()).unwrap();
    }
    let given = |pages: u32, shift: u32, directory: u64| {
        let mut given = header(11, 4, 2, 0, [0; 4]);
        given.operands = transmute!(FastRegisterOperands {
            iova: 0x1234_5678.into(),
            directory: directory.into(),
            page_shift: shift.into(),
            page_count: pages.into(),
            length: 9000.into(),
            access: 0x10_0003.into(),
            rkey: 0x4501.into(),
            unused: [0xEE; 12],
        });
        memory.write(0, given.as_bytes()).unwrap();
        read_send(&memory, 0, rules(QpKind::Rc, true, 2))
    };
    let Fetched::Request(request) = given(3, 12, directory) else { panic!("refused") };
    let expected = FastRegister {
        iova: 0x1234_5678,
        length: 9000,
        access: 0x10_0003,
        rkey: 0x4501,
        pages: [0x5000, 0x4000, 0x6000].into(),
    };
    assert_eq!(request.operation, Operation::FastRegister(Box::new(expected)));
    for (pages, shift, directory) in
        [(129, 12, directory), (0, 12, directory), (3, 21, directory), (3, 12, 1), (3, 12, 1 << 50)]
    {
        let refused = given(pages, shift, directory);
        assert!(matches!(refused, Fetched::Malformed { wr_id: 4, .. }), "{refused:?}");
    }
}
