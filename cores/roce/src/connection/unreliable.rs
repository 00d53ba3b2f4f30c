//! The responder of an unreliable connection: what doesn't follow is dropped, and nothing is answered.

use super::responder::{Done, Incoming};
use super::*;

impl Connection {
    /// A packet of an unreliable connection: what doesn't follow is dropped up to the next message.
    pub(super) fn receive_unreliable<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) {
        if self.state == State::Failed {
            self.counters.dropped_packets += 1;
            return;
        }
        let operation = packet.header.operation;
        // The peer may go anywhere at any time, so nothing is gained from numbers that never wrap.
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
            // The last packets of the message before are missing, or the peer gave it up.
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
                    // A receive that can't be used is this end's own fault.
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
