//! Packets from the BTH up to the pad: everything between UDP and the ICRC (IBTA volume 1, 9.2 to 9.4).
//!
//! [`Packet::parse`] accepts arbitrary bytes and never panics; [`Header::write`] is its inverse. Whole frames, with their ICRC, are in
//! [`crate::frame`].

use crate::psn;

/// Bytes of a base transport header.
pub const BTH: usize = 12;

/// Limit of header bytes: BTH, RETH and immediate data, or BTH and AtomicETH.
pub const MOST_HEADERS: usize = BTH + 28;

/// The default partition.
pub const DEFAULT_PKEY: u16 = 0xFFFF;

/// The transport service of a packet: the upper three bits of the opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification.
    Congestion,
}

/// The operation of a packet: the lower five bits of the opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // The names are the specification's.
pub enum Operation {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImmediate = 0x03,
    SendOnly = 0x04,
    SendOnlyImmediate = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImmediate = 0x09,
    WriteOnly = 0x0A,
    WriteOnlyImmediate = 0x0B,
    ReadRequest = 0x0C,
    ReadResponseFirst = 0x0D,
    ReadResponseMiddle = 0x0E,
    ReadResponseLast = 0x0F,
    ReadResponseOnly = 0x10,
    Acknowledge = 0x11,
    AtomicAcknowledge = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInvalidate = 0x16,
    SendOnlyInvalidate = 0x17,
    /// Congestion notification; its opcode is 0x81.
    Notification = 0x01 | 0x80,
}

impl Operation {
    const RC: [Option<Self>; 32] = {
        use Operation::*;
        let mut table = [None; 32];
        let all = [
            SendFirst,
            SendMiddle,
            SendLast,
            SendLastImmediate,
            SendOnly,
            SendOnlyImmediate,
            WriteFirst,
            WriteMiddle,
            WriteLast,
            WriteLastImmediate,
            WriteOnly,
            WriteOnlyImmediate,
            ReadRequest,
            ReadResponseFirst,
            ReadResponseMiddle,
            ReadResponseLast,
            ReadResponseOnly,
            Acknowledge,
            AtomicAcknowledge,
            CompareSwap,
            FetchAdd,
            SendLastInvalidate,
            SendOnlyInvalidate,
        ];
        let mut index = 0;
        while index < all.len() {
            table[all[index] as usize] = Some(all[index]);
            index += 1;
        }
        table
    };

    /// Service and operation of an opcode; `None` for a reserved one, or one of a service that RoCE doesn't use.
    #[inline]
    #[must_use]
    pub fn decode(opcode: u8) -> Option<(Service, Self)> {
        if opcode == Self::Notification as u8 {
            return Some((Service::Congestion, Self::Notification));
        }
        let operation = Self::RC[usize::from(opcode & 0x1F)]?;
        match opcode >> 5 {
            0 => Some((Service::Rc, operation)),
            1 if (operation as u8) < 0x0C => Some((Service::Uc, operation)),
            3 if matches!(operation, Self::SendOnly | Self::SendOnlyImmediate) => {
                Some((Service::Ud, operation))
            }
            _ => None,
        }
    }

    /// The opcode on the wire.
    #[inline]
    #[must_use]
    pub fn encode(self, service: Service) -> u8 {
        match service {
            Service::Rc => self as u8,
            Service::Uc => self as u8 | 0x20,
            Service::Ud => self as u8 | 0x60,
            Service::Congestion => Self::Notification as u8,
        }
    }

    /// Whether the packet goes from responder to requester.
    #[inline]
    #[must_use]
    pub fn is_response(self) -> bool {
        matches!(self as u8, 0x0D..=0x12)
    }

    /// Whether it is the first packet of a message.
    #[inline]
    #[must_use]
    pub fn begins(self) -> bool {
        use Operation::*;
        matches!(
            self,
            SendFirst
                | SendOnly
                | SendOnlyImmediate
                | SendOnlyInvalidate
                | WriteFirst
                | WriteOnly
                | WriteOnlyImmediate
        )
    }

