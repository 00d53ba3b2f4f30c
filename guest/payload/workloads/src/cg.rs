//! Conjugate gradients with a sparse, symmetric, positive definite matrix. Each vCPU has some rows. Every iteration needs the whole
//! direction vector and two sums over all. The first iteration runs twice, and the first time isn't timed, as in the NAS benchmark:
//! it fetches the matrix.
//!
//! Sources: Hestenes and Stiefel, *Methods of Conjugate Gradients for Solving Linear Systems* (1952); NPB 3, kernel CG, for the timed
//! part.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use core::ops::Range;
use payload_spmd::{Figure, Heap, Outcome, Random, Refused, Settings, Shared, Sums, Team};

/// `n`: unknowns (4096); `band`: entries off the diagonal per half row (6); `iterations` (15); `seed` (1).
pub const NAMES: &[&str] = &["n", "band", "iterations", "seed"];

/// A symmetric matrix by its diagonals. Entry (i, i + offset), with wraparound, is a function of i and the offset, and equals entry
/// (i + offset, i).
struct Matrix<'a> {
    n: usize,
    offsets: &'a [usize],
    /// `n` entries per offset.
    entries: &'a [f64],
    diagonal: f64,
}

impl Matrix<'_> {
    /// Multiplies row `row` by a vector.
    fn row(&self, row: usize, vector: &[f64]) -> f64 {
        let mut sum = self.diagonal * vector[row];
        for (offset, entries) in self.offsets.iter().zip(self.entries.chunks_exact(self.n)) {
            let after = if row + offset < self.n { row + offset } else { row + offset - self.n };
            let before = if row >= *offset { row - offset } else { row + self.n - offset };
            sum += entries[row] * vector[after] + entries[before] * vector[before];
        }
        sum
    }
}

/// Vectors of one solution.
#[derive(Clone, Copy)]
struct Vectors {
    solution: Shared<f64>,
    residual: Shared<f64>,
    direction: Shared<f64>,
    image: Shared<f64>,
}

impl Vectors {
    fn new(heap: &mut Heap, n: usize) -> Result<Self, Refused> {
        Ok(Self {
            solution: heap.array(n)?,
            residual: heap.array(n)?,
            direction: heap.array(n)?,
            image: heap.array(n)?,
        })
    }
}

/// Returns 0 for 0/0: with a zero residual there is no direction left. Like the NAS benchmark, this runs the requested number of
/// iterations even then (NAS: 25, few enough to leave a residual), and keeps the solution.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

