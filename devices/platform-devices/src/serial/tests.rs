//! Tests the port from both sides: registers as a driver uses them, bytes at the back end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::console::ConsoleBackend;

const DATA: u64 = 0;
const INTERRUPT_ENABLE: u64 = 1;
const MODEM_CONTROL: u64 = 4;
const LINE_STATUS: u64 = 5;
const SCRATCH: u64 = 7;
const LONG: Duration = Duration::from_secs(20);

struct Port {
    serial: Serial,
    interrupts: Arc<AtomicUsize>,
}

fn interrupt() -> (Interrupt, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    let interrupt = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        Ok(())
    };
    (Arc::new(interrupt), count)
}

fn port(backend: &ConsoleBackend) -> Port {
    let console = Console::open(backend, Arc::new(|_| {})).unwrap();
    let (interrupt, interrupts) = interrupt();
    Port { serial: Serial::new("com1", console, interrupt).unwrap(), interrupts }
}

impl Port {
    fn out(&self, offset: u64, value: u8) {
        self.serial.write(offset, &[value]);
    }

    fn input(&self, offset: u64) -> u8 {
        let mut byte = [0];
        self.serial.read(offset, &mut byte);
        byte[0]
    }

    fn print(&self, text: &[u8]) {
        text.iter().for_each(|&byte| self.out(DATA, byte));
    }