    #[inline]
    fn has_reth(self) -> bool {
        use Operation::*;
        matches!(self, WriteFirst | WriteOnly | WriteOnlyImmediate | ReadRequest)
    }

    #[inline]
    fn has_aeth(self) -> bool {
        use Operation::*;
        matches!(
            self,
            ReadResponseFirst | ReadResponseLast | ReadResponseOnly | Acknowledge | AtomicAcknowledge
        )
    }

    #[inline]
    fn has_immediate(self) -> bool {
        use Operation::*;
        matches!(self, SendLastImmediate | SendOnlyImmediate | WriteLastImmediate | WriteOnlyImmediate)
    }

    #[inline]
    fn has_invalidate(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }

    #[inline]
    fn has_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Bytes of BTH and extended headers.
    #[inline]
    #[must_use]
    pub fn headers(self, service: Service) -> usize {
        let mut len = BTH;
        if service == Service::Ud {
            len += 8;
        }
        if self.has_reth() {
            len += 16;
        }
        if self.has_aeth() {
            len += 4;
        }
        if self.has_immediate() || self.has_invalidate() {
            len += 4;
        }
        if self.has_atomic() {
            len += 28;
        }
        if self == Self::AtomicAcknowledge {
            len += 8;
        }
        len
    }
}

/// RDMA extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reth {
    /// Virtual address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub length: u32,
}

/// Atomic extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtomicEth {
    /// Virtual address.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
    /// New value, or addend.
    pub swap_add: u64,
    /// Expected value.
    pub compare: u64,
}

/// ACK extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aeth {
    /// Acknowledgement or NAK code; see [`Syndrome`].
    pub syndrome: u8,
    /// Completed requests, 24 bits.
    pub msn: u32,
}

/// Datagram extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// Sender's queue pair, 24 bits.
    pub source: u32,
}

/// A decoded AETH syndrome (IBTA volume 1, 9.7.5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syndrome {
    /// Acknowledged; flow-control credits are ignored.
    Ack,
    /// Receiver not ready: wait for the duration of the timer code.
    Rnr(u8),
    /// A packet is missing.
    SequenceError,
    /// Invalid request.
    InvalidRequest,
    /// Remote access error.
    AccessError,
    /// Remote operational error.
    OperationalError,
    /// Reserved, or of services that Causeway doesn't offer.
    Unknown(u8),
}

impl Syndrome {
    /// Decodes a syndrome.
    #[must_use]
    pub fn decode(byte: u8) -> Self {
        match byte {
            0x00..=0x1F => Self::Ack,
            0x20..=0x3F => Self::Rnr(byte & 0x1F),
            0x60 => Self::SequenceError,
            0x61 => Self::InvalidRequest,
            0x62 => Self::AccessError,
            0x63 => Self::OperationalError,
            other => Self::Unknown(other),
        }
    }

    /// Encodes it; an acknowledgement has no credits.
    #[must_use]
    pub fn encode(self) -> u8 {
        match self {
            Self::Ack => 0x1F,
            Self::Rnr(code) => 0x20 | (code & 0x1F),
            Self::SequenceError => 0x60,
            Self::InvalidRequest => 0x61,
            Self::AccessError => 0x62,
            Self::OperationalError => 0x63,
            Self::Unknown(byte) => byte,
        }
    }
}

/// The headers of a packet. [`Header::write`] ignores fields that the operation doesn't have; parsing leaves them at their defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Transport service.
    pub service: Service,
    /// Operation; with `service` it makes the BTH's opcode.
    pub operation: Operation,
    /// Solicited event.
    pub solicited: bool,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion notification.
    pub fecn: bool,
    /// Backward congestion notification.
    pub becn: bool,
    /// Destination queue pair, 24 bits.
    pub destination: u32,
    /// Requests an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number, 24 bits.
    pub psn: u32,
    /// Of WRITE FIRST and ONLY, and READ requests.
    pub reth: Reth,
    /// Of atomics.
    pub atomic: AtomicEth,
    /// Of responses, except READ response MIDDLE.
    pub aeth: Aeth,
    /// Of datagrams.
    pub deth: Deth,
    /// Previous value, in an atomic's acknowledgement.
    pub original: u64,
    /// Immediate data, as wire bytes; or the key to invalidate, big-endian.
    pub immediate: [u8; 4],
}

