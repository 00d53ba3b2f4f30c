//! MSI-X (PCI Local Bus 3.0, 6.8.2): vector table and pending bits in a BAR, delivery through
//! [`MsiVector`]s.
//!
//! ```text
//!            interrupt raised        enabled, not masked
//! idle ───────────────────────────▶ delivered at once
//!   │        interrupt raised, masked or disabled
//!   └──────▶ pending ── unmasked and enabled ──▶ delivered, idle
//! ```

mod layout;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub use layout::{MAX_VECTORS, MsixLayout};

use crate::config::ConfigSpace;
use crate::interrupt::{InterruptError, MsiMessage, MsiVector};
use crate::log_limit::LogLimit;
use crate::registers::{MSIX_ENABLE, MSIX_FUNCTION_MASK};
use crate::sync::lock;

const SAVED_VERSION: u32 = 1;
/// Size in bytes of a table entry.
const ENTRY_SIZE: u64 = 16;
const VECTOR_MASKED: u32 = 1;

/// The MSI-X state of one function. Thread-safe: any device thread may call [`Msix::trigger`], and vCPU threads access
/// table and pending bits. Each vector has its own lock, so queues don't contend.
pub struct Msix {
    layout: MsixLayout,
    /// Held while enable or function mask change. Locked before any vector's lock.
    control: Mutex<Control>,
    vectors: Vec<Vector>,
    log: LogLimit,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Control {
    enabled: bool,
    masked: bool,
}

impl Control {
    fn delivers(self) -> bool {
        self.enabled && !self.masked
    }
}

struct Vector {
    output: Arc<dyn MsiVector>,
    entry: Mutex<Entry>,
    delivered: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    pending: bool,
    /// Copy of [`Control::delivers`], so that a trigger needs only this entry's lock.
    function_delivers: bool,
    /// The message that the output was last set to.
    programmed: Option<MsiMessage>,
}

impl Entry {
    /// Power-on state: masked.
    const RESET: Self = Self {
        message: MsiMessage { address: 0, data: 0 },
        masked: true,
        pending: false,
        function_delivers: false,
        programmed: None,
    };

    fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.message.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.message.data.to_le_bytes());
        bytes[12..].copy_from_slice(&u32::from(self.masked).to_le_bytes());
        bytes
    }

    /// Stores a table entry as the guest wrote it. The low address bits, and all of vector control except the mask bit,
    /// are reserved and stay 0.
    fn set_bytes(&mut self, bytes: &[u8; 16]) {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        self.message =
            MsiMessage { address: u64::from(word(4)) << 32 | u64::from(word(0) & !3), data: word(8) };
        self.masked = word(12) & VECTOR_MASKED != 0;
    }
}

