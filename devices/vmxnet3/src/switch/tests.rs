//! The switch against a plain list of which port sent from which address.

use proptest::prelude::*;

use super::*;

const AGING: Duration = Duration::from_secs(100);

fn mac(last: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, last])
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn own_addresses_can_not_be_learnt_away() {
    let mut switch = Switch::new(AGING);
    assert!(switch.add_own(0, mac(10)));
    assert!(switch.add_own(1, mac(11)));
    assert!(!switch.add_own(2, mac(10)), "taken");
    assert!(!switch.admit(1, mac(10), true, at(0)), "another port's own address");
    assert!(!switch.admit(1, mac(50), false, at(0)), "not its own");
    assert!(switch.admit(1, mac(11), false, at(0)));
    assert_eq!(switch.route(1, mac(10), at(0)), Route::Port(0));
    assert_eq!(switch.route(1, mac(50), at(0)), Route::Flood, "nothing was learnt");
    assert_eq!(switch.route(0, mac(10), at(0)), Route::Nowhere);
    assert!(!switch.admit(1, MacAddress::BROADCAST, true, at(0)), "a group sends nothing");
}

#[test]
fn an_own_address_takes_over_what_was_learnt() {
    let mut switch = Switch::new(AGING);
    assert!(switch.admit(3, mac(10), true, at(0)));
    assert!(switch.add_own(0, mac(10)));
    assert_eq!(switch.route(3, mac(10), at(0)), Route::Port(0));
    assert!(!switch.admit(3, mac(10), true, at(0)));
}

#[test]
fn a_flood_of_addresses_pushes_out_nobody() {
    let mut switch = Switch::new(AGING);
    assert!(switch.admit(1, mac(99), true, at(0)));
    for number in 0..5000_u32 {
        let [a, b, ..] = number.to_le_bytes();
        assert!(switch.admit(0, MacAddress([2, 1, 0, 0, a, b]), true, at(0)));
    }
    assert!(switch.stations().count() <= LEARNT_MAX + 1);
    assert_eq!(switch.route(0, mac(99), at(0)), Route::Port(1));
    switch.sweep(at(1000));
    assert_eq!(switch.stations().count(), 0);
    assert!(switch.admit(0, mac(1), true, at(1000)));
    assert_eq!(switch.route(1, mac(1), at(1000)), Route::Port(0), "there is room again");
}

#[derive(Debug, Clone)]
enum Step {
    Hear { port: usize, from: u8 },
    Ask { port: usize, to: u8 },
    Wait(u64),
    Sweep,
    Remove(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_usize, 0..8_u8).prop_map(|(port, from)| Step::Hear { port, from }),
        4 => (0..4_usize, 0..8_u8).prop_map(|(port, to)| Step::Ask { port, to }),
        2 => (1..80_u64).prop_map(Step::Wait),
        1 => Just(Step::Sweep),
        1 => (1..4_usize).prop_map(Step::Remove),
    ]
}

proptest! {
    #[test]
    fn it_routes_as_the_last_hearing_of_each_address_says(
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut switch = Switch::new(AGING);
        prop_assert!(switch.add_own(0, mac(0)));
        let mut now = 0;
        // Address, port, time.
        let mut heard: Vec<(u8, usize, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Hear { port, from } => {
                    let may = switch.admit(port, mac(from), true, at(now));
                    prop_assert_eq!(may, from != 0 || port == 0);
                    if may && from != 0 {
                        heard.push((from, port, now));
                    }
                }
                Step::Ask { port, to } => {
                    let last = heard.iter().rev().find(|(address, ..)| *address == to);
                    let expected = match last {
                        _ if to == 0 && port == 0 => Route::Nowhere,
                        _ if to == 0 => Route::Port(0),
                        Some((_, own, when)) if now - when <= AGING.as_secs() => {
                            if *own == port { Route::Nowhere } else { Route::Port(*own) }
                        }
                        _ => Route::Flood,
                    };
                    prop_assert_eq!(switch.route(port, mac(to), at(now)), expected);
                }
                Step::Wait(seconds) => now += seconds,
                Step::Sweep => switch.sweep(at(now)),
                Step::Remove(gone) => {
                    switch.remove_port(gone);
                    // The last sighting of an address counts; it overwrites earlier ones at other ports.
                    let mut kept: Vec<(u8, usize, u64)> = Vec::new();
                    for (address, port, when) in &heard {
                        kept.retain(|(other, ..)| other != address);
                        kept.push((*address, *port, *when));
                    }
                    kept.retain(|(_, port, _)| *port != gone);
                    heard = kept;
                }
            }
        }
    }
}
