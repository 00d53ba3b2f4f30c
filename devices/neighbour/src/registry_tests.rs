use std::collections::BTreeMap;
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
/// A time at which no pause applies.
const LATER: Duration = Duration::from_secs(60);

fn neighbourhood(slots: u32) -> Neighbourhood {
    Neighbourhood::new(Geometry::new(1 << 30, 1 << 30, slots).unwrap(), Heartbeat::DEFAULT)
}

/// The new connections. Other tests check common members.
fn connects(group: &mut Neighbourhood, now: Duration) -> Vec<Action> {
    let all = group.settle(now);
    all.into_iter().filter(|action| matches!(action, Action::Connect { .. })).collect()
}

fn applicant(vm: &str, permits: &[&str]) -> Applicant {
    let permits = permits.iter().map(|vm| Permit { vm: (*vm).to_owned(), uid: 7 }).collect();
    Applicant { vm: vm.to_owned(), uid: 7, permits, slot: None, epoch: 0 }
}

#[test]
fn only_a_pair_that_permits_each_other_is_connected() {
    let mut group = neighbourhood(8);
    let a = group.join(Duration::ZERO, applicant("a", &["b", "c"])).unwrap();
    let b = group.join(Duration::ZERO, applicant("b", &["a"])).unwrap();
    let c = group.join(Duration::ZERO, applicant("c", &["b"])).unwrap();
    // The right name, but another user's VM.
    let stranger = Applicant { uid: 8, ..applicant("d", &["a", "b", "c"]) };
    let d = group.join(Duration::ZERO, stranger).unwrap();
    assert_eq!(connects(&mut group, Duration::ZERO), [Action::Connect { slots: [a, b], epoch: 1 }]);
    assert_eq!(connects(&mut group, LATER), []);
    assert_eq!(
        [(a, b), (a, c), (b, c), (a, d)].map(|(x, y)| group.connected(x, y)),
        [Some(1), None, None, None]
    );
}

#[test]
fn a_pair_has_in_common_those_who_permit_both_and_are_permitted_by_both() {
    let mut group = neighbourhood(8);
    let mut join = |vm, permits: &[&str]| group.join(Duration::ZERO, applicant(vm, permits)).unwrap();
    let files = join("files", &["raid", "disks"]);
    let raid = join("raid", &["files", "disks", "other"]);
    let disks = join("disks", &["files", "raid", "other"]);
    // It permits both, and one of them doesn't permit it; another permits only one.
    let other = join("other", &["raid", "disks", "files"]);
    let common = |actions: &[Action], to, peer| {
        let told = actions.iter().find_map(|action| match action {
            Action::Common { to: t, peer: p, slots } if (*t, *p) == (to, peer) => Some(*slots),
            _ => None,
        });
        told.map(|slots| (0..8).filter(|slot| slots >> slot & 1 == 1).collect::<Vec<u32>>())
    };
    let actions = group.settle(LATER);
    assert_eq!(common(&actions, files, raid), Some(vec![disks]));
    assert_eq!(common(&actions, raid, files), Some(vec![disks]));
    assert_eq!(common(&actions, disks, raid), Some(vec![files, other]));
    assert_eq!(common(&actions, other, disks), Some(vec![raid]));
    assert_eq!(common(&actions, files, other), None, "they aren't connected");
    assert_eq!(group.settle(LATER), [], "told once");
    // A slot leaves the common members before another VM can get it.
    group.leave(files);
    let actions = group.settle(LATER);
    assert_eq!(common(&actions, disks, raid), Some(vec![other]));
    assert_eq!(common(&actions, disks, files), None);
}

#[test]
fn a_restarted_member_gets_its_slot_back_and_waits_for_its_old_memory_to_be_released() {
    let mut group = neighbourhood(8);
    let a = group.join(Duration::ZERO, applicant("a", &["b"])).unwrap();
    let b = group.join(Duration::ZERO, applicant("b", &["a"])).unwrap();
    let _ = group.settle(Duration::ZERO);
    assert_eq!(group.leave(b), [Action::Gone { to: a, peer: b, epoch: 1, reason: Reason::Left }]);
    assert_eq!(group.join(Duration::ZERO, applicant("c", &[])).unwrap(), 2, "a slot in use isn't given away");
    assert_eq!(group.join(Duration::ZERO, applicant("b", &["a"])).unwrap(), b);
    assert_eq!(connects(&mut group, LATER), [], "a still has the window of the old b");
    assert_eq!(group.release(a, b, 1), []);
    assert_eq!(connects(&mut group, LATER), [Action::Connect { slots: [a, b], epoch: 2 }]);
    // A repeated release, or one of an earlier epoch, has no effect.
    assert_eq!(group.release(a, b, 1), []);
    assert_eq!(group.connected(a, b), Some(2));
}

