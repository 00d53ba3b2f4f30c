//! State of an HCA as objects, copied while the VM uses them. An object that changes after its copy is copied again.
//! Only the rest is copied while the VM is stopped.
//!
//! ```text
//! source:       touched, removed ─▶ Outgoing ─ round ─▶ pieces … stop … last round ─▶ pieces, Total
//! destination:                      Incoming ◀─ pieces ─────────────────────────────── Total ─▶ all objects, or what is wrong
//! ```
//! A piece carries the version of its object. The stream may be repeated from any point: an older version never
//! replaces a newer one. The total has the number of objects and a checksum over their names and versions, so that a
//! missing object is detected. The cost of a round grows with the number of changed objects, not of all.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

/// Maximum size of one object, in bytes.
pub const MAX_OBJECT_BYTES: usize = 1 << 20;

/// The kind of an object. Objects are restored in this order, because later kinds refer to earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Device attributes, addresses, quotas.
    Device = 0,
    /// A context of a user process.
    Context = 1,
    /// A protection domain.
    ProtectionDomain = 2,
    /// A memory region.
    MemoryRegion = 3,
    /// A completion queue.
    CompletionQueue = 4,
    /// A shared receive queue.
    SharedReceiveQueue = 5,
    /// A queue pair.
    QueuePair = 6,
    /// An address handle.
    AddressHandle = 7,
}

/// An object's name inside its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Object {
    /// Its kind.
    pub kind: Kind,
    /// Its handle in the HCA.
    pub handle: u32,
}

/// One object's state at one time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The object.
    pub object: Object,
    /// The source's counter of changes, over all objects; higher is newer.
    pub version: u64,
    /// The saved state. `None`: the object was destroyed.
    pub state: Option<Vec<u8>>,
}

/// The set of objects that a destination must have after the last round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Total {
    /// Number of objects that exist.
    pub objects: u64,
    /// Sum, modulo 2^64, of a hash of each object's name and version.
    pub sum: u64,
}

impl Total {
    fn add(&mut self, object: Object, version: u64) {
        self.objects += 1;
        self.sum = self.sum.wrapping_add(mix(object, version));
    }

    fn remove(&mut self, object: Object, version: u64) {
        self.objects -= 1;
        self.sum = self.sum.wrapping_sub(mix(object, version));
    }
}

/// Spreads a name and version over 64 bits, so that sums of different sets differ (the finalizer of splitmix64).
fn mix(object: Object, version: u64) -> u64 {
    let name = u64::from(object.kind as u8) << 32 | u64::from(object.handle);
    let mut z = name.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ version.wrapping_mul(0xD6E8_FEB8_6659_FD93);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The source's side: tracks changes, and makes pieces.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    /// Objects that exist, and their versions.
    versions: BTreeMap<Object, u64>,
    /// Objects that were changed, made or destroyed since the last round.
    dirty: BTreeSet<Object>,
    last: u64,
    total: Total,
}

impl Outgoing {
    /// State of an HCA without objects.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes that an object was made or changed.
    pub fn touched(&mut self, object: Object) {
        self.last += 1;
        if let Some(before) = self.versions.insert(object, self.last) {
            self.total.remove(object, before);
        }
        self.total.add(object, self.last);
        self.dirty.insert(object);
    }

    /// Notes that an object was destroyed.
    pub fn removed(&mut self, object: Object) {
        if let Some(before) = self.versions.remove(&object) {
            self.last += 1;
            self.total.remove(object, before);
            self.dirty.insert(object);
        }
    }

    /// Number of objects of the next round, which is what the blackout would have to copy now.
    #[must_use]
    pub fn left(&self) -> usize {
        self.dirty.len()
    }

    /// Passes `each` the pieces of at most `most` changed objects, in the order of their kinds. `save` returns an
    /// object's present state.
    pub fn round(
        &mut self,
        most: usize,
        mut save: impl FnMut(Object) -> Vec<u8>,
        mut each: impl FnMut(Piece),
    ) {
        for _ in 0..most {
            let Some(object) = self.dirty.pop_first() else { return };
            let piece = match self.versions.get(&object) {
                Some(version) => Piece { object, version: *version, state: Some(save(object)) },
                None => Piece { object, version: self.last, state: None },
            };
            each(piece);
        }
    }

    /// The total for the destination, after the last round.
    ///
    /// `None`: an object has changed since that round.
    #[must_use]
    pub fn total(&self) -> Option<Total> {
        self.dirty.is_empty().then_some(self.total)
    }
}

/// Why the received objects can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Incomplete {
    /// An object of more than [`MAX_OBJECT_BYTES`] bytes.
    #[error("An object of {0} bytes came, {MAX_OBJECT_BYTES} is the most: the source is faulty")]
    Big(usize),
    /// More objects than [`Incoming::new`] allows.
    #[error("More than {0} objects came, for which there is no room: the source is faulty")]
    Many(usize),
    /// The received objects aren't those of the source.
    #[error("{got} objects came of {expected}, or others than the source has: the stream lost something")]
    Differs {
        /// Number of objects that were received and exist.
        got: u64,
        /// Number of objects of the source.
        expected: u64,
    },
}

/// The destination's side: collects pieces, and checks that none is missing.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// Versions and states. A destroyed object keeps its version, so that an older piece doesn't restore it.
    objects: BTreeMap<Object, (u64, Option<Vec<u8>>)>,
    most: usize,
    total: Total,
}

impl Incoming {
    /// Capacity for `most` objects, including those that are destroyed during the copy.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { objects: BTreeMap::new(), most, total: Total::default() }
    }

    /// Records a piece. Returns whether it is newer than the recorded one.
    ///
    /// # Errors
    /// When it is larger than [`MAX_OBJECT_BYTES`], or there is no capacity for another object.
    pub fn take(&mut self, piece: Piece) -> Result<bool, Incomplete> {
        let Piece { object, version, state } = piece;
        if let Some(state) = state.as_ref().filter(|state| state.len() > MAX_OBJECT_BYTES) {
            return Err(Incomplete::Big(state.len()));
        }
        match self.objects.get(&object) {
            Some((known, _)) if *known >= version => return Ok(false),
            Some((known, Some(_))) => self.total.remove(object, *known),
            Some((_, None)) => {}
            None if self.objects.len() >= self.most => return Err(Incomplete::Many(self.most)),
            None => {}
        }
        if state.is_some() {
            self.total.add(object, version);
        }
        self.objects.insert(object, (version, state));
        Ok(true)
    }

    /// Checks that the received objects are those of the source. For a caller that restores objects as their pieces
    /// arrive, and passes [`Incoming::take`] an empty state.
    ///
    /// # Errors
    /// When they differ.
    pub fn check(&self, total: Total) -> Result<(), Incomplete> {
        if self.total == total {
            Ok(())
        } else {
            Err(Incomplete::Differs { got: self.total.objects, expected: total.objects })
        }
    }

    /// Returns all objects, in the order in which they can be restored.
    ///
    /// # Errors
    /// When they aren't those of the source.
    pub fn finish(self, total: Total) -> Result<Vec<(Object, Vec<u8>)>, Incomplete> {
        if self.total != total {
            return Err(Incomplete::Differs { got: self.total.objects, expected: total.objects });
        }
        Ok(self.objects.into_iter().filter_map(|(object, (_, state))| Some((object, state?))).collect())
    }
}
