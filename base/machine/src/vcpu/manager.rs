//! The vCPUs of a VM as a unit to start, pause and stop.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::x86::CpuId;
use kvm_ioctls::VcpuFd;
use rustix::thread::CpuSet;

use super::control::{Control, RunPage, RunState, install_kick_handler, kick, mask_signals};
use super::registers::{self, Vcpu};
use super::run::VcpuThread;
use super::{VcpuConfig, VcpuError, VcpuEvent, VcpuExitHandler, VcpuStart};
use crate::bus::AddressSpace;
use crate::exits::{ExitSnapshot, RangeNames, VcpuExits};
use crate::local_apic::{self, LocalApics};
use crate::state::SavedVcpu;
use crate::stats::{KernelStats, StatsReader};
use crate::vm::{Vm, errno};
use crate::x86::{kvm_regs, kvm_sregs, with_tsc_frequency};

/// Time limit for vCPUs to park or end: a device handler may delay them.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Buses and callbacks of vCPU threads.
pub struct VcpuOptions {
    /// I/O ports.
    pub ports: Arc<AddressSpace>,
    /// Memory-mapped I/O.
    pub memory: Arc<AddressSpace>,
    /// The names of both buses' ranges.
    pub names: Arc<RangeNames>,
    /// Receives events, on the thread of the vCPU. It must not wait for vCPUs; it passes the event to another thread.
    pub on_event: Arc<dyn Fn(VcpuEvent) + Send + Sync>,
    /// The VM's local APICs; `None` where KVM has them or the VM has none.
    pub local_apics: Option<Arc<dyn LocalApics>>,
    /// Handles port accesses and HLT before the buses do.
    pub exit_handler: Option<Arc<dyn VcpuExitHandler>>,
    /// Runs first on each vCPU thread, before any guest code: for its seccomp filter.
    pub on_thread_start: Option<Arc<dyn Fn() + Send + Sync>>,
}

/// The manager's data about one vCPU.
struct Member {
    id: u32,
    control: Arc<Control>,
    exits: Arc<VcpuExits>,
    stats: StatsReader,
    thread: Arc<Thread>,
}

/// `None` once joined.
type Thread = Mutex<Option<JoinHandle<()>>>;

impl Member {
    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kick(&self) {
        if let Some(thread) = &*self.thread() {
            kick(thread);
        }
    }
}

/// Kicks vCPUs, so that they check for interrupts: out of the guest, out of HLT, out of their wait for a start-up IPI. Cheap to clone.
/// Thread-safe, and never waits for a vCPU.
#[derive(Clone)]
pub struct VcpuKicks {
    /// Ascending by id.
    targets: Arc<[KickTarget]>,
}

struct KickTarget {
    id: u32,
    control: Arc<Control>,
    thread: Arc<Thread>,
}

impl VcpuKicks {
    fn new(members: &[Member]) -> Self {
        let one = |member: &Member| KickTarget {
            id: member.id,
            control: Arc::clone(&member.control),
            thread: Arc::clone(&member.thread),
        };
        let mut targets: Vec<_> = members.iter().map(one).collect();
        targets.sort_unstable_by_key(|target| target.id);
        Self { targets: targets.into() }
    }

