//! Checksums and segmentation by context descriptors (manual of the PCI/PCI-X family, 3.3.6 and 3.3.7).

/// Limit in bytes of a frame under construction: 64 KiB to be segmented, and its headers.
const MAX_SEGMENTED_FRAME_BYTES: usize = 0x1_0000 + 0x100;
/// Command bits of a context: TCP rather than UDP, IPv4 rather than IPv6.
const TCP: u8 = 1;
const IPV4: u8 = 2;
/// For segmented frames.
const SEGMENTS: u8 = 4;

/// Start of a checksum, its place, and its end (0: the frame's end).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum {
    start: usize,
    place: usize,
    end: usize,
}

/// Fields of a context descriptor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ContextFields {
    ip: Sum,
    transport: Sum,
    command: u8,
    header: usize,
    segment: usize,
}

/// The offloads that a frame's first data descriptor requests.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wishes {
    /// Insert the IP checksum.
    pub ip: bool,
    /// Insert the TCP or UDP checksum.
    pub transport: bool,
    /// Cut into segments.
    pub segments: bool,
}

/// Contexts, and the frame under construction.
#[derive(Debug, Default)]
pub(super) struct Offload {
    /// One context for frames without segmentation, and one for segmented frames.
    contexts: [ContextFields; 2],
    frame: Vec<u8>,
    wishes: Option<Wishes>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |pair| u16::from_be_bytes([pair[0], pair[1]]))
}

fn put_word(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

/// Returns the one's complement sum of RFC 1071, including the bytes at the checksum's place.
fn sum_of(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).fold(0u64, |sum, pair| {
        sum + u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
    });
    (0..4).fold(sum, |sum, _| (sum & 0xFFFF) + (sum >> 16)).try_into().unwrap_or(0)
}

fn insert(frame: &mut [u8], sum: Sum) {
    // The end is the last byte that counts.
    let end = if sum.end == 0 { frame.len() } else { (sum.end + 1).min(frame.len()) };
    if let Some(covered) = frame.get(sum.start..end) {
        let value = !sum_of(covered);
        put_word(frame, sum.place, value);
    }
}

impl Offload {
    /// Sets a context from its descriptor.
    pub fn set_context(&mut self, descriptor: &[u8; 16]) {
        let byte = |at: usize| usize::from(descriptor[at]);
        let end = |at: usize| usize::from(u16::from_le_bytes([descriptor[at], descriptor[at + 1]]));
        self.contexts[usize::from(descriptor[11] & SEGMENTS != 0)] = ContextFields {
            ip: Sum { start: byte(0), place: byte(1), end: end(2) },
            transport: Sum { start: byte(4), place: byte(5), end: end(6) },
            command: descriptor[11],
            header: byte(13),
            segment: end(14),
        };
    }

    /// Appends a piece to the frame. The offloads of the first piece apply.
    pub fn push(&mut self, piece: &[u8], wishes: Wishes) {
        self.wishes.get_or_insert(wishes);
        let room = MAX_SEGMENTED_FRAME_BYTES.saturating_sub(self.frame.len());
        self.frame.extend_from_slice(&piece[..piece.len().min(room)]);
    }

    /// Drops the frame under construction.
    pub fn forget_frame(&mut self) {
        self.frame.clear();
        self.wishes = None;
    }

    /// Completes the frame. Returns the frames for the wire.
    pub fn finish(&mut self) -> Vec<Vec<u8>> {
        let mut frame = std::mem::take(&mut self.frame);
        let wishes = self.wishes.take().unwrap_or_default();
        if wishes.segments {
            return self.cut(&frame, wishes);
        }
        self.sums(&mut frame, wishes);
        vec![frame]
    }

    fn sums(&self, frame: &mut [u8], wishes: Wishes) {
        let context = &self.contexts[usize::from(wishes.segments)];
        if wishes.transport {
            insert(frame, context.transport);
        }
        if wishes.ip {
            insert(frame, context.ip);
        }
    }

    /// Cuts into segments of at most MSS bytes and updates each one's headers. Returns none for an invalid context (no
    /// segment size, headers longer than the frame).
    fn cut(&self, frame: &[u8], wishes: Wishes) -> Vec<Vec<u8>> {
        let of = self.contexts[1];
        let Some((header, payload)) = frame.split_at_checked(of.header) else { return Vec::new() };
        if of.segment == 0 || header.is_empty() || payload.is_empty() {
            return Vec::new();
        }
        let pieces = payload.len().div_ceil(of.segment);
        let mut segments = Vec::with_capacity(pieces);
        for (number, piece) in payload.chunks(of.segment).enumerate() {
            let mut segment = header.to_vec();
            segment.extend_from_slice(piece);
            self.bring_up_to_date(&mut segment, number, number + 1 == pieces);
            self.sums(&mut segment, wishes);
            segments.push(segment);
        }
        segments
    }

