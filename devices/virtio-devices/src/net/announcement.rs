//! The announcement by which switches learn a guest's new port after a migration.

use super::header::HEADER_LEN;
use super::mac::MacAddress;

/// A reverse-ARP request from the guest's address, with an empty offload header. Switches learn the address from it whatever protocols the
/// guest uses, and no station responds (RFC 903; QEMU and libvirt announce with the same).
pub(super) fn message(mac: MacAddress) -> [u8; HEADER_LEN + 60] {
    let mut message = [0; HEADER_LEN + 60];
    let frame = &mut message[HEADER_LEN..];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac.0);
    // EtherType RARP; Ethernet, IPv4, lengths 6 and 4, "request reverse".
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    message
}
