//! A restored device equals the saved one, and a damaged state is refused.

use std::time::Duration;

use dma::HeapMemory;
use serde_json::Value;
use vmxnet3::saved::RestoreError;
use vmxnet3::{MacAddress, PortRules, SavedVmxnet3, Segment, SegmentConfig, Vmxnet3, Vmxnet3Config};
use vmxnet3_testbed::{CountedInterrupts, Driver, DriverOptions, TransmitRequest, ethernet};

fn config(last: u8) -> Vmxnet3Config {
    Vmxnet3Config { name: format!("nic{last}"), mac: MacAddress([2, 0, 0, 0, 0, last]), link_mbps: 1000 }
}

#[test]
fn a_device_goes_on_where_it_was_saved_in_the_middle_of_traffic() {
    let memory = HeapMemory::new(4 << 20);
    let interrupts = CountedInterrupts::default();
    let mut device = Vmxnet3::new(config(1), Box::new(interrupts.clone()));
    device.set_memory(Some(memory.clone()));
    let mut driver = Driver::new(memory.clone(), 0, DriverOptions::default());
    assert_eq!(driver.open(&mut device), 0);
    let mut segment = Segment::new(SegmentConfig::new("test"));
    let mut id = segment.attach_device(device, PortRules::default()).unwrap();
    let frame = ethernet([0xFF; 6], [2, 0, 0, 0, 0, 1], &[1; 100]);
    for round in 0..200 {
        let device = segment.device(id).unwrap();
        assert!(driver.send(device, &frame, &TransmitRequest::default()));
        if round % 3 == 0 {
            // Saved before the packet is sent: it is in the rings alone.
            let old = segment.detach(id).unwrap();
            let state = old.save();
            let text = serde_json::to_string(&state).unwrap();
            let state: SavedVmxnet3 = serde_json::from_str(&text).unwrap();
            let mut new = Vmxnet3::restore(config(1), Box::new(interrupts.clone()), state.clone()).unwrap();
            assert_eq!(new.save(), state);
            new.set_memory(Some(memory.clone()));
            id = segment.attach_device(new, PortRules::default()).unwrap();
        }
        segment.serve(Duration::ZERO);
        assert_eq!(driver.reap(), 1, "round {round}");
        driver.unmask(segment.device(id).unwrap());
    }
    assert_eq!(interrupts.count(0), 200);
}

#[test]
fn damaged_foreign_and_future_state_is_refused() {
    let memory = HeapMemory::new(4 << 20);
    let quiet = || Box::new(CountedInterrupts::default());
    let mut device = Vmxnet3::new(config(1), quiet());
    device.set_memory(Some(memory.clone()));
    let mut driver = Driver::new(memory, 0, DriverOptions::default());
    assert_eq!(driver.open(&mut device), 0);
    let good = device.save();
    let restore = |state: SavedVmxnet3| Vmxnet3::<HeapMemory>::restore(config(1), quiet(), state).err();
    assert_eq!(restore(good.clone()), None);
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut state = serde_json::to_value(&good).unwrap();
        change(&mut state);
        restore(serde_json::from_value(state).unwrap())
    };
    let future = changed(&|state| state["version"] = 2.into());
    assert!(matches!(future, Some(RestoreError::Version { found: 2, .. })));
    let other = Vmxnet3::<HeapMemory>::restore(config(2), quiet(), good.clone()).err();
    assert!(matches!(other, Some(RestoreError::OtherDevice { .. })));
    for change in [
        (|active| active["tx"][0]["layout"]["ring_size"] = 0.into()) as fn(&mut Value),
        |active| active["tx"][0]["next"]["next"] = 64.into(),
        |active| active["rx"][0]["completion"]["next"] = 4096.into(),
        |active| active["rx"][0]["layout"]["ring_sizes"][1] = 5000.into(),
        |active| active["vlans"].as_array_mut().unwrap().truncate(3),
        |active| active["tx"].as_array_mut().unwrap().clear(),
    ] {
        let damaged = changed(&|state| {
            let before = state["active"].clone();
            change(&mut state["active"]);
            assert_ne!(state["active"], before);
        });
        assert!(matches!(damaged, Some(RestoreError::Damaged { .. })));
    }
}
