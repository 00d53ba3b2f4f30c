//! Executes the commands of the pages of `docs/tutorials`. A command that fails, or an expected line that isn't printed, is a failed check.
//!
//! ```text
//!  page ── blocks ──▶ shell of a host (bash, one per page) ──▶ causeway run … &
//!            │                                                    │ console's socket
//!            └──────▶ terminal of a guest: the page's own socat ──┘
//! ```
//! [`crate::tutorial`] has the format of the pages. Each host has the files in `/root` that the first page requires.

use crate::channel::Session;
use crate::host::Host;
use crate::lab::Lab;
use crate::neighbours_image::module;
use crate::progress;
use crate::recipe::RDMA_KERNEL;
use crate::scenario::{Options, Report, Scenario};
use crate::topology::{HostSpec, Topology};
use crate::transcript::Waited;
use crate::tutorial::{self, Block, HOSTS, Place};
use crate::unfinished::Unfinished;
use crate::{guest_channel, paths, shell};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "tutorials",
    about: "the pages of docs/tutorials, followed command by command in hosts and guests (--only PAGE)",
    topology,
    run,
    prompt: Some(prompt),
};

/// A page, and the number of its hosts.
struct Tutorial {
    page: &'static str,
    hosts: usize,
    needs: Needs,
}

/// Files that a page requires on its hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Kernel, initrd and disk image for guests.
    Guests,
    /// The modules for neighbours as well.
    Neighbours,
    /// A kernel that nodes of a VM run on, and a payload program.
    Nodes,
}

const TUTORIALS: [Tutorial; 5] = [
    Tutorial { page: "first-vm", hosts: 1, needs: Needs::Guests },
    Tutorial { page: "rdma-between-two-guests", hosts: 1, needs: Needs::Guests },
    Tutorial { page: "migrate-with-open-connections", hosts: 2, needs: Needs::Guests },
    Tutorial { page: "storage-appliance", hosts: 1, needs: Needs::Neighbours },
    Tutorial { page: "program-over-two-nodes", hosts: 2, needs: Needs::Nodes },
];

/// The page whose blocks `prepare` are for all pages.
const PREPARED_BY: &str = "first-vm";
/// The lab's names of the hosts that nodes run on.
const NODE_HOSTS: [&str; 2] = ["node", "node2"];
/// Modules that a guest with neighbours loads.
const MODULES: [&str; 2] = ["cw_neigh", "mmblk"];
const PAYLOAD: &str = "jacobi";
/// Time-out of a block, in which an emulated host boots guests, migrates one, or computes.
const BLOCK_TIMEOUT: Duration = Duration::from_secs(600);
/// Time-out of a guest's boot up to its prompt.
const PROMPT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time-out of lines that a program in the background prints after the block that started it.
const LATER_LINES_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two attempts to get a response of a guest's shell.
const PROMPT_INTERVAL: Duration = Duration::from_secs(3);
/// Ends a block that is handed to a shell.
const END_OF_BLOCK: &str = "END_OF_TUTORIAL_BLOCK";
/// Part of all lines that this scenario prints in a shell.
const OWN_LINES: &str = "TUTORIAL-";
/// Begins the line by which a shell reports a block's end; followed by the block's number and status.
const DONE: &str = "TUTORIAL-DONE";
/// Printed by a guest's shell once its echo is off.
const QUIET: &str = "TUTORIAL-QUIET";
/// Printed by a guest's shell once it executes commands.
const READY: &str = "TUTORIAL-READY";

/// Wrapper of `causeway` on an emulated host, which is many times slower than a reader's. It raises time-outs, and disables parts of the
/// guests' kernels that are slow on an emulated processor.
const SLOW_CAUSEWAY: &str = r#"#!/bin/sh
real=/run/programs/causeway
case "$1 $2" in
'host '*) shift; exec $real host --doorbell-window 500 --neighbour-patience 20000 "$@" ;;
'cluster serve') shift 2; exec $real cluster serve --lease 30 --switch-limit 120000 "$@" ;;
'migrate '*) shift; exec $real migrate --downtime 3000 "$@" ;;
'run '*)
    left=$# last=
    while [ $left -gt 0 ]; do
        word=$1
        shift
        [ "$last" != --cmdline ] || word="$word mitigations=off tsc=reliable no_timer_check random.trust_cpu=on nopti cryptomgr.notests apparmor=0 init_on_alloc=0"
        set -- "$@" "$word"
        last=$word
        left=$((left - 1))
    done ;;
