//! 16550A UART (National Semiconductor PC16550D; the register model is vm-superio's) at eight I/O ports.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use machine::bus::BusDevice;
use telemetry::Counter;
use telemetry::guest_log::GuestLog;
use vm_superio::Trigger;
use vm_superio::serial::{Error as UartError, SerialEvents, SerialState};

use crate::console::{Accepted, Console, ConsoleError, InputSink, InputWaker, Output};
use crate::{Interrupt, RestoreError, ports};

/// Version of [`SavedSerial`].
const VERSION: u32 = 1;
/// Capacity in bytes of vm-superio's receive FIFO.
const FIFO_BYTES: usize = 64;
/// Modem control: loop-back mode.
const MODEM_LOOP: u8 = 1 << 4;

/// Saved state: registers, and bytes that the guest hasn't read yet. Buffered output belongs to this host's console and
/// stays there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedSerial {
    /// Version of this structure.
    pub version: u32,
    /// Divisor latch.
    pub divisor: u16,
    /// Interrupt enable register.
    pub interrupt_enable: u8,
    /// Interrupt identification register.
    pub interrupt_identification: u8,
    /// Line control register.
    pub line_control: u8,
    /// Line status register.
    pub line_status: u8,
    /// Modem control register.
    pub modem_control: u8,
    /// Modem status register.
    pub modem_status: u8,
    /// Scratch register.
    pub scratch: u8,
    /// Receive FIFO, oldest byte first.
    pub received: Vec<u8>,
}

impl From<SerialState> for SavedSerial {
    fn from(state: SerialState) -> Self {
        Self {
            version: VERSION,
            divisor: u16::from_le_bytes([state.baud_divisor_low, state.baud_divisor_high]),
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
        }
    }
}

impl SavedSerial {
    fn to_uart(&self) -> Result<SerialState, RestoreError> {
        if self.version != VERSION {
            return Err(RestoreError::Version { device: "serial", found: self.version, known: VERSION });
        }
        if self.received.len() > FIFO_BYTES {
            let what = format!("{} received bytes; the FIFO holds {FIFO_BYTES}", self.received.len());
            return Err(RestoreError::Damaged { device: "serial", what });
        }
        let [baud_divisor_low, baud_divisor_high] = self.divisor.to_le_bytes();
        Ok(SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: self.interrupt_enable,
            interrupt_identification: self.interrupt_identification,
            line_control: self.line_control,
            line_status: self.line_status,
            modem_control: self.modem_control,
            modem_status: self.modem_status,
            scratch: self.scratch,
            in_buffer: self.received.clone(),
        })
    }
}

struct Line {
    interrupt: Interrupt,
    counters: Arc<Counters>,
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.counters.interrupts.increment();
        (self.interrupt)()
    }
}

#[derive(Default)]
struct Counters {
    interrupts: Counter,
    errors: Counter,
}

struct Events {
    waker: InputWaker,
}

impl SerialEvents for Events {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        self.waker.wake();
    }
}

type Uart = vm_superio::Serial<Line, Events, Output>;

fn lock(uart: &Mutex<Uart>) -> MutexGuard<'_, Uart> {
    uart.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 16550A at eight I/O ports, with its console.
pub struct Serial {
    name: String,
    uart: Arc<Mutex<Uart>>,
    console: Console,
    interrupt: Interrupt,
    counters: Arc<Counters>,
    log: GuestLog,
}

impl Serial {
    /// Number of ports.
    pub const PORTS: u64 = 8;

    /// Creates the port at power-on state, and starts the console's thread.
    pub fn new(name: &str, console: Console, interrupt: Interrupt) -> Result<Self, ConsoleError> {
        Self::start(name, &SerialState::default(), console, interrupt)
    }

    /// Restores a saved state, and starts the console's thread. Pending interrupts are signalled again.
    pub fn restore(
        name: &str,
        saved: &SavedSerial,
        console: Console,
        interrupt: Interrupt,
    ) -> Result<Self, RestoreError> {
        let state = saved.to_uart()?;
        Self::start(name, &state, console, interrupt)
            .map_err(|source| RestoreError::Console { device: "serial", source })
    }

