//! Executes the actions of hosts' state machines on their engines.

use std::sync::Arc;

use dma::Dma;
use hca::names::Gid;
use host::migration::{Destination, Place, Source};
use nomad::objects::{Piece, Total};
use nomad::{Action, Event, HostId, MigrationId, VmId};
use pvrdma_testbed::Lines;

use super::verbs::Drain;
use super::{Cluster, OUTSIDE, PeerPause, Port, SEGMENT, SEGMENT_NAME, Timed, config, gid, memory};

impl Cluster {
    pub(super) fn act(&mut self, index: usize, action: Action) {
        match action {
            Action::Send(message) => self.messages.push_back(message),
            Action::Timer { timer, after_ms } => self.timer(u64::from(after_ms), Timed::Host(index, timer)),
            Action::Reserve { migration, moves } => {
                for moved in moves {
                    self.reserve(index, migration, moved.vm);
                }
                self.answers.push_back((index, Event::Reservation { migration, granted: true }));
            }
            Action::Release { migration } => self.release(index, migration),
            Action::Copy { migration, vm, to } => {
                let machine = &mut self.machines[index];
                let device = machine.here[&vm];
                let source = Source::begin(&mut machine.parts(), device);
                machine.leaving.insert(vm, (migration, to, source, 0));
                self.round(index, vm);
                self.timer(0, Timed::Copied(index, migration, vm));
            }
            Action::Queued { .. } => {}
            Action::EndCopy { migration } => self.end_copy(index, migration),
            Action::SuspendQps { migration, vm } => {
                self.hold(index, vm);
                self.drain(index, Drain::Peers(migration, vm));
            }
            Action::ResumeQps { vm, peer } => {
                self.draining.retain(|(at, drain)| *at != index || !drain.is_of_peers(peer.vm));
                self.open(index, vm, peer);
            }
            Action::Lost { peer } => panic!("{peer:?} is lost, and nobody was killed"),
            Action::Stop { migration, vm } => {
                self.hold_own(index, vm);
                self.drain(index, Drain::Own(migration, vm));
            }
            Action::Finish { migration, vm, to } => self.finish(index, migration, vm, to),
            Action::Run { vm, .. } => self.run(index, vm),
            Action::Discard { vm } => self.discard(index, vm),
        }
    }

    /// Prepares memory and a dormant device for a VM that migrates to a host.
    fn reserve(&mut self, index: usize, migration: MigrationId, vm: VmId) {
        let size = self.vms[&vm].size;
        let room = self.spare.pop().unwrap_or_else(|| memory(size));
        let place =
            Place { vm: host::transport::VmId(vm.0), segment: SEGMENT_NAME.to_owned(), segment_id: SEGMENT };
        let machine = &mut self.machines[index];
        let arrival = Destination::begin(&mut machine.parts(), config(vm), room.clone(), &place).unwrap();
        machine.host.lines.insert(arrival.device(), Lines::default());
        machine.arriving.insert(vm, (migration, arrival, room));
    }

    /// Discards what a host has reserved for a migration.
    fn release(&mut self, index: usize, migration: MigrationId) {
        let machine = &mut self.machines[index];
        let gone: Vec<VmId> =
            machine.arriving.iter().filter(|(_, (of, ..))| *of == migration).map(|(vm, _)| *vm).collect();
        for vm in gone {
            let (_, arrival, room) = machine.arriving.remove(&vm).unwrap();
            machine.drop_lines(arrival.device());
            arrival.discard(&mut machine.parts());
            self.spare.push(room);
        }
    }

    /// Ends a migration's copies of VMs that run.
    fn end_copy(&mut self, index: usize, migration: MigrationId) {
        let machine = &mut self.machines[index];
        let ended: Vec<VmId> =
            machine.leaving.iter().filter(|(_, (of, ..))| *of == migration).map(|(vm, _)| *vm).collect();
        for vm in ended {
            if machine.host.engine.is_stopped(machine.here[&vm]) {
                continue;
            }
            self.draining.retain(|(_, drain)| !drain.is_own(vm));
            let (.., source, _) = machine.leaving.remove(&vm).unwrap();
            source.stay(&mut machine.parts()).unwrap();
        }
    }

    /// Copies the last objects and the memory of a stopped VM to its destination.
    fn finish(&mut self, index: usize, migration: MigrationId, vm: VmId, to: HostId) {
        let total = self.round(index, vm).expect("the VM is stopped");
        let to = to.0 as usize - 1;
        let found = self.vms.get_mut(&vm).unwrap();
        found.left = Some(found.guest.memory.clone());
        self.bytes.resize(usize::try_from(found.size).unwrap(), 0);
        found.guest.memory.read(0, &mut self.bytes).unwrap();
        let Some((_, arrival, room)) = self.machines[to].arriving.get(&vm) else {
            return self.answers.push_back((index, Event::StreamBroke { migration }));
        };
        room.write(0, &self.bytes).unwrap();
        arrival.check(total).unwrap();
        self.answers.push_back((to, Event::Arrived { migration, vm }));
    }

    /// Removes what a VM that has left had at its source.
    fn discard(&mut self, index: usize, vm: VmId) {
        let machine = &mut self.machines[index];
        if let Some((.., source, _)) = machine.leaving.remove(&vm) {
            let device = machine.here.remove(&vm).unwrap();
            machine.drop_lines(device);
            source.leave(&mut machine.parts());
            // Nothing of this host writes to it any more: a write would now hit another VM's memory, and be detected.
            self.spare.extend(self.vms.get_mut(&vm).and_then(|found| found.left.take()));
        }
    }

