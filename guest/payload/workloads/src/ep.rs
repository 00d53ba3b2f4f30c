//! Embarrassingly parallel: Gaussian pairs by the polar method, counted by the annulus they fall into. No communication but the
//! sums at the end.
//!
//! Source: Bailey and others, *The NAS Parallel Benchmarks* (RNR-94-007), kernel EP: generator, seed, and the sums of class S, W and A.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use payload_spmd::{Figure, Heap, Outcome, PAGE, Refused, Settings, Team};

/// `m`: 2^m pairs (20).
pub const NAMES: &[&str] = &["m"];

/// Pairs per batch, as a power of two. Every batch has its own seed and sum, so results don't depend on the distribution of batches.
const BATCH: u32 = 10;
/// Number of annuli: class l counts pairs with l <= max(|x|, |y|) < l + 1.
const ANNULI: usize = 10;
/// Figures per batch: sum of x, sum of y, counts.
const FIGURES: usize = 2 + ANNULI;

const MULTIPLIER: u64 = 1_220_703_125; // 5^13
const SEED: u64 = 271_828_183;
const MASK: u64 = (1 << 46) - 1;

/// The NAS generator: x' = 5^13 x mod 2^46.
#[derive(Clone, Copy)]
struct Generator(u64);

impl Generator {
    /// Skips `steps` numbers.
    fn skipped(steps: u64) -> Self {
        let (mut factor, mut power, mut left) = (1_u64, MULTIPLIER, steps);
        while left > 0 {
            if left & 1 == 1 {
                factor = factor.wrapping_mul(power) & MASK;
            }
            power = power.wrapping_mul(power) & MASK;
            left >>= 1;
        }
        Self(SEED.wrapping_mul(factor) & MASK)
    }

    /// Returns a number from -1 to 1.
    #[expect(clippy::cast_precision_loss, reason = "46 bits fit a double")]
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(MULTIPLIER) & MASK;
        2.0 * (self.0 as f64 / (1_u64 << 46) as f64) - 1.0
    }
}

/// Computes sums and counts of one batch.
fn batch(number: usize, figures: &mut [f64]) {
    figures.fill(0.0);
    let mut generator = Generator::skipped((number as u64) << (BATCH + 1));
    for _ in 0..1 << BATCH {
        let (x, y) = (generator.next(), generator.next());
        let square = x * x + y * y;
        if square > 1.0 {
            continue;
        }
        let factor = libm::sqrt(-2.0 * libm::log(square) / square);
        let (x, y) = (x * factor, y * factor);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small positive number, whose whole part is wanted"
        )]
        let annulus = x.abs().max(y.abs()) as usize;
        figures[0] += x;
        figures[1] += y;
        figures[2 + annulus.min(ANNULI - 1)] += 1.0;
    }
}

/// Returns the published sums, if any.
fn published(m: u64) -> Option<(f64, f64)> {
    match m {
        24 => Some((-3.247_834_652_034_74e3, -6.958_407_078_382_297e3)),
        25 => Some((-2.863_319_731_645_753e3, -6.320_053_679_109_499e3)),
        28 => Some((-4.295_875_165_629_892e3, -1.580_732_573_678_431e4)),
        _ => None,
    }
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let m = settings.number("m", 20, u64::from(BATCH)..=32)?;
    let batches = 1_usize << (m - u64::from(BATCH));
    // A vCPU's results are on pages of its own, in the order of batches.
    let per_page = PAGE / size_of::<f64>();
    let most = batches.div_ceil(team.count()) * FIGURES;
    let stride = most.next_multiple_of(per_page);
    let results = heap.array::<f64>(stride * team.count())?;

    let nanoseconds = team.measure(|| {
        let mine = team.index() * stride;
        for (place, number) in team.part(batches).enumerate() {
            let at = mine + place * FIGURES;
            // SAFETY: only this vCPU uses its pages before the end.
            batch(number, unsafe { results.write(at..at + FIGURES) });
        }
    });
    if !team.leads() {
        return Ok(Outcome::new("pair", 1 << m, nanoseconds));
    }
    let mut sums = [0.0; FIGURES];
    for vcpu in 0..team.count() {
        for place in 0..team.part_of(vcpu, batches).len() {
            let at = vcpu * stride + place * FIGURES;
            // SAFETY: all have ended.
            let figures = unsafe { results.read(at..at + FIGURES) };
            sums.iter_mut().zip(figures).for_each(|(sum, figure)| *sum += figure);
        }
    }
    let mut serial = [0.0; FIGURES];
    let serial_ns = team.time(|| {
        let mut figures = [0.0; FIGURES];
        for number in 0..batches {
            batch(number, &mut figures);
            serial.iter_mut().zip(&figures).for_each(|(sum, figure)| *sum += figure);
        }
    });
    let close = |value: f64, known: f64| ((value - known) / known).abs() <= 1e-8;
    let as_published = published(m).is_none_or(|(x, y)| close(sums[0], x) && close(sums[1], y));
    let same = checksum(sums.map(f64::to_bits)) == checksum(serial.map(f64::to_bits));
    Ok(Outcome::new("pair", 1 << m, nanoseconds)
        .verified(same && as_published)
        .figure("serial_ns", Figure::Count(serial_ns))
        .figure("m", Figure::Count(m))
        .figure("sum_x", Figure::Real(sums[0]))
        .figure("sum_y", Figure::Real(sums[1]))
        .figure("gaussian_pairs", Figure::Real(sums[2..].iter().sum())))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;
    use payload_spmd::Figure;

    /// Any number of vCPUs yields the same sums to the last bit.
    #[test]
    fn sums_do_not_depend_on_the_team() {
        let outcomes = right(run, NAMES, &["m=15"]);
        assert!(outcomes.windows(2).all(|two| two[0].get("sum_x") == two[1].get("sum_x")));
    }

    /// Class S of the benchmark: the published sums and number of pairs.
    #[test]
    fn class_s_is_as_published() {
        let outcome = crate::testing::run(run, NAMES, 2, &["m=24"]).unwrap();
        assert!(outcome.verified, "{outcome:?}");
        assert_eq!(outcome.get("gaussian_pairs"), Some(Figure::Real(13_176_389.0)));
    }
}
