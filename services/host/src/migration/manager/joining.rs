//! The service takes this host for a start of it: the one that it is, or another one although the daemon lives.

use nomad::{Body, Event, HostId, Incarnation, Message, Node, VmId};

use super::{Draining, MigrationManager};

impl MigrationManager {
    pub(super) fn joined(&mut self, host: HostId, incarnation: Incarnation, switch_ms: u32) {
        self.switch_ms = switch_ms;
        let same =
            self.nomad.as_ref().is_some_and(|nomad| (nomad.id(), nomad.incarnation()) == (host, incarnation));
        if same {
            // The stream's first message says whose it is; the state machine has said what it had to say.
            let from = Node::Host(host);
            self.send(&Message { from, incarnation, to: Node::Coordinator, body: Body::Hello });
            return;
        }
        // Started again, as the service sees it: what was promised before is void, but for votes. These stay given, and their VMs as they are, until it is heard how that was
        // decided.
        self.draining = Draining::default();
        let voted = |vm: &VmId| {
            self.nomad.as_ref().is_some_and(|nomad| nomad.has_yielded(*vm) || nomad.has_voted(*vm))
        };
        let outgoing: Vec<VmId> = self.outgoing.keys().filter(|vm| !voted(vm)).copied().collect();
        let incoming: Vec<VmId> = self.incoming.keys().filter(|vm| !voted(vm)).copied().collect();
        for vm in outgoing {
            self.roll_back(vm, "the cluster service takes this host for one that was started again");
        }
        for vm in incoming {
            self.release(vm);
        }
        for vm in self.outgoing.keys().chain(self.incoming.keys()).filter_map(|vm| self.name(*vm)) {
            tracing::warn!(
                vm,
                "The cluster service takes this host for one that was started again; this VM was voted for, and stays as it is until the decision is heard"
            );
        }
        self.timers.clear();
        self.due.clear();
        match &mut self.nomad {
            Some(nomad) => nomad.renumber(host, incarnation),
            None => {
                let config = nomad::Config { switch_ms: switch_ms.max(1), ..nomad::Config::default() };
                self.nomad = Some(nomad::Host::new(host, incarnation, config));
            }
        }
        self.step(Event::Start);
    }
}
