//! Messages to an end with a shared receive queue. Once a receive is posted to the device's queue pair, only that connection's messages can
//! consume it. So the daemon posts one only for an existing message, which the sender announces.
//!
//! ```text
//! sender                                          receiver
//! guest posts ─▶ posted    ── Announce (posted) ──▶  wanted
//!                                                    taken ◀─ receives of the shared queue, while the device has room
//!                ready     ◀── Ready (n) ──────────  wanted, or what was taken where there is no room
//! sent, up to ready
//! ```
//! An empty queue blocks nothing here: the sender's device gets an RNR NAK as on any wire, and the guest's own number of retries applies.
//! Numbers are totals since the connection was established, modulo 2^32, so that a lost or repeated message does no harm.

/// Limit of messages in flight that a peer may have announced: more than any queue pair has requests.
const MAX_ANNOUNCED_MESSAGES: u32 = 1 << 16;

/// How far `to` is ahead of `from`; `None`: it is behind, or further than the limit of messages.
fn ahead(from: u32, to: u32) -> Option<u32> {
    let distance = to.wrapping_sub(from);
    (distance <= MAX_ANNOUNCED_MESSAGES).then_some(distance)
}

/// The sending end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Announcing {
    posted: u32,
    announced: u32,
    ready: u32,
    sent: u32,
}

impl Announcing {
    /// Counts a message that the guest has posted.
    pub fn post(&mut self) {
        self.posted = self.posted.wrapping_add(1);
    }

    /// The total to announce, if it is new.
    pub fn news(&mut self) -> Option<u32> {
        let new = self.announced != self.posted;
        self.announced = self.posted;
        new.then_some(self.posted)
    }

    /// The last announced total, to be repeated.
    pub fn announced(&self) -> u32 {
        self.announced
    }

    /// Whether the next message may be sent.
    pub fn may_send(&self) -> bool {
        self.sent != self.ready
    }

    /// Counts a message that was posted to the device.
    pub fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Handles the peer's total of messages that may be sent. False: it is old, or invalid.
    pub fn answer(&mut self, total: u32) -> bool {
        let Some(most) = ahead(self.ready, self.announced) else { return false };
        let news = ahead(self.ready, total).is_some_and(|news| (1..=most).contains(&news));
        if news {
            self.ready = total;
        }
        news
    }
}

/// The end with the shared receive queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Announced {
    wanted: u32,
    taken: u32,
    said: u32,
}

impl Announced {
    /// Handles the peer's announced total. False: it is old, or exceeds the limit.
    pub fn announce(&mut self, total: u32) -> bool {
        let news =
            ahead(self.wanted, total).is_some_and(|news| news > 0) && ahead(self.taken, total).is_some();
        if news {
            self.wanted = total;
        }
        news
    }

    /// Whether a receive is to be consumed for an announced message.
    pub fn wants(&self) -> bool {
        self.wanted != self.taken
    }

    /// Counts a receive that was posted to the device.
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
    }

    /// The total of messages that may be sent, if it has changed. `room`: whether the device has room for another receive.
    pub fn news(&mut self, room: bool) -> Option<u32> {
        let now = if room { self.wanted } else { self.taken };
        let news = ahead(self.said, now).is_some_and(|news| news > 0);
        if news {
            self.said = now;
        }
        news.then_some(now)
    }

    /// The last sent total, to be repeated.
    pub fn said(&self) -> u32 {
        self.said
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Messages of both ends may be lost, repeated or delayed. No message is sent without an announcement, no receive is consumed
        /// without one, and the device gets no more than it has room for. All are sent once messages get through. Totals wrap around.
        #[test]
        fn receives_are_taken_for_messages_alone(
            start in prop_oneof![Just(0), Just(u32::MAX - 5), any::<u32>()],
            steps in prop::collection::vec((0..7u8, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut sender = Announcing { posted: start, announced: start, ready: start, sent: start };
            let mut receiver = Announced { wanted: start, taken: start, said: start };
            let (mut posted, mut sent, mut taken, mut done) = (0u32, 0u32, 0u32, 0u32);
            let (mut announcements, mut answers) = (Vec::new(), Vec::new());
            const ROOM: u32 = 3;
            let work = |sender: &mut Announcing, sent: &mut u32| {
                while sender.may_send() {
                    sender.sent();
                    *sent += 1;
                }
            };
            for (what, which) in steps {
                match what {
                    0 => {
                        sender.post();
                        posted += 1;
                        announcements.extend(sender.news());
                    }
                    1 => announcements.push(sender.announced()),
                    // Possibly an old one, which may be repeated.
                    2 if !announcements.is_empty() => {
                        receiver.announce(*which.get(&announcements));
                        answers.extend(receiver.news(taken - done < ROOM));
                        answers.push(receiver.said());
                    }
                    // The queue has a receive.
                    3 if receiver.wants() && taken - done < ROOM => {
                        receiver.take();
                        taken += 1;
                    }
                    4 if !answers.is_empty() => {
                        sender.answer(*which.get(&answers));
                        work(&mut sender, &mut sent);
                    }
                    // A message arrives.
                    5 if done < sent.min(taken) => {
                        done += 1;
                        answers.extend(receiver.news(taken - done < ROOM));
                    }
                    // A hostile peer.
                    6 => {
                        let lie = sender.announced().wrapping_add(1 + u32::try_from(which.index(1000)).unwrap());
                        prop_assert!(!sender.answer(lie), "more than was announced");
                        prop_assert!(!receiver.announce(start.wrapping_add(u32::MAX / 2)));
                    }
                    _ => {}
                }
                prop_assert!(done <= sent && sent <= posted && taken <= posted && taken - done <= ROOM);
            }
            // All messages get through now.
            while done < posted {
                let before = (sent, taken, done);
                receiver.announce(sender.announced());
                while receiver.wants() && taken - done < ROOM {
                    receiver.take();
                    taken += 1;
                }
                receiver.news(taken - done < ROOM);
                sender.answer(receiver.said());
                work(&mut sender, &mut sent);
                done = sent.min(taken);
                prop_assert_ne!(before, (sent, taken, done), "no progress");
            }
            prop_assert_eq!((sent, taken, done), (posted, posted, posted));
        }
    }
}