    fn start(
        name: &str,
        state: &SerialState,
        mut console: Console,
        interrupt: Interrupt,
    ) -> Result<Self, ConsoleError> {
        let counters = Arc::new(Counters::default());
        let uart = uart(state, &console, &interrupt, &counters)
            .map_err(|error| ConsoleError::host("interrupt the guest", io::Error::other(error)))?;
        let uart = Arc::new(Mutex::new(uart));
        console.start(name, Box::new(Receiver(Arc::clone(&uart))))?;
        Ok(Self { name: name.to_owned(), uart, console, interrupt, counters, log: GuestLog::new() })
    }

    /// Saves registers and received bytes. The vCPUs must be paused.
    pub fn save(&self) -> SavedSerial {
        lock(&self.uart).state().into()
    }

    /// Resets the registers to power-on state and drops received bytes. The console is unchanged.
    pub fn reset(&self) {
        match uart(&SerialState::default(), &self.console, &self.interrupt, &self.counters) {
            Ok(fresh) => *lock(&self.uart) = fresh,
            // The power-on state raises no interrupt, so nothing can fail.
            Err(error) => self.failed(&error),
        }
        self.console.input_wanted();
    }

    /// Returns the port's console.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns state and counters.
    pub fn inspect(&self) -> serde_json::Value {
        let state = lock(&self.uart).state();
        serde_json::json!({
            "interrupt_enable": state.interrupt_enable,
            "line_control": state.line_control,
            "modem_control": state.modem_control,
            "received_unread": state.in_buffer.len(),
            "interrupts": self.counters.interrupts.get(),
            "errors": self.counters.errors.get(),
            "console": self.console.inspect(),
        })
    }

    fn failed(&self, error: &dyn std::fmt::Display) {
        self.counters.errors.increment();
        telemetry::guest_warn!(self.log, serial = self.name.as_str(), "Serial port: {error}");
    }
}

fn uart(
    state: &SerialState,
    console: &Console,
    interrupt: &Interrupt,
    counters: &Arc<Counters>,
) -> Result<Uart, UartError<io::Error>> {
    let line = Line { interrupt: Arc::clone(interrupt), counters: Arc::clone(counters) };
    Uart::from_state(state, line, Events { waker: console.input_waker() }, console.output())
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut uart = lock(&self.uart);
        // A wider access is an access to adjacent ports.
        for (port, byte) in ports(offset, data.len()).zip(data) {
            *byte = register(port).map_or(0xff, |register| uart.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut uart = lock(&self.uart);
        for (port, &byte) in ports(offset, data.len()).zip(data) {
            if let Some(register) = register(port)
                && let Err(error) = uart.write(register, byte)
            {
                self.failed(&error);
            }
        }
    }
}

/// Returns the register at a port, if any.
fn register(port: Option<u16>) -> Option<u8> {
    let register = u8::try_from(port?).ok()?;
    (u64::from(register) < Serial::PORTS).then_some(register)
}

/// The receive side, as the console thread uses it.
struct Receiver(Arc<Mutex<Uart>>);

impl InputSink for Receiver {
    fn accept(&self, bytes: &[u8]) -> Accepted {
        // Never waits: a vCPU may hold the lock while it waits for this very thread to read output.
        let mut uart = match self.0.try_lock() {
            Ok(uart) => uart,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Accepted::Busy,
        };
        // Drivers test the port in loop-back mode for a moment. Input would mix with the test data.
        if uart.state().modem_control & MODEM_LOOP != 0 {
            return Accepted::Busy;
        }
        let room = uart.fifo_capacity().min(bytes.len());
        match uart.enqueue_raw_bytes(&bytes[..room]) {
            Ok(count) => Accepted::Bytes(count),
            Err(UartError::FullFifo) => Accepted::Bytes(0),
            // The interrupt failed, but the bytes are in the FIFO.
            Err(UartError::Trigger(_) | UartError::IOError(_)) => Accepted::Bytes(room),
        }
    }
}

#[cfg(test)]
mod tests;
