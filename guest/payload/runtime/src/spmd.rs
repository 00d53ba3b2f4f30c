//! Runs an SPMD program: `guest/payload/README.md`, "Programs that run on one node or on several".

#![allow(unsafe_code)] // The free memory becomes the heap.

use crate::{Barrier, Vcpu, pointer_to, println};
use core::sync::atomic::AtomicU32;
use payload_loops::tsc;
use payload_spmd::{Heap, Machine, Outcome, OwnPage, Refused, Settings, Team};

/// Exit code for a wrong result.
const WRONG: u32 = 1;
/// Exit code for unsuitable arguments, memory or number of vCPUs.
const REFUSED: u32 = 2;

/// Capacity of a team: more vCPUs than a VM can have.
const MOST_VCPUS: usize = 256;

static NODES: OwnPage<[AtomicU32; MOST_VCPUS]> = OwnPage([const { AtomicU32::new(0) }; MOST_VCPUS]);
static BARRIER: OwnPage<Barrier> = OwnPage(Barrier::new());

/// An SPMD program: its name, its arguments' names, and its function.
#[derive(Debug)]
pub struct Program {
    /// Name in the output.
    pub name: &'static str,
    /// Names of its arguments.
    pub arguments: &'static [&'static str],
    /// The function of every vCPU. vCPU 0 prints its result.
    pub run: fn(&Team<'_>, &mut Heap, &Settings) -> Result<Outcome, Refused>,
}

struct PayloadMachine(Vcpu);

// SAFETY: a vCPU's data about itself is constant.
unsafe impl Sync for PayloadMachine {}

impl Machine for PayloadMachine {
    fn nanoseconds(&self) -> u64 {
        // Without a known frequency the result counts ticks, which still permits comparisons.
        let (ticks, khz) = (tsc::start(), self.0.info().tsc_khz);
        if khz == 0 {
            return ticks;
        }
        u64::try_from(u128::from(ticks) * 1_000_000 / u128::from(khz)).unwrap_or(u64::MAX)
    }

    fn phase(&self, begins: bool) {
        crate::ports::write(payload_abi::PORT_PHASE, u32::from(begins));
    }

    fn pause(&self) {
        crate::ports::write(payload_abi::PORT_PAUSE, 0);
    }
}

/// Joins all vCPUs, and calls `program` with the team and the heap. All vCPUs call it once.
pub fn with_team<R>(vcpu: Vcpu, program: impl FnOnce(&Team<'_>, &mut Heap) -> R) -> R {
    let machine = PayloadMachine(vcpu);
    let info = vcpu.info();
    let (index, count) = (vcpu.index() as usize, vcpu.count() as usize);
    let team = Team::join(index, count, info.node_index, &NODES.0, &BARRIER.0, &machine);
    let length = usize::try_from(info.free.size).unwrap_or(usize::MAX);
    // SAFETY: the free memory is zero at entry, and only this program's heaps use it.
    let mut heap = unsafe { Heap::new(pointer_to(info.free.start), length) };
    program(&team, &mut heap)
}

/// Prints why a program can't start; returns the exit code.
pub fn refuse(program: &str, refused: Refused) -> u32 {
    println!("{program}: {refused}");
    REFUSED
}

/// Runs `program` on this vCPU together with all others, and prints the result. Returns the exit code.
pub fn run(vcpu: Vcpu, program: &Program) -> u32 {
    with_team(vcpu, |team, heap| {
        let outcome = Settings::parse(vcpu.arguments().skip(1), program.arguments)
            .and_then(|settings| (program.run)(team, heap, &settings));
        if !team.leads() {
            return 0;
        }
        match outcome {
            Ok(outcome) => {
                println!("{}", outcome.line(program.name, team.count(), vcpu.info().node_count));
                if outcome.verified { 0 } else { WRONG }
            }
            Err(refused) => refuse(program.name, refused),
        }
    })
}

/// Makes an SPMD [`Program`] a payload.
#[macro_export]
macro_rules! spmd_entry {
    ($program:expr) => {
        $crate::entry!(spmd_main);
        fn spmd_main(vcpu: $crate::Vcpu) -> u32 {
            $crate::spmd::run(vcpu, &$program)
        }
    };
}