#[test]
fn a_frozen_guest_is_parted_and_comes_back_when_it_runs() {
    let mut group = neighbourhood(2);
    let a = group.join(Duration::ZERO, applicant("a", &["b"])).unwrap();
    let b = group.join(Duration::ZERO, applicant("b", &["a"])).unwrap();
    let _ = group.settle(Duration::ZERO);
    let mut told = Vec::new();
    for turn in 1..=10u32 {
        group.report(turn * 100 * MS, a, u64::from(turn));
        group.report(turn * 100 * MS, b, 1);
        told.extend(group.tick(turn * 100 * MS).into_iter().map(|action| (turn, action)));
    }
    let gone = |to, peer, reason| Action::Gone { to, peer, epoch: 1, reason };
    assert_eq!(told, [(8, gone(a, b, Reason::Hung)), (8, gone(b, a, Reason::Own))]);
    assert_eq!(group.release(a, b, 1), []);
    group.report(1100 * MS, a, 11);
    group.report(1100 * MS, b, 2);
    assert_eq!(group.tick(1100 * MS), []);
    assert_eq!(connects(&mut group, 1100 * MS), [], "b has not let go yet");
    assert_eq!(group.release(b, a, 1), []);
    assert_eq!(connects(&mut group, 1100 * MS), [Action::Connect { slots: [a, b], epoch: 2 }]);
}

#[test]
fn one_who_gives_up_ends_it_for_both() {
    let mut group = neighbourhood(2);
    let a = group.join(Duration::ZERO, applicant("a", &["b"])).unwrap();
    let b = group.join(Duration::ZERO, applicant("b", &["a"])).unwrap();
    let _ = group.settle(Duration::ZERO);
    assert_eq!(group.release(b, a, 1), [Action::Gone { to: a, peer: b, epoch: 1, reason: Reason::GivenUp }]);
    assert_eq!(connects(&mut group, LATER), []);
    assert_eq!(group.release(a, b, 1), []);
    assert_eq!(connects(&mut group, LATER), [Action::Connect { slots: [a, b], epoch: 2 }]);
}

#[test]
fn a_new_registry_goes_on_above_the_epochs_that_members_know() {
    let mut group = neighbourhood(4);
    let a = group.join(Duration::ZERO, Applicant { slot: Some(3), epoch: 40, ..applicant("a", &["b"]) });
    let b = group.join(Duration::ZERO, Applicant { slot: Some(1), epoch: 41, ..applicant("b", &["a"]) });
    assert_eq!((a, b), (Ok(3), Ok(1)));
    assert_eq!(connects(&mut group, Duration::ZERO), [Action::Connect { slots: [1, 3], epoch: 42 }]);
}

#[test]
fn a_full_neighbourhood_and_a_taken_name_are_told() {
    let mut group = neighbourhood(1);
    group.join(Duration::ZERO, applicant("a", &[])).unwrap();
    assert_eq!(group.join(Duration::ZERO, applicant("a", &[])), Err(JoinError::Taken { vm: "a".to_owned() }));
    assert_eq!(group.join(Duration::ZERO, applicant("b", &[])), Err(JoinError::Full { slots: 1 }));
}

