//! Figures: samples and those of a peer, as JSON and as a table.

use anyhow::Context;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Direction of improvement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Bandwidth and the like.
    Higher,
    /// Times and the like.
    Lower,
}

/// Summary of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Median: the middle sample, or the mean of the two middle ones.
    pub median: f64,
    /// The smallest.
    pub minimum: f64,
    /// The largest.
    pub maximum: f64,
    /// 5th percentile (nearest rank).
    pub p5: f64,
    /// 95th percentile (nearest rank).
    pub p95: f64,
    /// Number of samples.
    pub samples: usize,
}

impl Summary {
    /// Summarizes samples. Returns `None` without samples, or if one isn't finite.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: median(&sorted),
            minimum: *sorted.first()?,
            maximum: *sorted.last()?,
            p5: percentile(&sorted, 5)?,
            p95: percentile(&sorted, 95)?,
            samples: sorted.len(),
        })
    }
}

/// Returns a percentile of ascending values, by nearest rank.
pub(crate) fn percentile(sorted: &[f64], hundredths: usize) -> Option<f64> {
    let rank = (sorted.len() * hundredths).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// Returns the median of ascending values; NaN without any.
pub fn median(sorted: &[f64]) -> f64 {
    let upper = sorted.len() / 2;
    let lower = if sorted.len().is_multiple_of(2) { upper.saturating_sub(1) } else { upper };
    match (sorted.get(lower), sorted.get(upper)) {
        (Some(low), Some(high)) => f64::midpoint(*low, *high),
        _ => f64::NAN,
    }
}

/// The same work by other means, measured in the same run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peer {
    /// The peer's name.
    pub name: String,
    /// The peer's samples.
    #[serde(flatten)]
    pub summary: Summary,
}

/// One figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Name for programs.
    pub name: String,
    /// Description for readers of the table.
    pub what: String,
    /// Unit of all its numbers except the ratios.
    pub unit: &'static str,
    /// Direction of improvement.
    pub better: Better,
    /// The figure's samples.
    #[serde(flatten)]
    pub summary: Summary,
    /// The peer.
    pub peer: Peer,
    /// Median of the figure divided by the peer's.
    pub ratio: f64,
    /// Median of the ratios of consecutive samples.
    pub paired_ratio: f64,
    /// Required ratio: a minimum if higher is better, else a maximum.
    pub aim: Option<f64>,
    /// Whether `ratio` is on the right side of `aim`.
    pub aim_met: Option<bool>,
}

/// Samples of a figure and its peer, in the order of measurement.
#[derive(Debug, Clone, Default)]
pub struct Pairs {
    /// Pairs of (figure, peer).
    pub pairs: Vec<(f64, f64)>,
}

