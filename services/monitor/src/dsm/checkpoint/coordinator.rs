//! The checkpoint thread: on node 0 it makes checkpoints, on other nodes it serves node 0's requests.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::file::List;
use super::member::{Counted, Member};
use super::{Refused, Step};
use crate::dsm::link::Control;
use crate::dsm::spanning::chain;

/// Timeout of each phase of a checkpoint, in which vCPUs leave the guest and messages arrive.
const PHASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the phase that writes files, which may be large.
const WRITE_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause between two rounds of counts.
const COUNT_INTERVAL: Duration = Duration::from_millis(1);
/// Interval of checks for the VM's end during a checkpoint.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The same between checkpoints. Other threads send [`Step::Look`] to wake this one at once. The interval is long: each wakeup costs the
/// vCPU of the same core some 100 µs by cold caches.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why a checkpoint was abandoned.
enum Abandoned {
    /// The VM ends.
    Ending,
    /// Another reason: the VM continues, and the previous checkpoint stays valid.
    Because(String),
}

/// The checkpoint plan of node 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::dsm) struct Plan {
    /// Number of nodes of the VM.
    pub(in crate::dsm) nodes: u8,
    /// Number of the first checkpoint.
    pub(in crate::dsm) first: u64,
    /// Pause between two checkpoints.
    pub(in crate::dsm) every: Duration,
}

/// Makes checkpoints until the VM ends, or serves node 0's requests. Runs on a thread of its own.
pub(in crate::dsm) fn serve(member: &Member, steps: &Receiver<(u8, Step)>, plan: Plan) {
    if member.engine.me == 0 {
        let Plan { nodes, first, every } = plan;
        Coordinator { member, steps, nodes, every, number: first, failure_logged: false }.work();
    } else {
        serve_node_0(member, steps);
    }
}

fn serve_node_0(member: &Member, steps: &Receiver<(u8, Step)>) {
    let engine = &member.engine;
    while engine.outcome().is_none() {
        let step = match steps.recv_timeout(IDLE_POLL_INTERVAL) {
            Ok((_, Step::Look)) => continue,
            Ok((0, step)) => step,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
            Ok((peer, _)) => {
                engine.fail(format!(
                    "Node {peer} spoke of checkpoints to node {}, which only node 0 does",
                    engine.me
                ));
                return;
            }
        };
        let answer = match step {
            Step::Hold(number) => Step::Still(number, member.hold()),
            Step::Count(round) => Step::Counted(round, member.count()),
            Step::Save { number, token } => Step::Saved(number, member.save(number, token)),
            Step::Go(complete) => {
                if let Err(error) = member.go(complete) {
                    engine.fail(format!("Node {} can't go on after a checkpoint: {error}", engine.me));
                }
                continue;
            }
            Step::Still(..) | Step::Counted(..) | Step::Saved(..) | Step::Look | Step::Restore(_) => {
                engine.fail(
                    "Node 0 sent a message about checkpoints that it doesn't send while the VM runs"
                        .to_owned(),
                );
                return;
            }
        };
        engine.send_control(0, &Control::Checkpoint(answer));
    }
}

struct Coordinator<'a> {
    member: &'a Member,
    steps: &'a Receiver<(u8, Step)>,
    nodes: u8,
    /// Pause between two checkpoints.
    every: Duration,
    /// Number of the next checkpoint.
    number: u64,
    /// The log already says that checkpoints fail.
    failure_logged: bool,
}