impl Header {
    /// A header with these fields; the others are at their defaults.
    #[inline]
    #[must_use]
    pub fn new(service: Service, operation: Operation, destination: u32, psn: u32) -> Self {
        Self {
            service,
            operation,
            solicited: false,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            destination,
            ack_request: false,
            psn,
            reth: Reth::default(),
            atomic: AtomicEth::default(),
            aeth: Aeth::default(),
            deth: Deth::default(),
            original: 0,
            immediate: [0; 4],
        }
    }

    /// Bytes of a packet with these headers and so much payload, pad included.
    #[inline]
    #[must_use]
    pub fn packet_len(&self, payload: usize) -> usize {
        let body = if self.operation == Operation::Notification { 16 } else { payload.next_multiple_of(4) };
        self.operation.headers(self.service) + body
    }

    /// Writes headers and pad around a payload of `payload` bytes into `out`, which has [`Header::packet_len`] bytes. Returns the payload's
    /// place in it.
    ///
    /// # Panics
    /// When `out` is shorter.
    #[inline]
    pub fn write<'a>(&self, out: &'a mut [u8], payload: usize) -> &'a mut [u8] {
        let pad = payload.wrapping_neg() & 3;
        let flags = (u8::from(self.solicited) << 7) | ([0, 0x10, 0x20, 0x30][pad]);
        let destination = (self.destination & psn::MASK).to_be_bytes();
        let psn = (self.psn & psn::MASK).to_be_bytes();
        let pkey = self.pkey.to_be_bytes();
        let mut bth = [0u8; BTH];
        bth[0] = self.operation.encode(self.service);
        bth[1] = flags;
        bth[2..4].copy_from_slice(&pkey);
        bth[4] = (u8::from(self.fecn) << 7) | (u8::from(self.becn) << 6);
        bth[5..8].copy_from_slice(&destination[1..]);
        bth[8] = u8::from(self.ack_request) << 7;
        bth[9..12].copy_from_slice(&psn[1..]);
        out[..BTH].copy_from_slice(&bth);
        let mut writer = Writer { out: &mut out[BTH..] };
        if self.service == Service::Ud {
            writer.put(self.deth.qkey.to_be_bytes());
            writer.put((self.deth.source & psn::MASK).to_be_bytes());
        }
        let operation = self.operation;
        if operation.has_reth() {
            writer.put(self.reth.address.to_be_bytes());
            writer.put(self.reth.rkey.to_be_bytes());
            writer.put(self.reth.length.to_be_bytes());
        }
        if operation.has_atomic() {
            writer.put(self.atomic.address.to_be_bytes());
            writer.put(self.atomic.rkey.to_be_bytes());
            writer.put(self.atomic.swap_add.to_be_bytes());
            writer.put(self.atomic.compare.to_be_bytes());
        }
        if operation.has_aeth() {
            let word = (u32::from(self.aeth.syndrome) << 24) | (self.aeth.msn & psn::MASK);
            writer.put(word.to_be_bytes());
        }
        if operation == Operation::AtomicAcknowledge {
            writer.put(self.original.to_be_bytes());
        }
        if operation.has_immediate() || operation.has_invalidate() {
            writer.put(self.immediate);
        }
        if operation == Operation::Notification {
            writer.put([0; 16]);
        }
        let out = writer.out;
        out[payload..payload + pad].fill(0);
        &mut out[..payload]
    }
}

struct Writer<'a> {
    out: &'a mut [u8],
}

impl Writer<'_> {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        let (head, rest) = std::mem::take(&mut self.out).split_at_mut(N);
        head.copy_from_slice(&bytes);
        self.out = rest;
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    #[inline]
    fn get<const N: usize>(&mut self) -> Result<[u8; N], Invalid> {
        let (head, rest) = self.bytes.split_first_chunk::<N>().ok_or(Invalid::Short)?;
        self.bytes = rest;
        Ok(*head)
    }
}