    /// Reads as a driver does until `count` bytes have arrived.
    fn receive(&self, count: usize) -> Vec<u8> {
        let begin = Instant::now();
        let mut received = Vec::new();
        while received.len() < count {
            assert!(begin.elapsed() < LONG, "only {received:?} came");
            if self.input(LINE_STATUS) & 1 != 0 {
                received.push(self.input(DATA));
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        received
    }
}

fn temporary(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    std::env::temp_dir().join(format!("causeway-serial-{}-{number}-{name}", std::process::id()))
}

fn file(path: &Path) -> ConsoleBackend {
    ConsoleBackend::File { path: path.to_owned(), limit_bytes: 1 << 30 }
}

/// A client whose reads time out, so that a test fails rather than hangs.
fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

fn read_exactly(stream: &mut impl Read, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn output_ends_up_in_the_file_in_order_and_complete() {
    let path = temporary("out");
    let port = port(&file(&path));
    let text: Vec<u8> = (0..200_000u32).map(|n| b"0123456789abcdef\n"[n as usize % 17]).collect();
    port.print(&text);
    assert!(port.serial.console().flush(LONG));
    assert_eq!(std::fs::read(&path).unwrap(), text);
    let state = port.serial.inspect();
    assert_eq!(state["console"]["output_bytes"], 200_000);
    assert_eq!(state["console"]["dropped_bytes"], 0);
    // A burst wakes the thread about once a millisecond, not once per byte.
    assert!(state["console"]["wakes"].as_u64().unwrap() < 20_000, "{state}");
    std::fs::remove_file(path).unwrap();
}

/// A restart keeps the old log. A log that another program truncates (copytruncate) has no hole before later output.
#[test]
fn a_console_file_is_appended_to() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.log");
    drop(port(&file(&path)));
    std::fs::write(&path, "first run\n").unwrap();
    let port = port(&file(&path));
    port.print(b"second run\n");
    assert!(port.serial.console().flush(LONG));
    assert_eq!(std::fs::read(&path).unwrap(), b"first run\nsecond run\n");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    port.print(b"after the cut\n");
    assert!(port.serial.console().flush(LONG));
    assert_eq!(std::fs::read(&path).unwrap(), b"after the cut\n");
}

/// Neither file exceeds the limit, and both together end with the latest output.
#[test]
fn a_console_file_at_its_limit_becomes_the_older_file() {
    let directory = tempfile::tempdir().unwrap();
    let (path, link) = (directory.path().join("console.log"), directory.path().join("link"));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let older = directory.path().join("console.log.1");
    let backend = ConsoleBackend::File { path: link, limit_bytes: 10_000 };
    let port = port(&backend);
    let text: Vec<u8> = (0..35_000u32).map(|n| b"0123456789abcdef\n"[n as usize % 17]).collect();
    let mut rotated = false;
    for part in text.chunks(500) {
        port.print(part);
        assert!(port.serial.console().flush(LONG));
        let (old, new) = (std::fs::read(&older).unwrap(), std::fs::read(&path).unwrap());
        assert!(old.len() <= 10_000 && new.len() <= 10_000, "{} {}", old.len(), new.len());
        rotated |= !old.is_empty();
    }
    let both = [std::fs::read(&older).unwrap(), std::fs::read(&path).unwrap()].concat();
    assert!(rotated && both.len() > 10_000);
    assert!(text.ends_with(&both));
    assert_eq!(port.serial.inspect()["console"]["dropped_bytes"], 0);
}

/// A file that exceeds its limit from the start is kept whole. A special file has no limit and no older file.
#[test]
fn console_files_of_other_lengths_and_kinds_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.log");
    let older = directory.path().join("console.log.1");
    std::fs::write(&path, [b'x'; 300]).unwrap();
    let limited = |path: &Path| ConsoleBackend::File { path: path.to_owned(), limit_bytes: 200 };
    let first = port(&limited(&path));
    first.print(b"new");
    drop(first);
    assert_eq!(std::fs::read(&older).unwrap(), [b'x'; 300]);
    assert_eq!(std::fs::read(&path).unwrap(), b"new");

    std::fs::remove_file(&older).unwrap();
    std::fs::create_dir(&older).unwrap();
    let error = Console::open(&limited(&path), Arc::new(|_| {})).err().unwrap().to_string();
    assert!(error.contains("console.log.1: older output is to be moved there"), "{error}");
    drop(port(&limited(Path::new("/dev/null"))));
    assert!(!Path::new("/dev/null.1").exists());
}

#[test]
fn dropping_the_port_writes_what_is_buffered() {
    let path = temporary("last");
    let port = port(&file(&path));
    port.print(b"Kernel panic - not syncing\r\n");
    drop(port);
    assert_eq!(std::fs::read(&path).unwrap(), b"Kernel panic - not syncing\r\n");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_client_of_the_socket_gets_what_was_printed_before_and_may_come_back() {
    let path = temporary("socket");
    let port = port(&ConsoleBackend::Socket { path: path.clone() });
    port.print(b"early ");
    let mut first = connect(&path);
    port.print(b"late");
    assert_eq!(read_exactly(&mut first, 10), b"early late");
    first.write_all(b"typed").unwrap();
    assert_eq!(port.receive(5), b"typed");

    // A second client waits until the first has disconnected.
    let mut second = connect(&path);
    drop(first);
    second.write_all(b"x").unwrap();
    assert_eq!(port.receive(1), b"x");
    port.print(b"again");
    assert_eq!(read_exactly(&mut second, 5), b"again");
    assert_eq!(port.serial.inspect()["console"]["clients"], 2);
    drop(port);
    assert!(!path.exists(), "the socket is removed");
}

#[test]
fn a_client_with_unread_input_can_go_and_make_room_for_the_next() {
    let path = temporary("gone");
    let port = port(&ConsoleBackend::Socket { path: path.clone() });
    let mut first = connect(&path);
    // More than the FIFO holds, and the guest reads nothing.
    first.write_all(&[b'a'; 200]).unwrap();
    drop(first);
    let mut second = connect(&path);
    let begin = Instant::now();
    while port.serial.inspect()["console"]["clients"] != 2 {
        assert!(begin.elapsed() < LONG);
        port.print(b".");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The first may have disconnected before any output.
    port.print(b".");
    assert_eq!(read_exactly(&mut second, 1), b".");
}

#[test]
fn a_socket_client_that_does_not_read_never_stops_the_guest() {
    let path = temporary("stuck");
    let port = port(&ConsoleBackend::Socket { path: path.clone() });
    let client = connect(&path);
    let begin = Instant::now();
    port.print(&vec![b'a'; 2 << 20]);
    assert!(begin.elapsed() < LONG);
    assert!(port.serial.inspect()["console"]["dropped_bytes"].as_u64().unwrap() > 1 << 19);
    drop(client);
}

#[test]
fn a_socket_that_is_in_use_is_refused_and_a_stale_one_replaced() {
    let path = temporary("taken");
    let port_in_use = port(&ConsoleBackend::Socket { path: path.clone() });
    let backend = ConsoleBackend::Socket { path: path.clone() };
    let error = Console::open(&backend, Arc::new(|_| {})).err().unwrap().to_string();
    assert!(error.contains("another process listens there"), "{error}");
    drop(port_in_use);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(port(&backend));
    std::fs::write(&path, "a file").unwrap();
    let error = Console::open(&backend, Arc::new(|_| {})).err().unwrap().to_string();
    assert!(error.contains("no socket is there"), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_pty_carries_bytes_both_ways_and_its_link_goes_with_it() {
    let link = temporary("link");
    let port = port(&ConsoleBackend::Pty { link: Some(link.clone()) });
    assert_eq!(std::fs::read_link(&link).unwrap(), port.serial.console().pty_path().unwrap());
    let mut tty = std::fs::File::options().read(true).write(true).open(&link).unwrap();
    port.print(b"login: \r\n");
    // Raw: nothing is translated.
    assert_eq!(read_exactly(&mut tty, 9), b"login: \r\n");
    tty.write_all(b"root\r\x03").unwrap();
    assert_eq!(port.receive(6), b"root\r\x03");
    drop(tty);
    // First without a client, then with one.
    port.print(b"more");
    let mut tty = std::fs::File::open(&link).unwrap();
    assert_eq!(read_exactly(&mut tty, 4), b"more");
    drop(port);
    assert!(!link.exists());
}

#[test]
fn input_beyond_the_fifo_waits_until_the_guest_reads() {
    let path = temporary("fifo");
    let port = port(&ConsoleBackend::Socket { path: path.clone() });
    let mut client = connect(&path);
    let text: Vec<u8> = (0..100_000u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let sender = {
        let text = text.clone();
        std::thread::spawn(move || {
            client.write_all(&text).unwrap();
            client
        })
    };
    assert_eq!(port.receive(text.len()), text);
    sender.join().unwrap();
}

#[test]
fn received_bytes_and_an_empty_transmitter_interrupt_when_enabled() {
    let path = temporary("interrupt");
    let port = port(&ConsoleBackend::Socket { path: path.clone() });
    let count = || port.interrupts.load(Ordering::SeqCst);
    assert_eq!(count(), 0);
    port.out(INTERRUPT_ENABLE, 2);
    assert_eq!(count(), 1, "the transmitter is empty");
    let mut client = connect(&path);
    port.out(INTERRUPT_ENABLE, 1);
    client.write_all(b"k").unwrap();
    let begin = Instant::now();
    while count() < 2 {
        assert!(begin.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(port.receive(1), b"k");
}

#[test]
fn accesses_wider_than_a_byte_and_beyond_the_ports_do_no_harm() {
    let port = port(&ConsoleBackend::Null);
    let mut wide = [0; 4];
    port.serial.read(LINE_STATUS, &mut wide);
    assert_eq!(wide, [0x60, 0xb0, 0, 0xff]);
    port.serial.write(6, &[1, 2, 3, 4]);
    assert_eq!(port.input(SCRATCH), 2);
    port.serial.write(u64::MAX, &[1, 2]);
    port.serial.read(u64::MAX, &mut wide);
    assert_eq!(wide[0], 0xff);
}

#[test]
fn restore_continues_where_save_left_off() {
    let path = temporary("save");
    let source = port(&ConsoleBackend::Socket { path: path.clone() });
    source.out(SCRATCH, 0x5a);
    source.out(MODEM_CONTROL, 0x0b);
    source.out(INTERRUPT_ENABLE, 1);
    let mut client = connect(&path);
    client.write_all(b"ab").unwrap();
    let begin = Instant::now();
    while source.serial.save().received.len() < 2 {
        assert!(begin.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
    let saved = source.serial.save();
    let json = serde_json::to_string(&saved).unwrap();
    let saved: SavedSerial = serde_json::from_str(&json).unwrap();

    let (interrupt, interrupts) = interrupt();
    let console = || Console::open(&ConsoleBackend::Null, Arc::new(|_| {})).unwrap();
    let serial = Serial::restore("com1", &saved, console(), interrupt).unwrap();
    assert_eq!(interrupts.load(Ordering::SeqCst), 1, "unread bytes interrupt again");
    let restored = Port { serial, interrupts };
    assert_eq!((restored.input(SCRATCH), restored.input(MODEM_CONTROL)), (0x5a, 0x0b));
    assert_eq!(restored.receive(2), b"ab");

    restored.serial.reset();
    assert_eq!((restored.input(SCRATCH), restored.input(INTERRUPT_ENABLE)), (0, 0));
    let refuse = |saved: SavedSerial| {
        Serial::restore("com1", &saved, console(), Arc::new(|| Ok(()))).err().unwrap().to_string()
    };
    assert!(refuse(SavedSerial { version: 9, ..saved.clone() }).contains("version 9"));
    assert!(refuse(SavedSerial { received: vec![0; 65], ..saved }).contains("65 received bytes"));
}

proptest::proptest! {
    #[test]
    fn whatever_a_guest_writes_the_port_lives_on(
        accesses in proptest::collection::vec((0u64..10, proptest::collection::vec(0u8.., 1..9), 0u8..2), 1..200)
    ) {
        let port = port(&ConsoleBackend::Null);
        for (offset, mut data, write) in accesses {
            if write == 1 {
                port.serial.write(offset, &data);
            } else {
                port.serial.read(offset, &mut data);
            }
        }
        let saved = port.serial.save();
        proptest::prop_assert!(saved.received.len() <= FIFO_BYTES);
    }
}
