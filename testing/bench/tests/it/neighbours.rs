//! The rings of neighbours between two real VMs: payload programs, windows as read-only memslots, no exits. The programs check each
//! message: order, length, first and last word. Needs /dev/kvm and two CPUs; without them the test prints that it is skipped.

use bench::groups::neighbours::bed::Bed;
use bench::programs::Programs;
use payload_loops::rings::Role;

#[test]
fn messages_between_two_vms_arrive_and_none_leaves_the_guests() {
    let cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).take(2).collect();
    if !std::path::Path::new("/dev/kvm").exists() {
        return facilities::missing(facilities::Facility::Kvm, "there is no /dev/kvm");
    }
    let &[first, second] = cpus.as_slice() else {
        return facilities::missing(facilities::Facility::TwoProcessors, format!("{cpus:?} are not two"));
    };
    let programs = Programs::build().unwrap();
    let mut bed = Bed::start(&programs.path("measure"), [first, second]).unwrap();
    let exits = bed.exits();
    let mut runs = 0;
    for (roles, messages, length) in [
        ([Role::Send, Role::Receive], 3000, 64),
        ([Role::Receive, Role::Send], 3000, 64),
        ([Role::Send, Role::Receive], 100, 64 << 10),
        ([Role::Ping, Role::Pong], 50, 64),
        ([Role::CopyIn, Role::CopyOut], 3000, 64),
        ([Role::CopyIn, Role::CopyOut], 100, 64 << 10),
    ] {
        let ticks = bed.play(roles, messages, length);
        assert!(ticks.is_ok(), "{roles:?} with {messages} of {length} bytes: {ticks:?}");
        runs += 1;
    }
    // Each run requests a job once per VM.
    let exits = bed.exits() - exits;
    assert!(exits <= 4 * runs, "{exits} exits in {runs} runs");
    bed.finish().unwrap();
}