/// Solves for a vector of ones; returns the squared length of the final residual.
fn solve(team: &Team<'_>, matrix: &Matrix<'_>, vectors: &Vectors, sums: &mut Sums, iterations: u64) -> f64 {
    let n = matrix.n;
    let mine = Sums::range(team, n);
    let Vectors { solution, residual, direction, image } = vectors;
    // Each vCPU writes its own range only. Others read `direction` of it, between the barrier at the end of an iteration and that of
    // the next one's first sum. No vCPU writes it then.
    {
        // SAFETY: own ranges.
        let [x, r, p] = [solution, residual, direction].map(|array| unsafe { array.write(mine.clone()) });
        x.fill(0.0);
        r.fill(1.0);
        p.fill(1.0);
    }
    let square = |range: Range<usize>| {
        // SAFETY: a part of the own range, not written meanwhile.
        unsafe { residual.read(range) }.iter().map(|value| value * value).sum()
    };
    let mut length = sums.add(team, n, square);
    for _ in 0..iterations {
        {
            // SAFETY: no vCPU writes the direction before the barrier in the sum below.
            let whole = unsafe { direction.read(0..n) };
            // SAFETY: own range.
            let own = unsafe { image.write(mine.clone()) };
            for (value, row) in own.iter_mut().zip(mine.clone()) {
                *value = matrix.row(row, whole);
            }
        }
        let product = sums.add(team, n, |range| {
            // SAFETY: parts of the own range, not written meanwhile.
            let (p, q) = unsafe { (direction.read(range.clone()), image.read(range)) };
            p.iter().zip(q).map(|(p, q)| p * q).sum()
        });
        let step = ratio(length, product);
        {
            // SAFETY: own ranges.
            let (p, q) = unsafe { (direction.read(mine.clone()), image.read(mine.clone())) };
            // SAFETY: own ranges.
            let (x, r) = unsafe { (solution.write(mine.clone()), residual.write(mine.clone())) };
            for ((x, r), (p, q)) in x.iter_mut().zip(r).zip(p.iter().zip(q)) {
                *x += step * p;
                *r -= step * q;
            }
        }
        let before = core::mem::replace(&mut length, sums.add(team, n, square));
        let factor = ratio(length, before);
        {
            // SAFETY: own ranges; others have read the direction before the first sum's barrier.
            let (p, r) = unsafe { (direction.write(mine.clone()), residual.read(mine.clone())) };
            for (p, r) in p.iter_mut().zip(r) {
                *p = r + factor * *p;
            }
        }
        team.wait();
    }
    length
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    const MOST_OFFSETS: usize = 64;
    let n = settings.size("n", 4096, 64..=1 << 26)?;
    let band = settings.size("band", 6, 1..=MOST_OFFSETS.min(n / 2 - 1))?;
    let iterations = settings.number("iterations", 15, 1..=1 << 20)?;
    let seed = settings.number("seed", 1, 0..=u64::MAX)?;
    let entries = heap.array::<f64>(n * band)?;
    let vectors = Vectors::new(heap, n)?;
    let mut sums = Sums::new(heap, team.count())?;
    let reference = Vectors::new(heap, n)?;
    let mut lone_sums = Sums::new(heap, 1)?;

    // All vCPUs draw the same offsets: from near the diagonal to half the matrix, none twice.
    let mut random = Random::new(seed);
    let mut offsets = [0; MOST_OFFSETS];
    for (index, offset) in offsets[..band].iter_mut().enumerate() {
        let low = index * (n / 2 - 1) / band;
        let high = ((index + 1) * (n / 2 - 1) / band).max(low + 1);
        *offset = 1 + low + usize::try_from(random.below((high - low) as u64)).unwrap_or(0);
    }
    for (which, _) in offsets[..band].iter().enumerate() {
        let part = Sums::range(team, n);
        // SAFETY: entries of this vCPU's rows; others read them after the barrier in `measure`.
        let part_entries = unsafe { entries.write(which * n + part.start..which * n + part.end) };
        for (entry, row) in part_entries.iter_mut().zip(part) {
            *entry = Random::new(seed ^ (which as u64) << 40 ^ row as u64).unit() - 0.5;
        }
    }
    team.wait();
    // SAFETY: they are no longer written.
    let entries = unsafe { entries.read(0..n * band) };
    #[expect(clippy::cast_precision_loss, reason = "at most 64")]
    // Larger than all others of a row together, whose absolute values are below a half: positive definite.
    let diagonal = band as f64 + 1.0;
    let matrix = Matrix { n, offsets: &offsets[..band], entries, diagonal };

    let mut length = 0.0;
    let first_ns = team.time(|| {
        solve(team, &matrix, &vectors, &mut sums, 1);
    });
    let nanoseconds = team.measure(|| length = solve(team, &matrix, &vectors, &mut sums, iterations));
    let outcome = Outcome::new("iteration", iterations, nanoseconds);
    if !team.leads() {
        return Ok(outcome);
    }
    let mut serial = 0.0;
    solve(&team.alone(), &matrix, &reference, &mut lone_sums, 1);
    let serial_ns =
        team.time(|| serial = solve(&team.alone(), &matrix, &reference, &mut lone_sums, iterations));
    // SAFETY: all have ended.
    let (solution, reference) = unsafe { (vectors.solution.read(0..n), reference.solution.read(0..n)) };
    let same = solution.iter().zip(reference).all(|(one, other)| one.to_bits() == other.to_bits());
    // The actual residual, not the one that the iteration updates: rounding keeps both close.
    let mut worst = 0.0_f64;
    for row in 0..n {
        worst = worst.max((1.0 - matrix.row(row, solution)).abs());
    }
    let carried = libm::sqrt(length);
    Ok(outcome
        .verified(same && length.to_bits() == serial.to_bits() && worst <= carried + 1e-9)
        .figure("first_ns", Figure::Count(first_ns))
        .figure("serial_ns", Figure::Count(serial_ns))
        .figure("n", Figure::Count(n as u64))
        .figure("residual", Figure::Real(carried))
        .figure("checksum", Figure::Count(checksum(solution.iter().map(|value| value.to_bits())) >> 12)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;
    use payload_spmd::Figure;

    /// The solution is the same to the last bit for any team, and solves the system.
    #[test]
    fn the_solution_does_not_depend_on_the_team() {
        let outcomes = right(run, NAMES, &["n=777", "iterations=30"]);
        assert!(outcomes.windows(2).all(|two| two[0].get("checksum") == two[1].get("checksum")));
        let Some(Figure::Real(residual)) = outcomes[0].get("residual") else { panic!("no residual") };
        assert!(residual < 1e-6, "{residual}");
    }

    /// Iterations after a zero residual change nothing: the solution stays, without a 0/0.
    #[test]
    fn nothing_is_left_to_do_after_the_solution() {
        let outcomes = right(run, NAMES, &["n=300", "band=2", "iterations=400"]);
        assert_eq!(outcomes[0].get("residual"), Some(Figure::Real(0.0)));
    }
}
