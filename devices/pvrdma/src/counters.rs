//! Counters of a PVRDMA function, which a migration transfers.

/// Counts since the device was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Commands processed.
    pub commands: u64,
    /// Commands that failed.
    pub failed_commands: u64,
    /// Doorbell values received, in either mode.
    pub doorbells: u64,
    /// Interrupts of vectors 0, 1 and 2.
    pub interrupts: [u64; 3],
}

impl Counters {
    pub(crate) fn count_interrupt(&mut self, vector: u16) {
        if let Some(count) = self.interrupts.get_mut(usize::from(vector)) {
            *count += 1;
        }
    }
}
