//! Connected VMs: the list by which the coordinator knows which VMs must not move at the same time.

use std::collections::BTreeSet;
use std::time::Instant;

use nomad::VmId;

use super::{MAX_LINKS, Registry, Speaker};
use crate::refusal::Refusal;

impl Registry {
    /// Takes a host's report of its VMs' connections, in place of its report before. A pair is on the list as long as the host of one end reports
    /// it, or hasn't reported since the service began. The cost grows with the connections of the host's VMs, not with the cluster's.
    ///
    /// # Errors
    /// When the host was started again since, or reports more than [`MAX_LINKS`]. Pairs of VMs that it doesn't run, or that aren't known, are passed
    /// over: they may have ended or moved meanwhile.
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
        let ledger = &self.state().ledger;
        let runs =
            |vm: &VmId| ledger.vms.get(vm).is_some_and(|owner| owner.alive && owner.host == speaker.host);
        let reported: BTreeSet<(VmId, VmId)> = links
            .iter()
            .filter(|(vm, peer)| runs(vm) && ledger.vms.contains_key(peer) && vm != peer)
            .map(|(vm, peer)| (*vm.min(peer), *vm.max(peer)))
            .collect();
        // The other end's host reports the pair, or may do so yet.
        let has_other_report = |peer: VmId, link: &(VmId, VmId)| {
            let owner = ledger.vms.get(&peer).filter(|owner| owner.alive && owner.host != speaker.host);
            owner.is_some_and(|owner| {
                self.reported.get(&owner.host).is_none_or(|theirs| theirs.contains(link))
            })
        };
        let mut changes: BTreeSet<(VmId, VmId, bool)> = BTreeSet::new();
        for vm in ledger.vms.alive_on(speaker.host) {
            for peer in ledger.links.peers(vm) {
                let link = (vm.min(peer), vm.max(peer));
                if !reported.contains(&link) && !has_other_report(peer, &link) {
                    changes.insert((link.0, link.1, false));
                }
            }
        }
        changes
            .extend(reported.iter().filter(|link| !ledger.links.contains(link)).map(|(a, b)| (*a, *b, true)));
        let mut actions = Vec::new();
        let relinked = self.coordinator.relinked(changes, &mut actions);
        // Both ends are known.
        debug_assert!(relinked.is_ok(), "{relinked:?}");
        self.stage_actions(Vec::new(), actions, now);
        self.reported.insert(speaker.host, reported);
        Ok(())
    }
}
