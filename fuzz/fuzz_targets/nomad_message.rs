//! Hostile messages of migrations, to the parser, a host and the coordinator.
//!
//! Checked:
//! - There is no panic and no endless loop.
//! - Parsed bytes are encoded identically, and only messages that parse are sent.
//! - A host never runs a VM before its monitor has reported the complete state.
//! - The coordinator's state follows from its records.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use nomad::coordinator::{self, Coordinator, Ledger};
use nomad::{
    Action, Config, Epoch, Event, Host, HostId, Incarnation, Message, MigrationId, Node, Place, VmId, wire,
};

const STEPS: usize = 60;

#[derive(Debug, Arbitrary)]
enum Step {
    /// A message: kind and ends near values in use, a migration, trailing bytes.
    Message {
        kind: u8,
        from: u8,
        to: u8,
        migration: u8,
        bytes: Vec<u8>,
    },
    /// Raw bytes.
    Raw(Vec<u8>),
    /// Events of the host's engine and monitors.
    Connected {
        vm: u8,
        peer: u8,
        host: u8,
    },
    Room {
        migration: u8,
        granted: bool,
    },
    Converged {
        migration: u8,
        vm: u8,
    },
    Held {
        migration: u8,
        vm: u8,
    },
    Stopped {
        migration: u8,
        vm: u8,
    },
    Arrived {
        migration: u8,
        vm: u8,
    },
    Broke {
        migration: u8,
    },
    /// Requests of users.
    Migrate {
        vm: u8,
        to: u8,
    },
    Cancel {
        migration: u8,
    },
}

fn parse(bytes: &[u8]) -> Option<Message> {
    let message = wire::parse(bytes).ok()?;
    let mut again = Vec::new();
    wire::encode(&message, &mut again);
    assert_eq!(again, bytes, "read in one way only");
    Some(message)
}

fn leaves(message: &Message) {
    let mut bytes = Vec::new();
    wire::encode(message, &mut bytes);
    assert_eq!(wire::parse(&bytes).as_ref(), Ok(message), "what leaves is a message");
}

fn id(migration: u8) -> MigrationId {
    MigrationId(u64::from(migration % 4))
}

fn vm(vm: u8) -> VmId {
    VmId(u32::from(vm % 4) + 1)
}

fuzz_target!(|steps: Vec<Step>| {
    let mut host = Host::new(HostId(1), Incarnation(1), Config::default());
    let mut coordinator = Coordinator::new(Config::default(), Ledger::default());
    let mut here = vec![VmId(1), VmId(2)];
    let mut actions = Vec::new();
    let (mut decided, mut written) = (Vec::new(), Ledger::default());
    for vm in &here {
        host.step(Event::Started { vm: *vm, epoch: Epoch(1), after: MigrationId(0) }, &mut actions);
    }
    for (vm, at) in [(1, 1), (2, 1), (3, 2)] {
        let _ = coordinator.started(VmId(vm), HostId(at), &mut decided);
    }
    for step in steps.into_iter().take(STEPS) {
        let event = match step {
            Step::Message { kind, from, to, migration, bytes } => {
                let (from, to) = (from % 4, to % 4);
                let ends = u8::from(from == 0) | u8::from(to == 0) << 1;
                let mut message = vec![wire::VERSION, kind % 24, ends, 0];
                let numbered = !matches!(kind % 24, 1 | 2 | 20 | 21 | 22);
                let length = bytes.len() + if numbered { 8 } else { 0 };
                message.extend_from_slice(&(length as u32).to_le_bytes());
                message.extend_from_slice(&u32::from(from).to_le_bytes());
                message.extend_from_slice(&u32::from(to).to_le_bytes());
                message.extend_from_slice(&1_u64.to_le_bytes());
                if numbered {
                    message.extend_from_slice(&id(migration).0.to_le_bytes());
                }
                message.extend_from_slice(&bytes);
                parse(&message).map(Event::Message)
            }
            Step::Raw(bytes) => parse(&bytes).map(Event::Message),
            Step::Connected { vm: own, peer, host } => {
                let place = Place { vm: vm(peer), host: HostId(u32::from(host % 4)), epoch: Epoch(1) };
                Some(Event::Connected { vm: vm(own), peer: place })
            }
            Step::Room { migration, granted } => {
                Some(Event::Reservation { migration: id(migration), granted })
            }
            Step::Converged { migration, vm: of } => {
                Some(Event::Converged { migration: id(migration), vm: vm(of) })
            }
            Step::Held { migration, vm: of } => {
                Some(Event::QpsSuspended { migration: id(migration), vm: vm(of) })
            }
            Step::Stopped { migration, vm: of } => {
                Some(Event::Stopped { migration: id(migration), vm: vm(of) })
            }
            Step::Arrived { migration, vm: of } => {
                here.push(vm(of));
                Some(Event::Arrived { migration: id(migration), vm: vm(of) })
            }
            Step::Broke { migration } => Some(Event::StreamBroke { migration: id(migration) }),
            Step::Migrate { vm: of, to } => {
                let _ = coordinator.migrate(&[(vm(of), HostId(u32::from(to % 4)))], &mut decided);
                None
            }
            Step::Cancel { migration } => {
                coordinator.cancel(id(migration), &mut decided);
                None
            }
        };
        match event {
            Some(Event::Message(message)) if message.to == Node::Coordinator => {
                coordinator.step(coordinator::Event::Message(message), &mut decided);
            }
            Some(event) => host.step(event, &mut actions),
            None => {}
        }
        for action in actions.drain(..) {
            match action {
                Action::Send(message) => leaves(&message),
                Action::Run { vm, .. } => assert!(here.contains(&vm), "it runs what it has"),
                _ => {}
            }
        }
        for action in decided.drain(..) {
            match action {
                coordinator::Action::Send(message) => leaves(&message),
                coordinator::Action::Write(record) => written.apply(&record),
                _ => {}
            }
        }
        assert_eq!(coordinator.ledger(), &written, "what it knows is what its records make");
    }
});
