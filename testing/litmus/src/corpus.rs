//! The tests: two to four threads, written from the literature's definitions of the shapes.
//!
//! Names: Alglave, Maranget and Tautschnig, *Herding Cats* (TOPLAS 2014), table III. For `n4` to `n6`: Owens, Sarkar and Sewell, *A
//! Better x86 Memory Model: x86-TSO* (TPHOLs 2009). The `wide-…` tests are Causeway's own: their values differ in both halves, so
//! they are meaningful across page boundaries.

use crate::test::{Instruction, Operand, Test};
use crate::{ParseError, Variant};
use payload_litmus::table::Placement;

const TEXTS: &[&str] = &[
    include_str!("../corpus/SB.litmus"),
    include_str!("../corpus/SB+mfences.litmus"),
    include_str!("../corpus/SB+mfence+po.litmus"),
    include_str!("../corpus/SB+rfis.litmus"),
    include_str!("../corpus/SB+rfis+mfences.litmus"),
    include_str!("../corpus/SB+xchgs.litmus"),
    include_str!("../corpus/SB+lockadds.litmus"),
    include_str!("../corpus/SB+lockelsewhere.litmus"),
    include_str!("../corpus/SB+lockown.litmus"),
    include_str!("../corpus/SB64.litmus"),
    include_str!("../corpus/SB+mixed.litmus"),
    include_str!("../corpus/MP.litmus"),
    include_str!("../corpus/MP+xchg.litmus"),
    include_str!("../corpus/MP64.litmus"),
    include_str!("../corpus/LB.litmus"),
    include_str!("../corpus/R.litmus"),
    include_str!("../corpus/R+po+mfence.litmus"),
    include_str!("../corpus/S.litmus"),
    include_str!("../corpus/2+2W.litmus"),
    include_str!("../corpus/2+2W+reads.litmus"),
    include_str!("../corpus/CoRR.litmus"),
    include_str!("../corpus/CoWW.litmus"),
    include_str!("../corpus/CoRW1.litmus"),
    include_str!("../corpus/CoRW2.litmus"),
    include_str!("../corpus/CoWR.litmus"),
    include_str!("../corpus/n4.litmus"),
    include_str!("../corpus/n5.litmus"),
    include_str!("../corpus/n6.litmus"),
    include_str!("../corpus/inc.litmus"),
    include_str!("../corpus/lockinc.litmus"),
    include_str!("../corpus/xadds.litmus"),
    include_str!("../corpus/cmpxchgs.litmus"),
    include_str!("../corpus/xchg-xchg.litmus"),
    include_str!("../corpus/spinlock.litmus"),
    include_str!("../corpus/bits.litmus"),
    include_str!("../corpus/WRC.litmus"),
    include_str!("../corpus/WRC+locked.litmus"),
    include_str!("../corpus/RWC.litmus"),
    include_str!("../corpus/RWC+mfence.litmus"),
    include_str!("../corpus/ISA2.litmus"),
    include_str!("../corpus/WWC.litmus"),
    include_str!("../corpus/Z6.3.litmus"),
    include_str!("../corpus/3.SB.litmus"),
    include_str!("../corpus/3.SB+mfences.litmus"),
    include_str!("../corpus/3.LB.litmus"),
    include_str!("../corpus/IRIW.litmus"),
    include_str!("../corpus/IRIW+xchgs.litmus"),
    include_str!("../corpus/CoIRIW.litmus"),
    include_str!("../corpus/W+RWC.litmus"),
    include_str!("../corpus/4.SB+mfences.litmus"),
    include_str!("../corpus/4.xadds.litmus"),
    include_str!("../corpus/wide-CoRR.litmus"),
    include_str!("../corpus/wide-CoWW.litmus"),
    include_str!("../corpus/wide-MP.litmus"),
    include_str!("../corpus/wide-SB.litmus"),
    include_str!("../corpus/wide-SB+mfences.litmus"),
    include_str!("../corpus/wide-SB+xchgs.litmus"),
    include_str!("../corpus/wide-LB.litmus"),
    include_str!("../corpus/wide-lockadd.litmus"),
    include_str!("../corpus/wide-xadds.litmus"),
    include_str!("../corpus/wide-cmpxchg.litmus"),
    include_str!("../corpus/wide-IRIW.litmus"),
];

/// Returns all tests of the corpus.
///
/// # Errors
/// None while the unit tests pass, which parse all tests.
pub fn all() -> Result<Vec<Test>, ParseError> {
    TEXTS.iter().map(|text| Test::parse(text)).collect()
}

/// Returns the placements that are meaningful for a test. With one location, a separate page equals any page. Across a boundary,
/// values must differ on both sides, and accesses must have one width.
#[must_use]
pub fn variants(test: &Test) -> Vec<Variant<'_>> {
    let wide = |value: u64| value >= 0xffff;
    let constants = test.threads.iter().flatten().any(|instruction| match instruction {
        Instruction::Store(_, _, Operand::Constant(value))
        | Instruction::Modify { operand: Operand::Constant(value), .. } => wide(u64::from(*value)),
        _ => false,
    });
    let given = test.registers.iter().any(|(_, _, value)| wide(*value))
        || test.initial.iter().any(|value| wide(*value));
    let mut placements = vec![Placement::Line];
    if test.locations.len() > 1 {
        placements.extend([Placement::Page, Placement::Pages]);
    }
    if (constants || given) && test.width().is_some() {
        placements.push(Placement::Cross);
    }
    placements.into_iter().map(|placement| Variant { test, placement }).collect()
}

#[cfg(test)]
mod tests {
    use super::{all, variants};
    use payload_litmus::table::Placement;
    use std::collections::BTreeSet;

    #[test]
    fn every_test_is_read_and_has_its_own_name() {
        let tests = all().unwrap();
        let names: BTreeSet<&str> = tests.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(names.len(), tests.len());
        assert!(tests.iter().all(|test| (2..=4).contains(&test.threads.len())));
        let count = |placement| {
            tests.iter().flat_map(variants).filter(|variant| variant.placement == placement).count()
        };
        assert_eq!(count(Placement::Line), tests.len());
        assert_eq!(count(Placement::Page), count(Placement::Pages));
        let crossing: Vec<_> =
            tests.iter().flat_map(variants).filter(|variant| variant.placement == Placement::Cross).collect();
        assert!(
            crossing
                .iter()
                .all(|variant| variant.test.name.starts_with("wide-") || variant.test.width().is_some())
        );
        assert!(
            tests
                .iter()
                .filter(|test| test.name.starts_with("wide-"))
                .all(|test| { crossing.iter().any(|variant| variant.test.name == test.name) })
        );
    }
}
