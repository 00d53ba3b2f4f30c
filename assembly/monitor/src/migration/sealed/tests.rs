//! Handshakes between sides of one mind and of two, and records that somebody on the way changes, repeats, leaves out or takes from another stream.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;
use crate::migration::connection::Stop;

fn key(seed: u8) -> ClusterKey {
    ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ seed)).unwrap()
}

fn over(fd: impl Into<OwnedFd>) -> Connection {
    Connection::new(fd.into(), Stop::default(), Duration::from_secs(5))
}

/// Both sides of a handshake, and what came of it.
fn shake(
    source: Option<&ClusterKey>,
    destination: Option<&ClusterKey>,
) -> [(Connection, Result<(), MigrationError>); 2] {
    let (a, b) = UnixStream::pair().unwrap();
    let (mut a, mut b) = (over(a), over(b));
    std::thread::scope(|scope| {
        let there = scope.spawn(move || {
            let result = as_destination(&mut b, destination);
            (b, result)
        });
        let result = match source {
            Some(key) => as_source(&mut a, key),
            // What a source says that doesn't encrypt, up to the answer.
            None => {
                Sender::new().send(&mut a, Kind::Hello, &[b"hello"]).unwrap();
                match destination {
                    Some(_) => match Receiver::new().receive(&mut a) {
                        Ok((Kind::Refused, text)) => Err(MigrationError::Refused(message::sentence(text))),
                        other => panic!("{other:?}"),
                    },
                    None => Ok(()),
                }
            }
        };
        [(a, result), there.join().unwrap()]
    })
}

fn pair() -> (Connection, Connection) {
    let [(a, here), (b, there)] = shake(Some(&key(1)), Some(&key(1)));
    here.and(there).unwrap();
    (a, b)
}

/// Bytes come out as they went in, in both directions, however they are cut; and none of them is to be seen on the way.
#[test]
fn what_was_sealed_is_opened() {
    let (mut a, mut b) = pair();
    let bytes: Vec<u8> = (0..300_000u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            a.write_all(b"ab").unwrap();
            a.write_all(&bytes).unwrap();
            let mut answer = [0; 2];
            a.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"ok");
        });
        let mut first = [0; 1];
        b.read_exact(&mut first).unwrap();
        let mut rest = vec![0; bytes.len() + 1];
        b.read_exact(&mut rest).unwrap();
        assert_eq!((first[0], rest[0]), (b'a', b'b'));
        assert_eq!(rest[1..], bytes);
        b.write_all(b"ok").unwrap();
    });
}

/// Who isn't of the same mind is told in a sentence, on both sides.
#[test]
fn sides_of_two_minds_are_told() {
    let refused = |source: Option<u8>, destination: Option<u8>| {
        let (source, destination) = (source.map(key), destination.map(key));
        let [(_, here), (_, there)] = shake(source.as_ref(), destination.as_ref());
        (here.unwrap_err().to_string(), there.unwrap_err().to_string())
    };
    let (here, there) = refused(Some(1), None);
    assert!(here.contains("refuses") && here.contains("--incoming-key"), "{here}");
    assert!(there.contains("--incoming-key"), "{there}");
    let (here, there) = refused(None, Some(1));
    assert!(here.contains("refuses") && here.contains("its --key"), "{here}");
    assert!(there.contains("isn't encrypted"), "{there}");
    let (here, there) = refused(Some(1), Some(2));
    assert!(here.contains("another key") && there.contains("another key"), "{here}; {there}");
    let [(_, here), (_, there)] = shake(None, None);
    assert!(here.is_ok() && there.is_ok());
}

/// A destination that has seen the key's owner can't be spoken to with what was recorded then.
#[test]
fn a_recorded_handshake_leads_nowhere() {
    let recorded = {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut a = over(a);
        let mut state = builder(&key(1)).and_then(Builder::build_initiator).unwrap();
        put(&mut state, &mut a).unwrap();
        let mut bytes = [0; HEAD + MESSAGE];
        b.read_exact(&mut bytes).unwrap();
        bytes
    };
    let (mut a, b) = UnixStream::pair().unwrap();
    let mut b = over(b);
    a.write_all(&recorded).unwrap();
    // The handshake itself goes well, since nothing in it is the destination's yet; the first record doesn't.
    as_destination(&mut b, Some(&key(1))).unwrap();
    a.write_all(&[18, 0]).unwrap();
    a.write_all(&[7; 18]).unwrap();
    assert_eq!(b.read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

/// Records of two messages, as somebody on the way has them.
fn records(sealing: &mut Sealing, messages: &[&[u8]]) -> Vec<Vec<u8>> {
    let take = |message: &&[u8]| {
        let mut wire = Vec::new();
        sealing.write(message, &mut wire).unwrap();
        wire
    };
    messages.iter().map(take).collect()
}

fn ends(seed: u8) -> (Sealing, Opening) {
    let key = key(seed);
    let mut one = builder(&key).and_then(Builder::build_initiator).unwrap();
    let mut other = builder(&key).and_then(Builder::build_responder).unwrap();
    let mut bytes = [0; 100];
    let length = one.write_message(&[], &mut bytes).unwrap();
    other.read_message(&bytes[..length], &mut []).unwrap();
    let length = other.write_message(&[], &mut bytes).unwrap();
    one.read_message(&bytes[..length], &mut []).unwrap();
    (directions(one).unwrap().0, directions(other).unwrap().1)
}

/// Reads all that opens, and how it ended.
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
    // Another stream's, of the same key.
    let foreign = records(&mut ends(1).0, &messages);
    assert_eq!(tamper(&|all| all[0] = foreign[0].clone()), (Vec::new(), invalid));
}

/// Both sides change the key after as many records, and a side that doesn't is noticed.
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

/// One that sends and one that receives share a stream, each in a thread of its own; the one that gave the sending away can't send.
#[test]
fn sending_can_be_given_away() {
    let (mut a, mut b) = pair();
    a.write_all(b"one").unwrap();
    let mut sender = a.sender(Stop::default(), Duration::from_secs(5)).unwrap();
    assert!(a.write(b"no").is_err() && sender.read(&mut [0]).is_err());
    assert!(a.sender(Stop::default(), Duration::from_secs(5)).is_err());
    sender.write_all(b"two").unwrap();
    b.write_all(b"three").unwrap();
    let mut got = [0; 6];
    b.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"onetwo");
    let mut got = [0; 5];
    a.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"three");
}
