//! A real passt as the backend, with the mock driver as a guest that requests an address.

use super::*;
use crate::net::{Backend, NetConfig, NetError};

const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 3];

/// A DHCPDISCOVER in an Ethernet broadcast.
fn discover() -> Vec<u8> {
    let mut dhcp = vec![1, 1, 6, 0, 0x12, 0x34, 0x56, 0x78];
    dhcp.resize(28, 0);
    dhcp.extend(GUEST_MAC);
    dhcp.resize(236, 0);
    // Cookie, message type "discover", requests for the MTU and a router's address, end.
    dhcp.extend([99, 130, 83, 99, 53, 1, 1, 55, 2, 26, 3, 255]);
    dhcp.resize(300, 0);
    let mut udp = vec![0, 68, 0, 67];
    udp.extend(u16::try_from(8 + dhcp.len()).unwrap().to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(dhcp);
    let mut ip = vec![0x45, 0];
    ip.extend(u16::try_from(20 + udp.len()).unwrap().to_be_bytes());
    ip.extend([0, 1, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]);
    let mut sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    sum = (sum & 0xffff) + (sum >> 16);
    let check = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    [[0xff; 6].as_slice(), &GUEST_MAC, &[8, 0], &ip, &udp].concat()
}

#[test]
fn a_guest_gets_an_address_from_passt() {
    let config = NetConfig {
        name: "net0".to_owned(),
        backend: Backend::User,
        mac: Some(MacAddress(GUEST_MAC)),
        queue_pairs: 1,
        mtu: Some(1400),
    };
    let net = match Net::open(config) {
        Ok(net) => net,
        Err(error @ (NetError::PasstMissing | NetError::PasstEnded { .. })) => {
            facilities::missing(facilities::Facility::Passt, error);
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(net.features() & 1 << b::VIRTIO_NET_F_CSUM, 0, "passt knows no offloads");
    let mut guest = Guest::new(net, 1, testbed::RINGS | MERGEABLE);
    guest.activate();
    guest.post(0, BUFFERS, 64, 2048);
    guest.send(VnetHeader::default(), &discover());
    let mut at = BUFFERS;
    let offer = loop {
        let (_, written) = guest.receive[0].wait_used();
        let bytes = guest.receive[0].get(at + 12, written as usize - 12);
        at += 2048;
        // Neighbour discovery and the like arrive, too.
        if bytes.len() > 282 && bytes[12..14] == [8, 0] && bytes[23] == 17 && bytes[34..38] == [0, 67, 0, 68]
        {
            break bytes;
        }
    };
    assert_eq!(offer[42 + 4..42 + 8], [0x12, 0x34, 0x56, 0x78], "the answer to this question");
    assert_ne!(offer[42 + 16..42 + 20], [0; 4], "an address");
    let options = &offer[42 + 236..];
    assert!(options.windows(4).any(|option| option == [26, 2, 5, 0x78]), "the MTU of 1400");
    // The end of passt takes the link down, not the VM.
    let description = guest.net.inspect()["backend"].as_str().unwrap().to_owned();
    let pid = description.rsplit(' ').next().unwrap().parse().unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let start = Instant::now();
    while guest.net.inspect()["link_up"] == true {
        assert!(start.elapsed() < Duration::from_secs(10), "the loss goes unnoticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(guest.interrupt.failure(), None);
}
