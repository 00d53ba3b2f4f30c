//! Sleep, reset and event registers, and the power button.
//!
//! ```text
//! offset 0  reset register         write RESET_VALUE: reset        reads 0
//! offset 4  sleep control          SLP_TYP bits 4:2, SLP_EN bit 5  reads SLP_TYP
//! offset 5  sleep status           WAK_STS bit 7, write 1 clears
//! offset 8  pending events         bit 0 power button, reading clears
//! ```
//! Sources: ACPI 6.5, 4.8.3.6 (reset register), 4.8.3.7 (sleep control and status), 5.6.9 (generic event device).

use std::sync::atomic::{AtomicU8, Ordering};

use machine::bus::BusDevice;
use telemetry::Counter;

use crate::{EventSink, Interrupt, MachineEvent, ResetCause, RestoreError, ports};

/// Number of ports.
pub const PORTS: u64 = 16;
/// Offset of the reset register.
pub const RESET: u16 = 0;
/// Value that triggers a reset.
pub const RESET_VALUE: u8 = 1;
/// Offset of the sleep control register.
pub const SLEEP_CONTROL: u16 = 4;
/// Offset of the sleep status register.
pub const SLEEP_STATUS: u16 = 5;
/// Offset of the event register.
pub const EVENTS: u16 = 8;
/// SLP_TYP of S5, as the `_S5` package names it.
pub const SLEEP_TYPE_S5: u8 = 5;

/// Bit of the power button in the event register.
const EVENT_POWER_BUTTON: u8 = 1;
/// SLP_EN: a write with it starts the transition to the state in SLP_TYP.
const SLEEP_ENABLE: u8 = 1 << 5;

/// Version of [`SavedPower`].
const VERSION: u32 = 1;

/// Saved state of [`PowerRegisters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedPower {
    /// Version of this structure.
    pub version: u32,
    /// Events that the guest hasn't read yet.
    pub pending_events: u8,
    /// The sleep type that was last written.
    pub sleep_type: u8,
}

/// The registers and the power button. All state is atomic; calls may come from any thread.
pub struct PowerRegisters {
    pending: AtomicU8,
    sleep_type: AtomicU8,
    events: EventSink,
    interrupt: Interrupt,
    presses: Counter,
    resets: Counter,
    power_offs: Counter,
}

impl PowerRegisters {
    /// Creates the registers at power-on state. `interrupt` pulses the pin of the generic event device.
    pub fn new(events: EventSink, interrupt: Interrupt) -> Self {
        Self {
            pending: AtomicU8::new(0),
            sleep_type: AtomicU8::new(0),
            events,
            interrupt,
            presses: Counter::new(),
            resets: Counter::new(),
            power_offs: Counter::new(),
        }
    }

    /// Restores a saved state. An event that the guest hasn't read is signalled again: its edge may have been lost
    /// between save and restore. A spurious one is harmless.
    pub fn restore(
        saved: &SavedPower,
        events: EventSink,
        interrupt: Interrupt,
    ) -> Result<Self, RestoreError> {
        if saved.version != VERSION {
            return Err(RestoreError::Version { device: "power", found: saved.version, known: VERSION });
        }
        if saved.pending_events & !EVENT_POWER_BUTTON != 0 || saved.sleep_type > 7 {
            return Err(RestoreError::Damaged {
                device: "power",
                what: format!("pending events {:#x}, sleep type {}", saved.pending_events, saved.sleep_type),
            });
        }
        let device = Self::new(events, interrupt);
        device.pending.store(saved.pending_events, Ordering::SeqCst);
        device.sleep_type.store(saved.sleep_type, Ordering::SeqCst);
        if saved.pending_events != 0 {
            (device.interrupt)().map_err(|source| RestoreError::Interrupt { device: "power", source })?;
        }
        Ok(device)
    }

    /// Saves the state. The vCPUs must be paused.
    pub fn save(&self) -> SavedPower {
        SavedPower {
            version: VERSION,
            pending_events: self.pending.load(Ordering::SeqCst),
            sleep_type: self.sleep_type.load(Ordering::SeqCst),
        }
    }

    /// Presses the power button: the guest gets an ACPI notification.
    pub fn press_button(&self) -> std::io::Result<()> {
        self.presses.increment();
        // Before the interrupt: a guest that gets the interrupt must find the event.
        self.pending.fetch_or(EVENT_POWER_BUTTON, Ordering::SeqCst);
        (self.interrupt)()
    }

    /// Resets to power-on state.
    pub fn reset(&self) {
        self.pending.store(0, Ordering::SeqCst);
        self.sleep_type.store(0, Ordering::SeqCst);
    }

    /// Returns state and counters.
    pub fn inspect(&self) -> serde_json::Value {
        serde_json::json!({
            "pending_events": self.pending.load(Ordering::SeqCst),
            "sleep_type": self.sleep_type.load(Ordering::SeqCst),
            "button_presses": self.presses.get(),
            "resets": self.resets.get(),
            "power_offs": self.power_offs.get(),
        })
    }

