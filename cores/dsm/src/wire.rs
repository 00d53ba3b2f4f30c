//! The encoding of messages.
//!
//! ```text
//!  0 version (1)   1 kind   2 from   3 to   4 length of what follows the header (4)
//!  8 page (8)     16 seq (8)               24 need (8)                  32 body
//! ```
//! Little-endian. A receiver refuses unknown versions. Peers aren't trusted: every length is checked before use, and the parser allocates
//! no more than the message itself contains.

use thiserror::Error;

use crate::message::{Body, Grant, Intent, Message, Request, Stamp, Token};
use crate::names::{MAX_NODES, MAX_VCPUS, Mode, NodeId, NodeSet, Priority, Vcpu};
use crate::operation::{Atomic, Change, MAX_STORE, Operation, full_mask};
use crate::payload::Payload;

/// Version of the format.
pub const VERSION: u8 = 1;
/// Bytes of the header.
pub const HEADER: usize = 32;
/// Bytes of a page. Messages carry only pages of this size.
pub const PAGE_SIZE: usize = 4096;
/// Limit of pages in a `Token`, and so of write-update pages at one time.
pub const MAX_UPDATE_PAGES: usize = 4096;
/// Limit of a message, bytes: a `Token` with all its pages.
pub const MAX_MESSAGE: usize = HEADER + 5 + MAX_NODES as usize * 16 + MAX_UPDATE_PAGES * 17;

/// Why bytes aren't a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// Fewer bytes than the header announces, or than a header has.
    #[error(
        "A message of {got} bytes ends early: {needed} are needed. The connection is broken or the peer is faulty"
    )]
    Short {
        /// Bytes present.
        got: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// Bytes after the end of the body.
    #[error("A message has {0} bytes behind its end. The peer is faulty")]
    Long(usize),
    /// An unknown version of the format.
    #[error(
        "A message is in version {0} of the format, this node knows version 1 only: run the same release on all nodes"
    )]
    Version(u8),
    /// A field has an invalid value.
    #[error(
        "The field '{field}' of a message has the value {value}, which it can't have. The peer is faulty"
    )]
    Field {
        /// Its name.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

const RAW: u8 = 3;
const DIFFERENCE: u8 = 2;
const SAME: u8 = 1;
const ZERO: u8 = 0;

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    /// Writes a length. The core makes none above the limit; a receiver would refuse it.
    fn length(&mut self, value: usize) {
        self.u16(u16::try_from(value).unwrap_or(u16::MAX));
    }
    fn priority(&mut self, priority: Priority) {
        self.u64(priority.time);
        self.u16(priority.vcpu);
        self.u8(priority.node.0);
    }
    fn change(&mut self, change: &Change, flags: u8) {
        let partial = change.mask != full_mask(change.bytes.len());
        self.u16(change.offset);
        self.u8(u8::try_from(change.bytes.len()).unwrap_or(u8::MAX));
        self.u8(flags | u8::from(partial));
        if partial {
            self.u64(change.mask);
        }
        self.0.extend_from_slice(&change.bytes);
    }
    fn seqs(&mut self, values: &[u64]) {
        self.u8(u8::try_from(values.len()).unwrap_or(u8::MAX));
        for value in values {
            self.u64(*value);
        }
    }
}

const fn mode_code(mode: Mode) -> u8 {
    match mode {
        Mode::Invalidate => 0,
        Mode::Update => 1,
        Mode::SingleWriter => 2,
    }
}

const fn intent_code(intent: Intent) -> u8 {
    match intent {
        Intent::Read => 0,
        Intent::ReadOwn => 1,
        Intent::Write => 2,
    }
}

const fn kind_code(body: &Body) -> u8 {
    match body {
        Body::Request(_) => 1,
        Body::Grant(_) => 2,
        Body::Invalidate { .. } => 3,
        Body::InvalidateAck => 4,
        Body::Hurry { .. } => 5,
        Body::Operate { .. } => 6,
        Body::Update { .. } => 7,
        Body::Done { .. } => 8,
        Body::Refuse { .. } => 9,
        Body::Sync { .. } => 10,
        Body::Tick => 11,
        Body::Applied { .. } => 12,
        Body::Leave { .. } => 13,
        Body::Left { .. } => 14,
        Body::Advise { .. } => 15,
        Body::Reverted => 16,
        Body::RevertedAck => 17,
        Body::Token(_) => 18,
        Body::Weak { .. } => 19,
    }
}