    /// To be called after an interrupt was latched for the vCPU. Ignores a vCPU that doesn't exist or has ended.
    pub fn kick(&self, vcpu: u32) {
        let Ok(index) = self.targets.binary_search_by_key(&vcpu, |target| target.id) else { return };
        let KickTarget { control, thread, .. } = &self.targets[index];
        if control.kick()
            && let Some(thread) = &*thread.lock().unwrap_or_else(PoisonError::into_inner)
        {
            kick(thread);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ManagerState {
    Paused,
    Running,
    Stopped,
}

thread_local! {
    /// The number of the manager that this vCPU thread belongs to.
    static MANAGER: Cell<u64> = const { Cell::new(0) };
}

/// All vCPUs of a VM, each with a thread called `vcpu<id>`. Thread-safe; calls that change the run state are serialized.
///
/// ```text
/// start -> paused <-- pause/resume --> running ;  either -> stopped (threads joined)
/// ```
pub struct VcpuManager {
    number: u64,
    members: Vec<Member>,
    names: Arc<RangeNames>,
    state: Mutex<ManagerState>,
}

impl VcpuManager {
    /// Creates the vCPUs, paused, with their start state set.
    pub fn start(vm: &Arc<Vm>, configs: Vec<VcpuConfig>, options: VcpuOptions) -> Result<Self, VcpuError> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        check(vm, &configs)?;
        let first = configs.first().map_or(0, |config| config.id);
        install_kick_handler().map_err(|source| VcpuError::Thread {
            vcpu: first,
            what: "given a signal handler".into(),
            source,
        })?;
        if options.local_apics.is_some() {
            local_apic::enable(vm).map_err(VcpuError::LocalApics)?;
        }
        let names = Arc::clone(&options.names);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let options = Arc::new(options);
        let mut manager =
            Self { number, members: Vec::new(), names, state: Mutex::new(ManagerState::Paused) };
        for config in configs {
            // On an error, dropping `manager` ends the threads started so far.
            manager.members.push(create(vm, &config, &options, number)?);
        }
        if let Some(local_apics) = &options.local_apics {
            local_apics.connect(VcpuKicks::new(&manager.members));
        }
        let until = Instant::now() + PAUSE_TIMEOUT;
        for member in &manager.members {
            if !member.control.wait_parked(until) {
                return Err(stuck(member.id));
            }
        }
        Ok(manager)
    }

    fn state(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_own_thread(&self, what: &'static str) -> Result<(), VcpuError> {
        if MANAGER.get() == self.number { Err(VcpuError::OwnThread(what)) } else { Ok(()) }
    }

    /// Locks the run state; fails where `what` isn't possible.
    fn change(&self, what: &'static str) -> Result<MutexGuard<'_, ManagerState>, VcpuError> {
        self.not_own_thread(what)?;
        let state = self.state();
        if *state == ManagerState::Stopped { Err(VcpuError::Gone) } else { Ok(state) }
    }

    /// Resumes all vCPUs. Those that ended (an event was reported) stay parked until [`VcpuManager::set_state`].
    pub fn resume(&self) -> Result<(), VcpuError> {
        let mut state = self.change("resume its VM")?;
        for member in &self.members {
            member.control.request(RunState::Run);
        }
        *state = ManagerState::Running;
        Ok(())
    }

    /// Pauses all vCPUs, outside the guest and device handlers; a port or memory access in progress is completed. No interrupt is lost:
    /// they stay pending in the interrupt controllers. After [`VcpuError::Stuck`] the other vCPUs are paused, and the stuck one pauses
    /// when its device handler returns; call again or resume.
    pub fn pause(&self) -> Result<(), VcpuError> {
        let mut state = self.change("pause its VM")?;
        self.request_all(RunState::Pause);
        let until = Instant::now() + PAUSE_TIMEOUT;
        for member in &self.members {
            if !member.control.wait_parked(until) {
                return Err(stuck(member.id));
            }
        }
        *state = ManagerState::Paused;
        Ok(())
    }

    fn request_all(&self, requested: RunState) {
        for member in &self.members {
            member.control.request(requested);
            member.kick();
        }
    }

    /// Whether the vCPUs are paused.
    pub fn is_paused(&self) -> bool {
        *self.state() == ManagerState::Paused
    }

    /// Makes one vCPU leave and re-enter the guest. Doesn't wait for it.
    pub fn kick(&self, vcpu: u32) -> Result<(), VcpuError> {
        let member = self.member(vcpu)?;
        member.control.request_attention();
        member.kick();
        Ok(())
    }

    /// Makes the first vCPU raise a machine check before its next instruction, once it runs. For a device that refuses a deferred write
    /// ([`crate::coalesced`]): KVM's ring doesn't record which vCPU made the write. Doesn't wait for the vCPU.
    pub fn machine_check(&self) -> Result<(), VcpuError> {
        let member = self.members.first().ok_or(VcpuError::Absent(0))?;
        member.control.request_machine_check();
        member.kick();
        Ok(())
    }

    fn member(&self, vcpu: u32) -> Result<&Member, VcpuError> {
        self.members.iter().find(|member| member.id == vcpu).ok_or(VcpuError::Absent(vcpu))
    }

    /// Runs `work` on the vCPU's own thread, which must be parked.
    fn call<R: Send + 'static>(
        member: &Member,
        what: &'static str,
        work: impl FnOnce(&mut VcpuThread) -> R + Send + 'static,
    ) -> Result<R, VcpuError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let taken = member.control.command(Box::new(move |thread| {
            // The receiver below waits until this has finished.
            let _ = sender.send(work(thread));
        }));
        if !taken {
            return Err(VcpuError::NotPaused(what));
        }
        receiver.recv().map_err(|_| VcpuError::Panicked { vcpu: member.id, what })
    }

    /// Locks the run state, and requires that the vCPUs are paused.
    fn paused(&self, what: &'static str) -> Result<MutexGuard<'_, ManagerState>, VcpuError> {
        let state = self.change(what)?;
        if *state == ManagerState::Paused { Ok(state) } else { Err(VcpuError::NotPaused(what)) }
    }

    /// Sets the state of one vCPU while paused: reset or restore. A vCPU that had ended runs again after the next
    /// [`VcpuManager::resume`].
    pub fn set_state(&self, vcpu: u32, start: VcpuStart) -> Result<(), VcpuError> {
        let _life = self.paused("set the state of a vCPU")?;
        let member = self.member(vcpu)?;
        Self::call(member, "set the state of a vCPU", move |thread| {
            let power_on = Arc::clone(&thread.power_on);
            thread.halted = thread.is_halted_by(&start);
            thread.vcpu().start(&power_on, &start, false)
        })??;
        member.control.lock().ended = false;
        // Drops a machine check that was pending for the former state.
        member.control.take_machine_check();
        Ok(())
    }

    /// Saves all vCPUs, in order of creation, while paused. Fails if one has ended.
    pub fn save(&self) -> Result<Vec<SavedVcpu>, VcpuError> {
        let what = "save a vCPU";
        let _life = self.paused(what)?;
        let save = |member: &Member| {
            if member.control.lock().ended {
                let reason = "it has stopped for an event that it reported".to_owned();
                return Err(VcpuError::NotSaveable { vcpu: member.id, reason });
            }
            Self::call(member, what, |thread| thread.save())?
        };
        self.members.iter().map(save).collect()
    }

    /// Saves the vCPUs that have not ended, in order of creation, while paused; `None` for each that has ended.
    pub fn save_living(&self) -> Result<Vec<Option<SavedVcpu>>, VcpuError> {
        let what = "save a vCPU";
        let _life = self.paused(what)?;
        let save = |member: &Member| {
            if member.control.lock().ended {
                return Ok(None);
            }
            Self::call(member, what, |thread| thread.save())?.map(Some)
        };
        self.members.iter().map(save).collect()
    }

    /// While paused: marks a vCPU as ended, as if it had reported an event. It doesn't run until [`VcpuManager::set_state`].
    pub fn set_ended(&self, vcpu: u32) -> Result<(), VcpuError> {
        let _life = self.paused("end a vCPU")?;
        self.member(vcpu)?.control.set_ended();
        Ok(())
    }

    /// General and system registers of one vCPU, while paused or ended; for messages and tests.
    pub fn registers(&self, vcpu: u32) -> Result<(kvm_regs, kvm_sregs), VcpuError> {
        let what = "show the registers of a vCPU";
        let _life = self.change(what)?;
        let member = self.member(vcpu)?;
        let refused = move |error| VcpuError::Refused {
            vcpu,
            what: "read the registers of".into(),
            source: errno(error),
        };
        Self::call(member, what, move |thread| {
            Ok((thread.fd.get_regs().map_err(refused)?, thread.fd.get_sregs().map_err(refused)?))
        })?
    }

    /// Ends all threads and waits for them. Later calls return [`VcpuError::Gone`].
    pub fn stop(&self) -> Result<(), VcpuError> {
        self.not_own_thread("stop its VM")?;
        let mut state = self.state();
        *state = ManagerState::Stopped;
        self.request_all(RunState::Stop);
        let until = Instant::now() + PAUSE_TIMEOUT;
        let mut result = Ok(());
        for member in &self.members {
            if !member.control.wait_exited(until) {
                result = Err(stuck(member.id));
                continue;
            }
            let thread = member.thread().take();
            if thread.is_some_and(|thread| thread.join().is_err()) {
                result = Err(VcpuError::Panicked { vcpu: member.id, what: "stop" });
            }
        }
        result
    }

    /// Ids of the vCPUs, in order of creation.
    pub fn ids(&self) -> Vec<u32> {
        self.members.iter().map(|member| member.id).collect()
    }

    /// Counts of exits so far. May be called at any time.
    pub fn exits(&self) -> ExitSnapshot {
        let one = |member: &Member| member.exits.snapshot(member.id, &self.names);
        ExitSnapshot { vcpus: self.members.iter().map(one).collect() }
    }

    /// KVM's own statistics of each vCPU. May be called at any time.
    pub fn kernel_stats(&self) -> Vec<(u32, KernelStats)> {
        self.members.iter().map(|member| (member.id, member.stats.read())).collect()
    }
}

impl Drop for VcpuManager {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!(%error, "vCPU threads are left behind");
        }
    }
}

impl VcpuThread {
    pub(super) fn vcpu(&self) -> Vcpu<'_> {
        Vcpu { id: self.id, fd: &self.fd, vm: &self.vm }
    }
}

