//! The responder of an unreliable connection: it drops out-of-order packets and sends no response (IBTA volume 1, 9.8).

use super::responder::{Done, Incoming};
use super::*;

impl Connection {
    /// Processes a packet of an unreliable connection. After an out-of-order packet, drops everything up to the next message.
    pub(super) fn receive_unreliable<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) {
        if self.state == State::Failed {
            self.counters.dropped_packets += 1;
            return;
        }
        let operation = packet.header.operation;
        // The peer's PSN may jump arbitrarily, so extending it to 64 bits has no use.
        let psn = psn::first(packet.header.psn);
        self.responder.expected = psn::first(psn::wire(self.responder.expected));
        let follows = psn == self.responder.expected && self.responder.incoming != Incoming::Drop;
        if !follows {
            self.counters.out_of_sequence += u64::from(psn != self.responder.expected);
            self.drop_message(memory);
            if !operation.begins() {
                self.responder.expected = psn + 1;
                self.responder.incoming = Incoming::Drop;
                self.counters.dropped_packets += 1;
                return;
            }
        } else if operation.begins() && self.responder.incoming != Incoming::None {
            // The last packets of the previous message are missing, or the peer aborted it.
            self.drop_message(memory);
        }
        self.responder.expected = psn;
        self.establish(memory);
        match self.execute(packet, memory) {
            Done::Yes => {}
            done => {
                self.counters.out_of_buffer += u64::from(matches!(done, Done::NotReady));
                self.counters.dropped_packets += 1;
                self.drop_message(memory);
                self.responder.expected = psn + 1;
                self.responder.incoming = Incoming::Drop;
                if matches!(done, Done::RefusedSilently(_)) {
                    // A receive that can't be used is an error of this end.
                    self.fail(memory);
                }
            }
        }
    }

    fn drop_message<M: Memory>(&mut self, memory: &mut M) {
        if matches!(self.responder.incoming, Incoming::Send { .. }) {
            memory.keep_receive();
        }
        self.responder.incoming = Incoming::None;
    }
}