impl Pairs {
    /// Takes `count` pairs, after an uncounted one. The figure comes first in every other pair, since the second one finds warmer
    /// caches and a warmer processor. Pauses for a tenth of the time: the kernel stops real-time threads that use more than 95 % of a
    /// second.
    pub fn take(
        count: usize,
        ours: impl FnMut() -> anyhow::Result<f64>,
        peer: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<Self> {
        Self::take_for(count, Duration::ZERO, ours, peer)
    }

    /// As [`Pairs::take`], but continues until `time` has passed. So a disturbance of some seconds, as by other VMs on the host,
    /// affects only a part of the samples.
    pub fn take_for(
        least: usize,
        time: Duration,
        mut ours: impl FnMut() -> anyhow::Result<f64>,
        mut peer: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<Self> {
        ours()?;
        peer()?;
        let mut pairs = Vec::with_capacity(least);
        let all_began = Instant::now();
        while pairs.len() < least || all_began.elapsed() < time {
            let began = Instant::now();
            pairs.push(if pairs.len().is_multiple_of(2) {
                let first = ours()?;
                (first, peer()?)
            } else {
                let first = peer()?;
                (ours()?, first)
            });
            std::thread::sleep(began.elapsed() / 10);
        }
        Ok(Self { pairs })
    }
}

/// Samples of several ways to do the same, taken in turns.
#[derive(Debug, Clone, Default)]
pub struct Turns {
    /// Samples of each turn, in the order of the ways.
    turns: Vec<Vec<f64>>,
}

impl Turns {
    /// Takes `count` turns, after an uncounted one. Each turn starts with another way. Pauses as [`Pairs::take`] does.
    ///
    /// # Errors
    /// The first error of a way.
    pub fn take(count: usize, ways: &mut [&mut dyn FnMut() -> anyhow::Result<f64>]) -> anyhow::Result<Self> {
        let mut turns = Vec::with_capacity(count);
        for number in 0..=count {
            let began = Instant::now();
            let mut turn = vec![f64::NAN; ways.len()];
            for step in 0..ways.len() {
                let way = (step + number) % ways.len();
                if let (Some(sample), Some(take)) = (turn.get_mut(way), ways.get_mut(way)) {
                    *sample = take()?;
                }
            }
            if number > 0 {
                turns.push(turn);
            }
            std::thread::sleep(began.elapsed() / 10);
        }
        Ok(Self { turns })
    }

    /// Returns pairs of the samples of two ways; none if a way doesn't exist.
    #[must_use]
    pub fn pairs(&self, ours: usize, peer: usize) -> Pairs {
        let pair = |turn: &Vec<f64>| Some((*turn.get(ours)?, *turn.get(peer)?));
        Pairs { pairs: self.turns.iter().filter_map(pair).collect() }
    }
}

/// The figures of a group in order.
#[derive(Debug)]
pub struct Figures {
    group: &'static str,
    /// The figures so far.
    pub all: Vec<Figure>,
}

impl Figures {
    /// Creates an empty list.
    #[must_use]
    pub const fn of(group: &'static str) -> Self {
        Self { group, all: Vec::new() }
    }

    /// Adds a figure and prints it.
    ///
    /// # Errors
    /// The figure is `None`, see [`Figure::new`].
    pub fn add(&mut self, figure: Option<Figure>) -> anyhow::Result<()> {
        let figure =
            figure.context("A sample of the last figure isn't a positive number; is the clock sound?")?;
        eprintln!("bench: {}: {}: {:.4} of {}", self.group, figure.name, figure.ratio, figure.peer.name);
        self.all.push(figure);
        Ok(())
    }
}

/// Returns nanoseconds per item: `ticks` of a clock of `khz` for `count` items.
#[must_use]
pub fn nanoseconds(khz: f64, ticks: u64, count: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let each = ticks as f64 * 1e6 / khz / count.max(1) as f64;
    each
}

/// Returns 10^9 bytes per second: `bytes` in `ticks` of a clock of `khz`.
#[must_use]
pub fn gigabytes(khz: f64, ticks: u64, bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let rate = bytes as f64 / nanoseconds(khz, ticks, 1);
    rate
}

impl Figure {
    /// Creates a figure from samples. Returns `None` without samples, or if one isn't positive.
    pub fn new(
        name: &str,
        what: &str,
        unit: &'static str,
        better: Better,
        peer: &str,
        pairs: &Pairs,
        aim: Option<f64>,
    ) -> Option<Self> {
        let (ours, peers): (Vec<f64>, Vec<f64>) = pairs.pairs.iter().copied().unzip();
        if ours.iter().chain(&peers).any(|sample| *sample <= 0.0) {
            return None;
        }
        let ratios: Vec<f64> = pairs.pairs.iter().map(|(ours, peer)| ours / peer).collect();
        let summary = Summary::of(&ours)?;
        let peer = Peer { name: peer.to_owned(), summary: Summary::of(&peers)? };
        let ratio = summary.median / peer.summary.median;
        let aim_met = aim.map(|aim| match better {
            Better::Higher => ratio >= aim,
            Better::Lower => ratio <= aim,
        });
        Some(Self {
            name: name.to_owned(),
            what: what.to_owned(),
            unit,
            better,
            summary,
            peer,
            ratio,
            paired_ratio: Summary::of(&ratios)?.median,
            aim,
            aim_met,
        })
    }
}

/// The content of a group's file.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The group's name.
    pub group: &'static str,
    /// The reason if nothing was measured.
    pub skipped: Option<String>,
    /// The conditions.
    pub conditions: crate::conditions::Conditions,
    /// The figures.
    pub figures: Vec<Figure>,
    /// Additional results of the group, in tables of its own.
    #[serde(skip_serializing_if = "serde_json::Value::is_null")]
    pub details: serde_json::Value,
}

/// Formats the figures as a table.
pub fn table(figures: &[Figure]) -> String {
    let span = |summary: &Summary| {
        format!("{} [{} .. {}]", short(summary.median), short(summary.minimum), short(summary.maximum))
    };
    let mut rows = vec![
        ["figure", "unit", "ours: median [min .. max]", "peer: median [min .. max]", "ratio", "aim"]
            .map(str::to_owned),
    ];
    for figure in figures {
        let aim = match (figure.aim, figure.aim_met) {
            (Some(aim), Some(met)) => {
                let sign = if figure.better == Better::Higher { ">=" } else { "<=" };
                format!("{sign} {aim} {}", if met { "met" } else { "MISSED" })
            }
            _ => String::new(),
        };
        rows.push([
            figure.what.clone(),
            figure.unit.to_owned(),
            span(&figure.summary),
            span(&figure.peer.summary),
            format!("{:.3}", figure.ratio),
            aim,
        ]);
    }
    let mut text = String::new();
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..6).map(width).collect();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Formats three significant digits.
pub(crate) fn short(number: f64) -> String {
    match number.abs() {
        0.0..10.0 => format!("{number:.2}"),
        10.0..100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Better, Figure, Pairs, Summary, Turns, table};
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Summary::of(&[3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[f64::NAN]), None);
    }

