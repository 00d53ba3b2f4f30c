//! Errors that no guest can cause, but that must not look like success if they ever happen.

use dma::HeapMemory;

use super::*;
use crate::memory::Piece;
use crate::testing::World;

const PAGE: u64 = 4096;

fn gathered(sources: &[u64], targets: &[u64]) -> (World, u32, u32) {
    let mut world = World::default();
    let [one, other] = [(); 2].map(|()| world.guest(HeapMemory::new(8 * 4096)));
    let pieces = |lens: &[u64]| -> Vec<Piece> {
        (0..).zip(lens).map(|(index, len)| Piece { address: index * PAGE, len: *len }).collect()
    };
    world.engine.split_source().1.extend(pieces(sources));
    world.engine.split_target().1.extend(pieces(targets));
    (world, one.device.0, other.device.0)
}

#[test]
fn a_copy_whose_device_is_gone_fails() {
    let (mut world, from, to) = gathered(&[64], &[64]);
    assert_eq!(world.engine.copy(from, to), Ok(()));
    world.engine.remove_device(crate::names::DeviceId(to));
    assert_eq!(world.engine.copy(from, to), Err(CopyFault::Destination(DmaFault { address: 0, len: 64 })));
    assert_eq!(world.engine.copy(to, from), Err(CopyFault::Source(DmaFault { address: 0, len: 64 })));
    assert!(world.engine.write_target(to, &[1; 64]).is_err());
}

#[test]
fn a_copy_between_lists_of_different_lengths_fails_and_moves_nothing() {
    let short = |lens: &[u64], targets: &[u64]| {
        let (world, from, to) = gathered(lens, targets);
        world.engine.device(from).unwrap().memory.write(0, &[7; 4096]).unwrap();
        let result = world.engine.copy(from, to);
        let mut bytes = [0; 4096];
        world.engine.device(to).unwrap().memory.read(0, &mut bytes).unwrap();
        (result.is_err(), bytes.contains(&7))
    };
    for (sources, targets) in [
        (&[100][..], &[60][..]),
        (&[60], &[100]),
        (&[10, 90], &[60]),
        (&[100], &[]),
        (&[], &[1]),
        (&[10, 50], &[30, 40]),
    ] {
        assert_eq!(short(sources, targets), (true, false), "{sources:?} to {targets:?}");
    }
    assert_eq!(short(&[10, 50], &[30, 30]), (false, true));
    assert_eq!(short(&[], &[]), (false, false));
}
