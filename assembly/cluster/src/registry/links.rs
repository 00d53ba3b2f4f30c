//! Who is connected to whom: the list by which the coordinator knows which VMs must not move at the same time.

use std::collections::BTreeSet;
use std::time::Instant;

use nomad::VmId;

use super::{MAX_LINKS, Registry, Speaker};
use crate::refusal::Refusal;

impl Registry {
    /// A host says which of its VMs are connected to which others, in place of what it said before. A connection is on the list as long as the host
    /// of one end says so, or hasn't said anything since the service began.
    ///
    /// # Errors
    /// When the host was started again since, or says too much. What it says of VMs that it doesn't run, or that nobody knows, is passed over: they
    /// may have ended or moved meanwhile.
    pub fn report_links(
        &mut self,
        speaker: Speaker,
        links: &[(VmId, VmId)],
        now: Instant,
    ) -> Result<(), Refusal> {
        self.check(speaker, now)?;
        if links.len() > MAX_LINKS {
            return Err(Refusal::TooMany(format!(
                "{} connections of VMs are too many for one host; at most {MAX_LINKS} are possible",
                links.len()
            )));
        }
        let runs = |vm: &VmId| {
            self.state().ledger.vms.get(vm).is_some_and(|owner| owner.alive && owner.host == speaker.host)
        };
        let known = |vm: &VmId| self.state().ledger.vms.contains_key(vm);
        let said: BTreeSet<(VmId, VmId)> = links
            .iter()
            .filter(|(vm, peer)| runs(vm) && known(peer) && vm != peer)
            .map(|(vm, peer)| (*vm.min(peer), *vm.max(peer)))
            .collect();
        // Those that touch VMs of this host, and that nobody speaks for any more.
        let gone: Vec<(VmId, VmId)> = self
            .state()
            .ledger
            .links
            .iter()
            .filter(|link| !said.contains(link) && (runs(&link.0) || runs(&link.1)))
            .filter(|link| {
                let other = if runs(&link.0) { link.1 } else { link.0 };
                let owner = self.state().ledger.vms.get(&other).filter(|owner| owner.alive);
                owner.is_none_or(|owner| {
                    owner.host == speaker.host
                        || self.reported.get(&owner.host).is_some_and(|theirs| !theirs.contains(link))
                })
            })
            .copied()
            .collect();
        let mut actions = Vec::new();
        for (link, up) in said.iter().map(|link| (link, true)).chain(gone.iter().map(|link| (link, false))) {
            let linked = self.coordinator.linked(link.0, link.1, up, &mut actions);
            // Both ends are known.
            debug_assert!(linked.is_ok(), "{linked:?}");
        }
        self.commit(Vec::new(), actions, now)?;
        self.reported.insert(speaker.host, said);
        Ok(())
    }
}
