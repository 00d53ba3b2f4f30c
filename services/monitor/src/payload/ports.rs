//! The I/O ports of a payload machine.

use super::PayloadError;
use super::whole::Local;
use machine::bus::BusDevice;
use machine::vcpu::{ExitAction, GuestRegisters, VcpuEvent, VcpuExitHandler};
use payload_abi::{PORT_EXCEPTION, PORT_EXIT, PORT_PARK, PORT_PAUSE, PORT_PHASE};
use std::io::Write;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Shortest time for which a write to [`PORT_PAUSE`] yields the host's CPU. The host adds its timer's slack.
const YIELD_TIME: Duration = Duration::from_micros(50);

/// Serves the ports from [`payload_abi::PORT_HOST`] on, for library users. vCPU threads call it concurrently.
pub trait HostPorts: Send + Sync {
    /// A read of port `PORT_HOST + index`. Returns the value, which is truncated to the access. May block: the vCPU then waits without
    /// using a CPU. Must return soon after a request to stop the VM.
    fn read(&self, index: u16) -> u32;
    /// A write to port `PORT_HOST + index`, zero-extended to 32 bits.
    fn write(&self, index: u16, value: u32) {
        let _ = (index, value);
    }
}

/// Messages of vCPU threads to the thread that waits for the VM.
#[derive(Debug)]
pub(super) enum Message {
    /// The program exited with a code.
    Exit(u32),
    /// A vCPU parked.
    Park,
    /// A vCPU is in an exception stub.
    Exception(u32),
    /// The console's output failed.
    Console(std::io::Error),
    /// A vCPU ended for another reason.
    Event(VcpuEvent),
    /// `PayloadVm::stop` was called.
    Asked,
}

/// The ports that end a vCPU, which a bus device can't.
pub(super) struct Control {
    pub(super) messages: Mutex<Sender<Message>>,
    pub(super) local: Local,
}

impl Control {
    fn tell(&self, message: Message) {
        // Fails if no thread waits, and then the message isn't needed.
        let _ = self.messages.lock().unwrap_or_else(PoisonError::into_inner).send(message);
    }
}

impl VcpuExitHandler for Control {
    fn port_out(&self, vcpu: u32, port: u16, data: &[u8]) -> ExitAction {
        match port {
            PORT_EXIT => self.tell(Message::Exit(zero_extend(data))),
            PORT_PARK => self.tell(Message::Park),
            PORT_EXCEPTION => self.tell(Message::Exception(vcpu)),
            PORT_PAUSE => {
                std::thread::sleep(YIELD_TIME);
                return ExitAction::Handled;
            }
            PORT_PHASE if self.local.whole.is_some() => {
                if let Some(whole) = &self.local.whole {
                    whole.phase(zero_extend(data) != 0);
                }
                return ExitAction::Handled;
            }
            _ => return ExitAction::Pass,
        }
        if let Some(whole) = &self.local.whole {
            whole.ended(self.local.index(vcpu), port == PORT_PARK);
        }
        ExitAction::Stop
    }

    fn before_run(&self, vcpu: u32, registers: &dyn GuestRegisters) {
        if let Some(whole) = &self.local.whole {
            whole.before_run(self.local.index(vcpu), registers);
        }
    }
}

/// A callback that forwards the end of a vCPU, unless [`Control`] has ended it.
pub(super) fn on_event(messages: Sender<Message>) -> Arc<dyn Fn(VcpuEvent) + Send + Sync> {
    let messages = Mutex::new(messages);
    Arc::new(move |event| {
        if !matches!(event, VcpuEvent::Stopped { .. }) {
            let _ = messages.lock().unwrap_or_else(PoisonError::into_inner).send(Message::Event(event));
        }
    })
}

/// The console port.
pub(super) struct Console {
    state: Mutex<ConsoleState>,
}

struct ConsoleState {
    output: Box<dyn Write + Send>,
    messages: Sender<Message>,
    broken: bool,
}