    fn read_byte(&self, port: Option<u16>) -> u8 {
        match port {
            Some(RESET) => 0,
            Some(SLEEP_CONTROL) => self.sleep_type.load(Ordering::SeqCst) << 2,
            // S5 has no wake-up, so WAK_STS is never set.
            Some(SLEEP_STATUS) => 0,
            Some(EVENTS) => self.pending.swap(0, Ordering::SeqCst),
            _ => 0xff,
        }
    }

    fn write_byte(&self, port: Option<u16>, value: u8) {
        match port {
            Some(RESET) if value == RESET_VALUE => {
                self.resets.increment();
                (self.events)(MachineEvent::Reset(ResetCause::Acpi));
            }
            Some(SLEEP_CONTROL) => {
                let sleep_type = (value >> 2) & 7;
                self.sleep_type.store(sleep_type, Ordering::SeqCst);
                if value & SLEEP_ENABLE != 0 && sleep_type == SLEEP_TYPE_S5 {
                    self.power_offs.increment();
                    (self.events)(MachineEvent::PowerOff);
                }
            }
            _ => {}
        }
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (port, byte) in ports(offset, data.len()).zip(data) {
            *byte = self.read_byte(port);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (port, &byte) in ports(offset, data.len()).zip(data) {
            self.write_byte(port, byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    struct Bench {
        device: PowerRegisters,
        events: Arc<Mutex<Vec<MachineEvent>>>,
        interrupts: Arc<Counter>,
    }

    fn sinks() -> (EventSink, Interrupt, Arc<Mutex<Vec<MachineEvent>>>, Arc<Counter>) {
        let (events, interrupts) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Counter::new()));
        let (into, count) = (Arc::clone(&events), Arc::clone(&interrupts));
        let sink: EventSink = Arc::new(move |event| into.lock().unwrap().push(event));
        let interrupt: Interrupt = Arc::new(move || {
            count.increment();
            Ok(())
        });
        (sink, interrupt, events, interrupts)
    }

    fn bench() -> Bench {
        let (sink, interrupt, events, interrupts) = sinks();
        Bench { device: PowerRegisters::new(sink, interrupt), events, interrupts }
    }

    fn read(device: &PowerRegisters, offset: u16) -> u8 {
        let mut byte = [0];
        device.read(offset.into(), &mut byte);
        byte[0]
    }

    #[test]
    fn only_the_right_value_resets() {
        let bench = bench();
        bench.device.write(RESET.into(), &[0]);
        bench.device.write(RESET.into(), &[2]);
        assert!(bench.events.lock().unwrap().is_empty());
        bench.device.write(RESET.into(), &[RESET_VALUE]);
        assert_eq!(*bench.events.lock().unwrap(), [MachineEvent::Reset(ResetCause::Acpi)]);
    }

    #[test]
    fn only_s5_with_sleep_enable_powers_off() {
        let bench = bench();
        bench.device.write(SLEEP_CONTROL.into(), &[SLEEP_TYPE_S5 << 2]);
        bench.device.write(SLEEP_CONTROL.into(), &[3 << 2 | SLEEP_ENABLE]);
        assert!(bench.events.lock().unwrap().is_empty());
        assert_eq!(read(&bench.device, SLEEP_CONTROL), 3 << 2);
        bench.device.write(SLEEP_CONTROL.into(), &[SLEEP_TYPE_S5 << 2 | SLEEP_ENABLE]);
        assert_eq!(*bench.events.lock().unwrap(), [MachineEvent::PowerOff]);
    }

    #[test]
    fn a_press_is_seen_once_by_the_guest() {
        let bench = bench();
        assert_eq!(read(&bench.device, EVENTS), 0);
        bench.device.press_button().unwrap();
        bench.device.press_button().unwrap();
        assert_eq!(bench.interrupts.get(), 2);
        assert_eq!(read(&bench.device, EVENTS), 1);
        assert_eq!(read(&bench.device, EVENTS), 0);
    }

    #[test]
    fn a_press_before_a_save_reaches_the_guest_after_the_restore() {
        let source = bench();
        source.device.press_button().unwrap();
        let saved = source.device.save();
        let (sink, interrupt, _, interrupts) = sinks();
        let restored = PowerRegisters::restore(&saved, sink, interrupt).unwrap();
        assert_eq!(interrupts.get(), 1);
        assert_eq!(read(&restored, EVENTS), 1);
        restored.press_button().unwrap();
        restored.reset();
        assert_eq!(read(&restored, EVENTS), 0);

        let refuse = |saved: SavedPower| {
            let (sink, interrupt, ..) = sinks();
            PowerRegisters::restore(&saved, sink, interrupt).err().unwrap().to_string()
        };
        assert!(refuse(SavedPower { version: 2, ..saved }).contains("version 2"));
        assert!(refuse(SavedPower { pending_events: 0x80, ..saved }).contains("0x80"));
        assert!(refuse(SavedPower { sleep_type: 8, ..saved }).contains("sleep type 8"));
    }

    #[test]
    fn any_access_is_harmless() {
        let bench = bench();
        for offset in (0..PORTS).chain([u64::MAX - 3, u64::MAX]) {
            let mut data = [0xa5; 8];
            bench.device.read(offset, &mut data);
            bench.device.write(offset, &[0; 8]);
        }
        assert!(bench.events.lock().unwrap().is_empty());
    }
}
