//! Single steps of a host that the model checker reaches rarely or never.

use nomad::{
    Action, Body, Config, Epoch, Event, Host, HostId, Incarnation, Message, MigrationId, Move, Node, Place,
    VmId,
};

const ONE: MigrationId = MigrationId(1);
const TWO: MigrationId = MigrationId(2);

fn host(id: u32, fanout: u8) -> Host {
    Host::new(HostId(id), Incarnation(1), Config { fanout, ..Config::default() })
}

fn receives(host: &mut Host, from: Node, body: Body) -> Vec<Action> {
    let to = Node::Host(host.id());
    step(host, Event::Message(Message { from, incarnation: Incarnation(1), to, body }))
}

fn step(host: &mut Host, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    host.step(event, &mut actions);
    actions
}

fn sent(actions: &[Action]) -> Vec<(Node, Body)> {
    let message = |action: &Action| match action {
        Action::Send(message) => Some((message.to, message.body.clone())),
        _ => None,
    };
    actions.iter().filter_map(message).collect()
}

/// A VM starts on a host, and has never moved.
fn started(host: &mut Host, vm: u32, epoch: u64) -> Vec<Action> {
    step(host, Event::Started { vm: VmId(vm), epoch: Epoch(epoch), after: MigrationId(0) })
}

fn place(vm: u32, host: u32, epoch: u64) -> Place {
    Place { vm: VmId(vm), host: HostId(host), epoch: Epoch(epoch) }
}

/// A VM moves here. Before its peer has answered the announcement, another migration of it begins and is aborted. The
/// host announces the VM again, and its queue pairs resume.
#[test]
fn an_unanswered_announcement_survives_the_next_migration() {
    let mut two = host(2, 0);
    let moves = vec![Move { vm: VmId(1), from: HostId(1), to: HostId(2), epoch: Epoch(2) }];
    receives(&mut two, Node::Coordinator, Body::Reserve { migration: ONE, moves });
    step(&mut two, Event::Reservation { migration: ONE, granted: true });
    let peers = vec![place(7, 3, 1)];
    receives(&mut two, Node::Host(HostId(1)), Body::Handover { migration: ONE, vm: VmId(1), peers });
    let loaded = sent(&step(&mut two, Event::Arrived { migration: ONE, vm: VmId(1) }));
    assert_eq!(loaded.len(), 2, "to the source and the coordinator: {loaded:?}");
    let started =
        receives(&mut two, Node::Coordinator, Body::Commit { migration: ONE, places: vec![place(1, 2, 2)] });
    assert!(started.contains(&Action::Run { vm: VmId(1), epoch: Epoch(2) }));

    let moves = vec![Move { vm: VmId(1), from: HostId(2), to: HostId(4), epoch: Epoch(3) }];
    receives(&mut two, Node::Coordinator, Body::Begin { migration: TWO, moves });
    let stays =
        receives(&mut two, Node::Coordinator, Body::Abort { migration: TWO, places: vec![place(1, 2, 2)] });
    let told = sent(&stays).into_iter().any(|(to, body)| {
        to == Node::Host(HostId(3)) && matches!(body, Body::Running { after, .. } if after == TWO)
    });
    assert!(told, "{stays:?}");
    let ready = Body::Ready { after: TWO, origin: HostId(2), hosts: vec![HostId(3)] };
    let opened = receives(&mut two, Node::Host(HostId(3)), ready);
    assert_eq!(opened, [Action::ResumeQps { vm: VmId(1), peer: place(7, 3, 1) }]);
    assert!(two.is_idle());
}

/// A host forwards a message, and answers once, when it and all hosts below it are done.
#[test]
fn answers_come_back_along_the_tree() {
    let mut two = host(2, 1);
    started(&mut two, 5, 1);
    step(&mut two, Event::Connected { vm: VmId(5), peer: place(1, 1, 1) });
    let forward_to = vec![HostId(3), HostId(4)];
    let suspend = Body::Suspend { migration: ONE, origin: HostId(1), vms: vec![VmId(1)], forward_to };
    let actions = receives(&mut two, Node::Host(HostId(1)), suspend);
    let on =
        Body::Suspend { migration: ONE, origin: HostId(1), vms: vec![VmId(1)], forward_to: vec![HostId(4)] };
    assert_eq!(sent(&actions), [(Node::Host(HostId(3)), on)]);
    assert!(actions.contains(&Action::SuspendQps { migration: ONE, vm: VmId(1) }));
    assert_eq!(sent(&step(&mut two, Event::QpsSuspended { migration: ONE, vm: VmId(1) })), []);
    let hosts = vec![HostId(3), HostId(4)];
    let waits_for = Body::Suspended { migration: ONE, origin: HostId(1), hosts };
    let answer = sent(&receives(&mut two, Node::Host(HostId(3)), waits_for));
    let hosts = vec![HostId(2), HostId(3), HostId(4)];
    let all = Body::Suspended { migration: ONE, origin: HostId(1), hosts };
    assert_eq!(answer, [(Node::Host(HostId(1)), all)]);
}

/// A source sends one `Suspend` to each peers' host, whatever the number of VMs and connections there.
#[test]
fn one_message_per_peer_host() {
    let mut one = host(1, 0);
    let mut moves = Vec::new();
    for vm in 1..=3 {
        started(&mut one, vm, 1);
        for peer in 10..40 {
            step(&mut one, Event::Connected { vm: VmId(vm), peer: place(peer, 2 + peer % 3, 1) });
        }
        moves.push(Move { vm: VmId(vm), from: HostId(1), to: HostId(9), epoch: Epoch(2) });
    }
    receives(&mut one, Node::Coordinator, Body::Begin { migration: ONE, moves });
    for vm in 1..=3 {
        step(&mut one, Event::Converged { migration: ONE, vm: VmId(vm) });
    }
    let told = sent(&receives(&mut one, Node::Coordinator, Body::Switch { migration: ONE }));
    let hosts: Vec<_> = told.iter().map(|(to, _)| *to).collect();
    assert_eq!(hosts, [2, 3, 4].map(|host| Node::Host(HostId(host))));
}

