//! Monitors of both ends of a migration: they transfer memory by the dirty pages of guest and daemons, and state by vfio-user, as the
//! daemons request.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use control_api::host::HostClient;
use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, MoveVmReply, PeerHold};
use dma::Dma;
use vfio_user_protocol::client::Client;
use vfio_user_protocol::migration::DeviceState;

use super::late::LateRam;
use super::monitor::{Machine, Monitor};
use super::vm::Vm;

const PAGE: u64 = 4096;

/// A VM that migrates.
pub struct Move<'a> {
    name: String,
    source: HostClient,
    destination: HostClient,
    pub vm: &'a mut Vm,
    pub machine: Machine,
    pub monitor: Monitor,
    /// Number of pages that only daemons have marked dirty, in all rounds.
    pub by_daemon: usize,
    /// Number of this attempt of the VM.
    attempt: u64,
}

/// Number of attempts so far: each has its own.
static ATTEMPTS: AtomicU64 = AtomicU64::new(1);

fn clients(monitor: &Monitor) -> [&Client; 2] {
    [&monitor.ethernet, &monitor.rdma]
}

pub fn ask(daemon: &HostClient, vm: &str, step: Step) -> State {
    let MoveVmReply { state, reason, .. } = daemon.move_vm(vm, step).unwrap();
    if !reason.is_empty() {
        // Displayed when a test fails.
        eprintln!("VM {vm}: {reason}");
    }
    State::try_from(state).unwrap()
}

impl<'a> Move<'a> {
    /// Starts a monitor that waits at the destination.
    pub fn prepare(vm: &'a mut Vm, from: &Path, to: &Path) -> Self {
        let machine = Machine::with_ram(&vm.machine.vm, &vm.machine.segment, vm.machine.size);
        let monitor = machine.await_vm(to);
        let (source, destination) = (HostClient::new(from), HostClient::new(to));
        let name = vm.machine.vm.clone();
        let attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed);
        Self { name, source, destination, vm, machine, monitor, by_daemon: 0, attempt }
    }

    /// Starts a monitor that waits at the destination, and begins at the source's daemon.
    pub fn begin(vm: &'a mut Vm, from: &Path, to: &Path, host: &str) -> Self {
        let on_its_way = Self::prepare(vm, from, to);
        assert_eq!(ask(&on_its_way.source, &on_its_way.name, Step::Begin(host.to_owned())), State::Copy);
        on_its_way.copy_first();
        on_its_way
    }

    fn copy_first(&self) {
        let Self { vm, monitor, .. } = self;
        vm.machine.ram.set_dirty_log(true);
        for client in clients(&vm.monitor) {
            client.start_dma_logging(&[(0, vm.machine.size)]).unwrap();
            client.set_device_state(DeviceState::PreCopy).unwrap();
        }
        for client in clients(monitor) {
            client.set_device_state(DeviceState::Resuming).unwrap();
        }
        let mut all = vec![u64::MAX; usize::try_from(vm.machine.size / PAGE / 64).unwrap()];
        self.copy(&mut all);
    }

    fn together(&self, host: &str, vms: &[String]) -> Step {
        Step::BeginTogether(BeginTogether { host: host.to_owned(), vms: vms.to_vec(), attempt: self.attempt })
    }

    /// Requests a joint migration with others to a host; returns the daemon's error if it refuses.
    fn ask_together(&self, host: &str, vms: &[String]) -> Result<State, String> {
        let step = self.together(host, vms);
        let reply = self.source.move_vm(&self.name, step).map_err(|error| error.to_string())?;
        Ok(State::try_from(reply.state).unwrap())
    }

    fn copy(&self, words: &mut [u64]) {
        for (index, word) in (0_u64..).zip(words) {
            for bit in (0..64).filter(|bit| *word >> bit & 1 == 1) {
                let (at, mut page) = ((index * 64 + bit) * PAGE, [0; 4096]);
                self.vm.machine.ram.read(at, &mut page).unwrap();
                self.machine.ram.write(at, &page).unwrap();
            }
        }
    }

    /// Transfers changes since the last round: state, then memory.
    pub fn round(&mut self) {
        for (from, to) in clients(&self.vm.monitor).into_iter().zip(clients(&self.monitor)) {
            to.write_migration_data(&from.read_all_migration_data().unwrap()).unwrap();
        }
        let size = self.vm.machine.size;
        let mut words = self.vm.machine.ram.take_dirty(0, size).unwrap();
        for client in clients(&self.vm.monitor) {
            for (word, more) in words.iter_mut().zip(client.take_dirty(0, size).unwrap()) {
                self.by_daemon += usize::try_from((more & !*word).count_ones()).unwrap();
                *word |= more;
            }
        }
        self.copy(&mut words);
    }

    /// Waits until peers are suspended: the caller stops the guest, which must do nothing from here on.
    pub fn converged(&self) -> State {
        ask(&self.source, &self.name, Step::Converged(true))
    }

    /// Stops the devices, and transfers the rest: both memories are equal then.
    pub fn stop(&mut self) {
        for client in clients(&self.vm.monitor) {
            client.set_device_state(DeviceState::StopCopy).unwrap();
        }
        ask(&self.source, &self.name, Step::Stopped(true));
        self.round();
        let memories = [&self.vm.machine, &self.machine].map(|machine| {
            let mut bytes = vec![0; usize::try_from(machine.size).unwrap()];
            machine.ram.read(0, &mut bytes).unwrap();
            bytes
        });
        let differ = memories[0].chunks(4096).zip(memories[1].chunks(4096)).position(|(a, b)| a != b);
        assert_eq!(differ, None, "a page changed and nobody noted it");
    }

    /// As [`Move::stop`], but no memory is present, and pages arrive on request (post-copy).
    pub fn stop_late(&mut self) -> LateRam {
        self.stop();
        let mut bytes = vec![0; usize::try_from(self.machine.size).unwrap()];
        self.machine.ram.read(0, &mut bytes).unwrap();
        self.machine.empty();
        LateRam::begin(&self.machine.ram, self.machine.size, bytes, clients(&self.monitor))
    }

    /// Reports the arrival; returns the decision.
    pub fn arrived(&self) -> (State, State) {
        for client in clients(&self.monitor) {
            client.set_device_state(DeviceState::Stop).unwrap();
            // The monitor doesn't decide that.
            assert!(client.set_device_state(DeviceState::Running).is_err());
        }
        let there = ask(&self.destination, &self.name, Step::Arrived(true));
        (ask(&self.source, &self.name, Step::Wait(true)), there)
    }

    /// After the migration: its peers' pauses by host, from the source's daemon.
    pub fn peers_held(&self) -> Vec<(String, Duration)> {
        let reply = self.source.move_vm(&self.name, Step::Peers(true)).unwrap();
        let held = |peer: PeerHold| (peer.host, Duration::from_micros(peer.microseconds));
        reply.peers.into_iter().map(held).collect()
    }

    /// Runs the guest at the destination; the source's monitor ends.
    pub fn land(self) {
        for client in clients(&self.monitor) {
            client.set_device_state(DeviceState::Running).unwrap();
        }
        for vector in &self.monitor.vectors {
            rustix::io::write(vector, &1_u64.to_ne_bytes()).unwrap();
        }
        self.vm.guest.moved(&self.machine);
        self.vm.machine = self.machine;
        self.vm.monitor = self.monitor;
    }

    /// Aborts at the source, and returns the final state. The guest runs there again.
    pub fn give_up(self) -> State {
        let mut ended = ask(&self.source, &self.name, Step::Broken(true));
        while ended == State::Pending {
            ended = ask(&self.source, &self.name, Step::Wait(true));
        }
        self.stay();
        ended
    }

    /// Resumes the guest at the source.
    pub fn stay(self) {
        for client in clients(&self.vm.monitor) {
            client.set_device_state(DeviceState::Running).unwrap();
            client.stop_dma_logging().unwrap();
        }
        self.vm.machine.ram.set_dirty_log(false);
    }
}

