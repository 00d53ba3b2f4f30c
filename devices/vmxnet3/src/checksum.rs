//! The Internet checksum (RFC 1071), and checksum offloads.

use crate::frame::Transport;

/// Adds `bytes` to a running sum. All parts but the last must have an even length.
#[must_use]
pub(crate) fn sum(bytes: &[u8], initial: u64) -> u64 {
    let chunks = bytes.chunks_exact(4);
    let mut last = [0; 4];
    let remainder = chunks.remainder();
    last[..remainder.len()].copy_from_slice(remainder);
    // 2^16 is 1 modulo 65535, so 32-bit words add up to the same.
    let total: u64 = chunks.map(|c| u64::from(u32::from_be_bytes([c[0], c[1], c[2], c[3]]))).sum();
    initial + total + u64::from(u32::from_be_bytes(last))
}

/// Folds a running sum to 16 bits.
#[must_use]
pub(crate) fn fold(mut total: u64) -> u16 {
    while total >> 16 != 0 {
        total = (total & 0xFFFF) + (total >> 16);
    }
    let [a, b, ..] = total.to_le_bytes();
    u16::from_le_bytes([a, b])
}

fn store(frame: &mut [u8], at: usize, value: u16) {
    if let Some(field) = frame.get_mut(at..at.saturating_add(2)) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// Sum of the pseudo-header of a TCP or UDP packet, whose headers are in `head` and whose length is `len`.
pub(crate) fn pseudo_header(head: &[u8], transport: &Transport, len: usize) -> u64 {
    let addresses = if transport.v6 {
        head.get(transport.ip + 8..transport.ip + 40)
    } else {
        head.get(transport.ip + 12..transport.ip + 20)
    };
    let protocol = if transport.udp { 17 } else { 6 };
    sum(addresses.unwrap_or(&[]), protocol + len as u64)
}

/// Computes the checksum over everything from `start` on and stores it at `at`, where the sum of the pseudo-header is. Stores a sum of 0 as
/// 0xFFFF, which is equivalent, since 0 means "no checksum" for UDP.
pub(crate) fn complete(frame: &mut [u8], start: usize, at: usize) {
    let value = !fold(sum(frame.get(start..).unwrap_or(&[]), 0));
    store(frame, at, if value == 0 { 0xFFFF } else { value });
}

/// Recomputes the IPv4 header checksum of a frame.
pub(crate) fn complete_ipv4(frame: &mut [u8], transport: &Transport) {
    store(frame, transport.ip + 10, 0);
    let value = !fold(sum(frame.get(transport.ip..transport.l4).unwrap_or(&[]), 0));
    store(frame, transport.ip + 10, value);
}

/// Whether the IPv4 header checksum is good. A frame of IPv6 has none and counts as good.
pub(crate) fn ipv4_is_good(head: &[u8], transport: &Transport) -> bool {
    transport.v6 || head.get(transport.ip..transport.l4).is_some_and(|header| fold(sum(header, 0)) == 0xFFFF)
}

/// Offset of the TCP or UDP checksum from the start of the frame.
pub(crate) fn field(transport: &Transport) -> usize {
    transport.l4 + if transport.udp { 6 } else { 16 }
}

/// Stores the folded sum of the pseudo-header with the given length, as a sender does for a checksum offload.
pub(crate) fn store_pseudo_header(frame: &mut [u8], transport: &Transport, len: usize) {
    let value = fold(pseudo_header(frame, transport, len));
    store(frame, field(transport), value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition of RFC 1071, byte by byte.
    fn reference(bytes: &[u8]) -> u16 {
        let mut total: u32 = 0;
        for (at, byte) in bytes.iter().enumerate() {
            let value = if at % 2 == 0 { u32::from(*byte) << 8 } else { u32::from(*byte) };
            total += value;
            if total > 0xFFFF {
                total -= 0xFFFF;
            }
        }
        u16::try_from(total).unwrap()
    }

    proptest! {
        #[test]
        fn the_sum_is_the_one_of_the_definition(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(fold(sum(&bytes, 0)) % 0xFFFF, reference(&bytes) % 0xFFFF);
        }

        #[test]
        fn a_completed_frame_sums_to_ones(
            mut bytes in prop::collection::vec(any::<u8>(), 40..300),
            start in 0..10_usize,
            at in 5..10_usize,
        ) {
            let (start, at) = (2 * start, 2 * at + 18);
            let initial = fold(sum(&bytes[at..at + 2], 0));
            complete(&mut bytes, start, at);
            // The field's contents count as one more summand (the pseudo-header).
            prop_assert_eq!(fold(sum(&bytes[start..], u64::from(initial))), 0xFFFF);
        }
    }

    #[test]
    fn an_ipv4_header_of_rfc_791_shape_is_completed_and_recognised() {
        let mut frame = vec![0; 14];
        frame[12] = 8;
        frame.extend([0x45, 0, 0, 40, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0; 20]);
        let transport = Transport::parse(&frame).unwrap();
        assert!(!ipv4_is_good(&frame, &transport));
        complete_ipv4(&mut frame, &transport);
        assert!(ipv4_is_good(&frame, &transport));
    }
}
