//! The lab's command line.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use lab::topology::Topology;
use lab::{Lab, scenario};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// The virtual lab: emulated hosts that run Causeway on real KVM.
#[derive(Debug, Parser)]
#[command(name = "lab", subcommand_required = false, arg_required_else_help = true)]
struct Cli {
    /// List the scenarios.
    #[arg(long)]
    list: bool,
    #[command(subcommand)]
    command: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Open a host interactively.
    Shell {
        /// With the hosts of this scenario.
        #[arg(long)]
        scenario: Option<String>,
        /// Number of one of its hosts, beside its guests. Without it, a scenario with its own guests opens the first of them.
        #[arg(long)]
        host: Option<usize>,
        /// What guests do RDMA through: pvrdma (default) or rxe.
        #[arg(long)]
        device: Option<String>,
        /// Only the hosts for these parts of the scenario; may be given again.
        #[arg(long)]
        only: Vec<String>,
        /// Files to put into the hosts' /share/bin.
        #[arg(long)]
        bin: Vec<PathBuf>,
    },
    /// Boot one host, run a command in it, print its output, end with its status.
    Try {
        /// The command, for a shell.
        #[arg(long)]
        cmd: String,
        /// Files to put into /share/bin, besides those in target/lab-bin and the monitor.
        #[arg(long)]
        bin: Vec<PathBuf>,
        /// Seconds until it is given up.
        #[arg(long, default_value_t = 300)]
        timeout: u64,
        /// Where to copy what the command leaves in /share/out.
        #[arg(long)]
        out: Option<PathBuf>,
        /// CPUs of the host.
        #[arg(long, default_value_t = 2)]
        cpus: u32,
        /// Memory of the host in MiB.
        #[arg(long, default_value_t = 3072)]
        memory: u32,
    },
    /// Build the images that are missing or outdated.
    Images,
    /// Show what sparse and checkpatch find in guest/mmnet; fails when that is something.
    ModuleLint,
    /// What runs inside a host.
    #[command(hide = true)]
    Agent {
        /// The port to serve.
        port: PathBuf,
    },
    /// Run a shell script in a guest of this host (inside a host).
    #[command(hide = true)]
    In {
        /// The guest's vsock socket, or its name.
        guest: String,
        /// The script; with none, a shell in this terminal.
        script: Option<String>,
        /// Seconds to wait for a guest that is still booting.
        #[arg(long, default_value_t = 10)]
        wait: u64,
    },
    /// Count write faults at page tables of a guest (inside a host).
    #[command(hide = true)]
    WalksProbe,
    /// Attack a card by DMA, or use it as an honest driver does (inside a guest or a host).
    #[command(hide = true)]
    Attack {
        /// The card: rtl8139 or e1000.
        card: String,
        /// The attack's number; without it, a frame is sent and received.
        number: Option<usize>,
        /// The BAR to go through.
        #[arg(long, default_value_t = 0)]
        bar: u8,
        /// The card's PCI address [default: the only card of the kind]
        #[arg(long)]
        address: Option<String>,
        /// How long to wait for frames, in milliseconds.
        #[arg(long, default_value_t = 3000)]
        hold: u64,
        /// What a received frame holds, to be looked for in the end.
        #[arg(long)]
        marker: Option<String>,
    },
    /// Ask a card for what its model refuses, beside the driver that runs it (inside a guest).
    #[command(hide = true)]
    Inject {
        /// The card: rtl8139, e1000 or ne2000.
        card: String,
        /// The violation's number.
        number: usize,
        /// The BAR to go through.
        #[arg(long, default_value_t = 0)]
        bar: u8,
    },
    /// Fill a device with records (inside a guest).
    #[command(hide = true)]
    RecordsWrite {
        /// The device.
        device: PathBuf,
        /// The number of the run.
        run: u64,
    },
    /// Look for acknowledged records in an image (inside a host).
    #[command(hide = true)]
    RecordsCheck {
        /// The image.
        image: PathBuf,
        /// The number of the run.
        run: u64,
        /// The last record that was acknowledged.
        last: u64,
    },
    /// Receive streams of checked records (inside a guest).
    #[command(hide = true)]
    TrafficReceive {
        /// The TCP port.
        port: u16,
    },
    /// Send a stream of checked records for ever (inside a guest).
    #[command(hide = true)]
    TrafficSend {
        /// To whom: address and port.
        to: std::net::SocketAddr,
        /// The file in which to say what was done.
        state: PathBuf,
    },
    /// Write and read back a block device for ever (inside a guest).
    #[command(hide = true)]
    TrafficDisk {
        /// The device.
        device: PathBuf,
        /// The file in which to say what was done.
        state: PathBuf,
    },
    /// Memory and KVM counters of a monitor (inside a host).
    #[command(hide = true)]
    Measure {
        /// The monitor's process.
        pid: u32,
        /// Its guest's RAM in MiB.
        ram_mib: u64,
    },
    /// Run litmus tests in a payload VM on this machine's KVM, and compare what comes out with x86-TSO.
    DsmLitmus {
        /// Nodes that the VM spans.
        #[arg(long, default_value_t = 1)]
        nodes: u32,
        /// How often each test runs.
        #[arg(long, default_value_t = 1_000_000)]
        iterations: u64,
        /// How often tests with locked accesses across pages run, which some hosts hold up for milliseconds each [default: a thousandth of --iterations]
        #[arg(long)]
        split_lock_iterations: Option<u64>,
        /// vCPUs of all nodes together [default: one per thread, and with several nodes one more than nodes at least]
        #[arg(long)]
        cpus: Option<u32>,
        /// When a test's threads meet: before each run of it (each), before a round of many (round), in turn (mixed), or by their clocks (clock) [default: what suits processors and nodes]
        #[arg(long, value_parser = ["each", "round", "mixed", "clock"])]
        meeting: Option<String>,
        /// Nanoseconds from one run of a test to the next where threads meet by their clocks
        #[arg(long)]
        interval: Option<u64>,
        /// Runs of a test in a round
        #[arg(long)]
        round: Option<u64>,
        /// Only tests whose names (with their placements, as in `SB (pages)`) contain this, or are this; may be given again.
        #[arg(long = "only")]
        only: Vec<String>,
        /// Name the tests, with what the model says of them, and run nothing.
        #[arg(long)]
        list: bool,
        /// Further arguments for `causeway run`, such as `--coherence=invalidate`; may be given again.
        #[arg(long = "run-argument", allow_hyphen_values = true)]
        run_arguments: Vec<String>,
        /// Keep each test's result in this file as soon as it is there, and don't run those again whose results, of the same monitor and under the same conditions, are there
        #[arg(long)]
        results: Option<PathBuf>,
    },
    /// Kill, stop and cut off nodes of payload VMs on this machine's KVM at random moments, and restart them from checkpoints.
    DsmFaults {
        /// How many faults.
        #[arg(long, default_value_t = 200)]
        count: u32,
        /// Number of the first fault, to repeat or continue a run.
        #[arg(long, default_value_t = 0)]
        first: u32,
        /// Where randomness begins.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Most nodes of a VM.
        #[arg(long, default_value_t = 4)]
        nodes: u8,
    },
    /// Run the scenario of that name.
    #[command(external_subcommand)]
    Scenario(Vec<String>),
}

