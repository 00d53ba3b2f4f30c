//! Datagrams and the general services queue pair.

use crate::common;

use common::{Pair, sge, statuses};
use hca::attributes::{QpKind, QpState};
use hca::names::{GSI, Qpn};
use hca::work::{NetworkHeader, ReceiveRequest, SendRequest, Status};
use hca_testbed::requests;

const QKEY: u32 = 0x1234;

fn to_right(pair: &Pair, qkey: u32, len: u32) -> SendRequest {
    let sges = [pair.left_sge(0x1000, len)];
    requests::datagram(1, pair.a.pd.0, pair.b.gid, pair.right.qp.qpn, qkey, &sges)
}

#[test]
fn a_datagram_arrives_behind_its_header() {
    let mut pair = Pair::new(QpKind::Ud);
    pair.fill_left(0x1000, b"datagram");
    pair.receive(2, &[(0x2000, 30), (0x3000, 100)]);
    pair.send(to_right(&pair, QKEY, 8));
    let done = pair.right.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.status, done.byte_len), (2, Status::Success, 48));
    assert_eq!((done.source, done.grh), (Some(pair.left.qp.qpn), Some(NetworkHeader::Ipv4)));
    let mut area = pair.right_bytes(0x2000, 30);
    area.extend(pair.right_bytes(0x3000, 18));
    assert_eq!(area[..20], [0; 20]);
    assert_eq!(area[20], 0x45);
    assert_eq!(area[32..40], [10, 0, 0, 1, 10, 0, 0, 2], "both addresses");
    assert_eq!(&area[40..], b"datagram");
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
}

#[test]
fn what_does_not_fit_the_receiver_is_dropped_and_costs_it_nothing() {
    let mut pair = Pair::new(QpKind::Ud);
    pair.send(to_right(&pair, QKEY, 8));
    assert_eq!(pair.world.engine.counters(pair.b.device).out_of_buffer, 1, "no receive");
    pair.receive(2, &[(0x2000, 47)]);
    pair.send(to_right(&pair, QKEY + 1, 1));
    pair.send(to_right(&pair, QKEY, 8));
    let mut elsewhere = to_right(&pair, QKEY, 1);
    if let hca::work::Operation::Send { datagram: Some(to), .. } = &mut elsewhere.operation {
        to.qpn = Qpn(to.qpn.0 ^ (1 << 20));
    }
    pair.send(elsewhere);
    assert_eq!(pair.right.completions.waiting(), 0);
    assert_eq!(pair.world.engine.counters(pair.b.device).rx_dropped, 3, "Q_Key, length, number");
    pair.send(to_right(&pair, QKEY, 7));
    assert_eq!(statuses(&pair.right), [(2, Status::Success)], "the receive is still there");
    assert!(statuses(&pair.left).iter().all(|(_, status)| *status == Status::Success));
}

/// IBTA C10-93.1.1: nothing of it is sent, and its work request completes with an error, whatever the key of its memory. The limit is the
/// port's active MTU.
#[test]
fn a_datagram_longer_than_the_ports_mtu_goes_nowhere() {
    for mtu in [1024, 4096] {
        let mut pair = Pair::new(QpKind::Ud);
        pair.world.engine.set_port_mtu(pair.a.device, mtu);
        pair.receive(2, &[(0x2000, 8192)]);
        pair.send(to_right(&pair, QKEY, mtu));
        assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
        pair.receive(3, &[(0x2000, 8192)]);
        pair.send(to_right(&pair, QKEY, mtu + 1));
        assert_eq!(statuses(&pair.left), [(1, Status::LocalLength)]);
        assert_eq!(pair.world.state(&pair.left), QpState::SendQueueError);
        let counters = pair.world.engine.counters(pair.a.device);
        assert_eq!((counters.req_local_length_error, counters.port_xmit_packets), (1, 1));
        let lengths: Vec<_> = pair.right.completions.drain().iter().map(|done| done.byte_len).collect();
        assert_eq!(lengths, [40 + mtu]);
    }
}

