//! Frames for tests, and an independent computation of their checksums, byte by byte from RFC 1071, 793, 768 and 8200, without the tested
//! code.

use vmxnet3::Offload;

/// An Ethernet frame of a test's own type.
#[must_use]
pub fn ethernet(to: [u8; 6], from: [u8; 6], payload: &[u8]) -> Vec<u8> {
    // Local experimental EtherType 1.
    [&to[..], &from, &[0x88, 0xB5], payload].concat()
}

/// TCP or UDP over IP, as a guest passes it to its NIC.
#[derive(Debug, Clone)]
pub struct FrameSpec {
    /// Destination MAC address.
    pub to: [u8; 6],
    /// Source MAC address.
    pub from: [u8; 6],
    /// IPv6 instead of IPv4.
    pub v6: bool,
    /// UDP instead of TCP.
    pub udp: bool,
    /// A VLAN tag in the frame itself.
    pub vlan: Option<u16>,
    /// Number of 32-bit words of TCP options.
    pub options: u8,
    /// TCP flags.
    pub flags: u8,
    /// TCP sequence number.
    pub sequence: u32,
    /// IPv4 identification.
    pub id: u16,
    /// Payload of TCP or UDP.
    pub payload: Vec<u8>,
}

fn reference_sum(bytes: &[u8], mut total: u32) -> u32 {
    for (at, byte) in bytes.iter().enumerate() {
        total += if at % 2 == 0 { u32::from(*byte) << 8 } else { u32::from(*byte) };
        total = (total & 0xFFFF) + (total >> 16);
    }
    total
}

fn word(value: u32) -> [u8; 2] {
    [(value >> 8 & 0xFF) as u8, (value & 0xFF) as u8]
}

impl FrameSpec {
    fn tag(&self) -> usize {
        if self.vlan.is_some() { 4 } else { 0 }
    }

    /// Offset of the TCP or UDP header.
    #[must_use]
    pub fn l4(&self) -> usize {
        14 + self.tag() + if self.v6 { 40 } else { 20 }
    }

    /// Bytes of all headers.
    #[must_use]
    pub fn headers(&self) -> usize {
        self.l4() + if self.udp { 8 } else { 20 + 4 * usize::from(self.options) }
    }

    /// Offset of the checksum field.
    #[must_use]
    pub fn checksum_at(&self) -> usize {
        self.l4() + if self.udp { 6 } else { 16 }
    }

    /// The checksum offload that the driver requests.
    #[must_use]
    pub fn checksum_offload(&self) -> Offload {
        Offload::Checksum {
            start: u16::try_from(self.l4()).expect("a small header"),
            at: u16::try_from(self.checksum_at()).expect("a small header"),
        }
    }

    fn pseudo(&self, frame: &[u8], len: usize) -> u32 {
        let ip = 14 + self.tag();
        let addresses = if self.v6 { &frame[ip + 8..ip + 40] } else { &frame[ip + 12..ip + 20] };
        let protocol = if self.udp { 17 } else { 6 };
        let mut total = reference_sum(addresses, protocol);
        for part in [len >> 16, len & 0xFFFF] {
            total = reference_sum(&word(u32::try_from(part).expect("16 bits")), total);
        }
        total
    }

    fn build(&self, finish: impl FnOnce(&mut [u8], usize)) -> Vec<u8> {
        let l4_len = self.headers() - self.l4() + self.payload.len();
        let mut frame = [&self.to[..], &self.from].concat();
        if let Some(tag) = self.vlan {
            frame.extend([0x81, 0]);
            frame.extend(tag.to_be_bytes());
        }
        if self.v6 {
            frame.extend([0x86, 0xDD, 0x60, 0, 0, 0]);
            frame.extend(word(u32::try_from(l4_len & 0xFFFF).expect("16 bits")));
            frame.extend([if self.udp { 17 } else { 6 }, 64]);
            frame.extend([0xFD; 15]);
            frame.push(self.from[5]);
            frame.extend([0xFD; 15]);
            frame.push(self.to[5]);
        } else {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend(word(u32::try_from((l4_len + 20) & 0xFFFF).expect("16 bits")));
            frame.extend(self.id.to_be_bytes());
            frame.extend([0x40, 0, 64, if self.udp { 17 } else { 6 }, 0, 0]);
            frame.extend([10, 0, 0, self.from[5], 10, 0, 0, self.to[5]]);
        }
        if self.udp {
            frame.extend([0x13, 0x88, 0x13, 0x89]);
            frame.extend(word(u32::try_from(l4_len & 0xFFFF).expect("16 bits")));
            frame.extend([0, 0]);
        } else {
            frame.extend([0x13, 0x88, 0x13, 0x89]);
            frame.extend(self.sequence.to_be_bytes());
            frame.extend([0, 0, 0, 1, (5 + self.options) << 4, self.flags, 0x10, 0, 0, 0, 0, 0]);
            frame.extend(std::iter::repeat_n(1, 4 * usize::from(self.options)));
        }
        frame.extend(&self.payload);
        finish(&mut frame, l4_len);
        frame
    }