    fn bring_up_to_date(&self, segment: &mut [u8], number: usize, last: bool) {
        let of = self.contexts[1];
        let low = |value: usize| u16::try_from(value & 0xFFFF).unwrap_or(0);
        if of.command & IPV4 != 0 {
            put_word(segment, of.ip.start + 2, low(segment.len().saturating_sub(of.ip.start)));
            let id = word(segment, of.ip.start + 4).wrapping_add(low(number));
            put_word(segment, of.ip.start + 4, id);
        } else {
            put_word(segment, of.ip.start + 4, low(segment.len().saturating_sub(of.ip.start + 40)));
        }
        let transport = of.transport.start;
        let length = low(segment.len().saturating_sub(transport));
        if of.command & TCP != 0 {
            let at = transport + 4;
            let sequence = u32::from(word(segment, at)) << 16 | u32::from(word(segment, at + 2));
            let moved = u32::try_from(number * of.segment).unwrap_or(0);
            if let Some(place) = segment.get_mut(at..at + 4) {
                place.copy_from_slice(&sequence.wrapping_add(moved).to_be_bytes());
            }
            // FIN and PSH belong to the last segment.
            if let Some(flags) = segment.get_mut(transport + 13).filter(|_| !last) {
                *flags &= !0x09;
            }
        } else {
            put_word(segment, transport + 4, length);
        }
        // The driver stored the pseudo-header's sum there without a length, which differs between segments.
        let pseudo = u32::from(word(segment, of.transport.place)) + u32::from(length);
        let folded = (pseudo & 0xFFFF) + (pseudo >> 16);
        put_word(segment, of.transport.place, u16::try_from(folded & 0xFFFF).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ethernet, IPv4 and TCP headers of 14, 20 and 20 bytes, as Linux prepares them for segmentation.
    fn prepared(payload: usize) -> Vec<u8> {
        let mut frame = vec![0u8; 54];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[22..24].copy_from_slice(&[64, 6]);
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        put_word(&mut frame, 18, 0xFFFF);
        frame[38..42].copy_from_slice(&0xFFFF_FF00u32.to_be_bytes());
        frame[46] = 0x50;
        frame[47] = 0x19;
        let mut pseudo = frame[26..34].to_vec();
        pseudo.extend([0, 6]);
        put_word(&mut frame, 50, sum_of(&pseudo));
        frame.extend((0..payload).map(|at| u8::try_from(at % 251).unwrap_or(0)));
        frame
    }

    fn context(mss: u16, header: u8) -> [u8; 16] {
        let mut bytes = [14, 24, 33, 0, 34, 50, 0, 0, 0, 0, 0, 0x27, 0, header, 0, 0];
        bytes[14..].copy_from_slice(&mss.to_le_bytes());
        bytes
    }

    /// Checks that the sums over the receiver's ranges are all ones.
    fn is_right(segment: &[u8]) {
        assert_eq!(sum_of(&segment[14..34]), 0xFFFF, "the IP header");
        let mut covered = segment[26..34].to_vec();
        covered.extend([0, 6]);
        covered.extend(u16::try_from(segment.len() - 34).unwrap_or(0).to_be_bytes());
        covered.extend_from_slice(&segment[34..]);
        assert_eq!(sum_of(&covered), 0xFFFF, "TCP");
    }

    #[test]
    fn segments_have_headers_of_their_own() {
        let mut offload = Offload::default();
        offload.set_context(&context(1000, 54));
        let frame = prepared(2500);
        let wishes = Wishes { ip: true, transport: true, segments: true };
        offload.push(&frame[..100], wishes);
        offload.push(&frame[100..], wishes);
        let segments = offload.finish();
        assert_eq!(segments.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 554]);
        for (number, segment) in (0u16..).zip(&segments) {
            is_right(segment);
            assert_eq!(word(segment, 16), u16::try_from(segment.len() - 14).unwrap_or(0));
            assert_eq!(word(segment, 18), 0xFFFFu16.wrapping_add(number), "IPv4's id");
            assert_eq!(word(segment, 40), 0xFF00u16.wrapping_add(1000 * number), "the sequence number");
            assert_eq!(segment[47], if number == 2 { 0x19 } else { 0x10 }, "FIN and PSH");
        }
        assert_eq!(segments.concat().len(), 2500 + 3 * 54);
    }

    #[test]
    fn contexts_without_sense_send_nothing_and_end() {
        for (mss, header) in [(0, 54), (1000, 0), (1000, 255)] {
            let mut offload = Offload::default();
            offload.set_context(&context(mss, header));
            offload.push(&prepared(100), Wishes { segments: true, ..Wishes::default() });
            assert!(offload.finish().is_empty(), "{mss} {header}");
        }
        let mut offload = Offload::default();
        offload.set_context(&[0xFF; 16].map(|byte: u8| byte & !SEGMENTS));
        offload.push(&[0; 60], Wishes { ip: true, transport: true, segments: false });
        assert_eq!(offload.finish(), vec![vec![0; 60]], "a sum beyond the frame");
    }

    #[test]
    fn one_frame_gets_its_sums() {
        let mut offload = Offload::default();
        let mut plain = context(0, 0);
        plain[11] &= !SEGMENTS;
        offload.set_context(&plain);
        // A context for segmented frames leaves the other one unchanged.
        offload.set_context(&[0xFF; 16]);
        let mut frame = prepared(333);
        let ip_length = u16::try_from(frame.len() - 14).unwrap_or(0);
        put_word(&mut frame, 16, ip_length);
        let mut pseudo = frame[26..34].to_vec();
        pseudo.extend([0, 6]);
        pseudo.extend((ip_length - 20).to_be_bytes());
        put_word(&mut frame, 50, sum_of(&pseudo));
        offload.push(&frame, Wishes { ip: true, transport: true, segments: false });
        is_right(&offload.finish()[0]);
    }
}