esac
exec $real "$@"
"#;

fn wanted(options: &Options) -> impl Iterator<Item = &'static Tutorial> + '_ {
    TUTORIALS.iter().filter(|tutorial| options.wants(tutorial.page))
}

fn topology(options: &Options) -> Topology {
    let most = |nodes: bool| {
        wanted(options).filter(|t| (t.needs == Needs::Nodes) == nodes).map(|t| t.hosts).max().unwrap_or(0)
    };
    let mut topology = Topology::new();
    for name in HOSTS.iter().take(most(false)) {
        let host = HostSpec::new(name).cpus(4).memory(4096).rdma();
        topology = topology.host(if want_neighbours(options) { host.neighbours() } else { host });
    }
    for name in NODE_HOSTS.iter().take(most(true)) {
        topology = topology.host(HostSpec::new(name).newer());
    }
    if most(false) > 1 {
        topology = topology.link(HOSTS[0], HOSTS[1]);
    }
    if most(true) > 1 {
        topology = topology.link(NODE_HOSTS[0], NODE_HOSTS[1]);
    }
    topology
}

fn want_neighbours(options: &Options) -> bool {
    wanted(options).any(|tutorial| tutorial.needs == Needs::Neighbours)
}

/// A page's text.
fn page(name: &str) -> Result<String> {
    let path = paths::workspace().join("docs/tutorials").join(format!("{name}.md"));
    fs::read_to_string(&path).with_context(|| format!("Can't read {}", path.display()))
}

/// Parses a page of `docs/tutorials`.
fn blocks(name: &str) -> Result<Vec<Block>> {
    tutorial::blocks(&page(name)?).with_context(|| format!("docs/tutorials/{name}.md"))
}

/// Copies to a host the files that the first page requires. A host's number is its index in its page's hosts.
fn furnish(host: &Host, number: usize, nodes: bool, neighbours: bool) -> Result<()> {
    let script = format!(
        "set -e; mkdir -p /usr/local/bin /run/causeway; mv /share/bin/causeway /run/programs/causeway; cd /root\n\
         cat > /usr/local/bin/causeway <<'E'\n{SLOW_CAUSEWAY}E\n\
         printf '#!/bin/sh\\ncase $1 in host) a=1;; host2) a=2;; esac; shift\\nexec /share/.lab/lab in tcp:10.77.0.$a:{agent} \"$@\"\\n' > /usr/local/bin/on\n\
         chmod +x /usr/local/bin/causeway /usr/local/bin/on\n\
         ln -s /lab/{RDMA_KERNEL}/vmlinux /lab/{RDMA_KERNEL}/initrd .; ln -s /dev/vdd root.img\n\
         for link in /sys/class/net/x*; do [ -e $link ] || continue; name=${{link##*/}}; ip link set $name down; ip addr flush dev $name\n\
         [ $name = x0 ] || ip link set $name name x0; ip addr add 10.77.0.{address}/24 dev x0; ip link set x0 up; done",
        agent = guest_channel::PORT,
        address = number + 1,
    );
    host.sh(&script)?;
    if nodes {
        let program = paths::payload_programs()?.join(PAYLOAD);
        return put(
            host,
            PAYLOAD,
            &fs::read(&program).with_context(|| format!("Can't read {}", program.display()))?,
        );
    }
    let modules = if neighbours { &MODULES[..] } else { &[] };
    modules.iter().try_for_each(|name| put(host, &format!("{name}.ko"), &module(RDMA_KERNEL, name)?))
}

/// Copies a file to `/root`, the folder in which a reader works, and makes it executable.
fn put(host: &Host, name: &str, bytes: &[u8]) -> Result<()> {
    let path = host.share().join(name);
    fs::write(&path, bytes).with_context(|| format!("Can't write {}", path.display()))?;
    host.sh(&format!("mv /share/{name} /root/ && chmod +x /root/{name}")).map(drop)
}

