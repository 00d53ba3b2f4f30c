//! The judgment of outcomes, and sums over all tests.

use super::Line;
use crate::progress;
use litmus::model::{Order, Outcome, outcomes};
use litmus::{Instruction, Variant};
use payload_litmus::table::Placement;
use std::collections::{BTreeMap, BTreeSet};

/// Evaluation of a test's outcomes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Number of runs with outcomes that x86-TSO forbids.
    pub(super) forbidden: u64,
    /// Number of runs with outcomes that x86-TSO allows but sequential consistency doesn't.
    pub(super) weak: u64,
    /// Number of such outcomes in the model.
    pub(super) weak_possible: usize,
    /// Runs of `weak` with every thread on a node of its own.
    pub(super) weak_apart: u64,
    /// Runs with every thread on a node of its own, and an outcome that no sequential order of whole threads explains.
    pub(super) interleaved: u64,
    /// Number of such outcomes under sequential consistency.
    pub(super) interleaved_possible: usize,
    /// The forbidden outcomes.
    pub(super) culprits: Vec<Outcome>,
}

/// Evaluates observed outcomes by the model.
pub(super) fn judge(variant: &Variant<'_>, seen: &[(Outcome, u64, bool)]) -> Verdict {
    let memory = variant.memory();
    let allowed = outcomes(variant.test, Order::Tso, memory);
    let sequential = outcomes(variant.test, Order::Sequential, litmus::model::Memory::Whole);
    let serial = outcomes(variant.test, Order::Serial, litmus::model::Memory::Whole);
    let weak: BTreeSet<&Outcome> = allowed.difference(&sequential).collect();
    let interleaved_possible = sequential.difference(&serial).count();
    let mut verdict = Verdict { weak_possible: weak.len(), interleaved_possible, ..Verdict::default() };
    for (outcome, count, apart) in seen {
        if *apart && !serial.contains(outcome) {
            verdict.interleaved += count;
        }
        if !allowed.contains(outcome) {
            verdict.forbidden += count;
            verdict.culprits.push(outcome.clone());
        } else if weak.contains(outcome) {
            verdict.weak += count;
            verdict.weak_apart += if *apart { *count } else { 0 };
        }
    }
    verdict
}

/// Kinds of tests, which can't share a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Locations within pages.
    Within,
    /// Locations across pages, which need much memory.
    Across,
    /// The same with locked accesses. Kernels and processors may delay these, so by default such tests have fewer runs.
    SplitLocks,
}

impl Kind {
    pub(super) fn of(variant: &Variant<'_>) -> Self {
        let locks = |instruction: &Instruction| {
            matches!(
                instruction,
                Instruction::Modify { locked: true, .. }
                    | Instruction::Exchange(..)
                    | Instruction::ExchangeAdd(..)
                    | Instruction::CompareExchange(..)
            )
        };
        match variant.placement {
            Placement::Cross if variant.test.threads.iter().flatten().any(locks) => Self::SplitLocks,
            Placement::Cross => Self::Across,
            _ => Self::Within,
        }
    }
}

/// Results of one test over all its runs.
#[derive(Debug, Default)]
pub(super) struct Sum {
    pub(super) slow: bool,
    /// Whether weak outcomes are possible, and whether they occurred.
    pub(super) weak: (bool, bool),
    /// The same for outcomes of threads on different nodes that run in parallel.
    pub(super) interleaved: (bool, bool),
}

/// Results of all tests.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) tests: BTreeMap<String, Sum>,
    pub(super) forbidden: u64,
    /// Whether store buffering ran, and whether its weak outcome occurred.
    pub(super) buffering: (bool, bool),
    pub(super) broken: Vec<String>,
}

impl Tally {
    /// Returns the number of tests with a property.
    pub(super) fn count(&self, such: impl Fn(&Sum) -> bool) -> usize {
        self.tests.values().filter(|sum| such(sum)).count()
    }

    /// Adds a run of a test, which may run more than once.
    pub(super) fn add(&mut self, variant: &Variant<'_>, line: &Line, slow: bool) {
        let verdict = judge(variant, &line.outcomes);
        self.forbidden = self.forbidden.saturating_add(verdict.forbidden);
        let sum = self.tests.entry(variant.name()).or_default();
        sum.slow |= slow;
        sum.weak.0 |= verdict.weak_possible > 0;
        sum.weak.1 |= verdict.weak > 0;
        sum.interleaved.0 |= line.apart > 0 && verdict.interleaved_possible > 0;
        sum.interleaved.1 |= verdict.interleaved > 0;
        if ["SB", "SB64", "wide-SB"].contains(&variant.test.name.as_str()) && line.apart < line.iterations {
            self.buffering = (true, self.buffering.1 || verdict.weak > 0);
        }
        let name = variant.name();
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let seconds = line.ns as f64 / 1e9;
        let Verdict { forbidden, weak, weak_possible, weak_apart, interleaved, .. } = &verdict;
        let apart = match line.nodes {
            1 => String::new(),
            _ => format!(
                "; {} times each thread on a node of its own: {interleaved} interleaved, {weak_apart} weak",
                line.apart
            ),
        };
        progress!(
            "{name}: {} times in {seconds:.1} s: {forbidden} forbidden, {weak} weak ({weak_possible} weak outcomes are possible){apart}",
            line.iterations
        );
        for culprit in &verdict.culprits {
            let observed = variant.test.observed();
            progress!("CHECK FAILED: {name}: x86-TSO forbids {culprit:?} of {observed:?}");
            self.broken.push(name.clone());
        }
    }
}