#[test]
fn the_ports_mtu_outlives_a_reset() {
    let mut pair = Pair::new(QpKind::Ud);
    pair.world.engine.set_port_mtu(pair.a.device, 256);
    pair.world.engine.reset_device(pair.a.device);
    assert_eq!(pair.world.engine.port_mtu(pair.a.device), Some(256));
}

#[test]
fn a_qkey_with_the_high_bit_is_the_queue_pairs_own() {
    let mut pair = Pair::new(QpKind::Ud);
    pair.receive(2, &[(0x2000, 48)]);
    pair.send(to_right(&pair, 0x8000_0000, 8));
    assert_eq!(statuses(&pair.right), [(2, Status::Success)]);
}

#[test]
fn an_own_error_stops_the_send_queue_only() {
    let mut pair = Pair::new(QpKind::Ud);
    let mut bad = to_right(&pair, QKEY, 8);
    bad.sges[0].lkey ^= 0x100;
    pair.left.sends.post(bad);
    pair.send(to_right(&pair, QKEY, 8));
    assert_eq!(statuses(&pair.left), [(1, Status::LocalProtection), (1, Status::Flushed)]);
    assert_eq!(pair.world.state(&pair.left), QpState::SendQueueError);
    // It still receives.
    let lkey = pair.left_mr.lkey;
    let (left, right) = (pair.left.clone(), pair.right.clone());
    pair.world.receive(&left, 3, &[sge(0x4000, 100, lkey)]);
    let request = requests::datagram(4, pair.b.pd.0, pair.a.gid, left.qp.qpn, QKEY, &[]);
    pair.world.send(&right, request);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(3, Status::Success)]);
    // It sends again after a transition to RTS.
    let mut with = hca_testbed::World::<dma::HeapMemory>::attributes(pair.b.gid, right.qp.qpn);
    with.state = QpState::ReadyToSend;
    let mask = hca::attributes::QpAttributeMask::empty();
    pair.world.modify(pair.a.device, left.qp.handle, mask, &with).unwrap();
    pair.send(to_right(&pair, QKEY, 8));
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
}

#[test]
fn an_address_vector_of_another_domain_is_refused() {
    let mut pair = Pair::new(QpKind::Ud);
    let mut foreign = to_right(&pair, QKEY, 8);
    if let hca::work::Operation::Send { datagram: Some(to), .. } = &mut foreign.operation {
        to.pd += 1;
    }
    pair.send(foreign);
    assert_eq!(statuses(&pair.left), [(1, Status::LocalQpOperation)]);
}

#[test]
fn general_services_have_number_one_on_every_device() {
    let mut pair = Pair::new(QpKind::Gsi);
    assert_eq!((pair.left.qp.qpn, pair.right.qp.qpn), (GSI, GSI));
    pair.fill_left(0x1000, &[7; 256]);
    pair.receive(2, &[(0x2000, 296)]);
    pair.send(to_right(&pair, QKEY, 256));
    let done = pair.right.completions.poll().unwrap();
    assert_eq!((done.source, done.byte_len), (Some(GSI), 296));
    assert_eq!(pair.right_bytes(0x2028, 256), [7; 256]);
}

#[test]
fn shared_receives_take_datagrams() {
    let mut pair = Pair::new(QpKind::Ud);
    let guest = pair.b.clone();
    let (srq, ring) = pair.world.shared_queue(&guest, 0);
    let receiver = pair.world.queue_pair(&guest, QpKind::Ud, Some(srq));
    let with = hca_testbed::World::<dma::HeapMemory>::attributes(pair.a.gid, GSI);
    pair.world.raise(guest.device, receiver.qp.handle, QpKind::Ud, QpState::ReadyToReceive, &with);
    let sges = [sge(0x2000, 100, pair.right_mr.lkey)].into_iter().collect();
    ring.post(ReceiveRequest { wr_id: 9, sges });
    let request = requests::datagram(1, pair.a.pd.0, pair.b.gid, receiver.qp.qpn, QKEY, &[]);
    pair.send(request);
    assert_eq!(statuses(&receiver), [(9, Status::Success)]);
}
