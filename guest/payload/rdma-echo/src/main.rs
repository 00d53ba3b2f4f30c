//! A guest that measures pauses: of its own program, and of its RDMA connection with a peer, which may be a second such guest. It has no
//! kernel: it drives the RDMA function from ring 3, by polling, and is controlled through the serial console. Group `migration` of `bench`
//! runs it.
//!
//! The two ends send a message back and forth. The guest notes the largest time between two passes of its loop, and between two completions.
//!
//! ```text
//! request              response             meaning, all numbers hexadecimal
//!                      B                    the guest runs
//! s LAST QPS MIB       Q QPN                binds 10.80.0.LAST, writes RAM up to MIB, creates QPS queue pairs
//! c QPN LAST FIRST     C                    connects to the peer; FIRST 1 sends the first message
//! z                    Z                    begins a measurement
//! f                    F                    ends the measurement
//! r                    R PASS COMPLETION MESSAGES BEGAN
//!                                           largest times in TSC ticks, messages received, beginning of the longest time between two
//!                                           passes
//! t                    T NOW                present TSC
//! ```
//! A guest that can't continue writes `E` with a reason.

#![no_std]
#![no_main]

// The same definitions as the device's own.
#[path = "../../../../devices/pvrdma/src/abi/mod.rs"]
#[expect(dead_code, reason = "this program uses a part of it")]
mod abi;
mod connection;
mod device;
mod memory;
mod serial;
mod start;
#[path = "../../runtime/src/symbols.rs"]
mod symbols;

use connection::{Connection, gid};
use core::arch::x86_64::_rdtsc;
use core::hint::spin_loop;
use device::Device;
use memory::Pages;
use serial::{Line, reply};

/// TSC ticks between two looks at the console: some milliseconds, since each is an exit.
const CONSOLE_INTERVAL: u64 = 10_000_000;

fn now() -> u64 {
    #[expect(unsafe_code, reason = "an intrinsic")]
    // SAFETY: RDTSC is permitted in ring 3, since CR4.TSD is clear.
    unsafe {
        _rdtsc()
    }
}

/// Writes a reason, and ends: the VM's user ends the VM.
fn fail(reason: &str) -> ! {
    serial::print("E ");
    serial::print(reason);
    serial::put(b'\n');
    loop {
        spin_loop();
    }
}

/// What was measured since the last request `z`.
struct Measured {
    pass: u64,
    began: u64,
    completion: u64,
    messages: u64,
    ended: bool,
}

impl Measured {
    const fn new() -> Self {
        Self { pass: 0, began: 0, completion: 0, messages: 0, ended: false }
    }

    fn passed(&mut self, last: u64, now: u64) {
        if !self.ended && now.saturating_sub(last) > self.pass {
            (self.pass, self.began) = (now.saturating_sub(last), last);
        }
    }

    fn completed(&mut self, last: u64, now: u64) {
        if !self.ended {
            self.completion = self.completion.max(now.saturating_sub(last));
        }
    }
}

extern "C" fn main() -> ! {
    reply(b'B', &[]);
    let mut pages = Pages::new();
    let mut line = Line::new();
    let (device, connection) = set_up(&mut line, &mut pages);
    exchange(&mut line, &device, &connection)
}

fn set_up(line: &mut Line, pages: &mut Pages) -> (Device, Connection) {
    loop {
        if let Some((b's', [last, count, mebibytes, _])) = line.poll() {
            let device = Device::start(pages);
            device.bind(gid(last));
            let connection = Connection::new(&device, pages, half(count));
            pages.fill(mebibytes << 20);
            reply(b'Q', &[connection.qpn.into()]);
            return (device, connection);
        }
    }
}

/// The measuring loop.
fn exchange(line: &mut Line, device: &Device, connection: &Connection) -> ! {
    let mut measured = Measured::new();
    let mut message = 0;
    let (mut last_pass, mut last_completion, mut last_look) = (now(), now(), now());
    loop {
        let pass = now();
        measured.passed(last_pass, pass);
        last_pass = pass;
        if let Some(received) = connection.poll() {
            measured.completed(last_completion, pass);
            last_completion = pass;
            if let Some(received) = received {
                if received < message || received > message + 1 {
                    fail("a message was lost or came twice");
                }
                message = received + 1;
                measured.messages += 1;
                connection.post_receive();
                connection.post_send(message);
            }
        }
        if pass.abs_diff(last_look) > CONSOLE_INTERVAL {
            last_look = pass;
            if let Some(request) = line.poll() {
                answer(request, device, connection, &mut measured);
                // The exits of an answer aren't a pause.
                last_pass = now();
            }
        }
    }
}

/// A number of a request as 32 bits.
fn half(number: u64) -> u32 {
    u32::try_from(number).unwrap_or_else(|_| fail("a number of a request is too large"))
}

fn answer(
    request: (u8, [u64; serial::NUMBERS]),
    device: &Device,
    connection: &Connection,
    measured: &mut Measured,
) {
    match request {
        (b'c', [qpn, last, first, _]) => {
            connection.connect(device, half(qpn), gid(last));
            reply(b'C', &[]);
            if first == 1 {
                connection.post_send(0);
            }
        }
        (b'z', _) => {
            reply(b'Z', &[]);
            *measured = Measured::new();
        }
        (b'f', _) => {
            measured.ended = true;
            reply(b'F', &[]);
        }
        (b'r', _) => {
            let Measured { pass, began, completion, messages, .. } = *measured;
            reply(b'R', &[pass, completion, messages, began]);
        }
        (b't', _) => reply(b'T', &[now()]),
        _ => fail("an unknown request"),
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    fail("the guest's program panicked")
}