/// A commit with a newer epoch ends a VM here, although this host didn't take part.
#[test]
fn a_newer_epoch_elsewhere_ends_a_vm_here() {
    let mut one = host(1, 0);
    started(&mut one, 1, 4);
    let commit = |epoch| Body::Commit { migration: ONE, places: vec![place(1, 2, epoch)] };
    let older = receives(&mut one, Node::Coordinator, commit(4));
    assert!(!older.contains(&Action::Discard { vm: VmId(1) }));
    let newer = receives(&mut one, Node::Coordinator, commit(5));
    assert!(newer.contains(&Action::Discard { vm: VmId(1) }));
}

/// A source that has voted to move VM 1 to host 2.
fn yielded() -> Host {
    let mut one = host(1, 0);
    started(&mut one, 1, 1);
    let moves = vec![Move { vm: VmId(1), from: HostId(1), to: HostId(2), epoch: Epoch(2) }];
    receives(&mut one, Node::Coordinator, Body::Begin { migration: ONE, moves });
    step(&mut one, Event::Converged { migration: ONE, vm: VmId(1) });
    receives(&mut one, Node::Coordinator, Body::Switch { migration: ONE });
    step(&mut one, Event::Stopped { migration: ONE, vm: VmId(1) });
    receives(&mut one, Node::Host(HostId(2)), Body::Loaded { migration: ONE });
    assert!(one.has_yielded(VmId(1)));
    one
}

/// The service takes a running daemon for a restarted one. The daemon's vote stays valid: it asks for the decision, and
/// resumes the VM only after an abort.
#[test]
fn a_vote_survives_renumbering() {
    let mut one = yielded();
    one.renumber(HostId(1), Incarnation(2));
    let begins = step(&mut one, Event::Start);
    assert!(one.has_yielded(VmId(1)) && !begins.iter().any(|action| matches!(action, Action::Run { .. })));
    let asks = sent(&step(&mut one, Event::Timer(nomad::Timer::Outgoing(ONE))));
    assert_eq!(asks, [(Node::Coordinator, Body::Yield { migration: ONE })]);
    let stays = Body::Abort { migration: ONE, places: vec![place(1, 1, 1)] };
    assert!(
        receives(&mut one, Node::Coordinator, stays).contains(&Action::Run { vm: VmId(1), epoch: Epoch(1) })
    );
    let mut moves = yielded();
    moves.renumber(HostId(1), Incarnation(2));
    let gone = Body::Commit { migration: ONE, places: vec![place(1, 2, 2)] };
    assert!(receives(&mut moves, Node::Coordinator, gone).contains(&Action::Discard { vm: VmId(1) }));
}

/// An abort that doesn't name the VM as this host's: the coordinator has declared it lost, and another host may run it.
/// Here it resumes only in a new epoch.
#[test]
fn after_a_vote_an_abort_resumes_only_the_vms_that_it_names() {
    let mut one = yielded();
    let says_nothing = Body::Abort { migration: ONE, places: Vec::new() };
    let actions = receives(&mut one, Node::Coordinator, says_nothing);
    assert!(!actions.iter().any(|action| matches!(action, Action::Run { .. })), "{actions:?}");
    assert!(one.has_yielded(VmId(1)));
    let again = started(&mut one, 1, 1);
    assert!(again.is_empty(), "it gets what is known: {again:?}");
    let claimed = started(&mut one, 1, 2);
    assert!(claimed.contains(&Action::Run { vm: VmId(1), epoch: Epoch(2) }), "{claimed:?}");
    assert!(!one.has_yielded(VmId(1)) && one.is_idle());
}

/// A VM is lost with its host's daemon while peers are suspended for its migration. When it starts again, they resume
/// towards the new instance.
#[test]
fn a_restarted_vm_ends_its_peers_suspension() {
    let mut peers = host(3, 0);
    started(&mut peers, 7, 1);
    step(&mut peers, Event::Connected { vm: VmId(7), peer: place(1, 1, 1) });
    let suspend =
        Body::Suspend { migration: ONE, origin: HostId(1), vms: vec![VmId(1)], forward_to: Vec::new() };
    assert!(
        receives(&mut peers, Node::Host(HostId(1)), suspend)
            .contains(&Action::SuspendQps { migration: ONE, vm: VmId(1) })
    );
    step(&mut peers, Event::QpsSuspended { migration: ONE, vm: VmId(1) });
    // The daemon of its host restarts, and registers the VM again.
    let mut one = Host::new(HostId(1), Incarnation(2), Config { fanout: 0, ..Config::default() });
    step(&mut one, Event::Started { vm: VmId(1), epoch: Epoch(2), after: ONE });
    let asks = sent(&step(&mut peers, Event::Timer(nomad::Timer::Locate(VmId(1)))));
    let (_, question) = asks.into_iter().find(|(to, _)| *to == Node::Host(HostId(1))).unwrap();
    let [(_, answer)] = &sent(&receives(&mut one, Node::Host(HostId(3)), question))[..] else { panic!() };
    let opened = receives(&mut peers, Node::Host(HostId(1)), answer.clone());
    assert!(opened.contains(&Action::ResumeQps { vm: VmId(7), peer: place(1, 1, 2) }), "{opened:?}");
    assert!(peers.is_idle());
}
