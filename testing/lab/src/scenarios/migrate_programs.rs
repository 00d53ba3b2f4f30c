//! Programs of four migrating guests: an MPI job over all of them, `ibv_rc_pingpong` and perftest between pairs. Each must make
//! progress between two migrations, and end with a correct result.

use super::migrate_many as many;
use super::migrate_talk::{self as talk, STEP_TIMEOUT};
use super::rdma_tools::{RSH, TCP};
use crate::progress;
use crate::rdma::{Member, NIC, Pair};
use crate::scenario::{Options, Report};
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};

/// Server and client of each ping-pong. Every guest takes part.
const PING_PONGS: [(usize, usize); 2] = [(1, 0), (3, 2)];
/// Server and client of each perftest. The pairs differ from the ping-pongs'.
const PERFTESTS: [(usize, usize); 2] = [(2, 0), (3, 1)];
/// Port of perftest's servers. The ping-pongs use their default port.
const PERFTEST_PORT: u16 = 18520;
const PERFTEST_LISTENS: &str = "ss -Hltn \"sport = :18520\" | grep -q .";
/// Duration of a ping-pong in seconds before it is restarted, from the rate of a short undisturbed run. With all programs in parallel
/// it takes several times as long.
const LASTS: u32 = 100;

/// Required rounds of the job between two migrations.
const ROUNDS: u64 = 50;
/// Required requests of a ping-pong's first guest.
const MESSAGES: u64 = 20;
/// Required lines of perftest; it prints one per three seconds of the guest's clock.
const LINES: u64 = 1;

/// Largest message of the job in bytes: covers eager messages and UCX's rendezvous.
const LARGEST: u32 = 65536;
/// The job ends when this file exists in the first guest.
const STOP: &str = "/run/mpi.stop";

/// Values of `--only`: programs, and a transport.
const NAMES: [&str; 4] = ["mpi", "pingpong", "perftest", "verbs"];

/// The selected programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    job: bool,
    ping_pong: bool,
    perftest: bool,
}

impl Wanted {
    /// Parses the selection; default: the MPI job. Fails on an unknown name.
    pub fn of(options: &Options) -> Result<Self> {
        if let Some(other) = options.only.iter().find(|name| !NAMES.contains(&name.as_str())) {
            bail!("There is no program {other:?}; there are {} (each with its own --only)", NAMES.join(", "));
        }
        let named = |name: &str| options.only.iter().any(|only| only == name);
        let [job, ping_pong, perftest, _] = NAMES.map(named);
        Ok(Wanted { job: job || !(ping_pong || perftest), ping_pong, perftest })
    }
}

/// A program in two guests or in all.
#[derive(Debug, Clone)]
enum Kind {
    Job,
    PingPong { messages: u32 },
    Perftest,
}

#[derive(Debug, Clone)]
struct Program {
    kind: Kind,
    /// Name of its files in the guests.
    name: String,
    server: usize,
    client: usize,
    /// Progress: rounds, lines or requests.
    done: u64,
    /// Number of starts.
    runs: u32,
}

/// Runs a function for each in parallel, and fails if one fails.
pub(super) fn all_at_once<T: Send, R: Send>(
    those: impl Iterator<Item = T>,
    each: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = those.map(|one| scope.spawn(move || each(one))).collect();
        threads.into_iter().map(many::joined).collect()
    })
}

/// All running programs.
pub(super) struct Programs(Vec<Program>);

impl Programs {
    /// Starts the selected programs, and waits until each makes progress.
    pub fn start(pair: &Pair<'_>, wanted: Wanted) -> Result<Self> {
        let mut all = Vec::new();
        let mut add = |kind, name: String, (server, client)| {
            all.push(Program { kind, name, server, client, done: 0, runs: 0 });
        };
        if wanted.ping_pong {
            for between in PING_PONGS {
                let messages = talk::lasting(pair.member(between.0)?, pair.member(between.1)?, LASTS)?;
                add(Kind::PingPong { messages }, format!("pingpong{}{}", between.0, between.1), between);
            }
        }
        if wanted.perftest {
            for between in PERFTESTS {
                add(Kind::Perftest, format!("perftest{}{}", between.0, between.1), between);
            }
        }
        if wanted.job {
            add(Kind::Job, "job".to_owned(), (0, 0));
        }
        let mut programs = Programs(all);
        for program in &mut programs.0 {
            program.start(pair)?;
        }
        programs.go_on(pair)?;
        Ok(programs)
    }