    pub(super) fn stop(&mut self, index: usize, migration: MigrationId, vm: VmId) {
        let now = self.now();
        let found = self.vms.get_mut(&vm).unwrap();
        found.running = false;
        found.stopped_at = now;
        let machine = &mut self.machines[index];
        let device = machine.here[&vm];
        let lines = machine.host.lines.remove(&device).unwrap();
        let (of, to, mut source, rounds) = machine.leaving.remove(&vm).unwrap();
        source.stop(&mut machine.parts(), &found.guest.uar, &lines).unwrap();
        machine.leaving.insert(vm, (of, to, source, rounds));
        machine.host.lines.insert(device, lines);
        self.answers.push_back((index, Event::Stopped { migration, vm }));
    }

    /// Copies touched objects to their destination. Returns the totals of a stopped device.
    pub(super) fn round(&mut self, index: usize, vm: VmId) -> Option<Total> {
        let mut pieces: Vec<Piece> = Vec::new();
        let machine = &mut self.machines[index];
        let (migration, to, mut source, rounds) = machine.leaving.remove(&vm)?;
        source.round(&mut machine.parts(), |piece| pieces.push(piece));
        let stopped = machine.host.engine.is_stopped(machine.here[&vm]);
        let total = source.total().filter(|_| stopped);
        machine.leaving.insert(vm, (migration, to, source, rounds + 1));
        if stopped {
            self.moves.objects_in_pause += pieces.len() as u64;
            let bytes = pieces.iter().filter_map(|piece| piece.state.as_ref()).map(Vec::len).sum::<usize>();
            self.moves.bytes_in_pause += bytes as u64;
        }
        let machine = &mut self.machines[to.0 as usize - 1];
        if let Some((of, mut arrival, room)) = machine.arriving.remove(&vm) {
            for piece in pieces {
                arrival.take(&mut machine.parts(), piece).unwrap();
            }
            machine.arriving.insert(vm, (of, arrival, room));
        }
        total
    }

    fn hold(&mut self, index: usize, vm: VmId) {
        let at = self.now();
        let machine = &mut self.machines[index];
        if let Some(held) = &mut self.held {
            for other in machine.here.keys().filter(|other| **other != vm) {
                held.entry((*other, vm)).or_insert(at);
            }
        }
        let now = machine.host.now;
        for (&other, &device) in &machine.here {
            if other != vm {
                machine.host.engine.hold(device, Gid(gid(vm)));
                machine.transports.hold(device, host::transport::VmId(vm.0), now);
            }
        }
    }

    fn open(&mut self, index: usize, vm: VmId, peer: nomad::Place) {
        let machine = &mut self.machines[index];
        machine.directory.set(peer.vm, peer.host);
        let Some(&device) = machine.here.get(&vm) else { return };
        let now = machine.host.now;
        let engine = &mut machine.host.engine;
        if peer.host.0 as usize - 1 == index {
            if let Some(&beside) = machine.here.get(&peer.vm) {
                machine.transports.take_over(engine, now);
                self.moves.came_local += machine.transports.come_local(engine, device, beside) as u64;
            }
        } else {
            engine.moved_away(SEGMENT, Gid(gid(peer.vm)));
        }
        engine.open(device, Gid(gid(peer.vm)));
        machine.transports.go_on(&mut machine.host.engine, device, host::transport::VmId(peer.vm.0), now);
        self.note_peer(vm, peer.vm);
    }

    /// Records that a VM is open towards another one again: how long it was suspended, if only that one was.
    fn note_peer(&mut self, vm: VmId, mover: VmId) {
        let Some(since) = self.held.as_mut().and_then(|held| held.remove(&(vm, mover))) else { return };
        let now = self.now();
        let (Some(stayed), Some(moved)) = (self.vms.get(&vm), self.vms.get(&mover)) else { return };
        let (ran_at, stood_still) = moved.ran;
        if stayed.running && stayed.ran.0 < since && ran_at > since {
            self.peers.push(PeerPause { held_ns: now - since, mover_ns: stood_still });
        }
    }

    fn run(&mut self, index: usize, vm: VmId) {
        let now = self.now();
        let found = self.vms.get_mut(&vm).unwrap();
        let machine = &mut self.machines[index];
        let host = HostId(u32::try_from(index).unwrap() + 1);
        machine.directory.set(vm, host);
        // Peers outside of the cluster are neither suspended nor opened.
        let peers: Vec<VmId> = found.ends.keys().copied().filter(|peer| *peer != OUTSIDE).collect();
        let coming = machine.arriving.remove(&vm);
        let device = match &coming {
            Some((_, arrival, _)) => arrival.device(),
            None => machine.here[&vm],
        };
        // In a device that never stopped, all queue pairs are open still.
        let closed = machine.host.engine.is_stopped(device);
        for peer in peers.into_iter().filter(|_| closed) {
            machine.host.engine.hold(device, Gid(gid(peer)));
            machine.transports.hold(device, host::transport::VmId(peer.0), machine.host.now);
        }
        if let Some((_, arrival, room)) = coming {
            arrival.start(&mut machine.parts()).unwrap();
            if self.outside.is_some() {
                let port = Port::new();
                let name = format!("vm{}", vm.0);
                machine.transports.adopt(&mut machine.host.engine, device, &name, Arc::clone(&port.port));
                port.connect();
                machine.ports.insert(device, port);
            }
            machine.here.insert(vm, device);
            found.guest.id = device;
            found.guest.memory = room;
            found.on = index;
            self.moves.vms += 1;
        } else if let Some((.., source, _)) = machine.leaving.remove(&vm) {
            source.stay(&mut machine.parts()).unwrap();
        }
        if !found.running {
            let pause = now.saturating_sub(found.stopped_at);
            self.moves.longest_pause_ns = self.moves.longest_pause_ns.max(pause);
            self.moves.paused_ns += pause;
            found.ran = (now, pause);
        }
        found.running = true;
    }
}