/// Appends an encoded message to `out`.
pub fn encode(message: &Message, out: &mut Vec<u8>) {
    let start = out.len();
    let mut writer = Writer(out);
    writer.u8(VERSION);
    writer.u8(kind_code(&message.body));
    writer.u8(message.from.0);
    writer.u8(message.to.0);
    writer.0.extend_from_slice(&[0; 4]);
    writer.u64(message.page);
    writer.u64(message.stamp.seq);
    writer.u64(message.stamp.need);
    body(&message.body, &mut writer);
    let len = u32::try_from(out.len() - start - HEADER).unwrap_or(u32::MAX);
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
}

/// Bytes of the encoded message.
#[must_use]
pub fn encoded_len(message: &Message) -> usize {
    if let Body::Grant(grant) = &message.body {
        // Doesn't copy the page.
        return HEADER + 20 + grant.counters.len() * 8 + grant.payload.wire_len();
    }
    let mut out = Vec::new();
    encode(message, &mut out);
    out.len()
}

fn body(body: &Body, writer: &mut Writer<'_>) {
    match body {
        Body::Request(sent) => request(sent, writer),
        Body::Grant(sent) => grant(sent, writer),
        Body::Invalidate { writer: waits, priority, updated } => {
            writer.u8(waits.0);
            writer.u8(u8::from(*updated));
            writer.priority(*priority);
        }
        Body::InvalidateAck | Body::Tick | Body::Reverted | Body::RevertedAck => {}
        Body::Hurry { priority } => writer.priority(*priority),
        Body::Operate { requester, vcpu, operation } => operate(*requester, *vcpu, operation, writer),
        Body::Update { change, done } => {
            writer.change(change, u8::from(done.is_some()) << 1);
            if let Some((vcpu, old)) = done {
                writer.u16(*vcpu);
                writer.u64(*old);
            }
        }
        Body::Done { vcpu, old } => {
            writer.u16(*vcpu);
            writer.u64(*old);
        }
        Body::Refuse { vcpu } => writer.u16(*vcpu),
        Body::Sync { requester } => writer.u8(requester.0),
        Body::Applied { node, count: value } | Body::Leave { node, seq: value } => {
            writer.u8(node.0);
            writer.u64(*value);
        }
        Body::Left { seq, stays } => {
            writer.u64(*seq);
            writer.u8(u8::from(*stays));
        }
        Body::Advise { mode } => writer.u8(mode_code(*mode)),
        Body::Token(sent) => token(sent, writer),
        Body::Weak { counter, change } => {
            writer.u64(*counter);
            writer.change(change, 0);
        }
    }
}

fn request(request: &Request, writer: &mut Writer<'_>) {
    writer.u8(request.requester.0);
    writer.u8(intent_code(request.intent)
        | u8::from(request.as_update) << 2
        | u8::from(request.convert) << 3
        | u8::from(request.atomic) << 4
        | u8::from(request.held.is_some()) << 5);
    writer.u16(request.changed);
    writer.priority(request.priority);
    if let Some(held) = request.held {
        writer.u64(held);
    }
}

fn grant(grant: &Grant, writer: &mut Writer<'_>) {
    let (code, payload): (u8, &[u8]) = match &grant.payload {
        Payload::Zero => (ZERO, &[]),
        Payload::Same => (SAME, &[]),
        Payload::Difference(_) => (DIFFERENCE, &[]),
        Payload::Raw(bytes) => (RAW, bytes),
    };
    writer.u8(intent_code(grant.intent));
    writer.u8(mode_code(grant.mode));
    writer.u8(code);
    writer.u64(grant.version);
    writer.u64(grant.copies.0);
    writer.seqs(&grant.counters);
    writer.0.extend_from_slice(payload);
    if let Payload::Difference(runs) = &grant.payload {
        writer.length(runs.len());
        for (offset, bytes) in runs {
            writer.u16(*offset);
            writer.length(bytes.len());
            writer.0.extend_from_slice(bytes);
        }
    }
}

fn operate(requester: NodeId, vcpu: u16, operation: &Operation, writer: &mut Writer<'_>) {
    writer.u8(requester.0);
    writer.u16(vcpu);
    match operation {
        Operation::Store { offset, bytes, mask } => {
            writer.u8(0);
            writer.change(&Change { offset: *offset, bytes: bytes.clone(), mask: *mask }, 0);
        }
        Operation::Atomic { offset, width, kind, operand, expected } => {
            let code = Atomic::ALL.iter().position(|other| other == kind).unwrap_or(0);
            writer.u8(u8::try_from(code + 1).unwrap_or(u8::MAX));
            writer.u16(*offset);
            writer.u8(*width);
            writer.u64(*operand);
            writer.u64(*expected);
        }
    }
}