    /// Waits until each has made progress since the last call. They are polled in parallel, as most of the time is spent waiting for
    /// emulated hosts.
    pub fn go_on(&mut self, pair: &Pair<'_>) -> Result<()> {
        all_at_once(self.0.iter_mut(), |program| program.goes_on(pair)).map(drop)
    }

    /// Returns per guest how many of its programs have ended by themselves: that many of its queue pairs may be missing.
    pub fn gone(&self, pair: &Pair<'_>) -> Result<[usize; 4]> {
        let mut gone = [0; 4];
        let those = || self.0.iter().filter(|program| program.ends_by_itself());
        let ended = all_at_once(those(), |program| program.has_ended(pair))?;
        for (program, _) in those().zip(ended).filter(|(_, ended)| *ended) {
            gone[program.server] += 1;
            gone[program.client] += 1;
        }
        Ok(gone)
    }

    /// Restarts programs that have ended successfully, so that none is missing in the next migration. Returns whether there were any.
    pub fn begin_again(&mut self, pair: &Pair<'_>) -> Result<bool> {
        let those = self.0.iter_mut().filter(|program| program.ends_by_itself());
        let begun = all_at_once(those, |program| {
            if !program.has_ended(pair)? {
                return Ok(false);
            }
            if let Some(wrong) = program.wrong(pair)? {
                bail!("{}: {wrong}", program.name);
            }
            progress!("{} has ended well, and begins again", program.name);
            program.start(pair)?;
            Ok(true)
        })?;
        let again = begun.contains(&true);
        if again {
            self.go_on(pair)?;
        }
        Ok(again)
    }

    /// Ends all programs; returns the number of failures.
    pub fn end(&mut self, pair: &Pair<'_>, report: &mut Report) -> Result<u32> {
        let mut errors = 0;
        // Programs that end by themselves run faster after the others have ended.
        self.0.sort_by_key(Program::ends_by_itself);
        for program in &mut self.0 {
            let wrong = match program.kind {
                Kind::Perftest if program.has_ended(pair)? => Some(program.trouble(pair)),
                Kind::Perftest => {
                    // The client first: sending without a server would be an error.
                    let ends = [program.client, program.server].map(|guest| {
                        let (failed, said) = many::perftest_ends(pair.member(guest)?, &program.name)?;
                        Ok(failed.then_some(said))
                    });
                    let [client, server]: [Result<Option<String>>; 2] = ends;
                    client?.or(server?)
                }
                Kind::Job => {
                    pair.a.sh(&format!("touch {STOP}"))?;
                    program.wrong(pair)?
                }
                Kind::PingPong { .. } => program.wrong(pair)?,
            };
            errors += u32::from(wrong.is_some());
            report.check(wrong.is_none(), format!("{}: {}", program.name, wrong.unwrap_or_default()));
        }
        Ok(errors)
    }

    /// Returns each one's progress as text.
    pub fn said(&self) -> String {
        let said: Vec<String> = self
            .0
            .iter()
            .map(|program| {
                format!("{} {} {}, begun {} times", program.name, program.done, program.unit(), program.runs)
            })
            .collect();
        said.join("; ")
    }

    /// Adds the progress to the figures.
    pub fn figures(&self, report: &mut Report) {
        report.figure("said", self.said());
        for program in &self.0 {
            report.figure(&format!("{}_{}", program.name, program.unit()), program.done);
        }
    }
}

impl Program {
    fn ends_by_itself(&self) -> bool {
        matches!(self.kind, Kind::PingPong { .. })
    }

    fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Job => "rounds",
            Kind::PingPong { .. } => "requests",
            Kind::Perftest => "lines",
        }
    }

    fn step(&self) -> u64 {
        match self.kind {
            Kind::Job => ROUNDS,
            Kind::PingPong { .. } => MESSAGES,
            Kind::Perftest => LINES,
        }
    }

    fn ends<'p, 'l>(&self, pair: &'p Pair<'l>) -> Result<[&'p Member<'l>; 2]> {
        Ok([pair.member(self.server)?, pair.member(self.client)?])
    }

    fn start(&mut self, pair: &Pair<'_>) -> Result<()> {
        self.runs += 1;
        let [server, client] = self.ends(pair)?;
        match self.kind {
            Kind::Job => start_job(pair, &self.name)?,
            Kind::PingPong { messages } => {
                // With events: programs that poll in four guests starve emulated hosts.
                let run = |m, to| format!("stdbuf -oL {} -e", talk::pingpong(m, messages, to));
                talk::detach_as(server, &self.name, &run(server, None))?;
                talk::listens_as(server, &self.name, TCP)?;
                talk::detach_as(client, &self.name, &run(client, Some(&server.tcp)))?;
                // It has a new queue pair, whose counters start at zero.
                self.done = 0;
            }
            Kind::Perftest => {
                for m in [server, client] {
                    m.sh(many::QUARTER)?;
                }
                talk::detach_as(server, &self.name, &many::perftest(server, PERFTEST_PORT, ""))?;
                talk::listens_as(server, &self.name, PERFTEST_LISTENS)?;
                let command = many::perftest(client, PERFTEST_PORT, &server.tcp);
                talk::detach_as(client, &self.name, &command)?;
            }
        }
        Ok(())
    }

    /// Waits until it has made progress since the last call.
    fn goes_on(&mut self, pair: &Pair<'_>) -> Result<()> {
        let until = Instant::now() + STEP_TIMEOUT;
        let due = self.done + self.step();
        loop {
            none_panicked(pair)?;
            let done = self.counted(pair)?;
            let over = self.has_ended(pair)?;
            if done >= due || over && self.ends_by_itself() {
                self.done = done;
                return Ok(());
            }
            if over || Instant::now() > until {
                bail!("{} is at {done}, {due} are due: {}", self.name, self.trouble(pair));
            }
            std::thread::sleep(Duration::from_secs(2));
        }
    }

    /// Returns its progress.
    fn counted(&self, pair: &Pair<'_>) -> Result<u64> {
        let client = pair.member(self.client)?;
        match self.kind {
            Kind::Job => {
                let said = client.sh(&format!("grep ROUNDS /run/{}.out | tail -n 1 || true", self.name))?;
                Ok(said.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0))
            }
            Kind::Perftest => many::lines_of(client, &self.name),
            Kind::PingPong { .. } => {
                // It prints its result only at the end. Its queue pair's counters migrate with the guest.
                let said = client.sh(&format!("grep local /run/{}.out || true", self.name))?;
                let Some(qpn) = number_of(&said) else { return Ok(0) };
                let tree = super::rdma_fabric::tree(client.host())?;
                let all = tree["vms"][client.name]["nics"][NIC]["rdma"]["queue_pairs"].as_object();
                let mine = all.into_iter().flatten().find(|(_, qp)| qp["qpn"].as_u64() == Some(qpn));
                Ok(mine.and_then(|(_, qp)| qp["counters"]["requests"].as_u64()).unwrap_or(0))
            }
        }
    }

    fn has_ended(&self, pair: &Pair<'_>) -> Result<bool> {
        let ends = self.ends(pair)?;
        Ok(all_at_once(ends.into_iter(), |member| talk::works_as(member, &self.name))?.contains(&false))
    }

    /// Returns the failure of an ended program, if any.
    fn wrong(&self, pair: &Pair<'_>) -> Result<Option<String>> {
        let [server, client] = self.ends(pair)?;
        let until = Instant::now() + STEP_TIMEOUT * 2;
        while talk::works_as(client, &self.name)? && Instant::now() < until {
            // The peer of a restarted guest may wait forever.
            none_panicked(pair)?;
            std::thread::sleep(Duration::from_secs(5));
        }
        let (code, said) = talk::ended_as(client, &self.name, Duration::ZERO)?;
        let right = match self.kind {
            Kind::Job => code == 0 && said.contains("mismatches=0"),
            _ => {
                let (other, more) = talk::ended_as(server, &self.name, STEP_TIMEOUT)?;
                let texts = [&said, &more];
                let bad = |text: &&String| text.contains("invalid data") || text.contains("Failed");
                code == 0 && other == 0 && !texts.iter().any(bad)
            }
        };
        if right {
            progress!("{}: {}", self.name, said.trim().lines().last().unwrap_or_default());
        }
        Ok((!right).then(|| format!("ended with status {code}: {said}")))
    }

    /// Returns diagnostics of a program without progress. A failed query doesn't hide the original failure.
    fn trouble(&self, pair: &Pair<'_>) -> String {
        let look = format!(
            "tail -n 12 /run/{}.out; ps -e -o pid,stat,wchan:20,args | grep -v '\\]$' | tail -n 15; ss -tnp | head -n 20",
            self.name
        );
        let all = self.ends(pair).and_then(|[server, client]| Ok([client.sh(&look)?, server.sh(&look)?]));
        all.map_or_else(|error| format!("(it can't be looked at: {error:#})"), |all| all.join("\n---\n"))
    }
}