/// A scenario and its options.
#[derive(Debug, Parser)]
#[command(name = "lab", no_binary_name = true)]
struct ScenarioCli {
    /// The scenario.
    name: String,
    #[command(flatten)]
    options: OptionArgs,
}

#[derive(Debug, Args)]
struct OptionArgs {
    /// How many times (boots, kills…).
    #[arg(long)]
    count: Option<u32>,
    /// How long, in seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Where randomness begins, in scenarios that have some.
    #[arg(long)]
    seed: Option<u64>,
    /// Only this kernel; may be given again.
    #[arg(long = "kernel")]
    kernels: Vec<String>,
    /// Only this number of vCPUs; may be given again.
    #[arg(long = "cpus")]
    cpus: Vec<u32>,
    /// Only guests that end in this way: poweroff, reboot or button; may be given again.
    #[arg(long = "end")]
    ends: Vec<String>,
    /// Monitor that runs the guests, to test the lab itself: causeway, microvm or q35.
    #[arg(long)]
    monitor: Option<String>,
    /// Where guests' interrupt controllers are, in `boot`: kernel (default) or monitor.
    #[arg(long)]
    interrupts: Option<String>,
    /// What guests do RDMA through: pvrdma (default), or rxe over virtio-net to compare with.
    #[arg(long)]
    device: Option<String>,
    /// Only the parts of a scenario whose names contain this; may be given again.
    #[arg(long = "only", allow_hyphen_values = true)]
    only: Vec<String>,
}

impl From<OptionArgs> for scenario::Options {
    fn from(a: OptionArgs) -> Self {
        scenario::Options {
            count: a.count,
            seconds: a.seconds,
            seed: a.seed,
            kernels: a.kernels,
            cpus: a.cpus,
            ends: a.ends,
            monitor: a.monitor,
            interrupts: a.interrupts,
            device: a.device,
            only: a.only,
        }
    }
}