fn token(token: &Token, writer: &mut Writer<'_>) {
    writer.seqs(&token.last);
    writer.seqs(&token.unacked);
    writer.length(token.pages.len());
    for (page, mode, copies) in &token.pages {
        writer.u64(*page);
        writer.u8(mode_code(*mode));
        writer.u64(copies.0);
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let end = self.at.saturating_add(len);
        let short = WireError::Short { got: self.bytes.len(), needed: end };
        let taken = self.bytes.get(self.at..end).ok_or(short)?;
        self.at = end;
        Ok(taken)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }
    fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.array::<1>()?[0])
    }
    fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    fn node(&mut self) -> Result<NodeId, WireError> {
        below("node", self.u8()?, MAX_NODES).map(NodeId)
    }
    fn vcpu(&mut self) -> Result<Vcpu, WireError> {
        below("vcpu", self.u16()?, MAX_VCPUS)
    }
    fn mode(&mut self) -> Result<Mode, WireError> {
        match self.u8()? {
            0 => Ok(Mode::Invalidate),
            1 => Ok(Mode::Update),
            2 => Ok(Mode::SingleWriter),
            other => Err(field("mode", other)),
        }
    }
    fn priority(&mut self) -> Result<Priority, WireError> {
        let time = self.u64()?;
        if time > Priority::MAX_TIME && time != Priority::NO_INSTRUCTION {
            return Err(field("age", time));
        }
        let vcpu = self.vcpu()?;
        Ok(Priority { time, node: self.node()?, vcpu })
    }
    fn change(&mut self, allowed: u8) -> Result<(Change, u8), WireError> {
        let offset = self.u16()?;
        let len = usize::from(self.u8()?);
        let flags = below("flags", self.u8()?, allowed + 1)?;
        if !(1..=MAX_STORE).contains(&len) {
            return Err(WireError::Field { field: "store length", value: len as u64 });
        }
        let mask = if flags & 1 == 0 { full_mask(len) } else { self.u64()? };
        if mask & !full_mask(len) != 0 || (flags & 1 == 1 && mask == full_mask(len)) {
            return Err(WireError::Field { field: "mask", value: mask });
        }
        let bytes = self.take(len)?.to_vec();
        if usize::from(offset) + len > PAGE_SIZE {
            return Err(field("offset", offset));
        }
        Ok((Change { offset, bytes, mask }, flags))
    }
    fn seqs(&mut self) -> Result<Vec<u64>, WireError> {
        let count = below("count of nodes", self.u8()?, MAX_NODES + 1)?;
        (0..count).map(|_| self.u64()).collect()
    }
}

fn field(field: &'static str, value: impl Into<u64>) -> WireError {
    WireError::Field { field, value: value.into() }
}

fn below<T: PartialOrd + Copy + Into<u64>>(name: &'static str, value: T, limit: T) -> Result<T, WireError> {
    if value < limit { Ok(value) } else { Err(field(name, value)) }
}

/// Length of the message whose header is `header`, header included. For streams: pass at least [`HEADER`] bytes, then read up to that
/// length.
///
/// # Errors
/// [`WireError::Short`] for fewer bytes than a header, [`WireError::Version`], and [`WireError::Field`] for a length above [`MAX_MESSAGE`].
pub fn message_len(header: &[u8]) -> Result<usize, WireError> {
    let mut reader = Reader { bytes: header, at: 0 };
    let version = reader.u8()?;
    if version != VERSION {
        return Err(WireError::Version(version));
    }
    reader.take(3)?;
    let len = u32::from_le_bytes(reader.array()?);
    reader.take(HEADER - 8)?;
    match usize::try_from(len).ok().and_then(|len| len.checked_add(HEADER)) {
        Some(len) if len <= MAX_MESSAGE => Ok(len),
        _ => Err(field("length", len)),
    }
}

/// Parses one whole message.
///
/// # Errors
/// Returns an error for anything that [`encode`] doesn't write.
pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
    let len = message_len(bytes)?;
    if bytes.len() > len {
        return Err(WireError::Long(bytes.len() - len));
    }
    let mut reader = Reader { bytes, at: 1 };
    let kind = reader.u8()?;
    let (from, to) = (reader.node()?, reader.node()?);
    reader.take(4)?;
    let page = reader.u64()?;
    let stamp = Stamp { seq: reader.u64()?, need: reader.u64()? };
    if stamp.need > stamp.seq {
        return Err(field("need", stamp.need));
    }
    let body = parse_body(kind, &mut reader)?;
    if bytes.len() < len {
        return Err(WireError::Short { got: bytes.len(), needed: len });
    }
    match bytes.len() - reader.at {
        0 => Ok(Message { from, to, stamp, page, body }),
        rest => Err(WireError::Long(rest)),
    }
}

