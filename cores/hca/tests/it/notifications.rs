//! Completion events: exact arms, and sampled arms, which may be lost.

use crate::common;

use common::Pair;
use hca::attributes::QpKind;
use hca::work::Arm;
use hca_testbed::requests;

/// A pair with a receive posted and a completed send to it, after the right side was armed.
fn message(pair: &mut Pair, solicited: bool) {
    pair.receive(1, &[]);
    let mut request = requests::send(2, &[]);
    request.signaled = false;
    request.solicited = solicited;
    pair.send(request);
}

fn arm(pair: &mut Pair, arm: Arm) {
    let (device, cq) = (pair.b.device, pair.right.cq);
    pair.world.engine.arm_cq(device, cq, arm, &mut pair.world.events);
}

fn events(pair: &mut Pair) -> usize {
    std::mem::take(&mut pair.world.events.completions).len()
}

#[test]
fn an_exact_arm_is_one_event() {
    let mut pair = Pair::new(QpKind::Rc);
    message(&mut pair, false);
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 0, "not armed");
    let _ = pair.right.completions.drain();
    arm(&mut pair, Arm::Next);
    assert_eq!(events(&mut pair), 0, "nothing there");
    message(&mut pair, false);
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 1);
    arm(&mut pair, Arm::Next);
    assert_eq!(events(&mut pair), 0, "what lies there is found by polling after the arm");
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 1, "the first after the arm");
}

/// A sampled arm may be old: the consumer polled before the completions came, and sleeps.
#[test]
fn a_sampled_arm_with_completions_waiting_is_an_event_after_a_while() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    message(&mut pair, false);
    arm(&mut pair, Arm::Next);
    assert_eq!(events(&mut pair), 0, "the consumer may be about to poll");
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 1, "it is not");
}

#[test]
fn a_solicited_arm_waits_for_solicited_ones_and_errors() {
    let mut pair = Pair::new(QpKind::Rc);
    message(&mut pair, false);
    arm(&mut pair, Arm::Solicited);
    assert_eq!(events(&mut pair), 0, "what lies there is not solicited");
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 0);
    message(&mut pair, true);
    assert_eq!(events(&mut pair), 1);
    let _ = pair.right.completions.drain();
    arm(&mut pair, Arm::Solicited);
    assert_eq!(events(&mut pair), 0, "all consumed");
    pair.receive(1, &[]);
    pair.world.engine.destroy_qp(pair.a.device, pair.left.qp.handle).unwrap();
    let right = pair.right.clone();
    pair.world.send(&right, requests::send(3, &[]));
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 1, "an error is always told");
}

#[test]
fn a_later_solicited_arm_does_not_weaken_an_arm() {
    let mut pair = Pair::new(QpKind::Rc);
    arm(&mut pair, Arm::Next);
    arm(&mut pair, Arm::Solicited);
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 1);
}

#[test]
fn where_arms_may_be_missed_a_sleeper_is_told_once_per_step() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    message(&mut pair, false);
    pair.world.pass(19_000);
    assert_eq!(events(&mut pair), 0, "it may be polling");
    pair.world.pass(2_000);
    assert_eq!(events(&mut pair), 1);
    message(&mut pair, false);
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 0, "it was told, and has consumed nothing since");
    let _ = pair.right.completions.poll();
    message(&mut pair, false);
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 1);
    assert_eq!(pair.world.poll().next, None, "and nothing is left to look at");
}

/// A program that polls every 100 us leaves completions unconsumed for longer than 20 us. It gets one unrequested event per poll and no
/// more, however many completions it finds.
#[test]
fn where_arms_may_be_missed_a_slow_poller_is_told_once_per_step() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    for step in 0..50 {
        for _ in 0..4 {
            message(&mut pair, false);
            pair.world.pass(25_000);
        }
        assert_eq!(events(&mut pair), 1, "step {step}");
        assert_eq!(pair.right.completions.drain().len(), 4);
    }
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 0, "nothing lies there");
}

#[test]
fn where_arms_may_be_missed_a_fast_poller_is_never_told() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    for _ in 0..100 {
        message(&mut pair, false);
        pair.world.pass(10_000);
        let _ = pair.right.completions.poll();
    }
    assert_eq!(events(&mut pair), 0);
    assert_eq!(pair.world.engine.counters(pair.b.device).completion_events, 0);
}

#[test]
fn an_arm_that_was_seen_is_told_at_once_also_where_others_may_be_missed() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    arm(&mut pair, Arm::Next);
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 1);
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 0, "not a second time");
}

#[test]
fn the_switch_to_exact_arms_loses_no_sleeper() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_arm_exact(pair.b.device, false);
    // The guest arms here, unnoticed, and sleeps.
    pair.world.engine.set_arm_exact(pair.b.device, true);
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 1);
    message(&mut pair, false);
    assert_eq!(events(&mut pair), 0, "from now on only what is armed");
    // Back to sampled arms: the engine checks the unconsumed completions.
    let _ = pair.right.completions.poll();
    pair.world.engine.set_arm_exact(pair.b.device, false);
    pair.world.pass(100_000);
    assert_eq!(events(&mut pair), 1);
}

#[test]
fn a_full_event_ring_is_tried_again() {
    let mut pair = Pair::new(QpKind::Rc);
    arm(&mut pair, Arm::Next);
    pair.world.events.full = true;
    message(&mut pair, false);
    let progress = pair.world.poll();
    assert!(progress.next.is_some_and(|next| next > pair.world.now), "later, not in a loop");
    pair.world.events.full = false;
    pair.world.pass(100_000);
    assert_eq!(events(&mut pair), 1);
}

#[test]
fn a_destroyed_completion_queue_is_not_named_any_more() {
    let mut pair = Pair::new(QpKind::Rc);
    arm(&mut pair, Arm::Next);
    pair.world.events.full = true;
    message(&mut pair, false);
    pair.world.events.full = false;
    pair.world.engine.destroy_qp(pair.b.device, pair.right.qp.handle).unwrap();
    pair.world.engine.destroy_cq(pair.b.device, pair.right.cq).unwrap();
    pair.world.pass(1_000_000);
    assert_eq!(events(&mut pair), 0);
}
