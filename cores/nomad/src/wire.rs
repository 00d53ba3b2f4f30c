//! Messages as bytes.
//!
//! ```text
//!  0 version (1)   1 kind   2 ends: bit 0 from, bit 1 to the coordinator   3 zero   4 length of the body (4)
//!  8 from (4)     12 to (4)     16 incarnation (8)     24 body
//! ```
//! Little-endian; lists are a count (4) and so many entries. A receiver refuses versions that it doesn't know. A peer is not trusted to be
//! well-behaved: every count is checked against the bytes that are there before anything is allocated.

use thiserror::Error;

use crate::config::{MAX_HOSTS, MAX_PEERS_PER_VM, MAX_VMS_PER_MIGRATION};
use crate::message::{AbortReason, Body, Message};
use crate::names::{Epoch, HostId, Incarnation, MigrationId, Move, Node, Place, VmId};

/// Version of the format.
pub const VERSION: u8 = 2;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 24;
/// Most bytes of a message: a VM with all its peers.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + 64 + MAX_PEERS_PER_VM * 16;

const FROM_COORDINATOR: u8 = 1;
const TO_COORDINATOR: u8 = 2;

/// Why bytes aren't a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// Fewer bytes than are needed.
    #[error(
        "A message of {got} bytes ends early: {needed} are needed. The connection is broken or the peer is faulty"
    )]
    Short {
        /// Bytes that there are.
        got: usize,
        /// Bytes that are needed.
        needed: usize,
    },
    /// More bytes than the body has.
    #[error("A message has {0} bytes behind its end. The peer is faulty")]
    Long(usize),
    /// Another version.
    #[error(
        "A message is in version {0} of the format, this program knows {VERSION}: run the same release on all hosts"
    )]
    Version(u8),
    /// A field has a value that it can't have.
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

fn kind(body: &Body) -> u8 {
    match body {
        Body::Hello => 1,
        Body::Welcome => 2,
        Body::Reserve { .. } => 3,
        Body::Reserved { .. } => 4,
        Body::Begin { .. } => 5,
        Body::Converged { .. } => 6,
        Body::Switch { .. } => 7,
        Body::Suspend { .. } => 8,
        Body::Suspended { .. } => 9,
        Body::Handover { .. } => 10,
        Body::Loaded { .. } => 11,
        Body::Yield { .. } => 12,
        Body::Failed { .. } => 13,
        Body::Commit { .. } => 14,
        Body::Abort { .. } => 15,
        Body::Settled { .. } => 16,
        Body::Outcome { .. } => 17,
        Body::Running { .. } => 18,
        Body::Ready { .. } => 19,
        Body::Where { .. } => 20,
        Body::At { .. } => 21,
        Body::Lost { .. } => 22,
        Body::Queued { .. } => 23,
    }
}

const REASONS: [AbortReason; 10] = [
    AbortReason::Cancelled,
    AbortReason::NoRoom,
    AbortReason::NotHere,
    AbortReason::Busy,
    AbortReason::Stream,
    AbortReason::Peers,
    AbortReason::Timeout,
    AbortReason::Restarted,
    AbortReason::Epoch,
    AbortReason::Queue,
];

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    /// Lists are bounded by the state machines; a longer one would be refused by the receiver.
    fn list<T>(&mut self, values: &[T], each: impl Fn(&mut Self, &T)) {
        self.u32(u32::try_from(values.len()).unwrap_or(u32::MAX));
        for value in values {
            each(self, value);
        }
    }
    fn vms(&mut self, vms: &[VmId]) {
        self.list(vms, |writer, vm| writer.u32(vm.0));
    }
    fn hosts(&mut self, hosts: &[HostId]) {
        self.list(hosts, |writer, host| writer.u32(host.0));
    }
    fn place(&mut self, place: &Place) {
        self.u32(place.vm.0);
        self.u32(place.host.0);
        self.u64(place.epoch.0);
    }
    fn moves(&mut self, moves: &[Move]) {
        self.list(moves, |writer, moved| {
            writer.u32(moved.vm.0);
            writer.u32(moved.from.0);
            writer.u32(moved.to.0);
            writer.u64(moved.epoch.0);
        });
    }
}

/// Appends a message to bytes.
pub fn encode(message: &Message, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    let end = |node: Node, flag: u8| match node {
        Node::Coordinator => (flag, 0),
        Node::Host(host) => (0, host.0),
    };
    let ((from_flag, from), (to_flag, to)) =
        (end(message.from, FROM_COORDINATOR), end(message.to, TO_COORDINATOR));
    bytes.extend_from_slice(&[VERSION, kind(&message.body), from_flag | to_flag, 0, 0, 0, 0, 0]);
    let mut writer = Writer(bytes);
    writer.u32(from);
    writer.u32(to);
    writer.u64(message.incarnation.0);
    body(&message.body, &mut writer);
    let length = u32::try_from(bytes.len() - start - HEADER_BYTES).unwrap_or(u32::MAX);
    if let Some(field) = bytes.get_mut(start + 4..start + 8) {
        field.copy_from_slice(&length.to_le_bytes());
    }
}

