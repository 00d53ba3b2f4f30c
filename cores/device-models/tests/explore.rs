//! The exploration of every description, and that it finds descriptions that lack a check.

#[path = "../examples/explore/space.rs"]
mod space;

use device_models::describe::{Check, Device, Transition};
use device_models::devices;
use space::explore;

/// No path to a window that wasn't granted, a way to reusable from everywhere, and each window is used in some state.
#[test]
fn descriptions_hold() {
    for device in devices::ALL {
        let report = explore(device);
        assert_eq!(report.findings, Vec::<String>::new(), "{}", device.name);
        assert_eq!(report.unused, Vec::<&str>::new(), "{}", device.name);
        let size =
            (report.states > 1000, report.steps > report.states, report.depth > 5, report.requests > 10);
        assert_eq!(size, (true, true, true, true), "{}: {report:?}", device.name);
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
            let report = explore(without(device, at));
            assert!(
                !report.findings.is_empty(),
                "{}: transition {at} ({:?}) loses its checks unseen",
                device.name,
                transition.event
            );
        }
    }
}