fn main() -> ExitCode {
    match real_main(Cli::parse()) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("lab: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn status(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn install(lab: &Lab, files: &[PathBuf]) -> Result<()> {
    if lab::paths::causeway().is_ok() {
        lab.install_causeway()?;
    }
    for file in files {
        for host in lab.hosts() {
            host.install(file)?;
        }
    }
    Ok(())
}

fn real_main(cli: Cli) -> Result<ExitCode> {
    if cli.list {
        for s in scenario::all() {
            println!("{:16} {}", s.name, s.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    match cli.command {
        None => bail!("Say what to do: a scenario's name, `shell`, `try`, `images` or `--list`"),
        Some(Verb::Agent { port }) => lab::serve_agent(&port).map(|()| ExitCode::SUCCESS),
        Some(Verb::Images) => {
            lab::image::Images::ready(&lab::recipe::Artifact::ALL).map(|_| ExitCode::SUCCESS)
        }
        Some(Verb::WalksProbe) => lab::walks_probe::run().map(|()| ExitCode::SUCCESS),
        Some(Verb::ModuleLint) => lab::neighbours_image::lint().map(|()| ExitCode::SUCCESS),
        Some(Verb::In { guest, script, wait }) => {
            lab::guest_channel::run(&guest, script.as_deref(), Duration::from_secs(wait)).map(status)
        }
        Some(Verb::Attack { card, number, bar, address, hold, marker }) => {
            let request = lab::dma_attack::Request {
                card,
                number,
                bar,
                address,
                hold: Duration::from_millis(hold),
                marker,
            };
            lab::dma_attack::run(&request).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::Inject { card, number, bar }) => {
            lab::dma_attack::beside::inject(&card, number, bar).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::RecordsWrite { device, run }) => {
            lab::records::write(&device, run).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::RecordsCheck { image, run, last }) => {
            lab::records::check(&image, run, last).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::TrafficReceive { port }) => lab::traffic::receive(port).map(|()| ExitCode::SUCCESS),
        Some(Verb::TrafficSend { to, state }) => lab::traffic::send(to, &state).map(|()| ExitCode::SUCCESS),
        Some(Verb::TrafficDisk { device, state }) => {
            lab::traffic::disk(&device, &state).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::Measure { pid, ram_mib }) => lab::measure::print(pid, ram_mib).map(|()| ExitCode::SUCCESS),
        Some(Verb::DsmLitmus {
            nodes,
            iterations,
            split_lock_iterations,
            cpus,
            meeting,
            interval,
            round,
            only,
            list,
            run_arguments,
            results,
        }) => {
            let options = lab::litmus_run::Options {
                nodes,
                iterations,
                split_lock_iterations,
                cpus,
                meeting,
                interval,
                round,
                only,
                run_arguments,
                results,
            };
            if list { lab::litmus_run::list(&options) } else { lab::litmus_run::run(&options) }
                .map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::DsmFaults { count, first, seed, nodes }) => {
            let options = lab::dsm_faults::Options { count, first, seed, nodes };
            lab::dsm_faults::run(&options).map(|()| ExitCode::SUCCESS)
        }
        Some(Verb::Scenario(words)) => {
            let cli = match ScenarioCli::try_parse_from(words) {
                Ok(cli) => cli,
                Err(e) => e.exit(),
            };
            scenario::run(scenario::find(&cli.name)?, &cli.options.into())?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Verb::Shell { scenario, host, device, only, bin }) => {
            lab::need_terminal()?;
            let options = scenario::Options { device, only, ..scenario::Options::default() };
            options.check()?;
            let scenario = scenario.as_deref().map(scenario::find).transpose()?;
            let topology = scenario.map_or_else(Topology::single, |s| (s.topology)(&options));
            let lab = Lab::boot(&topology)?;
            install(&lab, &bin)?;
            // Before anything boots in a host that isn't there.
            lab.host(host.unwrap_or(0))?;
            match scenario.and_then(|s| s.prompt) {
                Some(prompt) => prompt(&lab, &options, host).map(status),
                None => lab::interactive(lab.host(host.unwrap_or(0))?).map(status),
            }
        }
        Some(Verb::Try { cmd, bin, timeout, out, cpus, memory }) => {
            let host = lab::topology::HostSpec::new("host").cpus(cpus).memory(memory);
            let lab = Lab::boot(&Topology::new().host(host))?;
            install(&lab, &bin)?;
            let host = lab.host(0)?;
            let code = follow(host, &cmd, Duration::from_secs(timeout));
            if let Some(out) = out {
                copy_out(&host.share().join("out"), &out)?;
            }
            code.map(status)
        }
    }
}

fn follow(host: &lab::Host, script: &str, timeout: Duration) -> Result<i32> {
    let session = host.start(script, None, Some(lab::print_sink()))?;
    match session.wait(timeout)? {
        Some(code) => Ok(code),
        None => {
            eprint!("{}", host.tails());
            bail!("The command didn't end within {} s", timeout.as_secs())
        }
    }
}

fn copy_out(from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let status = std::process::Command::new("cp")
        .arg("-a")
        .arg(from.join("."))
        .arg(to)
        .status()
        .context("Can't run cp")?;
    std::io::stdout().flush()?;
    if !status.success() {
        bail!("Can't copy the results to {}", to.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_take_their_options() {
        let cli =
            Cli::try_parse_from(["lab", "boot", "--count", "50", "--cpus", "1", "--cpus", "4"]).unwrap();
        let Some(Verb::Scenario(words)) = cli.command else { panic!("not a scenario") };
        let s = ScenarioCli::try_parse_from(words).unwrap();
        assert_eq!((s.name.as_str(), s.options.count, s.options.cpus), ("boot", Some(50), vec![1, 4]));
        assert!(ScenarioCli::try_parse_from(["boot", "--nonsense"]).is_err());
        assert!(Cli::try_parse_from(["lab", "--list"]).unwrap().list);
    }
}