fn stuck(vcpu: u32) -> VcpuError {
    VcpuError::Stuck { vcpu, seconds: PAUSE_TIMEOUT.as_secs() }
}

fn check(vm: &Vm, configs: &[VcpuConfig]) -> Result<(), VcpuError> {
    let mut ids = BTreeSet::new();
    for config in configs {
        let vcpu = config.id;
        if !ids.insert(vcpu) {
            return Err(VcpuError::BadConfig { vcpu, reason: "another one has the same id".into() });
        }
        if ids.len() > vm.max_vcpus() {
            let reason = format!("KVM of this host allows {} vCPUs in a VM", vm.max_vcpus());
            return Err(VcpuError::BadConfig { vcpu, reason });
        }
    }
    Ok(())
}

/// CPUID leaves of a vCPU: the saved ones, or those of the configuration with the TSC's frequency.
fn cpuid<'a>(fd: &VcpuFd, config: &'a VcpuConfig) -> Result<Cow<'a, CpuId>, VcpuError> {
    if let VcpuStart::Restored(saved) = &config.start {
        return Ok(Cow::Owned(registers::cpuid_of(saved)?));
    }
    match fd.get_tsc_khz() {
        Ok(khz) if config.tells_tsc_frequency && khz > 0 => {
            let too_many =
                || VcpuError::BadConfig { vcpu: config.id, reason: "there are too many CPUID leaves".into() };
            Ok(Cow::Owned(with_tsc_frequency(&config.cpuid, khz).ok_or_else(too_many)?))
        }
        // KVM reports no frequency for an unstable TSC of the host.
        _ => Ok(Cow::Borrowed(&config.cpuid)),
    }
}

