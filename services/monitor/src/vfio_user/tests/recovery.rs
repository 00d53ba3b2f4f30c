//! Servers that die, hang and return.

use super::*;

impl Served {
    /// Provides a new server of a device for the function's next attempt.
    fn offer(&mut self, device: &Arc<TestDevice>) {
        let (stream, server) = device.serve_pair();
        self.server = Some(server);
        lock(&self.prepared.streams).push(stream);
    }

    /// Kills the server's process.
    fn kill(&mut self) {
        drop(self.server.take());
        wait_until("the loss", || !self.function.is_connected());
    }
}

#[test]
fn a_device_fails_with_its_server_and_works_with_the_next() {
    let mut served = serve(TestDevice::new());
    let line = FakeLine::new();
    served.function.attach_intx(line.clone());
    served.set_vector(0, false);
    served.enable_msix(true);
    served.write_command(COMMAND_MEMORY | COMMAND_BUS_MASTER);
    served.device.want(DoorbellMode::Mapped);
    served.device.wait_for("mapped", |events| events.contains(&TestEvent::Reached(DoorbellMode::Mapped)));

    served.kill();
    wait_until("the function's own account", || served.function.inspect()["losses"] == 1);
    assert_eq!(served.config_u32(0), TEST_DEVICE_ID, "the function is still there");
    assert_eq!(served.config_u32(0x40) & 0xFF, 0x11);
    let mut data = [0; 4];
    served.function.bar_read(0, 0, &mut data);
    assert_eq!(data, [0xFF; 4]);
    served.function.bar_write(0, 0, &[0; 4]);
    assert_eq!(served.function.mappings().len(), 2, "memory stays mapped");
    served.function.quiesce().unwrap();
    served.function.unquiesce().unwrap();
    wait_until("attempts", || served.prepared.asked.load(Ordering::SeqCst) > 2);

    let next = TestDevice::new();
    served.offer(&next);
    wait_until("the return", || served.function.is_connected());
    next.wait_for("doorbell mode", |events| events.contains(&TestEvent::Reached(DoorbellMode::Trapped)));
    assert!(served.function.mappings().is_empty(), "the old memory is gone");
    assert_eq!(next.dma().len(), 2);
    assert_eq!(next.config(4, 2), (COMMAND_MEMORY | COMMAND_BUS_MASTER).to_le_bytes());
    assert!(next.raise(0));
    wait_until("an interrupt of the next server", || served.sent(0) == 1);
    served.function.bar_write(0, 4, &[7]);
    served.function.bar_read(0, 4, &mut data);
    assert_eq!(data, [7, 0, 0, 0]);
    wait_until("the count", || served.function.inspect()["reconnections"] == 1);
}

#[test]
fn machine_reset_and_configuration_work_without_a_server() {
    let mut served = serve(TestDevice::new());
    served.write_command(COMMAND_BUS_MASTER);
    served.kill();
    served.function.reset().unwrap();
    served.write_command(COMMAND_MEMORY);
    let next = TestDevice::new();
    served.offer(&next);
    wait_until("the return", || served.function.is_connected());
    assert_eq!(next.config(4, 2), COMMAND_MEMORY.to_le_bytes());
}

#[test]
fn another_device_in_its_place_is_refused() {
    let mut served = serve(TestDevice::new());
    served.kill();
    served.offer(&TestDevice::without_doorbell_mode());
    wait_until("an attempt", || served.function.inspect()["failed_attempts"].as_u64() >= Some(2));
    assert!(!served.function.is_connected());
    served.offer(&TestDevice::new());
    wait_until("the return", || served.function.is_connected());
}

#[test]
fn a_server_that_dies_again_and_again_leaves_nothing_behind() {
    let mut served = serve(TestDevice::new());
    for _ in 0..5 {
        served.kill();
        let next = TestDevice::new();
        served.offer(&next);
        wait_until("the return", || served.function.is_connected());
    }
    let device = Arc::clone(&served.device);
    drop(served);
    drop(device);
}
