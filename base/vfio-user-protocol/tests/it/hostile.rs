//! Hostile peers: neither side panics, grows or hangs. A server continues after messages with valid framing.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use proptest::prelude::*;
use vfio_user_device::{TestDevice, TestEvent};
use vfio_user_protocol::client::Client;
use vfio_user_protocol::server::Ended;

fn message(id: u16, command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = id.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&command.to_ne_bytes());
    bytes.extend_from_slice(&u32::try_from(16 + body.len()).unwrap().to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(body);
    bytes
}

/// Returns a reply's header fields (id, command, error) and body.
fn reply(stream: &mut UnixStream) -> (u16, u16, Option<u32>, Vec<u8>) {
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let u16_at = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let u32_at = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    assert_eq!(u32_at(8) & 0xF, 1);
    let mut body = vec![0; usize::try_from(u32_at(4)).unwrap() - 16];
    stream.read_exact(&mut body).unwrap();
    (u16_at(0), u16_at(2), (u32_at(8) & 0x20 != 0).then(|| u32_at(12)), body)
}

fn negotiated(device: &std::sync::Arc<TestDevice>) -> (UnixStream, vfio_user_device::TestServer) {
    let (mut stream, server) = device.serve_pair();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&message(1, 1, 0, b"\0\0\x07\0{\"capabilities\":{}}\0")).unwrap();
    let (id, command, error, body) = reply(&mut stream);
    assert_eq!((id, command, error), (1, 1, None));
    assert_eq!(&body[..4], &[0, 0, 1, 0], "the minor version is the smaller of both");
    assert_eq!(&body[4..], b"{\"capabilities\":{}}\0");
    (stream, server)
}

#[test]
fn what_is_wrong_gets_an_error_number_and_the_connection_goes_on() {
    let device = TestDevice::new();
    let (mut stream, _server) = negotiated(&device);
    let access = |region: u32, offset: u64, count: u32| {
        let mut body = offset.to_ne_bytes().to_vec();
        body.extend_from_slice(&region.to_ne_bytes());
        body.extend_from_slice(&count.to_ne_bytes());
        body
    };
    let irqs = |flags: u32, index: u32, start: u32, count: u32| -> Vec<u8> {
        [20, flags, index, start, count].iter().flat_map(|word: &u32| word.to_ne_bytes()).collect()
    };
    let cases: &[(u16, Vec<u8>, u32)] = &[
        (0, vec![], 95),                     // no command
        (11, vec![0; 16], 95),               // DMA_READ is the server's
        (15, vec![0; 8], 95),                // WRITE_MULTI
        (15, vec![0; 8], 95),                // REGION_WRITE_MULTI
        (16, vec![0; 8], 25),                // DEVICE_FEATURE: feature 0
        (0xFFFF, vec![0; 70_000], 95),       // no command, long
        (1, b"\0\0\x01\0{}\0".to_vec(), 22), // a second VERSION
        (2, vec![0; 32], 22),                // DMA_MAP of nothing
        (2, vec![0; 31], 22),                // cut
        (3, vec![0; 24], 2),                 // DMA_UNMAP of nothing
        (4, vec![], 22),                     // GET_INFO, cut
        (5, vec![0xFF; 32], 22),             // region 2^32 - 1
        (6, vec![0xFF; 16], 22),
        (7, vec![0xFF; 16], 22),
        (8, irqs(0x24, 2, 0, 1), 0),         // no descriptor: detaches
        (8, irqs(0x24, 2, 0, 0), 22),        // nothing
        (8, irqs(0x24, 2, 2, u32::MAX), 22), // overflow
        (8, irqs(0x24, 2, 3, 1), 22),        // no such vector
        (8, irqs(0x3F, 2, 0, 1), 22),        // everything at once
        (8, irqs(0x14, 2, 0, 1), 95),        // eventfd for unmask
        (8, irqs(0x22, 2, 0, 1), 22),        // booleans missing
        (8, irqs(0x21, 99, 0, 1), 22),       // no such index
        (9, access(0, 0, 0), 22),
        (9, access(0, 0, u32::MAX), 22),
        (9, access(0, 4095, 2), 22),
        (9, access(3, 0, 1), 22),
        (10, access(0, 0, 4), 22), // data missing
        (10, [access(0, 0, 4), vec![0; 5]].concat(), 22),
    ];
    for (number, (command, body, expected)) in cases.iter().enumerate() {
        let id = u16::try_from(number).unwrap();
        stream.write_all(&message(id, *command, 0, body)).unwrap();
        let (got_id, got_command, error, _) = reply(&mut stream);
        assert_eq!((got_id, got_command), (id, *command));
        assert_eq!(error.unwrap_or(0), *expected, "case {number}: command {command}");
    }
    // Without a reply, and in one piece with the next command.
    let mut both = message(7, 77, 0x10, &[]);
    both.extend(message(8, 9, 0, &access(7, 0, 2)));
    stream.write_all(&both).unwrap();
    let (id, _, error, body) = reply(&mut stream);
    assert_eq!((id, error, &body[16..]), (8, None, &[0x5E, 0xCA][..]));
}

