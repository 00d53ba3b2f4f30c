//! Converts queue pair attributes between the ABI and the engine. Only attributes in the mask are used: the others are garbage.

use hca::attributes::{Access, AddressVector, QpAttributeMask, QpAttributes, QpState};
use hca::names::{Gid, Qpn};

use super::QpRecord;
use super::error::CommandError;
use crate::abi::attributes::{Address, Capacities, QueuePair};

/// Mask of a PSN or a queue pair number.
const BITS_24: u32 = 0x00FF_FFFF;

fn state(value: u32) -> Result<QpState, CommandError> {
    Ok(match value {
        0 => QpState::Reset,
        1 => QpState::Init,
        2 => QpState::ReadyToReceive,
        3 => QpState::ReadyToSend,
        4 => QpState::SendQueueDrained,
        5 => QpState::SendQueueError,
        6 => QpState::Error,
        _ => return Err(CommandError::invalid("The state of a queue pair", value)),
    })
}

/// Decodes the attributes of a MODIFY_QP.
pub(super) fn decode(mask: u32, given: &QueuePair) -> Result<(QpAttributeMask, QpAttributes), CommandError> {
    let mask = QpAttributeMask::from_bits(mask)
        .ok_or_else(|| CommandError::invalid("The attribute mask of a queue pair", mask))?;
    let named = |which| mask.contains(which);
    let mut attributes = QpAttributes {
        state: QpState::Reset,
        current_state: QpState::Reset,
        path_mtu: 1,
        qkey: given.qkey.get(),
        rq_psn: given.rq_psn.get() & BITS_24,
        sq_psn: given.sq_psn.get() & BITS_24,
        destination_qpn: Qpn(given.destination_qpn.get()),
        // Unknown bits are ignored.
        access: Access::from_bits_truncate(given.access.get()),
        pkey_index: given.pkey_index.get(),
        sqd_notify: given.sqd_notify != 0,
        max_rd_atomic: given.max_rd_atomic,
        max_dest_rd_atomic: given.max_dest_rd_atomic,
        min_rnr_timer: given.min_rnr_timer & 0x1F,
        port: given.port,
        timeout: given.timeout & 0x1F,
        retry_count: given.retry_count,
        rnr_retry: given.rnr_retry,
        address: address(&given.address),
    };
    if named(QpAttributeMask::STATE) {
        attributes.state = state(given.state.get())?;
    }
    if named(QpAttributeMask::CURRENT_STATE) {
        attributes.current_state = state(given.current_state.get())?;
    }
    if named(QpAttributeMask::PATH_MTU) {
        let code = given.path_mtu.get();
        attributes.path_mtu = u8::try_from(code)
            .ok()
            .filter(|code| (1..=5).contains(code))
            .ok_or_else(|| CommandError::invalid("The path MTU code", code))?;
    }
    if named(QpAttributeMask::DESTINATION_QPN) && given.destination_qpn.get() > BITS_24 {
        return Err(CommandError::invalid("The destination queue pair number", given.destination_qpn.get()));
    }
    if named(QpAttributeMask::ADDRESS_VECTOR) && given.address.flags & 1 == 0 {
        return Err(CommandError::invalid("An address without a GRH", given.address.flags));
    }
    Ok((mask, attributes))
}

fn address(given: &Address) -> AddressVector {
    AddressVector {
        dgid: Gid(given.dgid),
        sgid_index: given.sgid_index,
        flow_label: given.flow_label.get() & 0x000F_FFFF,
        hop_limit: given.hop_limit,
        traffic_class: given.traffic_class,
        service_level: given.service_level,
        dmac: given.dmac,
    }
}