fn body(body: &Body, writer: &mut Writer<'_>) {
    match body {
        Body::Hello | Body::Welcome => {}
        Body::Reserve { migration, moves } | Body::Begin { migration, moves } => {
            writer.u64(migration.0);
            writer.moves(moves);
        }
        Body::Reserved { migration }
        | Body::Converged { migration }
        | Body::Switch { migration }
        | Body::Loaded { migration }
        | Body::Yield { migration }
        | Body::Outcome { migration } => writer.u64(migration.0),
        Body::Suspend { migration, origin, vms, forward_to } => {
            writer.u64(migration.0);
            writer.u32(origin.0);
            writer.vms(vms);
            writer.hosts(forward_to);
        }
        Body::Suspended { migration, origin, hosts } | Body::Ready { after: migration, origin, hosts } => {
            writer.u64(migration.0);
            writer.u32(origin.0);
            writer.hosts(hosts);
        }
        Body::Handover { migration, vm, peers } => {
            writer.u64(migration.0);
            writer.u32(vm.0);
            writer.list(peers, Writer::place);
        }
        Body::Failed { migration, reason } => {
            writer.u64(migration.0);
            let code = REASONS.iter().position(|known| known == reason).unwrap_or(0);
            writer.0.push(u8::try_from(code).unwrap_or(0));
        }
        Body::Commit { migration, places } | Body::Abort { migration, places } => {
            writer.u64(migration.0);
            writer.list(places, Writer::place);
        }
        Body::Settled { migration, lost } => {
            writer.u64(migration.0);
            writer.vms(lost);
        }
        Body::Running { after, origin, vms, forward_to } => {
            writer.u64(after.0);
            writer.u32(origin.0);
            writer.list(vms, |writer, (vm, epoch)| {
                writer.u32(vm.0);
                writer.u64(epoch.0);
            });
            writer.hosts(forward_to);
        }
        Body::Queued { migration, waits_for } => {
            writer.u64(migration.0);
            writer.u32(waits_for.0);
        }
        Body::Where { vm } => writer.u32(vm.0),
        Body::At { place } => writer.place(place),
        Body::Lost { vm, epoch } => {
            writer.u32(vm.0);
            writer.u64(epoch.0);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let short = WireError::Short { got: self.0.len(), needed: count };
        let (taken, rest) = self.0.split_at_checked(count).ok_or(short)?;
        self.0 = rest;
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
    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    /// A list of at most `most` entries of `size` bytes each.
    fn list<T>(
        &mut self,
        field: &'static str,
        most: usize,
        size: usize,
        each: impl Fn(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32()?;
        let entries = usize::try_from(count).ok().filter(|count| *count <= most);
        let entries = entries.ok_or(WireError::Field { field, value: u64::from(count) })?;
        let needed = entries * size;
        if self.0.len() < needed {
            return Err(WireError::Short { got: self.0.len(), needed });
        }
        (0..entries).map(|_| each(self)).collect()
    }
    fn migration(&mut self) -> Result<MigrationId, WireError> {
        Ok(MigrationId(self.u64()?))
    }
    fn vm(&mut self) -> Result<VmId, WireError> {
        match self.u32()? {
            0 => Err(WireError::Field { field: "VM", value: 0 }),
            vm => Ok(VmId(vm)),
        }
    }
    fn host(&mut self) -> Result<HostId, WireError> {
        Ok(HostId(self.u32()?))
    }
    fn epoch(&mut self) -> Result<Epoch, WireError> {
        Ok(Epoch(self.u64()?))
    }
    fn place(&mut self) -> Result<Place, WireError> {
        Ok(Place { vm: self.vm()?, host: self.host()?, epoch: self.epoch()? })
    }
    fn vms(&mut self) -> Result<Vec<VmId>, WireError> {
        self.list("number of VMs", MAX_VMS_PER_MIGRATION, 4, Self::vm)
    }
    fn hosts(&mut self) -> Result<Vec<HostId>, WireError> {
        self.list("number of hosts", MAX_HOSTS, 4, Self::host)
    }
    fn places(&mut self) -> Result<Vec<Place>, WireError> {
        self.list("number of VMs", MAX_VMS_PER_MIGRATION, 16, Self::place)
    }
    fn moves(&mut self) -> Result<Vec<Move>, WireError> {
        self.list("number of VMs", MAX_VMS_PER_MIGRATION, 20, |reader| {
            Ok(Move { vm: reader.vm()?, from: reader.host()?, to: reader.host()?, epoch: reader.epoch()? })
        })
    }
}

/// Reads a message, which must be all of the bytes.
///
/// # Errors
/// When they aren't one.
pub fn parse(bytes: &[u8]) -> Result<Message, WireError> {
    let mut reader = Reader(bytes);
    let short = WireError::Short { got: bytes.len(), needed: HEADER_BYTES };
    let [version, kind, ends, zero] = reader.array().map_err(|_| short)?;
    if version != VERSION {
        return Err(WireError::Version(version));
    }
    let length = reader.u32().map_err(|_| short)?;
    let (from, to) = (reader.u32().map_err(|_| short)?, reader.u32().map_err(|_| short)?);
    let incarnation = Incarnation(reader.u64().map_err(|_| short)?);
    if ends > 3 || zero != 0 {
        return Err(WireError::Field { field: "ends", value: u64::from(ends) | u64::from(zero) << 8 });
    }
    let got = reader.0.len();
    match usize::try_from(length) {
        Ok(needed) if got < needed => return Err(WireError::Short { got, needed }),
        Ok(needed) if got > needed => return Err(WireError::Long(got - needed)),
        Ok(_) => {}
        Err(_) => return Err(WireError::Field { field: "length", value: u64::from(length) }),
    }
    let node = |flag: u8, id: u32| match (ends & flag != 0, id) {
        (false, id) => Ok(Node::Host(HostId(id))),
        (true, 0) => Ok(Node::Coordinator),
        (true, id) => Err(WireError::Field { field: "coordinator", value: u64::from(id) }),
    };
    let (from, to) = (node(FROM_COORDINATOR, from)?, node(TO_COORDINATOR, to)?);
    let body = parse_body(kind, &mut reader)?;
    if !reader.0.is_empty() {
        return Err(WireError::Long(reader.0.len()));
    }
    Ok(Message { from, incarnation, to, body })
}

fn parse_body(kind: u8, reader: &mut Reader<'_>) -> Result<Body, WireError> {
    Ok(match kind {
        1 => Body::Hello,
        2 => Body::Welcome,
        3 => Body::Reserve { migration: reader.migration()?, moves: reader.moves()? },
        4 => Body::Reserved { migration: reader.migration()? },
        5 => Body::Begin { migration: reader.migration()?, moves: reader.moves()? },
        6 => Body::Converged { migration: reader.migration()? },
        7 => Body::Switch { migration: reader.migration()? },
        8 => Body::Suspend {
            migration: reader.migration()?,
            origin: reader.host()?,
            vms: reader.vms()?,
            forward_to: reader.hosts()?,
        },
        9 => {
            Body::Suspended { migration: reader.migration()?, origin: reader.host()?, hosts: reader.hosts()? }
        }
        10 => Body::Handover {
            migration: reader.migration()?,
            vm: reader.vm()?,
            peers: reader.list("number of peers", MAX_PEERS_PER_VM, 16, Reader::place)?,
        },
        11 => Body::Loaded { migration: reader.migration()? },
        12 => Body::Yield { migration: reader.migration()? },
        13 => {
            let migration = reader.migration()?;
            let code = reader.u8()?;
            let reason = REASONS.get(usize::from(code)).copied();
            let wrong = WireError::Field { field: "reason", value: u64::from(code) };
            Body::Failed { migration, reason: reason.ok_or(wrong)? }
        }
        14 => Body::Commit { migration: reader.migration()?, places: reader.places()? },
        15 => Body::Abort { migration: reader.migration()?, places: reader.places()? },
        16 => Body::Settled { migration: reader.migration()?, lost: reader.vms()? },
        17 => Body::Outcome { migration: reader.migration()? },
        18 => Body::Running {
            after: reader.migration()?,
            origin: reader.host()?,
            vms: reader.list("number of VMs", MAX_VMS_PER_MIGRATION, 12, |reader| {
                Ok((reader.vm()?, reader.epoch()?))
            })?,
            forward_to: reader.hosts()?,
        },
        19 => Body::Ready { after: reader.migration()?, origin: reader.host()?, hosts: reader.hosts()? },
        20 => Body::Where { vm: reader.vm()? },
        21 => Body::At { place: reader.place()? },
        22 => Body::Lost { vm: reader.vm()?, epoch: reader.epoch()? },
        23 => Body::Queued { migration: reader.migration()?, waits_for: reader.vm()? },
        kind => return Err(WireError::Field { field: "kind", value: u64::from(kind) }),
    })
}
