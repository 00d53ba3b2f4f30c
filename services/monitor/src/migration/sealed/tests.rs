//! Handshakes of sides with the same and with different configurations.

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

/// Runs both sides of a handshake; returns their connections and results.
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
            // The messages of a source that doesn't encrypt, up to the answer.
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

/// Received bytes are equal to the sent ones, in both directions, in pieces of any size. None of them is readable on the socket.
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

/// Sides with different configurations report it, each in a sentence.
#[test]
fn sides_with_different_keys_get_an_error() {
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

/// A recorded handshake can't be replayed to the destination.
#[test]
fn a_replayed_handshake_is_refused() {
    let recorded = {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut a = over(a);
        let mut state = Handshake::initiator(MIGRATION, &key(1)).unwrap();
        put(&mut state, &mut a).unwrap();
        let mut bytes = [0; HANDSHAKE_BYTES];
        b.read_exact(&mut bytes).unwrap();
        bytes
    };
    let (mut a, b) = UnixStream::pair().unwrap();
    let mut b = over(b);
    a.write_all(&recorded).unwrap();
    // The replayed handshake succeeds, because nothing in it depends on the destination; the first record fails.
    as_destination(&mut b, Some(&key(1))).unwrap();
    a.write_all(&[18, 0]).unwrap();
    a.write_all(&[7; 18]).unwrap();
    assert_eq!(b.read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

/// A sender and a receiver share a stream, each in its own thread. The connection that has passed on its sending side can't send.
#[test]
fn the_sending_half_can_be_split_off() {
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
