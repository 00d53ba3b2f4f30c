//! Jacobi's relaxation on a square grid: in each step, every inner point becomes the mean of its four neighbours. Each vCPU has some
//! rows, and needs one row of each adjacent vCPU per step.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use payload_spmd::{Figure, Heap, Outcome, Refused, Settings, Shared, Team};

/// `n`: rows and columns (256); `steps` (20).
pub const NAMES: &[&str] = &["n", "steps"];

/// Initializes a row of the grid: the edge is hot and uneven, the inside cold.
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn start(n: usize, row: usize, values: &mut [f64]) {
    for (column, value) in values.iter_mut().enumerate() {
        let edge = row == 0 || row == n - 1 || column == 0 || column == n - 1;
        *value = if edge { ((row * 31 + column * 17) % 100) as f64 } else { 0.0 };
    }
}

/// Computes one row of a step.
fn step(target: &mut [f64], above: &[f64], row: &[f64], below: &[f64]) {
    let last = row.len() - 1;
    target[0] = row[0];
    target[last] = row[last];
    let around = row.windows(3).zip(above[1..last].iter().zip(&below[1..last]));
    for (value, (row, (above, below))) in target[1..last].iter_mut().zip(around) {
        *value = (above + below + row[0] + row[2]) * 0.25;
    }
}

/// Runs all steps; returns the index of the grid with the result.
fn relax(team: &Team<'_>, grids: &[Shared<f64>; 2], n: usize, steps: u64) -> usize {
    let mine = team.part(n - 2);
    let of = |row: usize| row * n..(row + 1) * n;
    let mut from = 0;
    for _ in 0..steps {
        let (old, new) = (&grids[from], &grids[1 - from]);
        for row in mine.start + 1..mine.end + 1 {
            // SAFETY: no vCPU writes the old grid in this step.
            let [above, here, below] = [row - 1, row, row + 1].map(|row| unsafe { old.read(of(row)) });
            // SAFETY: only this vCPU uses this row of the new grid in this step.
            step(unsafe { new.write(of(row)) }, above, here, below);
        }
        team.wait();
        from = 1 - from;
    }
    from
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let n = settings.size("n", 256, 3..=16384)?;
    let steps = settings.number("steps", 20, 1..=1 << 32)?;
    let grids: [Shared<f64>; 2] = [heap.array(n * n)?, heap.array(n * n)?];
    let reference: [Shared<f64>; 2] = [heap.array(n * n)?, heap.array(n * n)?];
    let fill = |team: &Team<'_>, grids: &[Shared<f64>; 2]| {
        // The first and the last row belong to the vCPUs of the adjacent rows.
        let inner = team.part(n - 2);
        let first = if team.index() == 0 { 0 } else { inner.start + 1 };
        let last = if team.index() + 1 == team.count() { n } else { inner.end + 1 };
        for (grid, row) in grids.iter().flat_map(|grid| (first..last).map(move |row| (grid, row))) {
            // SAFETY: rows of this vCPU; others read them after a barrier.
            start(n, row, unsafe { grid.write(row * n..(row + 1) * n) });
        }
    };
    fill(team, &grids);
    let mut result = 0;
    let nanoseconds = team.measure(|| result = relax(team, &grids, n, steps));
    let outcome = Outcome::new("step", steps, nanoseconds);
    if !team.leads() {
        return Ok(outcome);
    }
    fill(&team.alone(), &reference);
    let serial_ns = team.time(|| {
        relax(&team.alone(), &reference, n, steps);
    });
    // SAFETY: all have ended.
    let (grid, reference) = unsafe { (grids[result].read(0..n * n), reference[result].read(0..n * n)) };
    let same = grid.iter().zip(reference).all(|(one, other)| one.to_bits() == other.to_bits());
    Ok(outcome
        .verified(same)
        .figure("serial_ns", Figure::Count(serial_ns))
        .figure("n", Figure::Count(n as u64))
        .figure("checksum", Figure::Count(checksum(grid.iter().map(|value| value.to_bits())) >> 12)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run, step};
    use crate::testing::right;

    #[test]
    fn a_point_becomes_the_mean_of_its_neighbours() {
        let mut target = [0.0; 3];
        step(&mut target, &[0.0, 1.0, 0.0], &[2.0, 99.0, 3.0], &[0.0, 6.0, 0.0]);
        assert_eq!(target, [2.0, 3.0, 3.0]);
    }

    #[test]
    fn the_grid_does_not_depend_on_the_team() {
        let outcomes = right(run, NAMES, &["n=33", "steps=11"]);
        assert!(outcomes.windows(2).all(|two| two[0].get("checksum") == two[1].get("checksum")));
        // Fewer rows than vCPUs.
        right(run, NAMES, &["n=3", "steps=1"]);
    }
}