/// A member releases each connection as soon as it is made, and a peer follows. In a minute with calls every 10 ms, they are connected a
/// few times, and a third member, which the peer permits, isn't disturbed. The same if the member leaves and returns instead.
#[test]
fn one_who_lets_go_at_once_is_connected_again_ever_more_rarely() {
    for leaves in [false, true] {
        let mut group = neighbourhood(4);
        let mut hostile = group.join(Duration::ZERO, applicant("hostile", &["peer"])).unwrap();
        let peer = group.join(Duration::ZERO, applicant("peer", &["hostile", "honest"])).unwrap();
        let honest = group.join(Duration::ZERO, applicant("honest", &["peer"])).unwrap();
        let mut begun = Vec::new();
        for turn in 0..6000_u32 {
            let now = turn * 10 * MS;
            for (count, slot) in [hostile, peer, honest].into_iter().enumerate() {
                group.report(now, slot, u64::from(turn) + count as u64);
            }
            let mut told = group.tick(now);
            loop {
                told.extend(group.settle(now));
                let Some(action) = told.pop() else { break };
                match action {
                    Action::Connect { slots, epoch } if slots.contains(&hostile) => {
                        begun.push(now);
                        assert!(begun.len() < 30, "they spin: {begun:?}");
                        if leaves {
                            told.extend(group.leave(hostile));
                            hostile = group.join(now, applicant("hostile", &["peer"])).unwrap();
                        } else {
                            told.extend(group.release(hostile, peer, epoch));
                        }
                    }
                    Action::Connect { slots, .. } => {
                        assert_eq!((slots, now), ([peer, honest], Duration::ZERO))
                    }
                    Action::Gone { to, peer: of, epoch, .. } => {
                        assert_eq!((to, of), (peer, hostile));
                        told.extend(group.release(to, of, epoch));
                    }
                    Action::Common { slots, .. } => {
                        assert_eq!(slots, 0, "no three of them permit each other")
                    }
                }
            }
        }
        assert!((15..=20).contains(&begun.len()), "{begun:?}");
        assert!(group.connected(peer, honest).is_some());
        // After a quiet time it is treated like any other member.
        let last = *begun.last().unwrap();
        for soon in [crate::pause::STEADY, crate::pause::STEADY + crate::pause::FIRST] {
            let connected = connects(&mut group, last + soon);
            let [Action::Connect { epoch, .. }] = connected[..] else { panic!("{connected:?}") };
            let _ = group.release(hostile, peer, epoch);
            let _ = group.release(peer, hostile, epoch);
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Join(usize, u32),
    Leave(u32),
    /// A notified member releases its oldest dead view, or ends its oldest live connection.
    Release(u32, bool),
    /// Time passes. Members of the first mask report, members of the second count.
    Time(u32, u8, u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0usize..6, 0u32..2).prop_map(|(vm, uid)| Step::Join(vm, uid)),
        1 => (0u32..5).prop_map(Step::Leave),
        3 => (0u32..5, prop::bool::weighted(0.2)).prop_map(|(slot, live)| Step::Release(slot, live)),
        3 => (1u32..300, any::<u8>(), any::<u8>()).prop_map(|(ms, heard, counts)| Step::Time(ms, heard, counts)),
    ]
}

/// The neighbourhood, and what must hold of it.
struct Model {
    group: Neighbourhood,
    /// (from, to, user): which VMs permit which.
    permits: Vec<(usize, usize, u32)>,
    /// slot -> (vm, uid)
    members: BTreeMap<u32, (usize, u32)>,
    /// (holder, peer) -> (epoch, whether it was notified of the end)
    views: BTreeMap<(u32, u32), (u32, bool)>,
    epochs: BTreeSet<u32>,
    now: Duration,
    count: u64,
}

fn name(vm: usize) -> String {
    format!("vm{vm}")
}

impl Model {
    fn permits_of(&self, vm: usize) -> Vec<Permit> {
        let of = self.permits.iter().filter(|(from, ..)| *from == vm);
        of.map(|(_, to, uid)| Permit { vm: name(*to), uid: *uid }).collect()
    }

    /// Whether the VM in a slot permits the VM in another one.
    fn permits(&self, from: u32, to: u32) -> bool {
        let (from, to) = (self.members[&from], self.members[&to]);
        self.permits_of(from.0).contains(&Permit { vm: name(to.0), uid: to.1 })
    }

    /// Takes a step. Returns the actions that it causes at once, which may only end connections.
    fn take(&mut self, step: &Step) -> Result<Vec<Action>, TestCaseError> {
        let mut actions = Vec::new();
        match *step {
            Step::Join(vm, uid) => {
                let permits = self.permits_of(vm);
                let applicant = Applicant { vm: name(vm), uid, permits, slot: None, epoch: 0 };
                let taken = self.members.values().any(|(other, _)| *other == vm);
                match self.group.join(self.now, applicant) {
                    Ok(slot) => {
                        prop_assert!(!taken && slot < 5 && self.members.insert(slot, (vm, uid)).is_none());
                    }
                    Err(JoinError::Taken { .. }) => prop_assert!(taken),
                    Err(JoinError::Full { .. }) => prop_assert!(!taken),
                }
            }
            Step::Leave(slot) => {
                self.members.remove(&slot);
                actions = self.group.leave(slot);
                self.views.retain(|(holder, _), _| *holder != slot);
            }
            Step::Release(slot, live) => {
                let mut views = self.views.iter();
                let view = views.find(|((holder, _), (_, over))| *holder == slot && *over != live);
                if let Some((&(holder, peer), &(epoch, _))) = view {
                    self.views.remove(&(holder, peer));
                    actions = self.group.release(holder, peer, epoch);
                }
            }
            Step::Time(ms, heard, counts) => {
                self.now += ms * MS;
                self.count += 1;
                for &slot in self.members.keys() {
                    if heard >> slot & 1 == 1 {
                        let count = if counts >> slot & 1 == 1 { self.count } else { 1 };
                        self.group.report(self.now, slot, count);
                    }
                }
                actions = self.group.tick(self.now);
            }
        }
        for action in &actions {
            let ends = matches!(action, Action::Gone { .. });
            prop_assert!(ends, "only settling connects");
        }
        Ok(actions)
    }

    fn check(&mut self, action: &Action) -> Result<(), TestCaseError> {
        match *action {
            Action::Connect { slots: [a, b], epoch } => {
                prop_assert!(a < b);
                prop_assert!(self.permits(a, b) && self.permits(b, a));
                let last = self.epochs.last().copied();
                prop_assert!(last.is_none_or(|last| last < epoch) && self.epochs.insert(epoch));
                for view in [(a, b), (b, a)] {
                    prop_assert!(self.views.insert(view, (epoch, false)).is_none(), "still has its old view");
                }
            }
            Action::Common { to, peer, slots } => {
                prop_assert!(self.group.connected(to, peer).is_some());
                for slot in 0..5 {
                    let third = self.members.contains_key(&slot) && slot != to && slot != peer;
                    let both = |one: u32| self.permits(slot, one) && self.permits(one, slot);
                    let wanted = third && both(to) && both(peer);
                    prop_assert_eq!(slots >> slot & 1 == 1, wanted, "slot {}", slot);
                }
            }
            Action::Gone { to, peer, epoch, .. } => {
                let view = self.views.get_mut(&(to, peer));
                prop_assert_eq!(view.as_ref().map(|view| **view), Some((epoch, false)));
                if let Some(view) = view {
                    view.1 = true;
                }
            }
        }
        Ok(())
    }

    /// A live view has a live peer, which has one, too, and the registry has both as connected.
    fn check_views(&self) -> Result<(), TestCaseError> {
        for (&(holder, peer), &(epoch, over)) in &self.views {
            if !over {
                prop_assert!(self.members.contains_key(&peer));
                prop_assert_eq!(self.group.connected(holder, peer), Some(epoch));
            }
        }
        Ok(())
    }
}

proptest! {
    /// With any behavior of members: none is connected without permission of both, by name and user. Epochs rise and are never reused. A
    /// member gets a peer only after it has released its previous view of that slot. Each connection ends once for each member, at the
    /// latest when the member is gone.
    #[test]
    fn permission_epochs_and_views_hold(
        permits in prop::collection::vec((0usize..6, 0usize..6, 0u32..2), 0..20),
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut model = Model {
            group: neighbourhood(5),
            permits,
            members: BTreeMap::new(),
            views: BTreeMap::new(),
            epochs: BTreeSet::new(),
            now: Duration::ZERO,
            count: 0,
        };
        for step in steps {
            let mut actions = model.take(&step)?;
            actions.extend(model.group.settle(model.now));
            for action in &actions {
                model.check(action)?;
            }
            model.check_views()?;
        }
        for slot in 0..5 {
            let _ = model.group.leave(slot);
        }
        prop_assert!(model.group.is_empty(), "nothing is kept of those who are gone");
    }
}