    fn set_ipv4_sum(&self, frame: &mut [u8]) {
        if !self.v6 {
            let ip = 14 + self.tag();
            let total = reference_sum(&frame[ip..ip + 20], 0);
            frame[ip + 10..ip + 12].copy_from_slice(&word(!total & 0xFFFF));
        }
    }

    /// The frame with all checksums.
    #[must_use]
    pub fn complete(&self) -> Vec<u8> {
        self.build(|frame, len| {
            self.set_ipv4_sum(frame);
            let total = reference_sum(&frame[self.l4()..], self.pseudo(frame, len));
            let value = if !total & 0xFFFF == 0 { 0xFFFF } else { !total & 0xFFFF };
            frame[self.checksum_at()..][..2].copy_from_slice(&word(value));
        })
    }

    /// The frame with a partial checksum: the sum of the pseudo-header in the checksum field.
    #[must_use]
    pub fn partial(&self) -> Vec<u8> {
        self.build(|frame, len| {
            self.set_ipv4_sum(frame);
            let total = self.pseudo(frame, len);
            frame[self.checksum_at()..][..2].copy_from_slice(&word(total));
        })
    }

    /// The frame as a driver passes it for segmentation: no IPv4 checksum, pseudo-header without the length.
    #[must_use]
    pub fn large(&self) -> Vec<u8> {
        self.build(|frame, _| {
            let total = self.pseudo(frame, 0);
            frame[self.checksum_at()..][..2].copy_from_slice(&word(total));
        })
    }

    /// The request for [`FrameSpec::large`].
    #[must_use]
    pub fn large_request(&self, mss: u16) -> super::TransmitRequest {
        super::TransmitRequest {
            offload: Offload::Tso { mss },
            header_len: u16::try_from(self.headers()).expect("a small header"),
            ..Default::default()
        }
    }

    /// The segments of a large packet: complete frames of at most `mss` bytes of payload.
    #[must_use]
    pub fn segments(&self, mss: usize) -> Vec<Vec<u8>> {
        let count = self.payload.len().div_ceil(mss).max(1);
        (0..count)
            .map(|index| {
                let from = index * mss;
                let to = (from + mss).min(self.payload.len());
                let mut flags = self.flags;
                if index > 0 {
                    flags &= !0x80;
                }
                if index + 1 < count {
                    flags &= !0x09;
                }
                let step = u32::try_from(from).expect("a packet");
                Self {
                    payload: self.payload[from..to].to_vec(),
                    sequence: self.sequence.wrapping_add(step),
                    id: self.id.wrapping_add(u16::try_from(index).expect("a packet")),
                    flags,
                    ..self.clone()
                }
                .complete()
            })
            .collect()
    }
}

/// Whether all checksums of a frame are good. It must be TCP or UDP over IP without options and extensions.
#[must_use]
pub fn checksums_are_good(frame: &[u8]) -> bool {
    let ip = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    let v6 = frame[ip] >> 4 == 6;
    let (l4, protocol, addresses) = if v6 {
        (ip + 40, frame[ip + 6], &frame[ip + 8..ip + 40])
    } else {
        (ip + 20, frame[ip + 9], &frame[ip + 12..ip + 20])
    };
    if !v6 && reference_sum(&frame[ip..ip + 20], 0) != 0xFFFF {
        return false;
    }
    let len = u32::try_from(frame.len() - l4).expect("a frame");
    let pseudo = reference_sum(&word(len & 0xFFFF), reference_sum(addresses, u32::from(protocol)));
    reference_sum(&frame[l4..], pseudo) == 0xFFFF
}