/// Fails with the guest kernel's output if one panicked.
fn none_panicked(pair: &Pair<'_>) -> Result<()> {
    for member in [&pair.a, &pair.b].into_iter().chain(pair.more()) {
        if let Some(said) = member.guest.panicked() {
            bail!("The kernel of guest {} on {} had a panic:\n{said}", member.name, member.host().name());
        }
    }
    Ok(())
}

/// Returns the queue pair's number in `local address:  LID 0x0000, QPN 0x00000c, PSN 0x…`.
fn number_of(said: &str) -> Option<u64> {
    let rest = said.split("QPN 0x").nth(1)?;
    let digits = rest.split(|c: char| !c.is_ascii_hexdigit()).next()?;
    u64::from_str_radix(digits, 16).ok()
}

/// Returns the job's command, for a file in the first guest: a rank in each guest.
fn job(a: &Member<'_>) -> String {
    format!(
        "{RSH}rm -f {STOP}; exec mpirun.openmpi --allow-run-as-root -H a:1,b:1,c:1,d:1 -np 4 --map-by node --mca plm_rsh_agent /tmp/rsh \
         --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include net0 --mca pml ucx --mca osc ucx --mca btl self --mca coll ^hcoll --mca mpi_yield_when_idle 1 \
         -x UCX_NET_DEVICES={}:1 -x UCX_IB_GID_INDEX={} -x UCX_TLS=rc_v,self --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any \
         -x UCX_UD_VERBS_ETH_DGID_CHECK=n mpi-steady {STOP} {LARGEST}\n",
        a.port.device, a.port.gid
    )
}

fn start_job(pair: &Pair<'_>, name: &str) -> Result<()> {
    let others = || pair.more().iter().chain([&pair.b]);
    for member in others() {
        member.sh(&format!(
            "{RSH}setsid socat TCP-LISTEN:514,fork,reuseaddr EXEC:bash < /dev/null > /dev/null 2>&1 & sleep 1"
        ))?;
    }
    for other in others().map(|member| member.name) {
        // mpirun may wait without limit for an unreachable host.
        let said =
            pair.a.sh(&format!("{RSH}timeout 60 /tmp/rsh {other} echo reached $(hostname) 2>&1 || true"))?;
        if !said.contains("reached") {
            bail!("Guest a can't start programs in guest {other} by its virtio-net address: {said}");
        }
    }
    pair.a.sh(&format!("cat > /run/mpi.sh <<'E'\n{}E\n", job(&pair.a)))?;
    talk::detach_as(&pair.a, name, "sh /run/mpi.sh").context("Can't start the MPI job")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn programs_are_asked_for_by_name() {
        let of = |parts: &[&str]| {
            let only = parts.iter().map(ToString::to_string).collect();
            Wanted::of(&Options { only, ..Options::default() })
        };
        assert!(of(&["pingpong,perftest"]).is_err());
        let of = |parts: &[&str]| of(parts).unwrap();
        let job = Wanted { job: true, ping_pong: false, perftest: false };
        assert_eq!(of(&[]), job);
        assert_eq!(of(&["verbs"]), job);
        assert_eq!(of(&["verbs", "pingpong"]), Wanted { job: false, ping_pong: true, ..job });
        assert_eq!(of(&["mpi", "perftest"]), Wanted { perftest: true, ..job });
    }

    /// Every guest takes part in a ping-pong and a perftest.
    #[test]
    fn every_guest_is_in_each() {
        for all in [PING_PONGS, PERFTESTS] {
            let guests: BTreeSet<usize> = all.into_iter().flat_map(|(a, b)| [a, b]).collect();
            assert_eq!(guests.len(), 4);
        }
    }

    #[test]
    fn numbers_of_queue_pairs_are_read() {
        let said = "  local address:  LID 0x0000, QPN 0x00000c, PSN 0x8b12f5, GID ::ffff:10.80.0.1";
        assert_eq!(number_of(said), Some(12));
        assert_eq!(number_of("nothing"), None);
    }
}
