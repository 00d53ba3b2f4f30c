//! The life of one connection, as a driver in a guest sees it.
//!
//! ```text
//!            Offer(e)             peer's ready word = e
//!  Waiting ───────────▶ Offered(e) ───────────▶ Live(e)
//!    ▲                     │ Gone, Violation,     │
//!    │                     │ Offer(later)         │
//!    │                     ▼                      ▼
//!    └──── LetGo ──────── Dead(e) ◀───────────────┘
//! ```
//!
//! An *epoch* names one connection of a pair. The registry raises it with each connection, and never reuses one. [`Action`]s are the
//! driver's duties: make its own rings and then write its ready word; begin; fail outstanding messages; release. Window and segment of a
//! dead connection stay mapped until `LetGo`, so that no access to them faults. A new offer waits until then.
//!
//! A driver writes its ready word after its rings, and reads the peer's before it reads the peer's rings. Stamps contain the epoch as well,
//! so neither side accepts entries of the previous connection.

/// An event for a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The registry offers a connection with this epoch: window and segment are mapped.
    Offer(u32),
    /// The peer's ready word, as read from the segment.
    PeerReady(u64),
    /// The registry ends the connection of this epoch: the peer died, hangs, or left.
    Gone(u32),
    /// The peer violated the protocol ([`neighbour::channel::Violation`]), or the segment's header is wrong.
    Violation,
    /// The driver uses nothing of the dead connection any more: no buffer of the peer's, no outstanding message.
    LetGo,
}

/// A duty of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make the own ends of both directions for this epoch, then write it into the own ready word, and signal the peer.
    Prepare(u32),
    /// The peer is ready: send and receive.
    Begin(u32),
    /// Fail outstanding messages, report an error, and stop using the segment. Once nothing of the peer's memory is in use, report
    /// [`Event::LetGo`].
    Fail(u32),
    /// Notify the registry that window and segment of this epoch are no longer used.
    Release(u32),
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// No offer.
    Waiting,
    /// The own rings are made. The peer's ready word hasn't been read.
    Offered(u32),
    /// In use.
    Live(u32),
    /// Ended. Memory of the peer may still be in use.
    Dead(u32),
}

/// The state machine of a connection; see the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    state: State,
    /// The latest epoch that was accepted. Only later ones are.
    latest: u32,
    /// An offer that came before the last connection was released.
    next: Option<u32>,
}

impl Default for Connection {
    fn default() -> Self {
        Self::new()
    }
}

impl Connection {
    /// The state before any offer.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::Waiting, latest: 0, next: None }
    }

    /// The present state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// The epoch in which messages may be sent and received.
    #[must_use]
    pub const fn live(&self) -> Option<u32> {
        match self.state {
            State::Live(epoch) => Some(epoch),
            _ => None,
        }
    }

    /// Processes an event, and returns the driver's duties, in order.
    #[must_use]
    pub fn on(&mut self, event: Event) -> [Option<Action>; 2] {
        match (event, self.state) {
            (Event::Offer(epoch), State::Waiting) if epoch > self.latest => [self.take_up(epoch), None],
            (Event::Offer(epoch), State::Offered(of) | State::Live(of)) if epoch > of => {
                // The end of the old connection was lost, or comes later.
                self.next = Some(epoch);
                [self.end(of), None]
            }
            (Event::Offer(epoch), State::Dead(of)) if epoch > of => {
                self.next = self.next.max(Some(epoch));
                [None, None]
            }
            (Event::PeerReady(word), State::Offered(epoch)) if word == u64::from(epoch) => {
                self.state = State::Live(epoch);
                [Some(Action::Begin(epoch)), None]
            }
            (Event::Gone(epoch), State::Offered(of) | State::Live(of)) if epoch == of => [self.end(of), None],
            (Event::Gone(epoch), _) if self.next == Some(epoch) => {
                self.next = None;
                self.latest = self.latest.max(epoch);
                [None, None]
            }
            (Event::Violation, State::Offered(of) | State::Live(of)) => [self.end(of), None],
            (Event::LetGo, State::Dead(of)) => {
                self.state = State::Waiting;
                let next = self.next.take().and_then(|epoch| self.take_up(epoch));
                [Some(Action::Release(of)), next]
            }
            _ => [None, None],
        }
    }

    fn take_up(&mut self, epoch: u32) -> Option<Action> {
        self.state = State::Offered(epoch);
        self.latest = epoch;
        Some(Action::Prepare(epoch))
    }

    fn end(&mut self, epoch: u32) -> Option<Action> {
        self.state = State::Dead(epoch);
        Some(Action::Fail(epoch))
    }
}
