//! A destination accepts hostile saved state: it refuses it with a sentence, or restores objects that an engine can run.

use std::sync::OnceLock;

use host_testbed::moving::hostile::{arrive, pieces};
use nomad::objects::Piece;
use proptest::prelude::*;

fn real() -> &'static [Piece] {
    static PIECES: OnceLock<Vec<Piece>> = OnceLock::new();
    PIECES.get_or_init(|| pieces(3))
}

#[test]
fn what_was_saved_arrives() {
    arrive(real()).unwrap();
}

#[test]
fn other_versions_are_refused_by_name() {
    let mut pieces = real().to_vec();
    if let Some(state) = pieces.last_mut().and_then(|piece| piece.state.as_mut()) {
        state[0] = 9;
    }
    let refused = arrive(&pieces).unwrap_err();
    let source = std::error::Error::source(&refused).map(ToString::to_string).unwrap_or_default();
    assert!(source.contains("version 9"), "{refused}: {source}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    /// Bytes changed, cut off or taken from other objects: neither restoring nor running panics.
    #[test]
    fn damaged_state_does_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
        swap in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
    ) {
        let mut pieces = real().to_vec();
        for (piece, at, value) in changes {
            if let Some(state) = piece.get_mut(&mut pieces).state.as_mut() {
                let at = at.index(state.len());
                state[at] = value;
            }
        }
        if let Some((piece, at)) = cut
            && let Some(state) = piece.get_mut(&mut pieces).state.as_mut()
        {
            state.truncate(at.index(state.len()));
        }
        if let Some((one, other)) = swap {
            let bytes = one.get(&pieces).state.clone();
            other.get_mut(&mut pieces).state = bytes;
        }
        if let Err(refused) = arrive(&pieces) {
            let text = refused.to_string();
            prop_assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
        }
    }
}
