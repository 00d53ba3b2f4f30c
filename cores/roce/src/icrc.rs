//! The invariant CRC (IBTA annex A17, RoCEv2).

use crc32fast::Hasher;

/// Length in bytes.
pub const LEN: usize = 4;

/// `crc32` of the eight bytes of ones that stand in for the absent local route header.
const AFTER_ROUTE_HEADER: u32 = 0x2144_DF1C;

/// The ICRC of a packet, as the four bytes on the wire.
///
/// `network` is the IP header (20 or 40 bytes), `udp` the UDP header, `packet` everything from the BTH to the pad. `None` when a header is
/// too short.
#[must_use]
pub fn compute(network: &[u8], udp: &[u8], packet: &[u8]) -> Option<[u8; LEN]> {
    let mut headers = [0u8; 40 + 8 + 12];
    let network_len = match network.first()? >> 4 {
        4 => 20,
        6 => 40,
        _ => return None,
    };
    let (ip, rest) = headers.split_at_mut(network_len);
    ip.copy_from_slice(network.get(..network_len)?);
    match network_len {
        20 => {
            ip[1] = 0xFF;
            ip[8] = 0xFF;
            ip[10] = 0xFF;
            ip[11] = 0xFF;
        }
        _ => {
            ip[0] |= 0x0F;
            ip[1..4].fill(0xFF);
            ip[7] = 0xFF;
        }
    }
    rest[..8].copy_from_slice(udp.get(..8)?);
    rest[6..8].fill(0xFF);
    let (bth, behind) = packet.split_at_checked(12)?;
    rest[8..20].copy_from_slice(bth);
    rest[12] = 0xFF;
    let mut hasher = Hasher::new_with_initial(AFTER_ROUTE_HEADER);
    hasher.update(&headers[..network_len + 20]);
    hasher.update(behind);
    Some(hasher.finalize().to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_starting_value_is_that_of_eight_bytes_of_ones() {
        assert_eq!(crc32fast::hash(&[0xFF; 8]), AFTER_ROUTE_HEADER);
        // The register before the final complement, as the specification has it.
        assert_eq!(!AFTER_ROUTE_HEADER, 0xDEBB_20E3);
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    fn check(packet: &[u8]) {
        let network = if packet[0] >> 4 == 4 { 20 } else { 40 };
        let (covered, icrc) = packet.split_at(packet.len() - LEN);
        let (ip, behind) = covered.split_at(network);
        let (udp, roce) = behind.split_at(8);
        assert_eq!(compute(ip, udp, roce).unwrap(), icrc);
        for position in 0..roce.len() {
            let mut broken = roce.to_vec();
            broken[position] ^= 0x20;
            let same = compute(ip, udp, &broken).unwrap() == icrc;
            assert_eq!(
                same,
                position == 4,
                "a flipped bit at {position} is found, unless the field is masked"
            );
        }
    }

    #[test]
    fn v1_ipv4_send_only() {
        check(&bytes(
            "4500003c123440004011df28c0a86401c0a86402 c00012b700280000
             0400ffff0000001180000001 526f4345763220746573742076656321 a41ad16e",
        ));
    }

    #[test]
    fn v2_masked_fields_differ() {
        check(&bytes(
            "456b003c12344000071117bec0a86401c0a86402 c00012b7002855aa
             0400ffffc000001180000001 526f4345763220746573742076656321 a41ad16e",
        ));
    }

    #[test]
    fn v3_ipv6_write_only() {
        check(&bytes(
            "6021234500301140 fd000000000000000000000000000001 fd000000000000000000000000000002
             c12312b700300000 0a30ffff0012345680abcdef
             00007f00123456780badcafe00000005 68656c6c6f000000 ade918fa",
        ));
    }

    #[test]
    fn v4_acknowledge() {
        check(&bytes(
            "45000030000040004011f168c0a86402c0a86401 c00012b7001c0000
             1100ffff0000001200000001 1f000001 6552b3be",
        ));
    }

    #[test]
    fn v5_datagram() {
        let mut packet = bytes(
            "4500013400014000401125b60a0000010a000002 c00012b701200000
             6400ffff0000000100000000 8001000000000001",
        );
        packet.extend(0..=255);
        packet.extend(bytes("c3cdff26"));
        check(&packet);
    }

    #[test]
    fn v6_congestion_notification_of_hardware() {
        check(&bytes(
            "45c2003c718c4000401191610a0011010a001201 000012b700280000
             8100ffff4000011800000000 00000000000000000000000000000000 82fd002a",
        ));
    }

    #[test]
    fn short_or_foreign_headers_have_none() {
        assert_eq!(compute(&[], &[0; 8], &[0; 12]), None);
        assert_eq!(compute(&[0x45; 19], &[0; 8], &[0; 12]), None);
        assert_eq!(compute(&[0x55; 20], &[0; 8], &[0; 12]), None);
        assert_eq!(compute(&[0x45; 20], &[0; 7], &[0; 12]), None);
        assert_eq!(compute(&[0x45; 20], &[0; 8], &[0; 11]), None);
    }
}