/// Why bytes are not a packet. Such packets are dropped without a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// Too short for its headers and pad.
    #[error("The packet is too short for its headers")]
    Short,
    /// A reserved opcode.
    #[error("The packet has opcode {0:#04x}, which doesn't exist")]
    Opcode(u8),
    /// A transport header version other than 0.
    #[error("The packet has transport header version {0} instead of 0")]
    Version(u8),
    /// The payload and pad are no multiple of 4 bytes, or a payload isn't permitted.
    #[error("The packet's length doesn't fit its opcode")]
    Length,
}

/// A packet: headers, copied, and its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Headers from the BTH on; see [`Header`].
    pub header: Header,
    /// Payload without the pad.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a packet from the BTH to the pad, without ICRC. The bytes may be hostile.
    ///
    /// # Errors
    /// When it isn't a packet.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Invalid> {
        let mut reader = Reader { bytes };
        let bth: [u8; BTH] = reader.get()?;
        let (service, operation) = Operation::decode(bth[0]).ok_or(Invalid::Opcode(bth[0]))?;
        let version = bth[1] & 0x0F;
        if version != 0 {
            return Err(Invalid::Version(version));
        }
        let destination = u32::from_be_bytes([0, bth[5], bth[6], bth[7]]);
        let mut header =
            Header::new(service, operation, destination, u32::from_be_bytes([0, bth[9], bth[10], bth[11]]));
        header.solicited = bth[1] & 0x80 != 0;
        header.pkey = u16::from_be_bytes([bth[2], bth[3]]);
        header.fecn = bth[4] & 0x80 != 0;
        header.becn = bth[4] & 0x40 != 0;
        header.ack_request = bth[8] & 0x80 != 0;
        if service == Service::Ud {
            header.deth.qkey = u32::from_be_bytes(reader.get()?);
            header.deth.source = u32::from_be_bytes(reader.get()?) & psn::MASK;
        }
        if operation.has_reth() {
            header.reth.address = u64::from_be_bytes(reader.get()?);
            header.reth.rkey = u32::from_be_bytes(reader.get()?);
            header.reth.length = u32::from_be_bytes(reader.get()?);
        }
        if operation.has_atomic() {
            header.atomic.address = u64::from_be_bytes(reader.get()?);
            header.atomic.rkey = u32::from_be_bytes(reader.get()?);
            header.atomic.swap_add = u64::from_be_bytes(reader.get()?);
            header.atomic.compare = u64::from_be_bytes(reader.get()?);
        }
        if operation.has_aeth() {
            let word = u32::from_be_bytes(reader.get()?);
            header.aeth = Aeth { syndrome: word.to_be_bytes()[0], msn: word & psn::MASK };
        }
        if operation == Operation::AtomicAcknowledge {
            header.original = u64::from_be_bytes(reader.get()?);
        }
        if operation.has_immediate() || operation.has_invalidate() {
            header.immediate = reader.get()?;
        }
        let body = reader.bytes;
        if operation == Operation::Notification {
            return Ok(Self { header, payload: &[] });
        }
        let pad = usize::from((bth[1] >> 4) & 3);
        if !body.len().is_multiple_of(4) {
            return Err(Invalid::Length);
        }
        let payload = body.get(..body.len().checked_sub(pad).ok_or(Invalid::Short)?).ok_or(Invalid::Short)?;
        let empty = matches!(
            operation,
            Operation::ReadRequest
                | Operation::Acknowledge
                | Operation::AtomicAcknowledge
                | Operation::CompareSwap
                | Operation::FetchAdd
        );
        if empty && !body.is_empty() {
            return Err(Invalid::Length);
        }
        Ok(Self { header, payload })
    }

    /// The destination queue pair alone, to find a packet's receiver; `None` when it is too short.
    #[inline]
    #[must_use]
    pub fn destination(bytes: &[u8]) -> Option<u32> {
        let bth = bytes.first_chunk::<BTH>()?;
        Some(u32::from_be_bytes([0, bth[5], bth[6], bth[7]]))
    }
}
