//! Input of the migration thread, each message once. Senders repeat a message that isn't answered in 20 ms. A host that is slow for a while,
//! because its engine is busy or its machine crowded, would otherwise fall behind further with each repetition. A second copy gives its
//! room back at once.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use nomad::Message;

use crate::migration::handle::Input;

/// Input that waits to be taken.
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
    /// When none came, or all senders are gone.
    pub fn next(&mut self, until: Option<Instant>) -> Result<Input, RecvTimeoutError> {
        while let Ok(input) = self.inputs.try_recv() {
            self.keep(input);
        }
        if let Some(input) = self.waiting.pop_front() {
            if let Input::Message(message, _) = &input {
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
        if let Input::Message(message, _) = &input
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

    fn message(migration: u64) -> Input {
        let body = Body::Switch { migration: MigrationId(migration) };
        let from = Node::Coordinator;
        let message = Message { from, incarnation: Incarnation(0), to: Node::Host(HostId(1)), body };
        Input::Message(message, None)
    }

    /// Copies of a queued message are dropped, and the first copy keeps its position. A copy that comes after the first was taken is
    /// queued.
    #[test]
    fn a_repeated_message_is_queued_once() {
        let (say, inputs) = unbounded();
        let mut inbox = Inbox::new(inputs);
        for _ in 0..1000 {
            say.send(message(1)).expect("it listens");
            say.send(message(2)).expect("it listens");
        }
        say.send(Input::Ended { vm: VmId(7) }).expect("it listens");
        let mut next = || format!("{:?}", inbox.next(Some(Instant::now())));
        let taken = [next(), next(), next(), next()];
        assert!(taken[0].contains("MigrationId(1)") && taken[1].contains("MigrationId(2)"), "{taken:?}");
        assert!(taken[2].contains("Ended") && taken[3].contains("Timeout"), "{taken:?}");
        say.send(message(1)).expect("it listens");
        assert!(format!("{:?}", inbox.next(None)).contains("MigrationId(1)"));
    }

    /// Copies of a message don't keep room from others.
    #[test]
    fn a_repeated_message_returns_its_permit() {
        let (say, inputs) = unbounded();
        let mut inbox = Inbox::new(inputs);
        let room = std::sync::Arc::new(tokio::sync::Semaphore::new(10));
        for _ in 0..10 {
            let Input::Message(message, _) = message(1) else { panic!("a message") };
            let permit = std::sync::Arc::clone(&room).try_acquire_owned().expect("room");
            say.send(Input::Message(message, Some(permit))).expect("it listens");
        }
        assert_eq!(room.available_permits(), 0);
        drop(inbox.next(None));
        assert_eq!(room.available_permits(), 10);
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
