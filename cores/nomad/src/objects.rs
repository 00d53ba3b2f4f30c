//! State of an HCA as objects that are copied while they are used: what has changed since it was copied is copied again, and when the VM
//! is stopped only that is left.
//!
//! ```text
//! source:       touched, removed ─▶ Outgoing ─ round ─▶ pieces … stop … last round ─▶ pieces, Total
//! destination:                      Incoming ◀─ pieces ─────────────────────────────── Total ─▶ all objects, or what is wrong
//! ```
//! A piece carries the version of its object. The stream may be repeated from any point; an older version never replaces a newer one.
//! The total says how many objects there are and what all their names and versions add up to, so that nothing is missing unnoticed.
//! The work of a round depends on what was touched, not on how many objects there are.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

/// Most bytes of one object.
pub const MAX_OBJECT: usize = 1 << 20;

/// What kind of object, in the order in which they are made: those behind refer to those before.
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
    /// What.
    pub kind: Kind,
    /// Its handle.
    pub handle: u32,
}

/// One object's state at one time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Which object.
    pub object: Object,
    /// Counts its changes as the source sees them; higher is newer.
    pub version: u64,
    /// Its saved state; `None`: it was destroyed.
    pub state: Option<Vec<u8>>,
}

/// What a destination must have in the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Total {
    /// Objects that exist.
    pub objects: u64,
    /// Names and versions of all of them.
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

/// The source's side.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    /// Objects that exist, and their versions.
    versions: BTreeMap<Object, u64>,
    /// Changed, made or destroyed since the last round.
    dirty: BTreeSet<Object>,
    last: u64,
    total: Total,
}

impl Outgoing {
    /// Nothing exists.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An object was made or changed.
    pub fn touched(&mut self, object: Object) {
        self.last += 1;
        if let Some(before) = self.versions.insert(object, self.last) {
            self.total.remove(object, before);
        }
        self.total.add(object, self.last);
        self.dirty.insert(object);
    }

    /// An object was destroyed.
    pub fn removed(&mut self, object: Object) {
        if let Some(before) = self.versions.remove(&object) {
            self.last += 1;
            self.total.remove(object, before);
            self.dirty.insert(object);
        }
    }

    /// How many objects the next round has: what is left for the pause if the VM were stopped now.
    #[must_use]
    pub fn left(&self) -> usize {
        self.dirty.len()
    }

    /// Pieces of at most so many objects that have changed, in the order of their kinds. `save` gives an object's state as it is now.
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

    /// What the destination must have after the last round.
    ///
    /// `None`: something has changed since then.
    #[must_use]
    pub fn total(&self) -> Option<Total> {
        self.dirty.is_empty().then_some(self.total)
    }
}

/// Why what has come can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Incomplete {
    /// Too big.
    #[error("An object of {0} bytes came, {MAX_OBJECT} is the most: the source is faulty")]
    Big(usize),
    /// Too many.
    #[error("More than {0} objects came, for which there is no room: the source is faulty")]
    Many(usize),
    /// Not what the source has.
    #[error("{got} objects came of {expected}, or others than the source has: the stream lost something")]
    Differs {
        /// Objects that are here.
        got: u64,
        /// Objects of the source.
        expected: u64,
    },
}

/// The destination's side.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// Versions and states; destroyed objects keep their version, so that an old piece doesn't bring them back.
    objects: BTreeMap<Object, (u64, Option<Vec<u8>>)>,
    most: usize,
    total: Total,
}

impl Incoming {
    /// Room for so many objects, those destroyed meanwhile included.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { objects: BTreeMap::new(), most, total: Total::default() }
    }

    /// A piece came. Whether it was newer than what was here.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn take(&mut self, piece: Piece) -> Result<bool, Incomplete> {
        let Piece { object, version, state } = piece;
        if let Some(state) = state.as_ref().filter(|state| state.len() > MAX_OBJECT) {
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

    /// Whether what came is what the source has: for whoever makes objects as they come, and gives [`Incoming::take`] no bytes to keep.
    ///
    /// # Errors
    /// When it isn't.
    pub fn check(&self, total: Total) -> Result<(), Incomplete> {
        if self.total == total {
            Ok(())
        } else {
            Err(Incomplete::Differs { got: self.total.objects, expected: total.objects })
        }
    }

    /// All objects, in the order in which they can be made.
    ///
    /// # Errors
    /// When they aren't what the source has.
    pub fn finish(self, total: Total) -> Result<Vec<(Object, Vec<u8>)>, Incomplete> {
        if self.total != total {
            return Err(Incomplete::Differs { got: self.total.objects, expected: total.objects });
        }
        Ok(self.objects.into_iter().filter_map(|(object, (_, state))| Some((object, state?))).collect())
    }
}
