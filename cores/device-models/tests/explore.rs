//! Explores every description, and checks that the exploration finds descriptions that lack a check.

#[path = "../examples/explore/space.rs"]
mod space;

use device_models::describe::{BusMaster, Check, Device, Transition};
use device_models::devices;
use space::{GRANTED, Order, explore};

/// No path leads to a window that wasn't granted. A quiescent state is reachable from every state. Some state uses each
/// window.
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

/// For each bus-mastering device, the exploration finds a monitor that releases windows before the device has the write
/// that ends their use.
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

/// Returns the device without the checks of one transition.
fn without(device: &'static Device, at: usize) -> &'static Device {
    let mut transitions: Vec<Transition> = device.transitions.to_vec();
    transitions[at].checks = &[];
    Box::leak(Box::new(Device { transitions: transitions.leak(), ..*device }))
}

/// If any transition loses its window check, the exploration finds a path to the device's misuse.
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
