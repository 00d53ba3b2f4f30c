//! Configuration, life cycle, saved state, several queue pairs.

use super::*;
use crate::device::SavedDevice;
use crate::net::{Backend, NetConfig, NetError};

const CONTROL: u64 =
    1 << b::VIRTIO_NET_F_CTRL_VQ | 1 << b::VIRTIO_NET_F_MQ | 1 << b::VIRTIO_NET_F_CTRL_MAC_ADDR;

fn control(guest: &mut Guest, command: &[u8]) -> u8 {
    let at = BUFFERS + 0x80_0000;
    guest.control.put(at, command);
    guest.control.put(at + 0x1000, &[0xff]);
    let length = u32::try_from(command.len()).unwrap();
    guest.control.push(&[(at, length, false), (at + 0x1000, 1, true)]).unwrap();
    guest.control.kick();
    guest.control.wait_used();
    guest.control.get(at + 0x1000, 1)[0]
}

#[test]
fn the_configuration_shows_address_link_pairs_and_mtu() {
    let (mut net, _others) = pair_device(3);
    let mut config = [0xff; 16];
    net.config_read(0, &mut config);
    assert_eq!(config, [2, 0, 0, 0, 0, 1, 1, 0, 3, 0, 0xdc, 5, 0, 0, 0, 0]);
    net.set_link(false);
    let mut status = [0xff; 2];
    net.config_read(6, &mut status);
    assert_eq!(status, [0, 0]);
    net.config_read(u64::MAX, &mut status);
    assert_eq!(status, [0, 0]);
    assert_eq!(net.queue_sizes().len(), 7);
    assert_ne!(net.features() & 1 << b::VIRTIO_NET_F_MQ, 0);
}

/// The network learns the guest's new port from a broadcast with its address. A guest whose link is down isn't announced.
#[test]
fn a_guest_that_has_moved_is_announced_by_its_address() {
    let (mut net, others) = pair_device(1);
    net.announce().unwrap();
    let mut message = [0; 128];
    let (_, length) = rustix::net::recv(&others[0], &mut message, rustix::net::RecvFlags::DONTWAIT).unwrap();
    assert_eq!(length, 12 + 60);
    assert_eq!(message[12..24], [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1]);
    assert_eq!(message[24..26], [0x80, 0x35]);
    net.set_link(false);
    net.announce().unwrap();
    assert!(rustix::net::recv(&others[0], &mut message, rustix::net::RecvFlags::DONTWAIT).is_err());
}

#[test]
fn several_pairs_carry_frames_once_the_driver_asks_for_them() {
    let (mut guest, others) = Guest::paired(3, OFFLOADS | MERGEABLE | CONTROL);
    guest.activate();
    for pair in 0..3 {
        guest.post(pair, BUFFERS + pair as u64 * 0x10000, 4, 2048);
    }
    other_send(&others[2], VnetHeader::default(), &frame(1, 100));
    std::thread::sleep(Duration::from_millis(30));
    assert!(guest.receive[2].pop_used().is_none(), "pair 2 isn't in use yet");
    assert_eq!(control(&mut guest, &[4, 0, 3, 0]), 0);
    guest.receive[2].wait_used();
    assert_eq!(guest.receive[2].get(BUFFERS + 0x20000 + 12, 100), frame(1, 100));
    for pair in 0..3u32 {
        let at = BUFFERS + 0x10_0000 + u64::from(pair) * 4096;
        guest.queue_frame(pair as usize, at, VnetHeader::default(), &frame(pair, 200));
        guest.transmit[pair as usize].kick();
        guest.transmit[pair as usize].wait_used();
        assert_eq!(other_receive(&others[pair as usize]).unwrap().1, frame(pair, 200));
    }
    assert_eq!(guest.net.inspect()["active_queue_pairs"], 3);
    // Back to one pair: the thread of pair 2 doesn't use its channel.
    assert_eq!(control(&mut guest, &[4, 0, 1, 0]), 0);
    other_send(&others[2], VnetHeader::default(), &frame(2, 100));
    std::thread::sleep(Duration::from_millis(30));
    assert!(guest.receive[2].pop_used().is_none());
}

#[test]
fn without_multiqueue_the_control_queue_is_the_third() {
    let (net, _others) = pair_device(3);
    let features = testbed::RINGS | CONTROL & !(1 << b::VIRTIO_NET_F_MQ);
    let mut guest = Guest::new(net, 1, features);
    guest.activate();
    assert_eq!(control(&mut guest, &[1, 1, 2, 7, 7, 7, 7, 7]), 0);
    assert_eq!(guest.net.mac(), MacAddress([2, 7, 7, 7, 7, 7]));
}