/// The running hosts, each with its number on a page, and whether it runs nodes.
fn hosts(lab: &Lab) -> impl Iterator<Item = (&Host, usize, bool)> {
    lab.hosts().iter().filter_map(|host| {
        let number = |names: [&str; 2]| names.iter().position(|name| *name == host.name());
        number(HOSTS)
            .map(|number| (host, number, false))
            .or_else(|| number(NODE_HOSTS).map(|number| (host, number, true)))
    })
}

/// A shell that executes a page's commands.
struct Shell {
    name: String,
    session: Session,
    /// Number of blocks that were typed.
    count: usize,
}

impl Shell {
    /// Starts a shell on a host.
    fn of_host(host: &Host) -> Result<Self> {
        let session = host.spawn(
            &format!("shell of {}", host.name()),
            &format!("{ENVIRONMENT} cd /root; exec bash --norc 2>&1"),
        )?;
        Ok(Shell { name: host.name().to_owned(), session, count: 0 })
    }

    /// Opens a guest's terminal by `command`, and waits until its shell responds.
    fn of_guest(host: &Host, guest: &str, command: &str) -> Result<Self> {
        let session = host.start(&format!("{ENVIRONMENT} cd /root; {command}"), Some((24, 200)), None)?;
        let began = Instant::now();
        loop {
            // The terminal echoes the input, which must not look like the response.
            session.input(format!("echo {READY}''\n").as_bytes())?;
            std::thread::sleep(PROMPT_INTERVAL);
            if session.out.lines_from(0).iter().any(|line| line.trim_end().ends_with(READY)) {
                break;
            }
            if let Some(status) = session.try_wait() {
                bail!("The terminal ended with status {status}: {}", session.out.tail(10));
            }
            if began.elapsed() > PROMPT_TIMEOUT {
                session.suspect();
                let text = format!("Guest {guest} gives no prompt; {}", session.out.last_words());
                return Err(Unfinished::expired(PROMPT_TIMEOUT, text).into());
            }
        }
        session.input(b"set +o emacs; stty -echo; PS1=; PS2=; echo TUTORIAL-''QUIET\n")?;
        match session.wait_for(QUIET, 0, PROMPT_TIMEOUT) {
            Waited::Line(..) => {}
            _ => bail!("Guest {guest}'s shell doesn't stop its echo: {}", session.out.tail(10)),
        }
        Ok(Shell { name: guest.to_owned(), session, count: 0 })
    }

