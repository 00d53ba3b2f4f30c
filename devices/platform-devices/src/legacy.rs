//! A PC's legacy ports: two ways to reset, and ports that kernels write as a delay.

use std::sync::Arc;

use machine::bus::BusDevice;
use telemetry::Counter;

use crate::{EventSink, MachineEvent, ResetCause};

/// Keyboard controller ports 0x60 to 0x64, only as far as needed for a reset.
pub const KEYBOARD_CONTROLLER: u16 = 0x60;
/// Number of ports at [`KEYBOARD_CONTROLLER`].
pub const KEYBOARD_CONTROLLER_PORTS: u64 = 5;
/// Ports of an 8254 timer: three counters, and their control.
pub const TIMER: u16 = 0x40;
/// Ports taken at [`TIMER`].
pub const TIMER_PORTS: u64 = 4;
/// POST code port. Linux writes it as a delay with `io_delay=0x80`.
pub const POST_PORT: u16 = 0x80;
/// Alternative delay port.
pub const DELAY_PORT: u16 = 0xed;
/// PCI configuration address (four ports) and data (four ports); byte 1 is the reset control register.
pub const PCI_CONFIGURATION: u16 = 0xcf8;

/// Offset of the status and command port.
const COMMAND: u64 = 4;
/// "Pulse output port, bit 0 low": the CPU's reset line.
const PULSE_RESET: u8 = 0xfe;
/// Offset of the reset control register from 0xCF8.
const RESET_CONTROL: u64 = 1;
/// RST_CPU: a transition from 0 to 1 resets.
const RESET_CPU: u8 = 1 << 2;

/// Keyboard controller without a keyboard. Its status is idle, and command 0xFE resets the machine.
pub struct KeyboardReset {
    events: EventSink,
    resets: Counter,
}

impl KeyboardReset {
    /// Creates the device.
    pub fn new(events: EventSink) -> Self {
        Self { events, resets: Counter::new() }
    }

    /// Returns the counters.
    pub fn inspect(&self) -> serde_json::Value {
        serde_json::json!({ "resets": self.resets.get() })
    }
}

impl BusDevice for KeyboardReset {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Status 0: no byte to read, ready for a command. Kernels wait for that before they reset.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == COMMAND && data == [PULSE_RESET] {
            self.resets.increment();
            (self.events)(MachineEvent::Reset(ResetCause::KeyboardController));
        }
    }
}

/// Ports 0xCF8 to 0xCFF: the reset control register at byte 0xCF9. All other accesses go to the PCI root.
pub struct ResetControl {
    pci: Arc<dyn BusDevice>,
    events: EventSink,
    resets: Counter,
}

impl ResetControl {
    /// Creates the register in front of `pci`, which handles the same eight ports.
    pub fn new(pci: Arc<dyn BusDevice>, events: EventSink) -> Self {
        Self { pci, events, resets: Counter::new() }
    }

    /// Returns the counters.
    pub fn inspect(&self) -> serde_json::Value {
        serde_json::json!({ "resets": self.resets.get() })
    }
}

impl BusDevice for ResetControl {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset == RESET_CONTROL && data.len() == 1 {
            data[0] = 0;
        } else {
            self.pci.read(offset, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // Only byte accesses reach the register. 0xCF8 itself is written as a dword.
        match (offset, data) {
            (RESET_CONTROL, &[value]) => {
                if value & RESET_CPU != 0 {
                    self.resets.increment();
                    (self.events)(MachineEvent::Reset(ResetCause::ResetControl));
                }
            }
            _ => self.pci.write(offset, data),
        }
    }
}

/// The ports of an absent 8254 timer. Its counters read as 0, so that Linux detects at the first read that they don't count down. With
/// ones, as from an unclaimed port, it reads 100,000 times (`quick_pit_calibrate` in arch/x86/kernel/tsc.c). Guests with another clock
/// don't read it.
#[derive(Debug, Default)]
pub struct AbsentTimer;

impl BusDevice for AbsentTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

/// A port whose writes have no effect. As a separate device they are cheap, and counted by name.
#[derive(Debug, Default)]
pub struct DelayPort;

impl BusDevice for DelayPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn sink() -> (EventSink, Arc<Mutex<Vec<MachineEvent>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&events);
        (Arc::new(move |event| into.lock().unwrap().push(event)), events)
    }

    #[test]
    fn the_keyboard_controller_resets_on_0xfe_and_is_always_ready() {
        let (sink, events) = sink();
        let device = KeyboardReset::new(sink);
        let mut status = [0xff];
        device.read(COMMAND, &mut status);
        assert_eq!(status, [0]);
        device.write(COMMAND, &[0xd1]);
        device.write(0, &[PULSE_RESET]);
        assert!(events.lock().unwrap().is_empty());
        device.write(COMMAND, &[PULSE_RESET]);
        assert_eq!(*events.lock().unwrap(), [MachineEvent::Reset(ResetCause::KeyboardController)]);
    }

    /// Records the accesses that reach the PCI root.
    #[derive(Default)]
    struct Root(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Root {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn the_reset_control_register_shares_its_port_with_the_pci_address() {
        let (sink, events) = sink();
        let root = Arc::new(Root::default());
        let device = ResetControl::new(Arc::clone(&root) as _, sink);
        // Linux writes 0x02, then 0x06.
        device.write(1, &[0x02]);
        assert!(events.lock().unwrap().is_empty());
        device.write(1, &[0x06]);
        assert_eq!(*events.lock().unwrap(), [MachineEvent::Reset(ResetCause::ResetControl)]);
        // An address with bit 10 set is no reset.
        device.write(0, &0x8000_0400u32.to_le_bytes());
        device.write(4, &[6]);
        assert_eq!(*root.0.lock().unwrap(), [(0, vec![0, 4, 0, 0x80]), (4, vec![6])]);
        assert_eq!(events.lock().unwrap().len(), 1);
        let mut data = [0; 2];
        device.read(6, &mut data);
        assert_eq!(data, [6, 6]);
        let mut byte = [9];
        device.read(1, &mut byte);
        assert_eq!(byte, [0]);
    }
}
