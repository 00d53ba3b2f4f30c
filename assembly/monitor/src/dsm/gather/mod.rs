//! A program that doesn't pay on several nodes is brought together on node 0.
//!
//! Node 0 has made the vCPUs of all nodes, those of others ended. A move is a cut as for a checkpoint ([`super::checkpoint`]), at which saved vCPUs and memory go
//! over links instead of into files:
//! ```text
//! node 0                                  every other node
//!   Hold, Count …                         all stand still, nothing is under way
//!   Give ──────────────────────────────▶  one after the other
//!   ◀──────────────────── Vcpu …, Given   what its vCPUs are; or why it can't: then all go on as before
//!   fits the processor and the clock here?  no: all go on as before
//!   Move ──────────────────────────────▶  from here on there is no way back: who is lost ends the VM
//!   ◀────────────────── Pages …, Moved    the pages that it owns
//!   all of them are here: memory is ordinary memory from now on, and vCPUs have their states
//!   Gathered ──────────────────────────▶  its vCPUs have ended; it stays for counts, and to be told of the end
//! ```
//!
//! At each moment at most one node runs a vCPU: others' are stopped before their states are told, and begin at node 0 after the point of no return.
//! What node 0 has afterwards: the pages that it owned, those that others owned, and pages that nobody has used, which are the same everywhere. The protocol has
//! nothing to do any more; order of memory is the processor's.
//!
//! | module | holds |
//! |---|---|
//! | `policy` | when: from numbers alone |
//! | `looks` | these numbers: what vCPUs spend their time with |
//! | `spinning` | whether code only waits |
//! | `turns` | who runs where processors are fewer than vCPUs |
//! | `pages` | pages as bytes on a link |
//! | `coordinator` | node 0: the order of all this |
//! | `member` | what a node does when it is told to |

mod coordinator;
mod looks;
mod member;
mod pages;
mod policy;
mod spinning;
mod turns;

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use dsm::Page;
use machine::vcpu::GuestRegisters;
use serde_json::{Value, json};

use super::checkpoint::OWN_PAGES;
use super::engine::{Core, Engine, now};
use super::link::Control;
use looks::is_spinning;
pub(super) use looks::{Look, Taken};
pub(super) use member::processors;
use policy::Decision;
pub(super) use policy::{Found, Told, Watch};
pub(super) use turns::Turns;

/// Where a VM's vCPUs and memory are.
#[derive(Debug, Default)]
pub(super) enum Gathering {
    /// Each node has its own.
    #[default]
    No,
    /// On node 0: pages of others come. Which have come, and how many from whom.
    Taking { taken: Vec<bool>, from: BTreeMap<u8, u64> },
    /// All is on node 0.
    Over(Gathered),
}

/// What bringing together came to, for people. Where a node doesn't know it, zero.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Gathered {
    /// Why.
    pub(super) found: Found,
    /// How long the program had run when that was seen, nanoseconds.
    pub(super) after_ns: u64,
    /// How long all vCPUs stood still, nanoseconds.
    pub(super) took_ns: u64,
    /// Pages that were moved.
    pub(super) pages: u64,
    /// vCPUs that were moved.
    pub(super) vcpus: u32,
}

impl Gathering {
    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::Over(_))
    }

    pub(super) fn to_json(&self) -> Value {
        match self {
            Self::Over(gathered) => json!({
                "vcpus": gathered.vcpus,
                "pages": gathered.pages,
                "after_ns": gathered.after_ns,
                "stood_still_ns": gathered.took_ns,
                "waited_permille": gathered.found.permille(gathered.found.waited),
                "spun_permille": gathered.found.permille(gathered.found.spun),
                "done_permille_of_a_vcpu": gathered.found.done,
            }),
            Self::No | Self::Taking { .. } => Value::Null,
        }
    }
}

impl Engine {
    /// Tells node 0 what vCPUs have spent their time with. Whether something was sent to it.
    pub(super) fn tell_time(&self) -> bool {
        if !self.gathers {
            return false;
        }
        let servants = self.servants().clone();
        let told = match &mut *self.lock() {
            Some(core) if !core.gathering.is_over() && !core.standing => core.spent(&servants),
            _ => return false,
        };
        if self.me == 0 {
            self.told(0, told);
        } else {
            self.send_control(0, &Control::Told(told));
        }
        self.me != 0
    }

