//! What the migration thread is told, each message once: whoever hears no answer in 20 ms says it again, and a host that is slow for a while, since its
//! engine is busy or its machine crowded, would otherwise fall behind further with each answer that it owes.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use nomad::Message;

use super::Input;

/// What waits to be taken.
pub(super) struct Inbox {
    inputs: Receiver<Input>,
    waiting: VecDeque<Input>,
    /// Messages among `waiting`.
    messages: HashSet<Message>,
}

impl Inbox {
    pub fn new(inputs: Receiver<Input>) -> Self {
        Self { inputs, waiting: VecDeque::new(), messages: HashSet::new() }
    }

    /// The next one, waited for until `until`.
    ///
    /// # Errors
    /// When none came, or nobody is there to say anything.
    pub fn next(&mut self, until: Option<Instant>) -> Result<Input, RecvTimeoutError> {
        while let Ok(input) = self.inputs.try_recv() {
            self.keep(input);
        }
        if let Some(input) = self.waiting.pop_front() {
            if let Input::Message(message) = &input {
                self.messages.remove(message);
            }
            return Ok(input);
        }
        match until {
            Some(until) => self.inputs.recv_timeout(until.saturating_duration_since(Instant::now())),
            None => self.inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn keep(&mut self, input: Input) {
        if let Input::Message(message) = &input
            && !self.messages.insert(message.clone())
        {
            return;
        }
        self.waiting.push_back(input);
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;
    use nomad::{Body, HostId, Incarnation, MigrationId, Node, VmId};

    use super::*;

    fn message(migration: u64) -> Message {
        let body = Body::Switch { migration: MigrationId(migration) };
        Message { from: Node::Coordinator, incarnation: Incarnation(0), to: Node::Host(HostId(1)), body }
    }

    /// What is said again while it waits is taken once, in its first place; what is said again later is taken again.
    #[test]
    fn what_is_said_again_waits_once() {
        let (say, inputs) = unbounded();
        let mut inbox = Inbox::new(inputs);
        for _ in 0..1000 {
            say.send(Input::Message(message(1))).expect("it listens");
            say.send(Input::Message(message(2))).expect("it listens");
        }
        say.send(Input::Ended { vm: VmId(7) }).expect("it listens");
        let mut next = || format!("{:?}", inbox.next(Some(Instant::now())));
        let taken = [next(), next(), next(), next()];
        assert!(taken[0].contains("MigrationId(1)") && taken[1].contains("MigrationId(2)"), "{taken:?}");
        assert!(taken[2].contains("Ended") && taken[3].contains("Timeout"), "{taken:?}");
        say.send(Input::Message(message(1))).expect("it listens");
        assert!(format!("{:?}", inbox.next(None)).contains("MigrationId(1)"));
    }

    /// Nothing that a monitor says is left out.
    #[test]
    fn other_inputs_are_all_taken() {
        let (say, inputs) = unbounded();
        let mut inbox = Inbox::new(inputs);
        for _ in 0..3 {
            say.send(Input::Ended { vm: VmId(7) }).expect("it listens");
        }
        drop(say);
        let ended = (0..3).filter(|_| inbox.next(None).is_ok()).count();
        assert_eq!(ended, 3);
        assert!(matches!(inbox.next(None), Err(RecvTimeoutError::Disconnected)));
    }
}