fn parse_body(kind: u8, reader: &mut Reader<'_>) -> Result<Body, WireError> {
    Ok(match kind {
        1 => Body::Request(parse_request(reader)?),
        2 => Body::Grant(parse_grant(reader)?),
        3 => {
            let (writer, updated) = (reader.node()?, below("flags", reader.u8()?, 2)? == 1);
            Body::Invalidate { writer, updated, priority: reader.priority()? }
        }
        4 => Body::InvalidateAck,
        5 => Body::Hurry { priority: reader.priority()? },
        6 => {
            let (requester, vcpu) = (reader.node()?, reader.vcpu()?);
            Body::Operate { requester, vcpu, operation: parse_operation(reader)? }
        }
        7 => {
            let (change, flags) = reader.change(3)?;
            let done = if flags & 2 == 0 { None } else { Some((reader.vcpu()?, reader.u64()?)) };
            Body::Update { change, done }
        }
        8 => Body::Done { vcpu: reader.vcpu()?, old: reader.u64()? },
        9 => Body::Refuse { vcpu: reader.vcpu()? },
        10 => Body::Sync { requester: reader.node()? },
        11 => Body::Tick,
        12 => Body::Applied { node: reader.node()?, count: reader.u64()? },
        13 => Body::Leave { node: reader.node()?, seq: reader.u64()? },
        14 => Body::Left { seq: reader.u64()?, stays: below("flags", reader.u8()?, 2)? == 1 },
        15 => Body::Advise { mode: reader.mode()? },
        16 => Body::Reverted,
        17 => Body::RevertedAck,
        18 => {
            let (last, unacked) = (reader.seqs()?, reader.seqs()?);
            let count = usize::from(reader.u16()?);
            if count > MAX_UPDATE_PAGES {
                return Err(field("count of pages", count as u64));
            }
            let page = |_| Ok((reader.u64()?, reader.mode()?, NodeSet(reader.u64()?)));
            let pages = (0..count).map(page).collect::<Result<_, WireError>>()?;
            Body::Token(Token { last, unacked, pages })
        }
        19 => Body::Weak { counter: reader.u64()?, change: reader.change(1)?.0 },
        other => return Err(field("kind", other)),
    })
}

fn parse_intent(code: u8) -> Result<Intent, WireError> {
    match code {
        0 => Ok(Intent::Read),
        1 => Ok(Intent::ReadOwn),
        2 => Ok(Intent::Write),
        other => Err(field("intent", other)),
    }
}

fn parse_request(reader: &mut Reader<'_>) -> Result<Request, WireError> {
    let requester = reader.node()?;
    let flags = below("flags", reader.u8()?, 64)?;
    let changed = reader.u16()?;
    let priority = reader.priority()?;
    Ok(Request {
        requester,
        intent: parse_intent(flags & 3)?,
        priority,
        held: if flags & 32 == 0 { None } else { Some(reader.u64()?) },
        as_update: flags & 4 != 0,
        convert: flags & 8 != 0,
        atomic: flags & 16 != 0,
        changed,
    })
}

fn parse_grant(reader: &mut Reader<'_>) -> Result<Grant, WireError> {
    let intent = parse_intent(reader.u8()?)?;
    let mode = reader.mode()?;
    let code = reader.u8()?;
    let version = reader.u64()?;
    let copies = NodeSet(reader.u64()?);
    let counters = reader.seqs()?;
    let payload = match code {
        ZERO => Payload::Zero,
        SAME => Payload::Same,
        RAW => Payload::Raw(reader.take(PAGE_SIZE)?.to_vec()),
        DIFFERENCE => {
            let count = reader.u16()?;
            let mut runs = Vec::new();
            for _ in 0..count {
                let (offset, len) = (reader.u16()?, reader.u16()?);
                let bytes = reader.take(usize::from(len))?;
                if usize::from(offset) + bytes.len() > PAGE_SIZE || bytes.is_empty() {
                    return Err(field("run", offset));
                }
                runs.push((offset, bytes.to_vec()));
            }
            Payload::Difference(runs)
        }
        other => return Err(field("payload", other)),
    };
    Ok(Grant { intent, mode, version, copies, payload, counters })
}

fn parse_operation(reader: &mut Reader<'_>) -> Result<Operation, WireError> {
    let code = reader.u8()?;
    let Some(kind) = usize::from(code).checked_sub(1) else {
        let (Change { offset, bytes, mask }, _) = reader.change(1)?;
        return Ok(Operation::Store { offset, bytes, mask });
    };
    let kind = *Atomic::ALL.get(kind).ok_or(field("operation", code))?;
    let (offset, width) = (reader.u16()?, reader.u8()?);
    let operation =
        Operation::Atomic { offset, width, kind, operand: reader.u64()?, expected: reader.u64()? };
    if operation.is_valid(PAGE_SIZE) { Ok(operation) } else { Err(field("offset", offset)) }
}
