//! The exploration of every description, and that it finds descriptions that lack a check.

#[path = "../examples/explore/space.rs"]
mod space;

use device_models::describe::{BusMaster, Check, Device, Transition};
use device_models::devices;
use space::{GRANTED, Order, explore};

/// No path to a window that wasn't granted, a way to reusable from everywhere, and each window is used in some state.
#[test]
fn descriptions_hold() {
    for device in devices::ALL {
        let report = explore(device, Order::DeviceFirst);
        assert_eq!(report.findings, Vec::<String>::new(), "{}", device.name);
        assert_eq!(report.unused, Vec::<&str>::new(), "{}", device.name);
        let size =
            (report.states > 1000, report.steps > report.states, report.depth > 5, report.requests > 10);
        assert_eq!(size, (true, true, true, true), "{}: {report:?}", device.name);
    }
}

/// A monitor that gives windows back before the device has got the write that ends their use is found at each device that masters the bus.
#[test]
fn windows_that_are_given_back_too_early_are_found() {
    for device in devices::ALL.iter().filter(|device| device.pci.bus_master != BusMaster::Never) {
        let report = explore(device, Order::WindowsFirst);
        assert!(
            report.findings.iter().any(|finding| finding.contains(GRANTED)),
            "{}: {:?}",
            device.name,
            report.findings
        );
    }
}

/// The device without the checks of one transition.
fn without(device: &'static Device, at: usize) -> &'static Device {
    let mut transitions: Vec<Transition> = device.transitions.to_vec();
    transitions[at].checks = &[];
    Box::leak(Box::new(Device { transitions: transitions.leak(), ..*device }))
}

/// Whatever transition loses the check of its window, a path to the device's misuse is found.
#[test]
fn a_description_that_lacks_a_window_check_is_found() {
    for device in devices::ALL {
        for (at, transition) in device.transitions.iter().enumerate() {
            if !transition.checks.iter().any(|check| matches!(check, Check::Window(_))) {
                continue;
            }
            let report = explore(without(device, at), Order::DeviceFirst);
            assert!(
                !report.findings.is_empty(),
                "{}: transition {at} ({:?}) loses its checks unseen",
                device.name,
                transition.event
            );
        }
    }
}
