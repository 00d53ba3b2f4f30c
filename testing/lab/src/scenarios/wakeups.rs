//! Two guests that only sleep and wake each other's processes, for a given time. A lost wake-up (in the emulator, in KVM, in the
//! monitor) hangs a guest. Here it shows after minutes instead of hundreds of boots.

use crate::guest::{Guest, GuestSpec};
use crate::lab::Lab;
use crate::progress;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::Topology;
use anyhow::Result;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "wakeups",
    about: "two guests with 2 vCPUs sleep, wake and send themselves through pipes; none may stand still (--seconds N, --monitor)",
    topology: |_| Topology::single(),
    run,
    prompt: None,
};

/// A guest without output for this long counts as hung.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// Timers that expire on both CPUs, pipes across CPUs, short processes; a line per round.
const SCRIPT: &str = "for i in 1 2; do (while :; do sleep 0.02; done) & done\n\
    n=0; while :; do i=0; while [ $i -lt 5 ]; do echo x | cat | cat > /dev/null; i=$((i+1)); done\n\
    n=$((n+1)); echo \"WAKEUPS round $n\"; done\n";

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    let vmm = options.vmm()?;
    lab.install_causeway()?;
    let host = lab.host(0)?;
    let kernel = options.kernels.first().map_or("6.1-generic", String::as_str);
    let cpus = options.cpus.first().copied().unwrap_or(2);
    let start = |name: &str| {
        let spec = GuestSpec::new(name, kernel, cpus).root().script(SCRIPT);
        Guest::start(host, &spec, vmm)
    };
    let guests = [start("a")?, start("b")?];
    let begin = Instant::now();
    let length = Duration::from_secs(options.seconds.unwrap_or(120));
    let mut rounds = [0u64; 2];
    let mut still = 0;
    'all: while begin.elapsed() < length {
        for (guest, rounds) in guests.iter().zip(&mut rounds) {
            if let Err(error) = guest.expect(&format!("WAKEUPS round {}", *rounds + 1), SILENCE_LIMIT) {
                progress!("after {:.0} s: {error:#}", begin.elapsed().as_secs_f64());
                report.figure("goes_on_after_a_signal", host.wakes_by_signal());
                eprint!("{}", host.tails());
                lab.hold()?;
                still += 1;
                break 'all;
            }
            *rounds += 1;
        }
    }
    report.figure("seconds", begin.elapsed().as_secs());
    report.figure("rounds", rounds.iter().sum::<u64>());
    report.figure("guests_standing_still", still);
    report.figure("monitor", vmm.name());
    report.check(still == 0, "a guest stands still");
    Ok(())
}