impl Vector {
    /// Updates the output from the entry, and sends a pending interrupt if permitted.
    fn apply(&self, entry: &mut Entry) -> Result<(), InterruptError> {
        let wanted = (entry.function_delivers && !entry.masked).then_some(entry.message);
        if entry.programmed != wanted {
            self.output.set(wanted)?;
            entry.programmed = wanted;
        }
        if entry.pending && wanted.is_some() {
            self.output.trigger()?;
            entry.pending = false;
            self.delivered.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl std::fmt::Debug for Msix {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Msix")
            .field("layout", &self.layout)
            .field("control", &*lock(&self.control))
            .finish_non_exhaustive()
    }
}

impl Msix {
    /// Creates MSI-X in power-on state: disabled, every vector masked.
    ///
    /// # Errors
    /// The number of vectors differs from the layout's.
    pub fn new(layout: MsixLayout, vectors: Vec<Arc<dyn MsiVector>>) -> Result<Self, MsixError> {
        if vectors.len() != usize::from(layout.count()) {
            return Err(MsixError::VectorCount { wanted: layout.count(), given: vectors.len() });
        }
        let vectors = vectors
            .into_iter()
            .map(|output| Vector { output, entry: Mutex::new(Entry::RESET), delivered: AtomicU64::new(0) })
            .collect();
        Ok(Self { layout, control: Mutex::new(Control::default()), vectors, log: LogLimit::new() })
    }

    /// Returns the layout of table and pending bits.
    #[must_use]
    pub fn layout(&self) -> &MsixLayout {
        &self.layout
    }

    /// Returns the number of vectors.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.layout.count()
    }

    /// Returns whether the guest has enabled MSI-X, which turns INTx off.
    #[must_use]
    pub fn enabled(&self) -> bool {
        lock(&self.control).enabled
    }

    /// Returns the output of a vector, for instance to pass its eventfd to a device server.
    #[must_use]
    pub fn vector(&self, index: u16) -> Option<&Arc<dyn MsiVector>> {
        self.vectors.get(usize::from(index)).map(|vector| &vector.output)
    }

    /// Sends interrupt `index`, or keeps it pending while it is masked or MSI-X is disabled. A nonexistent index sends
    /// nothing (virtio: `NO_VECTOR`).
    ///
    /// # Errors
    /// The interrupt controller refuses; the interrupt stays pending.
    pub fn trigger(&self, index: u16) -> Result<(), InterruptError> {
        let Some(vector) = self.vectors.get(usize::from(index)) else { return Ok(()) };
        let mut entry = lock(&vector.entry);
        entry.pending = true;
        vector.apply(&mut entry)
    }

    /// Applies enable and function mask from the MSI-X capability. Call it after each configuration write, under the
    /// lock that guards `config`.
    pub fn follow(&self, config: &ConfigSpace) {
        self.set_control(config.msix_control().unwrap_or(0));
    }

    /// Applies MSI-X message control (bits 14 and 15) as written.
    pub fn set_control(&self, message_control: u16) {
        let new = Control {
            enabled: message_control & MSIX_ENABLE != 0,
            masked: message_control & MSIX_FUNCTION_MASK != 0,
        };
        let mut control = lock(&self.control);
        if *control != new {
            *control = new;
            self.apply_control(new);
        }
    }

    /// The caller must hold the control lock.
    fn apply_control(&self, control: Control) {
        for (index, vector) in self.vectors.iter().enumerate() {
            let mut entry = lock(&vector.entry);
            entry.function_delivers = control.delivers();
            self.report(index, vector.apply(&mut entry));
        }
    }

    /// Rate-limits the log: a failure is the host's, but the guest decides how often it is tried.
    fn report(&self, index: usize, result: Result<(), InterruptError>) {
        if let Err(error) = result
            && let Some(suppressed) = self.log.admit()
        {
            tracing::warn!(
                suppressed,
                error = &error as &dyn std::error::Error,
                "MSI-X vector {index} is stuck"
            );
        }
    }

    /// Handles a BAR read that begins in the table or the pending bits. Returns false for any other.
    #[must_use]
    pub fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> bool {
        if let Some(at) = self.layout.within_table(bar, offset) {
            self.table_read(at, data);
        } else if let Some(at) = self.layout.within_pba(bar, offset) {
            self.pba_read(at, data);
        } else {
            return false;
        }
        true
    }

    /// Handles a BAR write that begins in the table or the pending bits. Returns false for any other.
    #[must_use]
    pub fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) -> bool {
        if let Some(at) = self.layout.within_table(bar, offset) {
            self.table_write(at, data);
            return true;
        }
        // Pending bits are read-only.
        self.layout.within_pba(bar, offset).is_some()
    }

