//! Matrix multiplication: C = A B; each vCPU computes some rows of C.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::checksum;
use payload_spmd::{Figure, Heap, Outcome, Random, Refused, Settings, Shared, Team};

/// `n`: rows and columns (128); `seed` (1).
pub const NAMES: &[&str] = &["n", "seed"];

/// Fills row `row` of a random matrix.
fn fill(row: &mut [f64], seed: u64) {
    let mut random = Random::new(seed);
    row.fill_with(|| random.unit() - 0.5);
}

/// Computes one row of the product.
fn row(target: &mut [f64], left: &[f64], right: &[f64]) {
    target.fill(0.0);
    for (factor, row) in left.iter().zip(right.chunks_exact(target.len())) {
        for (sum, value) in target.iter_mut().zip(row) {
            *sum += factor * value;
        }
    }
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let n = settings.size("n", 128, 1..=8192)?;
    let seed = settings.number("seed", 1, 0..=u64::MAX)?;
    let matrices: [Shared<f64>; 2] = [heap.array(n * n)?, heap.array(n * n)?];
    let product = heap.array::<f64>(n * n)?;
    let reference = heap.array::<f64>(n * n)?;
    let of = |index: usize| index * n..(index + 1) * n;

    // The vCPU that uses a row of A fills it. All vCPUs need B.
    for (which, matrix) in (0_u64..).zip(&matrices) {
        for index in team.part(n) {
            // SAFETY: rows of this vCPU, which others read after the barrier in `measure`.
            fill(unsafe { matrix.write(of(index)) }, seed ^ which << 32 ^ (index as u64) << 1);
        }
    }
    let [left, right] = &matrices;
    let multiply = |team: &Team<'_>, target: &Shared<f64>| {
        for index in team.part(n) {
            // SAFETY: A and B are no longer written.
            let (left, right) = unsafe { (left.read(of(index)), right.read(0..n * n)) };
            // SAFETY: rows of this vCPU.
            row(unsafe { target.write(of(index)) }, left, right);
        }
    };
    let nanoseconds = team.measure(|| multiply(team, &product));
    let outcome = Outcome::new("multiplication", (n * n * n) as u64, nanoseconds);
    if !team.leads() {
        return Ok(outcome);
    }
    let serial_ns = team.time(|| multiply(&team.alone(), &reference));
    // SAFETY: all have ended.
    let (product, reference) = unsafe { (product.read(0..n * n), reference.read(0..n * n)) };
    let same = product.iter().zip(reference).all(|(one, other)| one.to_bits() == other.to_bits());
    Ok(outcome
        .verified(same)
        .figure("serial_ns", Figure::Count(serial_ns))
        .figure("n", Figure::Count(n as u64))
        .figure("checksum", Figure::Count(checksum(product.iter().map(|value| value.to_bits())) >> 12)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, row, run};
    use crate::testing::right;

    #[test]
    fn a_row_of_a_product() {
        let mut target = [9.0; 2];
        row(&mut target, &[1.0, 2.0], &[3.0, 4.0, 5.0, 6.0]);
        assert_eq!(target, [13.0, 16.0]);
    }

    #[test]
    fn the_product_does_not_depend_on_the_team() {
        let outcomes = right(run, NAMES, &["n=37"]);
        assert!(outcomes.windows(2).all(|two| two[0].get("checksum") == two[1].get("checksum")));
        right(run, NAMES, &["n=1"]);
    }
}