impl Coordinator<'_> {
    fn work(&mut self) {
        while self.await_due() {
            if let Err(error) = self.checkpoint() {
                self.member.engine.fail(format!("Node 0 can't go on after a checkpoint: {error}"));
                return;
            }
            self.number += 1;
        }
    }

    fn checkpoint(&mut self) -> Result<(), String> {
        let made = self.write_checkpoint();
        let complete = made.is_ok().then_some(self.number);
        self.send_all(&Step::Go(complete));
        self.member.go(complete)?;
        match made {
            Ok(took) => {
                self.failure_logged = false;
                tracing::info!(number = self.number, milliseconds = took.as_millis(), "Checkpoint written");
            }
            Err(Abandoned::Ending) => {}
            Err(Abandoned::Because(reason)) if self.failure_logged => tracing::debug!("{reason}"),
            Err(Abandoned::Because(reason)) => {
                self.failure_logged = true;
                tracing::warn!(
                    "No checkpoint could be written; the VM goes on, and the one before, if any, stays: {reason}"
                );
            }
        }
        Ok(())
    }

    /// Waits until the next checkpoint is due. Returns false if the VM has ended.
    fn await_due(&self) -> bool {
        let begin = Instant::now();
        while self.member.engine.outcome().is_none() {
            let left = self.every.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return true;
            }
            // A message is a late answer to an abandoned checkpoint, or `Look`.
            if matches!(
                self.steps.recv_timeout(left.min(IDLE_POLL_INTERVAL)),
                Err(RecvTimeoutError::Disconnected)
            ) {
                return false;
            }
        }
        false
    }

    fn send_all(&self, step: &Step) {
        for node in 1..self.nodes {
            self.member.engine.send_control(node, &Control::Checkpoint(step.clone()));
        }
    }

    /// Collects an answer of each other node. `take` extracts the result from a matching answer.
    fn collect<T>(
        &self,
        timeout: Duration,
        what: &str,
        extract: impl Fn(Step) -> Option<T>,
    ) -> Result<BTreeMap<u8, T>, Abandoned> {
        let until = Instant::now() + timeout;
        let mut answers = BTreeMap::new();
        while answers.len() < usize::from(self.nodes) - 1 {
            if self.member.engine.outcome().is_some() {
                return Err(Abandoned::Ending);
            }
            if Instant::now() >= until {
                let missing = (1..self.nodes).find(|node| !answers.contains_key(node)).unwrap_or(0);
                let seconds = timeout.as_secs();
                return Err(Abandoned::Because(format!("node {missing} has not {what} within {seconds} s")));
            }
            // Other messages are answers to an abandoned round.
            if let Ok((peer, step)) = self.steps.recv_timeout(POLL_INTERVAL)
                && let Some(answer) = extract(step)
            {
                answers.insert(peer, answer);
            }
        }
        Ok(answers)
    }

    /// Quiesces all nodes, with nothing in flight. The caller must send `Go` in any case. Returns the sequencer.
    fn suspend_nodes(&self) -> Result<u8, Abandoned> {
        let member = self.member;
        let number = self.number;
        self.send_all(&Step::Hold(number));
        let own = member.hold();
        let mut still = self.collect(PHASE_TIMEOUT, "brought its vCPUs to a stop", |step| match step {
            Step::Still(of, answer) if of == number => Some(answer),
            _ => None,
        })?;
        still.insert(0, own);
        for (node, answer) in still {
            answer.map_err(|error| Abandoned::Because(format!("node {node} can't stand still: {error}")))?;
        }
        self.await_quiet()
    }

    /// Makes one checkpoint. The caller must send `Go` in any case.
    fn write_checkpoint(&self) -> Result<Duration, Abandoned> {
        let begin = Instant::now();
        let member = self.member;
        let number = self.number;
        let token = self.suspend_nodes()?;
        // All console output of other nodes' vCPUs arrived before their counts.
        let console_bytes = member.engine.flush_console().map_err(|error| {
            Abandoned::Because(format!("what the guest wrote to its console can't be written: {error}"))
        })?;
        self.send_all(&Step::Save { number, token });
        let own = member.save(number, token);
        let mut saved = self.collect(WRITE_TIMEOUT, "written its file", |step| match step {
            Step::Saved(of, answer) if of == number => Some(answer),
            _ => None,
        })?;
        saved.insert(0, own);
        let mut listed = Vec::new();
        for (node, answer) in saved {
            match answer {
                Ok(one) if one.node == node && one.number == number => listed.push(one),
                Ok(_) => {
                    return Err(Abandoned::Because(format!("node {node} has written another node's file")));
                }
                Err(Refused::Ending) => return Err(Abandoned::Ending),
                Err(Refused::Because(reason)) => {
                    return Err(Abandoned::Because(format!("node {node} can't be saved: {reason}")));
                }
            }
        }
        let list = List::new(member.identity, number, console_bytes, listed);
        list.write(&member.folder).map_err(|error| Abandoned::Because(chain(&error)))?;
        Ok(begin.elapsed())
    }

    /// Waits until nothing is in flight. Returns the sequencer.
    fn await_quiet(&self) -> Result<u8, Abandoned> {
        let until = Instant::now() + PHASE_TIMEOUT;
        let mut before: Option<Vec<Counted>> = None;
        for round in 0.. {
            self.send_all(&Step::Count(round));
            let own = self.member.count();
            let mut counts = self.collect(PHASE_TIMEOUT, "told what it has sent", |step| match step {
                Step::Counted(of, counted) if of == round => Some(counted),
                _ => None,
            })?;
            counts.insert(0, own);
            let counts: Vec<Counted> = counts.into_values().collect();
            if let Some(holder) = quiet(before.as_deref(), &counts) {
                return Ok(holder);
            }
            if Instant::now() >= until {
                let busy = counts.iter().position(|counted| !counted.idle);
                return Err(Abandoned::Because(match busy {
                    Some(node) => {
                        format!("node {node} still waits for pages after {} s", PHASE_TIMEOUT.as_secs())
                    }
                    None => format!("messages are still under way after {} s", PHASE_TIMEOUT.as_secs()),
                }));
            }
            before = Some(counts);
            std::thread::sleep(COUNT_INTERVAL);
        }
        Err(Abandoned::Ending)
    }
}