fn create(
    vm: &Arc<Vm>,
    config: &VcpuConfig,
    options: &Arc<VcpuOptions>,
    number: u64,
) -> Result<Member, VcpuError> {
    let id = config.id;
    let refused = |what: &'static str| {
        move |error: kvm_ioctls::Error| VcpuError::Refused {
            vcpu: id,
            what: what.into(),
            source: errno(error),
        }
    };
    let fd: VcpuFd = vm.fd().create_vcpu(u64::from(id)).map_err(refused("create"))?;
    // Before the power-on state is saved, so that a later reset restores these leaves.
    fd.set_cpuid2(&*cpuid(&fd, config)?).map_err(refused("set CPUID of"))?;
    let vcpu = Vcpu { id, fd: &fd, vm };
    // Firmware does this on every processor. As part of the power-on state, a reset restores it.
    vcpu.enable_mtrrs()?;
    if options.local_apics.is_some() {
        vcpu.announce_locked_x2apic()?;
    }
    let power_on = Arc::new(vcpu.save()?);
    vcpu.start(&power_on, &config.start, true)?;
    let stats = StatsReader::open(&fd);
    let page = RunPage::map(&fd).map_err(|source| VcpuError::Refused {
        vcpu: id,
        what: "map the run page of".into(),
        source,
    })?;
    vm.coalesced().map(&fd).map_err(|source| VcpuError::Refused {
        vcpu: id,
        what: "map the ring of deferred writes of".into(),
        source,
    })?;
    let control = Arc::new(Control::new(page));
    let exits = Arc::new(VcpuExits::new());
    let mut thread = VcpuThread {
        id,
        fd,
        vm: Arc::clone(vm),
        power_on,
        control: Arc::clone(&control),
        exits: Arc::clone(&exits),
        options: Arc::clone(options),
        halted: false,
    };
    thread.halted = thread.is_halted_by(&config.start);
    let pin_to = config.pin_to.clone();
    let (sender, receiver) = mpsc::sync_channel(1);
    let body = move || {
        MANAGER.set(number);
        let ready = prepare_thread(id, &pin_to);
        if let Some(hook) = &thread.options.on_thread_start {
            hook();
        }
        let go_on = ready.is_ok();
        // `create` waits for this message.
        let _ = sender.send(ready);
        if go_on {
            thread.work();
        }
    };
    let handle = std::thread::Builder::new()
        .name(format!("vcpu{id}"))
        .spawn(body)
        .map_err(|source| VcpuError::Thread { vcpu: id, what: "started".into(), source })?;
    receiver.recv().map_err(|_| VcpuError::Panicked { vcpu: id, what: "start" })??;
    Ok(Member { id, control, exits, stats, thread: Arc::new(Mutex::new(Some(handle))) })
}

fn prepare_thread(vcpu: u32, pin_to: &[usize]) -> Result<(), VcpuError> {
    let what = "given its signal mask".to_owned();
    mask_signals().map_err(|source| VcpuError::Thread { vcpu, what, source })?;
    if pin_to.is_empty() {
        return Ok(());
    }
    let pinned = || format!("pinned to host CPUs {pin_to:?}");
    let mut set = CpuSet::new();
    for &cpu in pin_to {
        if cpu >= CpuSet::MAX_CPU {
            let source = std::io::ErrorKind::InvalidInput.into();
            return Err(VcpuError::Thread { vcpu, what: pinned(), source });
        }
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| VcpuError::Thread {
        vcpu,
        what: pinned(),
        source: error.into(),
    })
}