    /// On node 0: a node has told what its vCPUs have spent their time with.
    pub(super) fn told(&self, node: u8, told: Told) {
        if let Some(core) = &mut *self.lock()
            && !core.standing
            && let Some(watch) = &mut core.watch
            && watch.told(node, told) == Decision::Gather
        {
            // Once: it is told again and again until it is done.
            if !self.gather_now.swap(true, Ordering::Relaxed) {
                self.call_cuts();
            }
        }
    }

    /// On node 0: another node hands pages over. Each must be one that is shared, that isn't owned here, and that hasn't come before.
    pub(super) fn take_pages(&self, peer: u8, bytes: &[u8]) -> Result<(), String> {
        let mut locked = self.lock();
        let Some(core) = &mut *locked else { return Err("this node isn't there yet".to_owned()) };
        let Core { node, pages, gathering, .. } = core;
        let Gathering::Taking { taken, from } = gathering else {
            return Err("nobody has asked for it".to_owned());
        };
        let count = from.entry(peer).or_default();
        for one in pages::parse(bytes) {
            let (page, content) = one?;
            let place = usize::try_from(page).ok().and_then(|page| taken.get_mut(page));
            let Some(place) = place.filter(|taken| page >= OWN_PAGES && !**taken && !node.is_owner(page))
            else {
                return Err(format!("page {page:#x} isn't its to hand over"));
            };
            *place = true;
            pages.ram.write(page, 0, content).map_err(|error| error.to_string())?;
            *count += 1;
        }
        Ok(())
    }
}

impl Engine {
    /// After everything has come together: waits until this vCPU's turn has come, where there are turns.
    pub(super) fn await_turn(
        &self,
        mut locked: MutexGuard<'_, Option<Core>>,
        index: usize,
        registers: &dyn GuestRegisters,
    ) {
        while let Some(core) = &mut *locked
            && let Some(turns) = &mut core.turns
            && !core.stopping
            && !core.holding
        {
            if turns.is_called(index) {
                let spins = self.registers(registers).is_some_and(|found| is_spinning(core, found.rip));
                let next = core.turns.as_mut().and_then(|turns| turns.looked(index, spins, now()));
                if let Some(next) = next {
                    self.notify(next);
                }
                self.arm_turns(core);
                continue;
            }
            if turns.may_run(index, now()) {
                return;
            }
            self.arm_turns(core);
            locked = self.wait(locked, index);
        }
    }

    /// A vCPU waits for others and says so. Whether another one has its turn now; if not, nobody waits for one.
    pub(super) fn gives_way(&self, index: usize) -> bool {
        let mut locked = self.lock();
        let Some(core) = &mut *locked else { return false };
        if !core.gathering.is_over() {
            core.says_that_it_waits(index);
        }
        let Some(next) = core.turns.as_mut().and_then(|turns| turns.gave_way(index, now())) else {
            return false;
        };
        self.notify(next);
        // It is asked whether it may run when it is called out of the guest only.
        self.summon(core, index);
        true
    }

    /// Calls those out whose turn may be over. Returns when to come again.
    pub(super) fn look_at_turns(&self, core: &mut Core) -> u64 {
        let Some(turns) = &mut core.turns else { return u64::MAX };
        let due = turns.due(now());
        let next = turns.next_look();
        for vcpu in due {
            self.summon(core, vcpu);
        }
        core.armed = Some(next);
        next
    }

    /// Lets the faults thread know of a turn that may be over before it comes by itself. (A wake costs the vCPU beside it some 100 µs.)
    fn arm_turns(&self, core: &mut Core) {
        let next = core.turns.as_ref().map_or(u64::MAX, Turns::next_look);
        if core.armed.is_none_or(|armed| next < armed) {
            core.armed = Some(next);
            self.poke();
        }
    }
}

/// All shared pages that a machine with so many pages has.
fn none_taken(pages: Page) -> Vec<bool> {
    vec![false; usize::try_from(pages).unwrap_or(0)]
}
