//! Packets between daemons: headers, handshakes and sealed packets, over a network that stores, loses, duplicates, changes and
//! invents packets.
//!
//! Checked: each received packet was sent by the other side, is unchanged, and is received once; sessions are bounded; no panic.

#![no_main]

use arbitrary::Arbitrary;
use host::transport::fuzzing::{TwoHosts, headers};
use libfuzzer_sys::fuzz_target;

/// Limit of steps per input.
const STEPS: usize = 60;
/// Limit of packets that the network stores.
const KEPT: usize = 256;

#[derive(Debug, Arbitrary)]
enum Step {
    /// A side sends a packet with a unique number.
    Send { side: bool, lane: u8, padding: u8 },
    /// The network delivers a stored packet, and may keep it.
    Deliver { which: u8, keep: bool },
    /// The network delivers all stored packets in order.
    DeliverAll,
    /// The network delivers a changed copy.
    Change { which: u8, at: u8, mask: u8, cut: u8, longer: bool },
    /// The network delivers a packet to its sender.
    Reflect { which: u8 },
    /// The network invents a packet.
    Invent { side: bool, socket: u8, kind: u8, bytes: Vec<u8> },
    /// An unencrypted packet.
    Plain { bytes: Vec<u8> },
    /// Time passes.
    Pass { milliseconds: u16, long: bool },
    /// A daemon restarts.
    Restart { side: bool },
}

struct Network {
    hosts: TwoHosts,
    /// Packets with their destination side.
    kept: Vec<(usize, Vec<u8>)>,
    /// By number: destination side, body, whether it was received.
    sent: Vec<(usize, Vec<u8>, bool)>,
}

impl Network {
    fn collect(&mut self) {
        for side in 0..2 {
            for message in self.hosts.messages(side) {
                self.keep(1 - side, message);
            }
        }
    }

    fn keep(&mut self, side: usize, packet: Vec<u8>) {
        if self.kept.len() < KEPT {
            self.kept.push((side, packet));
        }
    }

    fn pick(&self, which: u8) -> Option<usize> {
        (!self.kept.is_empty()).then(|| usize::from(which) % self.kept.len())
    }

    fn deliver(&mut self, side: usize, socket: u16, bytes: &[u8]) {
        if let Some(body) = self.hosts.deliver(side, socket, bytes) {
            let number = u32::from_le_bytes(body[..4].try_into().expect("a number")) as usize;
            let (to, was, came) = &mut self.sent[number];
            assert_eq!((*to, &*was), (side, &body), "what comes out was put in");
            assert!(!*came, "and comes out once");
            *came = true;
        }
        for side in 0..2 {
            assert!(self.hosts.sessions(side) <= 3);
        }
        self.collect();
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let hosts = TwoHosts::new(*b"thirty-two bytes that are a key!").expect("a key");
    let mut network = Network { hosts, kept: Vec::new(), sent: Vec::new() };
    for step in steps.into_iter().take(STEPS) {
        match step {
            Step::Send { side, lane, padding } => {
                let side = usize::from(side);
                let mut body = (network.sent.len() as u32).to_le_bytes().to_vec();
                body.resize(4 + usize::from(padding), 0xA5);
                let packet = network.hosts.seal(side, usize::from(lane), &body);
                network.sent.push((1 - side, body, false));
                if let Some(packet) = packet {
                    network.keep(1 - side, packet);
                }
                network.collect();
            }
            Step::Deliver { which, keep } => {
                if let Some(at) = network.pick(which) {
                    let (side, packet) = network.kept[at].clone();
                    if !keep {
                        network.kept.remove(at);
                    }
                    network.deliver(side, 0, &packet);
                }
            }
            Step::DeliverAll => {
                for (side, packet) in std::mem::take(&mut network.kept) {
                    network.deliver(side, 0, &packet);
                }
            }
            Step::Change { which, at, mask, cut, longer } => {
                if let Some(picked) = network.pick(which) {
                    let (side, mut packet) = network.kept[picked].clone();
                    let before = packet.clone();
                    let len = packet.len();
                    packet[usize::from(at) % len] ^= mask;
                    packet.truncate(len - usize::from(cut) % len);
                    if longer {
                        packet.push(mask);
                    }
                    if packet != before {
                        let came = network.sent.iter().filter(|sent| sent.2).count();
                        network.deliver(side, 0, &packet);
                        assert_eq!(
                            came,
                            network.sent.iter().filter(|sent| sent.2).count(),
                            "nothing changed opens"
                        );
                    }
                }
            }
            Step::Reflect { which } => {
                if let Some(at) = network.pick(which) {
                    let (side, packet) = network.kept[at].clone();
                    assert_eq!(network.hosts.deliver(1 - side, 0, &packet), None);
                    network.collect();
                }
            }
            Step::Invent { side, socket, kind, bytes } => {
                let mut packet = vec![2, kind % 7, 0, 0];
                packet.extend(bytes);
                network.deliver(usize::from(side), u16::from(socket), &packet);
            }
            Step::Plain { bytes } => headers(&bytes),
            Step::Pass { milliseconds, long } => {
                let unit = if long { 100_000_000 } else { 1_000_000 };
                network.hosts.pass(u64::from(milliseconds) * unit);
            }
            Step::Restart { side } => network.hosts.restart(usize::from(side)),
        }
    }
});