/// Begins a joint migration of all, each to its host, up to the copying.
pub fn begin_together(moves: &[Move<'_>], hosts: &[&str]) {
    let vms: Vec<String> = moves.iter().map(|one| one.name.clone()).collect();
    let mut copied = vec![false; moves.len()];
    while copied.contains(&false) {
        for ((one, host), done) in moves.iter().zip(hosts).zip(&mut copied).filter(|(_, done)| !**done) {
            let state = one.ask_together(host, &vms).unwrap();
            assert!(matches!(state, State::Copy | State::Pending), "{state:?}");
            *done = state == State::Copy;
        }
    }
    moves.iter().for_each(Move::copy_first);
}

/// All request a joint migration concurrently; returns each one's final error.
pub fn refused_together(moves: &[Move<'_>], hosts: &[&str]) -> Vec<String> {
    let vms: Vec<String> = moves.iter().map(|one| one.name.clone()).collect();
    let asking = moves.iter().zip(hosts).map(|(one, host)| {
        let (source, name, step) = (one.source.clone(), one.name.clone(), one.together(host, &vms));
        std::thread::spawn(move || {
            let until = Instant::now() + Duration::from_secs(45);
            loop {
                match source.move_vm(&name, step.clone()) {
                    Ok(reply) if reply.state == i32::from(State::Pending) && Instant::now() < until => {}
                    Ok(reply) => {
                        return format!("{:?}: {}", State::try_from(reply.state).unwrap(), reply.reason);
                    }
                    Err(error) => return error.to_string(),
                }
            }
        })
    });
    let asking: Vec<_> = asking.collect();
    asking.into_iter().map(|one| one.join().unwrap()).collect()
}

/// Executes a step at all sources (or destinations) concurrently: each returns when all have reached it.
pub fn together(moves: &[Move<'_>], there: bool, step: &Step) -> Vec<State> {
    let asking = moves.iter().map(|one| {
        let daemon = if there { &one.destination } else { &one.source };
        let (daemon, name, step) = (daemon.clone(), one.name.clone(), step.clone());
        std::thread::spawn(move || ask(&daemon, &name, step))
    });
    let asking: Vec<_> = asking.collect();
    asking.into_iter().map(|one| one.join().unwrap()).collect()
}

/// Reports the arrival of all; returns the decision at each destination and at each source.
pub fn arrived_together(moves: &[Move<'_>]) -> (Vec<State>, Vec<State>) {
    for client in moves.iter().flat_map(|one| clients(&one.monitor)) {
        client.set_device_state(DeviceState::Stop).unwrap();
    }
    (together(moves, true, &Step::Arrived(true)), together(moves, false, &Step::Wait(true)))
}
