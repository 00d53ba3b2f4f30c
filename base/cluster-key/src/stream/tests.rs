//! Handshakes, and records that an attacker in the path changes, repeats, drops or takes from another stream.

use super::*;

fn key(seed: u8) -> ClusterKey {
    ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ seed)).unwrap()
}

/// The records of some messages, as an attacker in the path sees them.
fn records(sealing: &mut Sealing, messages: &[&[u8]]) -> Vec<Vec<u8>> {
    let take = |message: &&[u8]| {
        let mut wire = Vec::new();
        sealing.write(message, &mut wire).unwrap();
        wire
    };
    messages.iter().map(take).collect()
}

const PURPOSE: Purpose = Purpose { magic: *b"CWtt", version: 1, prologue: b"tests" };

fn shake(one: Purpose, other: Purpose, keys: [u8; 2]) -> Result<(Handshake, Handshake), Mismatch> {
    let mut initiator = Handshake::initiator(one, &key(keys[0])).unwrap();
    let mut responder = Handshake::responder(other, &key(keys[1])).unwrap();
    responder.take(&initiator.put().unwrap())?;
    initiator.take(&responder.put().unwrap())?;
    Ok((initiator, responder))
}

fn ends(seed: u8) -> (Sealing, Opening) {
    let (one, other) = shake(PURPOSE, PURPOSE, [seed; 2]).unwrap();
    (one.finish().unwrap().0, other.finish().unwrap().1)
}

/// A handshake with another purpose, version or key fails.
#[test]
fn sides_that_do_not_mean_the_same_are_told_apart() {
    let foreign = Purpose { magic: *b"CWuu", ..PURPOSE };
    let newer = Purpose { version: 2, ..PURPOSE };
    let other = Purpose { prologue: b"others", ..PURPOSE };
    for (purpose, keys, expected) in [
        (foreign, [1, 1], Mismatch::Foreign),
        (newer, [1, 1], Mismatch::Version(1)),
        (other, [1, 1], Mismatch::Key),
        (PURPOSE, [1, 2], Mismatch::Key),
    ] {
        assert_eq!(shake(PURPOSE, purpose, keys).err(), Some(expected), "{purpose:?}");
    }
}

/// Reads everything that opens, and returns how it ended.
fn read_all(opening: &mut Opening, wire: &[u8]) -> (Vec<u8>, Result<(), io::ErrorKind>) {
    let (mut all, mut from) = (Vec::new(), wire);
    loop {
        let mut some = [0; 7];
        match opening.read(&mut some, &mut from) {
            Ok(0) => return (all, Ok(())),
            Ok(count) => all.extend_from_slice(&some[..count]),
            Err(error) => return (all, Err(error.kind())),
        }
    }
}

#[test]
fn records_that_were_changed_on_the_way_do_not_open() {
    let messages: [&[u8]; 3] = [b"first record", b"second", b"third"];
    let (mut sealing, mut opening) = ends(1);
    let whole = records(&mut sealing, &messages);
    assert!(!whole.concat().windows(5).any(|some| some == b"first"), "it can be read on the way");
    assert_eq!(read_all(&mut opening, &whole.concat()), (messages.concat(), Ok(())));

    let invalid = Err(io::ErrorKind::InvalidData);
    let tamper = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
        let (mut sealing, mut opening) = ends(1);
        let mut records = records(&mut sealing, &messages);
        change(&mut records);
        read_all(&mut opening, &records.concat())
    };
    assert_eq!(tamper(&|all| all[1][9] ^= 1), (messages[0].to_vec(), invalid));
    assert_eq!(tamper(&|all| all.swap(0, 1)), (Vec::new(), invalid));
    assert_eq!(tamper(&|all| drop(all.remove(1))), (messages[0].to_vec(), invalid));
    assert_eq!(tamper(&|all| all[1] = all[0].clone()), (messages[0].to_vec(), invalid));
    assert_eq!(tamper(&|all| all[0] = vec![16, 0]), (Vec::new(), invalid));
    let (here, end) = tamper(&|all| all[2].truncate(9));
    assert_eq!((here, end), (messages[..2].concat(), Err(io::ErrorKind::UnexpectedEof)));
    // A record of another stream with the same key.
    let foreign = records(&mut ends(1).0, &messages);
    assert_eq!(tamper(&|all| all[0] = foreign[0].clone()), (Vec::new(), invalid));
}

/// Both sides change the key after the same number of records. A side that doesn't is detected.
#[test]
fn keys_change_on_both_sides() {
    let messages = [b"record".as_slice(); 10];
    let (mut sealing, mut opening) = ends(1);
    (sealing.direction.rekey_after, opening.direction.rekey_after) = (3, 3);
    let wire = records(&mut sealing, &messages).concat();
    assert_eq!(read_all(&mut opening, &wire), (messages.concat(), Ok(())));
    let (mut sealing, mut opening) = ends(1);
    sealing.direction.rekey_after = 3;
    let wire = records(&mut sealing, &messages).concat();
    assert_eq!(read_all(&mut opening, &wire), (messages[..3].concat(), Err(io::ErrorKind::InvalidData)));
}