/// Returns the sequencer if two consecutive rounds of counts, in the order of nodes, prove that nothing is in flight.
fn quiet(before: Option<&[Counted]>, counts: &[Counted]) -> Option<u8> {
    let same = before == Some(counts);
    let sum = |what: fn(&Counted) -> u64| counts.iter().map(what).fold(0, u64::wrapping_add);
    let even = sum(|counted| counted.sent) == sum(|counted| counted.received);
    let idle = counts.iter().all(|counted| counted.idle);
    let holder = counts.iter().position(|counted| counted.token);
    (same && even && idle).then_some(holder).flatten().and_then(|holder| u8::try_from(holder).ok())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dsm::FaultInjection;
    use crate::dsm::engine::Engine;

    fn counted(sent: u64, received: u64, idle: bool, token: bool) -> Counted {
        Counted { sent, received, idle, token }
    }

    /// A checkpoint is due after its pause, also after a pause of zero or the longest one. None is due after the VM's end.
    #[test]
    fn a_checkpoint_is_due_until_the_vm_ends() {
        let (sender, steps) = std::sync::mpsc::sync_channel(1);
        let engine =
            Arc::new(Engine::new(0, vec![None, None], 1, FaultInjection::default(), sender).unwrap());
        let member = Member { engine: Arc::clone(&engine), folder: "unused".into(), identity: 0 };
        let of = |every| Coordinator {
            member: &member,
            steps: &steps,
            nodes: 2,
            every,
            number: 1,
            failure_logged: false,
        };
        assert!(of(Duration::ZERO).await_due() && of(Duration::from_millis(1)).await_due());
        std::thread::scope(|scope| {
            scope.spawn(|| engine.fail("for this test".to_owned()));
            assert!(!of(Duration::MAX).await_due());
        });
        assert!(!of(Duration::ZERO).await_due());
    }

    /// Quiet requires two equal rounds, idle nodes, as many messages received as sent, and a sequencer.
    #[test]
    fn quiet_is_what_two_rounds_agree_on() {
        let still = [counted(5, 7, true, false), counted(7, 5, true, true)];
        assert_eq!(quiet(Some(&still), &still), Some(1));
        assert_eq!(quiet(None, &still), None);
        let more = [counted(6, 7, true, false), counted(7, 6, true, true)];
        assert_eq!(quiet(Some(&more), &still), None, "something went on in between");
        for busy in [
            [counted(5, 7, false, false), counted(7, 5, true, true)],
            [counted(6, 7, true, false), counted(7, 5, true, true)],
            [counted(5, 7, true, false), counted(7, 5, true, false)],
        ] {
            assert_eq!(quiet(Some(&busy), &busy), None, "{busy:?}");
        }
    }
}