    /// Types a block, and waits for its end. Returns the status of the last command that failed, or 0, and the printed lines.
    fn type_in(&mut self, block: &Block) -> Result<(i32, Vec<String>)> {
        self.count += 1;
        let from = self.session.out.position();
        self.session.input(handed_over(&block.commands, self.count).as_bytes())?;
        let done = format!("{DONE} {} ", self.count);
        let line = match self.session.wait_for(&done, from, BLOCK_TIMEOUT) {
            Waited::Line(line, _) => line,
            Waited::Ended => bail!("The shell of {} ended: {}", self.name, self.session.out.tail(20)),
            Waited::Timeout => {
                self.session.suspect();
                let text = format!("It came to no end: {}", self.session.out.tail(20));
                return Err(Unfinished::expired(BLOCK_TIMEOUT, text).into());
            }
        };
        let status = line.split(&done).nth(1).and_then(|status| status.trim().parse().ok());
        let status = status.with_context(|| format!("{:?} has no status", line))?;
        let began = Instant::now();
        loop {
            let printed: Vec<String> = self
                .session
                .out
                .lines_from(from)
                .into_iter()
                .filter(|line| !line.contains(OWN_LINES))
                // Text before a carriage return is the terminal's.
                .map(|line| line.trim_end().rsplit('\r').next().unwrap_or_default().to_owned())
                .collect();
            let complete = tutorial::missing(&block.prints, &printed).is_none();
            if complete || status != 0 || began.elapsed() > LATER_LINES_TIMEOUT {
                return Ok((status, printed));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Start of each shell of a host: PATH has the wrapper before the program.
const ENVIRONMENT: &str = "export PATH=/usr/local/bin:$PATH HOME=/root;";

/// Input that makes a shell execute a block as a whole, and print the status of the last command that failed, or 0.
fn handed_over(commands: &str, number: usize) -> String {
    format!(
        "failed=0; trap 'failed=$?' ERR\n\
         eval \"$(cat <<'{END_OF_BLOCK}'\n{commands}\n{END_OF_BLOCK}\n)\"$'\\n' < /dev/null\n\
         trap - ERR; echo; echo {OWN_LINES}''DONE {number} $failed\n"
    )
}

/// Executes a page. Returns its numbers of blocks and of expected lines.
fn follow(lab: &Lab, tutorial: &Tutorial, report: &mut Report) -> Result<(usize, usize)> {
    let named = |name: &str| {
        hosts(lab)
            .find(|(_, number, nodes)| HOSTS[*number] == name && *nodes == (tutorial.needs == Needs::Nodes))
            .map(|(host, ..)| host)
            .with_context(|| format!("There is no host {name:?} for this page"))
    };
    let mut shells: BTreeMap<String, Shell> = BTreeMap::new();
    for name in HOSTS.iter().take(tutorial.hosts) {
        shells.insert((*name).to_owned(), Shell::of_host(named(name)?)?);
    }
    let (mut count, mut lines) = (0, 0);
    for block in blocks(tutorial.page)? {
        let step = |name: &str| {
            format!(
                "{}.md, line {}, in {name}: {:?}",
                tutorial.page,
                block.line,
                block.commands.lines().next().unwrap_or_default()
            )
        };
        let names = match &block.place {
            Place::Prepare => continue,
            Place::Terminal { host, guest } => {
                progress!("{}", step(host));
                let terminal =
                    Shell::of_guest(named(host)?, guest, &block.commands).with_context(|| step(host))?;
                shells.insert(guest.clone(), terminal);
                count += 1;
                continue;
            }
            Place::In(names) => names,
        };
        for name in names {
            progress!("{}", step(name));
            let shell = shells.get_mut(name).with_context(|| step(name))?;
            let (status, printed) = shell.type_in(&block).with_context(|| step(name))?;
            let missing = tutorial::missing(&block.prints, &printed);
            for line in &printed {
                progress!("    {line}");
            }
            report.check(status == 0, format!("{}: a command ended with status {status}", step(name)));
            if let Some(missing) = missing {
                report.check(false, format!("{}: it doesn't print {missing:?}", step(name)));
            }
            if status != 0 || missing.is_some() {
                bail!("{} isn't followed further", step(name));
            }
            count += 1;
            lines += block.prints.len();
        }
    }
    Ok((count, lines))
}

/// Copies the monitor and the pages' files to all hosts.
fn furnish_all(lab: &Lab, options: &Options) -> Result<()> {
    lab.install_causeway_in_memory()?;
    let neighbours = want_neighbours(options);
    hosts(lab).try_for_each(|(host, number, nodes)| furnish(host, number, nodes, neighbours))
}

fn run(lab: &Lab, options: &Options, report: &mut Report) -> Result<()> {
    furnish_all(lab, options)?;
    let prepare: Vec<Block> =
        blocks(PREPARED_BY)?.into_iter().filter(|block| block.place == Place::Prepare).collect();
    for (host, ..) in hosts(lab) {
        let mut shell = Shell::of_host(host)?;
        for block in &prepare {
            let (status, printed) = shell.type_in(block)?;
            if status != 0 || tutorial::missing(&block.prints, &printed).is_some() {
                bail!("{PREPARED_BY}.md, line {} on {}: {printed:?}", block.line, host.name());
            }
        }
    }
    for tutorial in wanted(options) {
        let (blocks, lines) = follow(lab, tutorial, report).with_context(|| tutorial.page)?;
        progress!("passed  {}: {blocks} blocks, {lines} lines of output", tutorial.page);
        report.figure(tutorial.page, serde_json::json!({ "blocks": blocks, "lines": lines }));
    }
    Ok(())
}

/// Opens the shell of `lab shell --scenario tutorials`: a host with all files of the pages. There `on host2` opens the other host's.
fn prompt(lab: &Lab, options: &Options, number: Option<usize>) -> Result<i32> {
    furnish_all(lab, options)?;
    let serve = format!(
        "{ENVIRONMENT} cd /root; exec socat TCP-LISTEN:{},fork,reuseaddr EXEC:'/share/.lab/lab agent -'",
        guest_channel::PORT
    );
    let _agents: Vec<Session> =
        lab.hosts().iter().map(|host| host.spawn("agent", &serve)).collect::<Result<_>>()?;
    let intro = "\r\nThe folder /root has what docs/tutorials need. Where there are two hosts, `on host2` opens a shell on the other.\r\n\
                 Leave with `exit` or Ctrl-]; everything is gone then.\r\n\r\n";
    shell::prompt(lab.host(number.unwrap_or(0))?, intro, &format!("{ENVIRONMENT} cd /root; exec bash"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::process::Command;

    #[test]
    fn every_page_is_known_and_parses() {
        let folder = paths::workspace().join("docs/tutorials");
        let pages: BTreeSet<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".md", ""))
            .collect();
        assert_eq!(pages, TUTORIALS.iter().map(|t| t.page.to_owned()).collect());
        for tutorial in &TUTORIALS {
            let blocks = blocks(tutorial.page).unwrap();
            assert!(blocks.iter().any(|block| !block.prints.is_empty()), "{}", tutorial.page);
            let second = blocks.iter().any(|block| match &block.place {
                Place::In(names) => names.iter().any(|name| name == HOSTS[1]),
                Place::Terminal { host, .. } => host == HOSTS[1],
                Place::Prepare => false,
            });
            assert_eq!(tutorial.hosts, 1 + usize::from(second), "{}", tutorial.page);
            let prepares = blocks.iter().any(|block| block.place == Place::Prepare);
            assert_eq!(prepares, tutorial.page == PREPARED_BY, "{}", tutorial.page);
        }
    }

    #[test]
    fn hosts_are_those_of_the_wanted_pages() {
        let names = |only: &[&str]| {
            let only = only.iter().map(ToString::to_string).collect();
            let topology = topology(&Options { only, ..Options::default() });
            topology.check().unwrap();
            topology.hosts.iter().map(|host| host.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&["first-vm"]), ["host"]);
        assert_eq!(names(&["migrate", "rdma"]), ["host", "host2"]);
        assert_eq!(names(&["program"]), ["node", "node2"]);
        assert_eq!(names(&[]), ["host", "host2", "node", "node2"]);
    }

    /// The lines by which a shell reports the ends of blocks.
    fn typed(script: &str) -> Vec<String> {
        let output = Command::new("bash").args(["--norc", "-c", script]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn a_failed_command_anywhere_in_a_block_is_reported() {
        let script = [
            handed_over("x=1\ncat <<'E'\n$x\nE", 1),
            handed_over("(exit 3)\necho more", 2),
            handed_over("if false; then :; fi\nread y || echo $x", 3),
        ];
        assert_eq!(
            typed(&script.concat()),
            ["$x", "TUTORIAL-DONE 1 0", "more", "TUTORIAL-DONE 2 3", "1", "TUTORIAL-DONE 3 0"]
        );
    }

    /// The words of a command that the wrapper passes to the program.
    fn wrapped(words: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let script = SLOW_CAUSEWAY.replace("real=/run/programs/causeway", "real='printf %s\\n'");
        let path = folder.path().join("causeway");
        fs::write(&path, script).unwrap();
        let output = Command::new("sh").arg(&path).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn slow_hosts_get_longer_timeouts() {
        assert_eq!(wrapped(&["list", "--json"]), ["list", "--json"]);
        let words = wrapped(&["run", "--cmdline", "a b", "--cpus", "2"]);
        assert_eq!(
            (&words[..2], &words[3..]),
            (&["run".into(), "--cmdline".into()][..], &["--cpus".into(), "2".into()][..])
        );
        assert!(words[2].starts_with("a b mitigations=off"));
        assert!(wrapped(&["host", "--name", "h1"]).ends_with(&["--name".into(), "h1".into()]));
        assert!(wrapped(&["cluster", "serve", "--listen", "x"]).contains(&"--switch-limit".to_owned()));
        assert_eq!(wrapped(&["cluster", "vms"]), ["cluster", "vms"]);
        assert_eq!(wrapped(&["migrate", "a"]), ["migrate", "--downtime", "3000", "a"]);
    }
}