/// Encodes the response to QUERY_QP; the guest's driver adopts all of it.
pub(super) fn encode(attributes: &QpAttributes, draining: bool, record: &QpRecord) -> QueuePair {
    let path = &attributes.address;
    let none = Address {
        dgid: [0; 16],
        flow_label: 0.into(),
        sgid_index: 0,
        hop_limit: 0,
        traffic_class: 0,
        reserved0: 0,
        dlid: 0.into(),
        vlan: 0.into(),
        service_level: 0,
        source_path_bits: 0,
        static_rate: 0,
        flags: 0,
        port: 0,
        dmac: [0; 6],
        reserved1: 0,
    };
    QueuePair {
        state: (attributes.state as u32).into(),
        current_state: (attributes.state as u32).into(),
        path_mtu: u32::from(attributes.path_mtu).into(),
        path_migration: 0.into(),
        qkey: attributes.qkey.into(),
        rq_psn: attributes.rq_psn.into(),
        sq_psn: attributes.sq_psn.into(),
        destination_qpn: attributes.destination_qpn.0.into(),
        access: attributes.access.bits().into(),
        pkey_index: attributes.pkey_index.into(),
        alternate_pkey_index: 0.into(),
        sqd_notify: u8::from(attributes.sqd_notify),
        sq_draining: u8::from(draining),
        max_rd_atomic: attributes.max_rd_atomic,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        port: attributes.port,
        timeout: attributes.timeout,
        retry_count: attributes.retry_count,
        rnr_retry: attributes.rnr_retry,
        alternate_port: 0,
        alternate_timeout: 0,
        reserved: [0; 5],
        capacities: Capacities {
            max_send_wr: record.max_send_wr.into(),
            max_receive_wr: record.max_receive_wr.into(),
            max_send_sge: record.max_send_sge.into(),
            max_receive_sge: record.max_receive_sge.into(),
            max_inline_data: 0.into(),
            reserved: 0.into(),
        },
        address: Address {
            dgid: path.dgid.0,
            flow_label: path.flow_label.into(),
            sgid_index: path.sgid_index,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            service_level: path.service_level,
            flags: 1,
            port: 1,
            dmac: path.dmac,
            ..none
        },
        alternate_address: none,
    }
}

/// Limit of RoCEv2 header bytes in an Ethernet MTU, as Linux computes it (`iboe_get_mtu`): GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4.
const HEADERS_BYTES: u32 = 96;

/// The largest path MTU code whose packets fit an Ethernet MTU of `mtu` bytes.
pub(super) fn active_mtu(mtu: u32) -> u32 {
    match mtu.saturating_sub(HEADERS_BYTES) {
        4096.. => 5,
        2048.. => 4,
        1024.. => 3,
        512.. => 2,
        _ => 1,
    }
}

/// Size of a path MTU code, bytes.
pub(super) fn mtu_bytes(code: u32) -> u32 {
    128 << code.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]

        /// QUERY_QP returns what a valid MODIFY_QP has set, and nothing else.
        #[test]
        fn attributes_round_trip(bytes in proptest::collection::vec(0u8.., 160), mask in 0u32..1 << 21) {
            let mut given = <QueuePair as zerocopy::FromBytes>::read_from_bytes(&bytes).unwrap();
            given.state = (given.state.get() % 7).into();
            given.current_state = (given.current_state.get() % 7).into();
            given.path_mtu = (given.path_mtu.get() % 5 + 1).into();
            given.destination_qpn = (given.destination_qpn.get() & 0xFF_FFFF).into();
            given.address.flags = 1;
            let (_, decoded) = decode(mask, &given).unwrap();
            let record = QpRecord {
                pd: 1,
                context: hca::names::ContextHandle(0),
                kind: hca::attributes::QpKind::Rc,
                max_send_wr: 1,
                max_receive_wr: 2,
                max_send_sge: 3,
                max_receive_sge: 4,
            };
            let shown = encode(&decoded, true, &record);
            let (_, again) = decode(mask | 1, &shown).unwrap();
            let expected = QpAttributes { current_state: again.current_state, ..decoded };
            if mask & 1 != 0 {
                proptest::prop_assert_eq!(again, expected);
                proptest::prop_assert_eq!(again.state as u32, given.state.get());
            }
            proptest::prop_assert_eq!(shown.qkey, given.qkey);
            proptest::prop_assert_eq!(shown.address.dgid, given.address.dgid);
            proptest::prop_assert_eq!((shown.rq_psn.get(), shown.sq_psn.get()),
                (given.rq_psn.get() & 0xFF_FFFF, given.sq_psn.get() & 0xFF_FFFF));
            proptest::prop_assert_eq!((shown.capacities.max_send_wr.get(), shown.sq_draining), (1, 1));
        }

        /// Attributes that the mask doesn't include may be garbage.
        #[test]
        fn unnamed_attributes_dont_count(bytes in proptest::collection::vec(0u8.., 160), mask: u32) {
            let given = <QueuePair as zerocopy::FromBytes>::read_from_bytes(&bytes).unwrap();
            let named = mask & (1 | 1 << 1 | 1 << 7 | 1 << 8 | 1 << 20);
            let decoded = decode(mask & !named, &given);
            proptest::prop_assert_eq!(decoded.is_ok(), mask & !named < 1 << 21);
        }
    }
}