impl Console {
    pub(super) fn new(output: Box<dyn Write + Send>, messages: Sender<Message>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(ConsoleState { output, messages, broken: false }) })
    }

    /// Flushes buffered output.
    pub(super) fn flush(&self) -> Result<(), PayloadError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken { Ok(()) } else { state.output.flush().map_err(PayloadError::Console) }
    }
}

impl BusDevice for Console {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // The value of QEMU's and Bochs's debug port, by which programs detect it.
        data.fill(0xe9);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.broken
            && let Err(error) = state.output.write_all(data)
        {
            state.broken = true;
            let _ = state.messages.send(Message::Console(error));
        }
    }
}

/// The host ports as a bus device.
pub(super) struct HostPortDevice(pub(super) Arc<dyn HostPorts>);

impl BusDevice for HostPortDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = self.0.read(u16::try_from(offset).unwrap_or(u16::MAX)).to_le_bytes();
        for (byte, value) in data.iter_mut().zip(value) {
            *byte = value;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.write(u16::try_from(offset).unwrap_or(u16::MAX), zero_extend(data));
    }
}

/// The rest of the doorbell page: reads as zero, ignores writes.
pub(super) struct DoorbellPage;

impl BusDevice for DoorbellPage {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

fn zero_extend(data: &[u8]) -> u32 {
    let mut value = [0; 4];
    for (value, byte) in value.iter_mut().zip(data) {
        *value = *byte;
    }
    u32::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::{Console, Control, HostPortDevice, HostPorts, Local, Message, zero_extend};
    use machine::bus::BusDevice;
    use machine::vcpu::{ExitAction, VcpuExitHandler};
    use std::sync::{Arc, Mutex, mpsc};

    #[test]
    fn control_ports_stop_the_vcpu_and_say_why_and_others_pass() {
        let (sender, messages) = mpsc::channel();
        let local = Local { vcpus: vec![(3, 3)], whole: None };
        let control = Control { messages: Mutex::new(sender), local };
        assert_eq!(control.port_out(3, payload_abi::PORT_EXIT, &[7, 0, 0, 0]), ExitAction::Stop);
        assert_eq!(control.port_out(3, payload_abi::PORT_PARK, &[0]), ExitAction::Stop);
        assert_eq!(control.port_out(3, payload_abi::PORT_EXCEPTION, &[0]), ExitAction::Stop);
        assert_eq!(control.port_out(3, payload_abi::PORT_CONSOLE, b"x"), ExitAction::Pass);
        assert!(matches!(messages.recv().unwrap(), Message::Exit(7)));
        assert!(matches!(messages.recv().unwrap(), Message::Park));
        assert!(matches!(messages.recv().unwrap(), Message::Exception(3)));
    }

    #[test]
    fn a_broken_console_is_told_once() {
        struct Broken;
        impl std::io::Write for Broken {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (sender, messages) = mpsc::channel();
        let console = Console::new(Box::new(Broken), sender);
        console.write(0, b"a");
        console.write(0, b"b");
        assert!(matches!(messages.try_recv().unwrap(), Message::Console(_)));
        assert!(messages.try_recv().is_err());
        console.flush().unwrap();
    }

    #[test]
    fn host_ports_see_32_bit_values_whatever_the_width() {
        struct Recorder(Mutex<Vec<(u16, u32)>>);
        impl HostPorts for Recorder {
            fn read(&self, index: u16) -> u32 {
                0x1122_3300 + u32::from(index)
            }
            fn write(&self, index: u16, value: u32) {
                self.0.lock().unwrap().push((index, value));
            }
        }
        let recorder = Arc::new(Recorder(Mutex::default()));
        let device = HostPortDevice(recorder.clone());
        let mut data = [0; 2];
        device.read(5, &mut data);
        assert_eq!(data, [0x05, 0x33]);
        device.write(2, &[0xff]);
        assert_eq!(*recorder.0.lock().unwrap(), [(2, 255)]);
        assert_eq!(zero_extend(&[1, 2, 3, 4, 5]), 0x0403_0201);
    }
}