    #[test]
    fn pairs_take_turns_after_one_of_each() {
        let order = std::cell::RefCell::new(String::new());
        let pairs = Pairs::take(
            3,
            || {
                order.borrow_mut().push('o');
                Ok(1.0)
            },
            || {
                order.borrow_mut().push('p');
                Ok(2.0)
            },
        )
        .unwrap();
        assert_eq!(*order.borrow(), "opoppoop");
        assert_eq!(pairs.pairs, [(1.0, 2.0); 3]);
    }

    #[test]
    fn ways_take_turns_and_keep_their_samples_together() {
        let order = std::cell::RefCell::new(String::new());
        let way = |name: char, sample: f64| {
            let order = &order;
            move || {
                order.borrow_mut().push(name);
                Ok(sample)
            }
        };
        let (mut a, mut b, mut c) = (way('a', 1.0), way('b', 2.0), way('c', 3.0));
        let turns = Turns::take(2, &mut [&mut a, &mut b, &mut c]).unwrap();
        assert_eq!(*order.borrow(), "abcbcacab");
        assert_eq!(turns.pairs(2, 0).pairs, [(3.0, 1.0); 2]);
        assert!(turns.pairs(0, 3).pairs.is_empty());
        let mut fails = || anyhow::bail!("no");
        assert!(Turns::take(1, &mut [&mut fails]).is_err());
    }

    #[test]
    fn percentiles_are_samples_of_the_nearest_rank() {
        let samples: Vec<f64> = (1..=101).map(f64::from).collect();
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.p5, summary.median, summary.p95), (6.0, 51.0, 96.0));
        let one = Summary::of(&[7.0]).unwrap();
        assert_eq!((one.p5, one.p95), (7.0, 7.0));
    }

    /// Pairs continue until their time is over, and have at least the requested number.
    #[test]
    fn pairs_last_as_long_as_they_are_to() {
        let sample = || {
            std::thread::sleep(Duration::from_millis(1));
            Ok(1.0)
        };
        let began = Instant::now();
        let many = Pairs::take_for(2, Duration::from_millis(50), sample, sample).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(50) && many.pairs.len() >= 2);
        let few = Pairs::take_for(3, Duration::from_nanos(1), sample, sample).unwrap();
        assert_eq!(few.pairs.len(), 3);
    }

    #[test]
    fn aims_point_the_right_way() {
        let pairs = Pairs { pairs: vec![(9.0, 10.0)] };
        let figure = |better| Figure::new("n", "w", "u", better, "p", &pairs, Some(0.95)).unwrap();
        assert_eq!(figure(Better::Higher).aim_met, Some(false));
        assert_eq!(figure(Better::Lower).aim_met, Some(true));
        assert!(table(&[figure(Better::Higher)]).contains(">= 0.95 MISSED"));
        let zero = Pairs { pairs: vec![(0.0, 1.0)] };
        assert!(Figure::new("n", "w", "u", Better::Lower, "p", &zero, None).is_none());
    }

    proptest! {
        /// The median is between minimum and maximum, with equally many samples below and above.
        #[test]
        fn summaries_are_ordered(samples in prop::collection::vec(-1e9_f64..1e9, 1..50)) {
            let summary = Summary::of(&samples).unwrap();
            prop_assert!(summary.minimum <= summary.median && summary.median <= summary.maximum);
            let below = samples.iter().filter(|sample| **sample < summary.median).count();
            let above = samples.iter().filter(|sample| **sample > summary.median).count();
            prop_assert!(below <= samples.len() / 2 && above <= samples.len() / 2);
        }
    }
}
