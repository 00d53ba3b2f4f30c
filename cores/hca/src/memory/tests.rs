//! Protection and translation.

use proptest::prelude::*;

use super::*;

fn region(start: u64, length: u64, access: Access, extent: Extent) -> Region {
    Region { key: 0, pd: 1, access, valid: true, kind: Kind::User, start, length, exported: false, extent }
}

fn gather(regions: &Regions, pd: u32, sges: &[Sge], need: Access) -> Result<Vec<Piece>, Forbidden> {
    let mut pieces = Vec::new();
    let len = sges.iter().map(|sge| u64::from(sge.length)).sum();
    regions.gather(pd, sges, len, 0..len, need, &mut pieces)?;
    Ok(pieces)
}

#[test]
fn every_condition_of_an_access_is_checked() {
    let mut regions = Regions::new(100);
    let (_, lkey) =
        regions.insert(region(0x1000, 0x100, Access::LOCAL_WRITE, Extent::Single(0x8000)), 1).unwrap();
    let sge = |address, length, lkey| Sge { address, length, lkey };
    let none = Access::empty();
    assert_eq!(
        gather(&regions, 1, &[sge(0x1010, 0x10, lkey)], Access::LOCAL_WRITE),
        Ok(vec![Piece { address: 0x8010, len: 0x10 }])
    );
    assert!(gather(&regions, 2, &[sge(0x1010, 0x10, lkey)], none).is_err(), "other protection domain");
    assert!(gather(&regions, 1, &[sge(0x1010, 0x10, lkey ^ 1)], none).is_err(), "other variant");
    assert!(gather(&regions, 1, &[sge(0x1010, 0x10, 0)], none).is_err(), "key 0");
    assert!(gather(&regions, 1, &[sge(0x10F1, 0x10, lkey)], none).is_err(), "beyond the end");
    assert!(gather(&regions, 1, &[sge(0xFFF, 2, lkey)], none).is_err(), "before the start");
    assert!(gather(&regions, 1, &[sge(u64::MAX, 2, lkey)], none).is_err(), "wraps around");
    assert!(gather(&regions, 1, &[sge(0x1010, 1, lkey)], Access::REMOTE_READ).is_err(), "no such right");
    assert_eq!(gather(&regions, 1, &[sge(7, 0, 99)], none), Ok(vec![]), "nothing is accessed");
    regions.of_key_mut(lkey).unwrap().valid = false;
    assert!(gather(&regions, 1, &[sge(0x1010, 1, lkey)], none).is_err(), "invalid");
}

#[test]
fn only_fast_regions_are_invalidated() {
    let mut regions = Regions::new(100);
    let (_, user) = regions.insert(region(0, 16, Access::empty(), Extent::Single(0)), 1).unwrap();
    assert!(regions.invalidate(user, 1).is_err());
    let mut fast = region(0, 16, Access::empty(), Extent::Single(0));
    fast.kind = Kind::Fast { max_pages: 1 };
    let (_, fast) = regions.insert(fast, 2).unwrap();
    assert!(regions.invalidate(fast, 2).is_err(), "other protection domain");
    assert!(regions.invalidate(fast ^ 1, 1).is_err(), "other variant");
    assert!(regions.invalidate(fast, 1).is_ok());
    assert!(gather(&regions, 1, &[Sge { address: 0, length: 1, lkey: fast }], Access::empty()).is_err());
}

#[test]
fn pages_must_be_aligned_and_must_not_wrap() {
    assert_eq!(Extent::from_pages(0, &[0x1001]), None);
    assert_eq!(Extent::from_pages(0, &[0xFFFF_FFFF_FFFF_F000]), None);
    assert_eq!(Extent::from_pages(0, &[]), None);
    assert_eq!(Extent::from_pages(5, &[0x1000, 0x2000]), Some(Extent::Single(0x1005)));
}

proptest! {
    /// Translation by runs equals a look-up of each byte's page.
    #[test]
    fn runs_are_the_page_list(
        pages in prop::collection::vec(0u64..6, 1..20),
        first in 0u64..4096,
        offset in 0u64..80_000,
        len in 0u64..80_000,
    ) {
        let pages: Vec<u64> = pages.into_iter().map(|page| page * 4096).collect();
        let length = pages.len() as u64 * 4096 - first;
        let offset = offset % length;
        let len = 1 + len % (length - offset);
        let region = region(0, length, Access::empty(), Extent::from_pages(first, &pages).unwrap());
        let mut pieces = Vec::new();
        region.pieces(offset, len, &mut pieces);
        let bytes: Vec<u64> = pieces.iter().flat_map(|p| p.address..p.address + p.len).collect();
        let expected: Vec<u64> = (offset..offset + len)
            .map(|at| pages[usize::try_from((first + at) / 4096).unwrap()] + (first + at) % 4096)
            .collect();
        prop_assert_eq!(bytes, expected);
    }
}
