//! `wire` connections of a VM that migrates. The peer doesn't know of it: packets lost meanwhile are retransmitted, as after any loss.
//!
//! ```text
//! source        stop ─ the port is suspended: nothing is sent, received frames are dropped ─ saved ─ leave, or go_on_outside
//! destination   restored, without frames ─ start, adopt ─ landing, until the Ethernet function is in its segment ─ announced, go_on_outside
//! ```
//! The two functions of a NIC start one after the other. Connections wait for both; otherwise their packets would be dropped and counted as
//! retries.

use std::net::{IpAddr, Ipv6Addr};

use hca::engine::Engine;
use hca::names::DeviceId;
use hca::provider::Provider;

use super::super::carrier::Carrier;
use super::super::{LINGER_NS, Transports};
use super::{Wire, ip};

impl Wire {
    /// Suspends or resumes a device's port, with its VM.
    pub fn stand_still(&mut self, device: DeviceId, still: bool) {
        if let Some((port, _)) = self.ports.get(&device) {
            port.stand_still(still);
        }
    }

    /// Records that a device has arrived with its VM, which runs here now.
    pub fn lands(&mut self, device: DeviceId) {
        self.landing.insert(device);
    }
}

impl Transports {
    /// Whether a device is connected with peers outside of the cluster.
    #[must_use]
    pub fn faces_outside(&self, device: DeviceId) -> bool {
        !self.connections.outside(device).is_empty()
    }

    /// Resumes a device's connections with peers outside of the cluster: its VM runs here, and its frames have a path.
    pub fn go_on_outside<P: Provider>(&mut self, engine: &mut Engine<P>, device: DeviceId, now: u64) {
        self.wire.stand_still(device, false);
        let allowed = self.by_wire(device).is_ok();
        for index in self.connections.outside(device) {
            let Some(entry) = self.connections.get_mut(index) else { continue };
            if entry.line.is_none() {
                let info = engine.connection(entry.qp).filter(|_| allowed);
                entry.line = info.and_then(|info| self.wire.line(&info));
            }
            if entry.line.is_none() {
                // It failed before it moved, or may not exist here: its requests fail, and so does its queue pair.
                entry.connection.fail(&mut Carrier { engine, qp: entry.qp });
                entry.remove_at.get_or_insert(now + LINGER_NS);
            }
            entry.connection.resume(now);
            self.connections.ready(index);
        }
    }

    /// Resumes devices that have arrived once their Ethernet functions are in their segments. First announces their addresses to stations
    /// with address tables.
    pub(super) fn land<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) {
        while let Some(&device) = self
            .wire
            .landing
            .iter()
            .find(|device| self.wire.ports.get(device).is_none_or(|(port, _)| port.is_connected()))
        {
            self.wire.landing.remove(&device);
            self.go_on_outside(engine, device, now);
            let Some((port, _)) = self.wire.ports.get(&device) else { continue };
            let frames: Vec<Vec<u8>> =
                engine.addresses(device).map(|(gid, mac)| announcement(ip(gid), mac)).collect();
            port.send(frames.iter().map(Vec::as_slice));
        }
    }
}

/// A frame that announces an address's new port to bridges, switches and neighbours: a gratuitous ARP request (RFC 5227, section 3), or an
/// unsolicited neighbour advertisement (RFC 4861, section 7.2.6).
fn announcement(address: IpAddr, mac: [u8; 6]) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => {
            let address = address.octets();
            let mut frame = Vec::with_capacity(60);
            frame.extend([0xFF; 6]);
            frame.extend(mac);
            // ARP; Ethernet, IPv4, lengths 6 and 4, request.
            frame.extend([0x08, 0x06, 0, 1, 0x08, 0x00, 6, 4, 0, 1]);
            frame.extend(mac);
            frame.extend(address);
            frame.extend([0; 6]);
            frame.extend(address);
            frame.resize(60, 0);
            frame
        }
        IpAddr::V6(address) => {
            let all = Ipv6Addr::new(0xFF02, 0, 0, 0, 0, 0, 0, 1).octets();
            // Neighbour advertisement, without a checksum yet; flag "override"; the target, and its link-layer address.
            let mut message = vec![136, 0, 0, 0, 0x20, 0, 0, 0];
            message.extend(address.octets());
            message.extend([2, 1]);
            message.extend(mac);
            let pseudo = [&address.octets()[..], &all[..], &[0, 0, 0, 32, 0, 0, 0, 58], &message].concat();
            let sum = checksum(&pseudo);
            message[2..4].copy_from_slice(&sum);
            let mut frame = Vec::with_capacity(86);
            frame.extend([0x33, 0x33, 0, 0, 0, 1]);
            frame.extend(mac);
            // IPv6: no class nor flow, 32 bytes of ICMPv6, hop limit 255, which the receiver checks.
            frame.extend([0x86, 0xDD, 0x60, 0, 0, 0, 0, 32, 58, 255]);
            frame.extend(address.octets());
            frame.extend(all);
            frame.extend(message);
            frame
        }
    }
}

/// The Internet checksum of an even number of bytes.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks_exact(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
    let mut sum = words.sum::<u64>();
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    let [.., high, low] = (!sum).to_be_bytes();
    [high, low]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    /// Fields are where the RFCs have them, and the checksum is right.
    #[test]
    fn announcements_are_those_of_the_rfcs() {
        let mac = [0x52, 0x54, 0, 0x4D, 0, 1];
        let frame = announcement("10.80.0.1".parse().unwrap(), mac);
        assert_eq!((frame.len(), &frame[..6], &frame[6..12]), (60, &[0xFF; 6][..], &mac[..]));
        assert_eq!(frame[12..22], [0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(
            (&frame[22..28], &frame[28..32], &frame[38..42]),
            (&mac[..], &[10, 80, 0, 1][..], &[10, 80, 0, 1][..])
        );
        let address: Ipv6Addr = "fe80::5054:ff:fe4d:1".parse().unwrap();
        let frame = announcement(address.into(), mac);
        assert_eq!((frame.len(), frame[12], frame[13], frame[20], frame[21]), (86, 0x86, 0xDD, 58, 255));
        assert_eq!((&frame[62..78], &frame[80..86]), (&address.octets()[..], &mac[..]));
        let pseudo = [&frame[22..54], &[0, 0, 0, 32, 0, 0, 0, 58], &frame[54..]].concat();
        assert_eq!(checksum(&pseudo), [0, 0]);
    }
}
