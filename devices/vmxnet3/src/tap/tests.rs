//! Headers, and taps in a network namespace of the test's own, whose kernel checks them.

use std::process::Command;
use std::time::{Duration, Instant};

use vmxnet3_testbed::FrameSpec;

use super::*;

#[test]
fn interface_names_are_checked_before_the_kernel_sees_them() {
    for bad in ["", "a/b", "0123456789abcdef", "tap 0", "..", "tap%d", "t\u{e4}p"] {
        assert!(matches!(Tap::open(bad), Err(TapError::Name { .. })), "{bad:?}");
    }
    assert!(name_bytes("tap0").is_ok());
}

#[test]
fn headers_say_what_is_left_to_do() {
    for offload in [Offload::None, Offload::Verified, Offload::Checksum { start: 34, at: 50 }] {
        let header = make_header(&[0; 60], offload).unwrap();
        assert_eq!(parse_header(&header), Some(offload));
    }
    assert_eq!(make_header(&[0; 60], Offload::Tso { mss: 1448 }), None, "no TCP");
    let mut udp_segmentation = [0; HEADER];
    udp_segmentation[1] = 5;
    assert_eq!(parse_header(&udp_segmentation), None);
}

#[test]
fn a_descriptor_that_is_no_tap_is_refused() {
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(matches!(Tap::from_fd(null), Err(TapError::NoTap(_))));
}

/// Runs a thread in a network namespace of its own; `false` when this user may not create one.
fn in_namespace(test: impl FnOnce() + Send + 'static) -> bool {
    let run = move || {
        // SAFETY: the namespace is this thread's alone, which ends with the test.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return false;
        }
        test();
        true
    };
    std::thread::spawn(run).join().unwrap()
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// A tap whose host side has no offloads: the kernel computes checksums and segments before.
fn plain_tap(ifname: &str) -> OwnedFd {
    let fd = rustix::fs::open("/dev/net/tun", OFlags::RDWR | OFlags::NONBLOCK, Mode::empty()).unwrap();
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    ioctl_request(fd.as_fd(), libc::TUNSETIFF, &mut request(name_bytes(ifname).unwrap(), flags)).unwrap();
    fd
}

/// The next frame of the test, within some seconds.
fn next<T>(mut receive: impl FnMut() -> Option<(Vec<u8>, T)>) -> (Vec<u8>, T) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match receive() {
            Some((frame, rest)) if frame[6..12] == FROM => return (frame, rest),
            // The kernel's own frames.
            Some(_) => {}
            None => {
                assert!(Instant::now() < deadline, "no frame came");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Linux finishes our offloads as the reference does, and we understand Linux's.
#[test]
fn the_kernel_makes_of_our_packets_what_the_reference_makes() {
    let ran = in_namespace(|| {
        if !std::path::Path::new("/dev/net/tun").exists() {
            facilities::missing(facilities::Facility::Tun, "there is no /dev/net/tun");
            return;
        }
        ip("link add br0 type bridge");
        let mut ours = Tap::open("cw0").unwrap();
        let mut other = Tap::open("cw1").unwrap();
        let plain = plain_tap("cw2");
        for port in ["cw0", "cw1", "cw2"] {
            ip(&format!("link set {port} master br0 up"));
        }
        ip("link set br0 up");
        for (v6, vlan) in [(false, None), (true, None), (false, Some(7)), (true, Some(7))] {
            let spec = FrameSpec {
                to: [2, 0, 0, 0, 0, 2],
                from: FROM,
                v6,
                udp: false,
                vlan,
                options: 3,
                flags: 0x99,
                sequence: u32::MAX - 5000,
                id: 65_530,
                payload: (0..=255).cycle().take(20_000).collect(),
            };
            let mut large = spec.large();
            Plan::new(&large[..256], large.len(), 1400).unwrap().prepare_uncut(&mut large);
            let small = FrameSpec { payload: vec![9; 777], ..spec.clone() };
            let unfinished = Offload::Tso { mss: 1400 };
            let start = u16::try_from(small.l4()).unwrap();
            let checksum = Offload::Checksum { start, at: start + 16 };
            let mut from_plain = || {
                let mut frame = Vec::with_capacity(70_000);
                rustix::io::read(&plain, spare_capacity(&mut frame)).ok()?;
                Some((frame, ()))
            };
            let mut from_other = || {
                let mut frame = Vec::new();
                other.receive(&mut frame).unwrap().map(|offload| (frame, offload))
            };
            ours.send(&large, unfinished).unwrap();
            for segment in spec.segments(1400) {
                assert_eq!(next(&mut from_plain).0, segment, "v6 {v6}, VLAN {vlan:?}");
            }
            assert_eq!(next(&mut from_other), (large, unfinished));
            ours.send(&small.partial(), checksum).unwrap();
            assert_eq!(next(&mut from_plain).0, small.complete());
            assert_eq!(next(&mut from_other), (small.partial(), checksum));
            ours.send(&small.complete(), Offload::Verified).unwrap();
            assert_eq!(next(&mut from_plain).0, small.complete());
            assert_eq!(next(&mut from_other).0, small.complete());
        }
    });
    if !ran {
        facilities::missing(facilities::Facility::Root, "this user may not make a network namespace");
    }
}
