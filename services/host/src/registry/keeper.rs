//! The keeper: a thread that removes NICs whose clients have disconnected, or never connected, and saves the record of NICs.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::nic::Nic;
use super::{Event, NicKey, Registry, forget_limits};

/// Time after which a NIC without clients is removed.
const UNUSED: Duration = Duration::from_secs(60);
/// Delay of saving the record after a change, so that a guest can't keep the disk busy.
const WRITE_AFTER: Duration = Duration::from_millis(200);

impl Registry {
    /// The keeper's thread: removes NICs whose clients have disconnected, and saves the record.
    pub(crate) fn keep(&self, inbox: &Receiver<Event>) {
        let mut write_at: Option<Instant> = None;
        loop {
            let wait = [write_at, self.next_unused()].into_iter().flatten().min();
            let event = match wait {
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match event {
                Ok(Event::Unused { key, generation }) => self.remove_unused(&key, generation),
                Ok(Event::Changed) => write_at = write_at.or_else(|| Instant::now().checked_add(WRITE_AFTER)),
                Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if write_at.is_some_and(|at| at <= Instant::now()) {
                write_at = None;
                self.write();
            }
            self.remove_never_used();
        }
        self.write();
    }

    fn write(&self) {
        if let Err(error) = self.remembered.flush() {
            telemetry::guest_warn!(self.log, %error, "What this daemon knows of its NICs can't be written; after a restart drivers are not told");
        }
    }

    fn remove_unused(&self, key: &NicKey, generation: u64) {
        let mut state = self.state();
        let same = |nic: &Nic| nic.shared.generation == generation && !nic.shared.in_use();
        if !state.nics.get(key).is_some_and(same) {
            return;
        }
        // Under the lock: a NIC with the same name that is created concurrently would have its addresses and sockets' names, and lose the
        // latter to it. It has no clients, so its threads end at once.
        drop(state.nics.remove(key));
        forget_limits(&mut state, &key.vm);
        drop(state);
        telemetry::guest_info!(self.log, vm = key.vm, nic = key.name, "NIC released: its monitor has gone");
    }

    /// Time at which the next NIC without clients is removed.
    fn next_unused(&self) -> Option<Instant> {
        let state = self.state();
        let waiting = state.nics.values().filter(|nic| !nic.was_used && !nic.shared.in_use());
        waiting.filter_map(|nic| nic.since.checked_add(UNUSED)).min()
    }

    fn remove_never_used(&self) {
        let mut state = self.state();
        let mut gone = Vec::new();
        for nic in state.nics.values_mut() {
            nic.was_used |= nic.shared.in_use();
            if !nic.was_used && nic.since.elapsed() >= UNUSED {
                gone.push(nic.shared.key.clone());
            }
        }
        for key in &gone {
            drop(state.nics.remove(key));
            forget_limits(&mut state, &key.vm);
        }
        drop(state);
        for key in gone {
            telemetry::guest_info!(
                self.log,
                vm = key.vm,
                nic = key.name,
                "NIC released: nobody connected to it"
            );
        }
    }
}