#[test]
fn version_comes_first_and_must_fit() {
    for (command, body) in [
        (9, vec![0; 16]),
        (1, b"\x01\0\0\0{}\0".to_vec()),
        (1, b"\0\0\0\0{\0".to_vec()),
        (1, b"\0".to_vec()),
        (1, [b"\0\0\0\0".to_vec(), vec![b'['; 5000]].concat()),
    ] {
        let device = TestDevice::new();
        let (mut stream, server) = device.serve_pair();
        stream.write_all(&message(3, command, 0, &body)).unwrap();
        assert!(reply(&mut stream).2.is_some());
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        assert_eq!(server.join(), Ended::Failed);
        assert_eq!(device.events(), [TestEvent::Disconnected]);
    }
}

#[test]
fn absurd_sizes_end_the_connection_without_taking_memory() {
    for size in [0, 15, (1 << 20) + 33, u32::MAX] {
        let device = TestDevice::new();
        let (mut stream, server) = device.serve_pair();
        let mut bytes = message(0, 1, 0, &[]);
        bytes[4..8].copy_from_slice(&u32::to_ne_bytes(size));
        stream.write_all(&bytes).unwrap();
        assert_eq!(server.join(), Ended::Failed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Random bytes at a server: it closes the connection or waits for more, and resets the device.
    #[test]
    fn a_server_survives_random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let device = TestDevice::new();
        let (mut stream, server) = device.serve_pair();
        let _ = stream.write_all(&bytes);
        drop(stream);
        let _ = server.join();
        prop_assert_eq!(device.events().pop(), Some(TestEvent::Disconnected));
    }

    /// Well-framed commands with random bodies get exactly one reply each.
    #[test]
    fn a_server_answers_each_framed_command(
        commands in proptest::collection::vec(
            (0_u16..20, proptest::collection::vec(prop_oneof![Just(0_u8), Just(1), Just(255), any::<u8>()], 0..48)),
            1..20,
        )
    ) {
        let device = TestDevice::new();
        let (mut stream, _server) = negotiated(&device);
        for (number, (command, body)) in commands.iter().enumerate() {
            let id = u16::try_from(number).unwrap();
            stream.write_all(&message(id, *command, 0, body)).unwrap();
            let (got, got_command, _, _) = reply(&mut stream);
            prop_assert_eq!((got, got_command), (id, *command));
        }
    }

    /// A server replies with a plausible header and random bytes. The client's calls return in time.
    #[test]
    fn a_client_survives_random_replies(
        bodies in proptest::collection::vec(
            (proptest::collection::vec(prop_oneof![Just(0_u8), Just(1), Just(32), any::<u8>()], 0..160), any::<bool>()), 12
        )
    ) {
        let (theirs, mut ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut bodies = bodies.into_iter();
            let mut first = true;
            loop {
                let mut header = [0; 16];
                if ours.read_exact(&mut header).is_err() { return; }
                let size = u32::from_ne_bytes(header[4..8].try_into().unwrap());
                let mut body = vec![0; usize::try_from(size).unwrap() - 16];
                if ours.read_exact(&mut body).is_err() { return; }
                let command = u16::from_ne_bytes([header[2], header[3]]);
                let (body, index) = if std::mem::take(&mut first) {
                    (b"\0\0\x01\0{}\0".to_vec(), false)
                } else {
                    match bodies.next() { Some(next) => next, None => return }
                };
                let mut body = body;
                // Often with the right index, so that deeper code is reached.
                if index && body.len() > 12 { body[8..12].copy_from_slice(&2_u32.to_ne_bytes()); }
                let id = u16::from_ne_bytes([header[0], header[1]]);
                if ours.write_all(&message(id, command, 1, &body)).is_err() { return; }
            }
        });
        let client = Client::from_stream(theirs, Duration::from_secs(5)).unwrap();
        let _ = client.device();
        let _ = client.region(2);
        let _ = client.region_io_fds(2);
        let _ = client.interrupts(2);
        let _ = client.region_read(2, 0, &mut [0; 8]);
        let _ = client.region_write(2, 0, &[0; 8]);
        let _ = client.dma_unmap(0, 4096);
        let _ = client.reset();
        client.close();
        drop(client);
        server.join().unwrap();
    }
}