    /// Reads the table at a byte offset. Bytes beyond its end are zero.
    pub fn table_read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        for (index, within, range) in pieces(offset, data.len(), ENTRY_SIZE) {
            if let Some(vector) = self.vectors.get(index) {
                let bytes = lock(&vector.entry).bytes();
                let len = range.len();
                data[range].copy_from_slice(&bytes[within..within + len]);
            }
        }
    }

    /// Writes the table at a byte offset. Bytes beyond its end are ignored.
    pub fn table_write(&self, offset: u64, data: &[u8]) {
        for (index, within, range) in pieces(offset, data.len(), ENTRY_SIZE) {
            if let Some(vector) = self.vectors.get(index) {
                let mut entry = lock(&vector.entry);
                let mut bytes = entry.bytes();
                let len = range.len();
                bytes[within..within + len].copy_from_slice(&data[range]);
                entry.set_bytes(&bytes);
                self.report(index, vector.apply(&mut entry));
            }
        }
    }

    /// Reads the pending bits at a byte offset. Bytes beyond their end are zero.
    pub fn pba_read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (0u64..).zip(data.iter_mut()) {
            let first = offset.saturating_add(at).saturating_mul(8);
            let first = usize::try_from(first).unwrap_or(usize::MAX);
            let vectors = self.vectors.get(first..).unwrap_or_default();
            *byte = vectors
                .iter()
                .take(8)
                .enumerate()
                .fold(0, |bits, (bit, vector)| bits | u8::from(lock(&vector.entry).pending) << bit);
        }
    }

    /// Resets to power-on state and drops pending interrupts.
    pub fn reset(&self) {
        let mut control = lock(&self.control);
        *control = Control::default();
        for (index, vector) in self.vectors.iter().enumerate() {
            let mut entry = lock(&vector.entry);
            *entry = Entry { programmed: entry.programmed, ..Entry::RESET };
            self.report(index, vector.apply(&mut entry));
        }
    }

    /// Saves the state. Interrupts that are triggered later aren't in it: stop the device first.
    #[must_use]
    pub fn save(&self) -> SavedMsix {
        let control = lock(&self.control);
        let vectors = self
            .vectors
            .iter()
            .map(|vector| {
                let entry = lock(&vector.entry);
                SavedVector { message: entry.message, masked: entry.masked, pending: entry.pending }
            })
            .collect();
        SavedMsix { version: SAVED_VERSION, enabled: control.enabled, masked: control.masked, vectors }
    }

    /// Restores a saved state. Sends pending interrupts that aren't masked.
    ///
    /// # Errors
    /// Version or number of vectors differ.
    pub fn restore(
        layout: MsixLayout,
        vectors: Vec<Arc<dyn MsiVector>>,
        saved: &SavedMsix,
    ) -> Result<Self, MsixError> {
        if saved.version != SAVED_VERSION {
            return Err(MsixError::Version { found: saved.version, known: SAVED_VERSION });
        }
        let msix = Self::new(layout, vectors)?;
        if saved.vectors.len() != msix.vectors.len() {
            return Err(MsixError::VectorCount { wanted: layout.count(), given: saved.vectors.len() });
        }
        for (vector, saved) in msix.vectors.iter().zip(&saved.vectors) {
            let mut entry = lock(&vector.entry);
            entry.message = saved.message;
            entry.masked = saved.masked;
            entry.pending = saved.pending;
        }
        let control = Control { enabled: saved.enabled, masked: saved.masked };
        *lock(&msix.control) = control;
        msix.apply_control(control);
        Ok(msix)
    }

    /// Returns state and counters for `causeway inspect`.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let control = *lock(&self.control);
        let vectors: Vec<_> = self
            .vectors
            .iter()
            .map(|vector| {
                let entry = *lock(&vector.entry);
                serde_json::json!({
                    "address": format!("{:#x}", entry.message.address),
                    "data": format!("{:#x}", entry.message.data),
                    "masked": entry.masked,
                    "pending": entry.pending,
                    "delivered": vector.delivered.load(Ordering::Relaxed),
                })
            })
            .collect();
        serde_json::json!({ "enabled": control.enabled, "masked": control.masked, "vectors": vectors })
    }
}

/// Splits an access into pieces within one element each: element, offset within it, range of the data.
fn pieces(
    offset: u64,
    len: usize,
    element: u64,
) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset.checked_add(u64::try_from(done).ok()?)?;
        let index = usize::try_from(at / element).ok()?;
        let within = usize::try_from(at % element).ok()?;
        let room = usize::try_from(element).ok()? - within;
        let piece = room.min(len - done);
        let range = done..done + piece;
        done += piece;
        (piece != 0).then_some((index, within, range))
    })
}

/// Saved state of [`Msix`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedMsix {
    /// Version of this type, 1.
    pub version: u32,
    /// MSI-X enable.
    pub enabled: bool,
    /// Function mask.
    pub masked: bool,
    /// The table, by vector.
    pub vectors: Vec<SavedVector>,
}

/// Saved state of one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedVector {
    /// Address and data of the table entry.
    pub message: MsiMessage,
    /// Mask bit.
    pub masked: bool,
    /// Pending bit.
    pub pending: bool,
}

/// MSI-X can't be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MsixError {
    /// The number of vectors is invalid.
    #[error("A function can't have {count} MSI-X vectors; use 1 to {MAX_VECTORS}")]
    Count {
        /// Number of vectors.
        count: u16,
    },
    /// Table or pending bits have an invalid position.
    #[error(
        "The MSI-X {what} can't be at {offset:#x} of BAR {bar}; use a BAR from 0 to 5 and a multiple of 8"
    )]
    Place {
        /// `table` or `pending bits`.
        what: &'static str,
        /// BAR index.
        bar: u8,
        /// Offset within it.
        offset: u32,
    },
    /// Table and pending bits overlap.
    #[error("The MSI-X table and pending bits of {count} vectors overlap in BAR {bar}; move one of them")]
    Overlap {
        /// BAR index.
        bar: u8,
        /// Number of vectors.
        count: u16,
    },
    /// Too few or too many vectors.
    #[error("MSI-X with {wanted} vectors was given {given}; give the same number")]
    VectorCount {
        /// The layout's number.
        wanted: u16,
        /// The given number.
        given: usize,
    },
    /// A later version saved the state.
    #[error("Saved MSI-X state has version {found}, this program knows up to {known}; use a newer one")]
    Version {
        /// Version of the saved state.
        found: u32,
        /// The newest supported version.
        known: u32,
    },
}