#[test]
fn a_pause_loses_no_frame_and_returns_unused_buffers() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    guest.post(0, BUFFERS, 200, 2048);
    let mut at = BUFFERS;
    for number in 0..100u32 {
        other_send(&others[0], VnetHeader::default(), &frame(number, 300));
        if number % 3 == 0 {
            guest.pause_and_resume();
        }
        guest.receive[0].wait_used();
        assert_eq!(guest.receive[0].get(at + 12, 300), frame(number, 300), "frame {number}");
        at += 2048;
    }
    let queues = guest.net.stop().unwrap();
    assert_eq!(queues.iter().map(|queue| queue.index).collect::<Vec<_>>(), [0, 1]);
    use virtio_queue::QueueT;
    assert_eq!((queues[0].queue.next_avail(), queues[0].queue.next_used()), (100, 100));
    assert!(guest.net.stop().unwrap().is_empty(), "not active any more");
}

#[test]
fn a_restored_device_has_the_drivers_settings_and_asks_for_an_announcement() {
    let announce = 1 << b::VIRTIO_NET_F_GUEST_ANNOUNCE;
    let (mut guest, _others) = Guest::paired(2, OFFLOADS | CONTROL | announce);
    guest.activate();
    assert_eq!(control(&mut guest, &[4, 0, 2, 0]), 0);
    assert_eq!(control(&mut guest, &[1, 1, 2, 9, 9, 9, 9, 9]), 0);
    let queues = guest.net.stop().unwrap();
    assert_eq!(queues.len(), 5);
    let saved = guest.net.save().unwrap();

    let (fresh, _others) = pair_device(2);
    guest.net = fresh.with_saved(&saved).unwrap();
    assert_eq!(guest.net.mac(), MacAddress([2, 9, 9, 9, 9, 9]));
    let mut status = [0; 2];
    guest.net.config_read(6, &mut status);
    assert_eq!(status, [3, 0], "link up, announcement wanted");
    let before = guest.interrupt.configs();
    let interrupt: Arc<dyn crate::device::VirtioInterrupt> = guest.interrupt.clone();
    let (memory, features) = (guest.space.clone(), guest.features);
    guest.net.activate(crate::device::Activation { memory, features, queues, interrupt }).unwrap();
    assert_eq!(guest.interrupt.configs(), before + 1);
    assert_eq!(guest.net.inspect()["active_queue_pairs"], 2);
    assert_eq!(control(&mut guest, &[3, 0]), 0);
    guest.net.config_read(6, &mut status);
    assert_eq!(status, [1, 0]);
    guest.net.stop().unwrap();
    guest.net.reset();
    assert_eq!(guest.net.mac(), MacAddress([2, 0, 0, 0, 0, 1]), "a reset returns to the first address");
}

#[test]
fn damaged_saved_state_is_an_error() {
    let (net, _others) = pair_device(1);
    let good = net.save().unwrap();
    for length in 0..good.state.len() {
        let (net, _others) = pair_device(1);
        let cut = SavedDevice { version: 1, state: good.state[..length].to_vec() };
        assert!(net.with_saved(&cut).is_err(), "{length} bytes");
    }
    let (net, _others) = pair_device(2);
    assert!(net.with_saved(&good).is_err(), "another number of pairs");
    let (net, _others) = pair_device(1);
    assert!(net.with_saved(&SavedDevice { version: 2, ..good }).is_err());
}

#[test]
fn a_back_end_that_goes_away_takes_the_link_down_and_nothing_else() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE | OFFLOADS);
    guest.activate();
    drop(others);
    let start = Instant::now();
    while guest.net.inspect()["link_up"] == true {
        guest.post(0, BUFFERS, 1, 2048);
        assert!(start.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.send(VnetHeader::default(), &frame(1, 100));
    assert_eq!(guest.counter("transmit_drop"), 1);
    assert_eq!(guest.interrupt.failure(), None);
    assert!(guest.interrupt.configs() >= 1);
}

#[test]
fn wrong_settings_are_refused_with_a_sentence() {
    let open = |backend, queue_pairs, mac: Option<MacAddress>, mtu| {
        let config = NetConfig { name: "net0".to_owned(), backend, mac, queue_pairs, mtu };
        Net::open(config).err().expect("refused").to_string()
    };
    let tap = || Backend::Tap { ifname: "cw-none".to_owned() };
    assert_eq!(
        open(tap(), 0, None, None),
        "Network device net0: the number of queue pairs is 0; 1 to 256 are possible"
    );
    assert_eq!(
        open(Backend::User, 2, None, None),
        "Network device net0: the number of queue pairs is 2; passt has one"
    );
    assert_eq!(
        open(tap(), 1, None, Some(67)),
        "Network device net0: the MTU is 67; 68 to 65535 are possible"
    );
    let text = open(tap(), 1, Some(MacAddress([1, 0, 0, 0, 0, 0])), None);
    assert!(text.starts_with("Network device net0: 01:00:00:00:00:00 is no address"), "{text}");
    let config = NetConfig {
        name: "net0".to_owned(),
        backend: Backend::TapFd(Vec::new()),
        mac: None,
        queue_pairs: 1,
        mtu: None,
    };
    assert!(matches!(Net::open(config), Err(NetError::Range { .. })));
}
