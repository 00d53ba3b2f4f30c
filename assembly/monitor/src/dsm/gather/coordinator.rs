//! Node 0: brings a program together, in the right order.

use std::time::{Duration, Instant};

use machine::state::SavedVcpu;

use super::member::{Arrival, fits};
use super::{Found, Gathered};
use crate::dsm::checkpoint::{Abandoned, Coordinator, Refused, Step};
use crate::dsm::link::Control;
use crate::payload::vcpus_of;

/// How long a node may take to tell what its vCPUs are.
const GIVING: Duration = Duration::from_secs(10);
/// How long nodes may take to hand over their memory, which may be large.
const MOVING: Duration = Duration::from_secs(600);

impl Coordinator<'_> {
    /// Brings all vCPUs and all memory here. Whatever comes of it, all nodes are to be told to go on, unless the VM has ended: after `Move` a node that went on might
    /// run what runs here, too.
    pub(in crate::dsm) fn gather(&self) -> Result<Gathered, Abandoned> {
        let begin = Instant::now();
        let member = self.member;
        let token = self.stand_still()?;
        let mut given = Vec::new();
        for node in 1..self.nodes {
            given.push((node, self.given_by(node)?));
        }
        // After the others': time mustn't go back.
        let here = member.sample().map_err(|refused| because(0, refused))?;
        let mut arrivals = Vec::new();
        for (node, vcpus) in given {
            for (index, state) in vcpus {
                let place = usize::try_from(index).unwrap_or(usize::MAX).wrapping_sub(member.own);
                let made = member.spare.get(place).map(Vec::as_slice).unwrap_or_default();
                fits(&state, made, &here).map_err(|reason| {
                    Abandoned::Because(format!("vCPU {index} of node {node} must stay there: {reason}"))
                })?;
                arrivals.push(Arrival { index, state });
            }
        }
        member.begin_taking();
        self.tell(&Step::Move { number: self.number, token });
        match self.finish(arrivals, begin) {
            Ok(gathered) => Ok(gathered),
            Err(Abandoned::Because(reason)) => {
                // Its pages are half here and half there.
                member.engine.fail(format!("The program can't be brought together on node 0: {reason}"));
                Err(Abandoned::Ending)
            }
            Err(Abandoned::Ending) => Err(Abandoned::Ending),
        }
    }

    /// After the point of no return.
    fn finish(&self, arrivals: Vec<Arrival>, begin: Instant) -> Result<Gathered, Abandoned> {
        let member = self.member;
        let number = self.number;
        let moved = self.collect(MOVING, "handed over its memory", |step| match step {
            Step::Moved(of, answer) if of == number => Some(answer),
            _ => None,
        })?;
        let mut pages = 0;
        for (node, told) in moved {
            let told = told.map_err(|reason| {
                Abandoned::Because(format!("node {node} can't hand over its memory: {reason}"))
            })?;
            let taken = member.taken_from(node);
            if told != taken {
                let text = format!("node {node} says that it handed over {told} pages, but {taken} came");
                return Err(Abandoned::Because(text));
            }
            pages += taken;
        }
        let vcpus = u32::try_from(arrivals.len()).unwrap_or(u32::MAX);
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let after_ns = nanoseconds(begin.saturating_duration_since(self.began));
        let gathered =
            Gathered { found: self.found(), after_ns, took_ns: nanoseconds(begin.elapsed()), pages, vcpus };
        member.take_over(arrivals, gathered).map_err(Abandoned::Because)?;
        Ok(gathered)
    }

    /// What has shown that the program doesn't pay.
    fn found(&self) -> Found {
        let locked = self.member.engine.lock();
        locked.as_ref().and_then(|core| core.watch.as_ref()).map(super::Watch::last).unwrap_or_default()
    }

    /// The living vCPUs of a node.
    fn given_by(&self, node: u8) -> Result<Vec<(u32, SavedVcpu)>, Abandoned> {
        let number = self.number;
        let its = vcpus_of(node.into(), self.nodes.into(), self.member.vcpus);
        let wrong = |what: &str| Abandoned::Because(format!("node {node} gave {what}"));
        self.member.engine.send_control(node, &Control::Checkpoint(Step::Give(number)));
        let until = Instant::now() + GIVING;
        let mut vcpus: Vec<(u32, SavedVcpu)> = Vec::new();
        loop {
            if self.member.engine.outcome().is_some() {
                return Err(Abandoned::Ending);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(wrong("nothing within 10 s"));
            }
            match self.steps.recv_timeout(left.min(crate::dsm::checkpoint::LOOK)) {
                Ok((from, Step::Vcpu { number: of, index, state })) if (from, of) == (node, number) => {
                    if !its.contains(&index) || vcpus.iter().any(|(known, _)| *known >= index) {
                        return Err(wrong("a vCPU that isn't its own, or one twice"));
                    }
                    let state = ciborium::from_reader(state.as_slice());
                    vcpus.push((index, state.map_err(|_| wrong("a vCPU's state that can't be read"))?));
                }
                Ok((from, Step::Given(of, answer))) if (from, of) == (node, number) => {
                    let count = answer.map_err(|refused| because(node, refused))?;
                    let all = usize::try_from(count).is_ok_and(|count| count == vcpus.len());
                    return if all { Ok(vcpus) } else { Err(wrong("fewer vCPUs than it says")) };
                }
                // Others are answers to what was given up.
                _ => {}
            }
        }
    }
}

fn because(node: u8, refused: Refused) -> Abandoned {
    match refused {
        Refused::Ending => Abandoned::Ending,
        Refused::Because(reason) => Abandoned::Because(format!("node {node} can't stand still: {reason}")),
    }
}
