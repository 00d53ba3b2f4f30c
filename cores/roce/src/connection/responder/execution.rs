//! Execution of SENDs, WRITEs, READs and atomics.

use super::*;
use crate::memory::{Received, ReceivedOperation};
use crate::status::Unmoved;

impl Connection {
    /// Executes the expected packet.
    #[inline]
    pub(in crate::connection) fn execute<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        use Operation::*;
        let operation = packet.header.operation;
        match operation {
            SendFirst | SendMiddle | SendLast | SendLastImmediate | SendOnly | SendOnlyImmediate
            | SendLastInvalidate | SendOnlyInvalidate => self.execute_send(packet, memory),
            WriteFirst | WriteMiddle | WriteLast | WriteLastImmediate | WriteOnly | WriteOnlyImmediate => {
                self.execute_write(packet, memory)
            }
            ReadRequest => self.execute_read(&packet.header, memory),
            CompareSwap | FetchAdd => self.execute_atomic(&packet.header, memory),
            // `receive_parsed` passes responses to the requester.
            _ => Done::Refused(Refusal::InvalidRequest),
        }
    }

    fn execute_send<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        let header = &packet.header;
        let operation = header.operation;
        let last = !matches!(operation, Operation::SendFirst | Operation::SendMiddle);
        let (begun, mut offset) = match self.responder.incoming {
            Incoming::None => (None, 0),
            Incoming::Send { offset, capacity } => (Some(capacity), offset),
            Incoming::Write { .. } | Incoming::Drop => return Done::Refused(Refusal::InvalidRequest),
        };
        let fits = self.payload_fits(packet, last);
        if begun.is_some() == operation.begins() || !fits {
            return Done::Refused(Refusal::InvalidRequest);
        }
        let capacity = match begun {
            Some(capacity) => capacity,
            None => match memory.take_receive() {
                Ok(capacity) => capacity,
                Err(why) => return why.into(),
            },
        };
        let before = std::mem::replace(&mut self.responder.incoming, Incoming::None);
        let end = offset + packet.payload.len() as u64;
        if end > capacity {
            self.counters.resp_local_length_error += 1;
            if self.config.reliability == Reliability::Reliable {
                memory.fail_receive(Status::LocalLength);
            } else {
                // The message is dropped, and its receive stays for the next one.
                memory.keep_receive();
            }
            return Done::Refused(Refusal::InvalidRequest);
        }
        if !packet.payload.is_empty()
            && let Err(unmoved) = memory.place_receive(offset, packet.payload)
        {
            let Unmoved::Failed(status) = unmoved else {
                self.responder.incoming = before;
                return Done::NotHere;
            };
            if status == Status::Flushed {
                self.responder.incoming = before;
                return Done::Gone;
            }
            memory.fail_receive(status);
            return Done::RefusedSilently(Refusal::Operation);
        }
        offset = end;
        self.responder.expected += 1;
        if !last {
            self.responder.incoming = Incoming::Send { offset, capacity };
            return Done::Yes;
        }
        let mut received = Received {
            operation: ReceivedOperation::Send,
            length: u32::try_from(offset).unwrap_or(u32::MAX),
            immediate: None,
            invalidated: None,
            solicited: header.solicited,
        };
        match operation {
            Operation::SendLastImmediate | Operation::SendOnlyImmediate => {
                received.immediate = Some(header.immediate);
            }
            Operation::SendLastInvalidate | Operation::SendOnlyInvalidate => {
                let key = u32::from_be_bytes(header.immediate);
                if let Err(refusal) = memory.invalidate(key) {
                    self.responder.expected -= 1;
                    if refusal == Refusal::Gone {
                        self.responder.incoming = before;
                        return Done::Gone;
                    }
                    memory.fail_receive(Status::RemoteInvalidRequest);
                    return Done::Refused(refusal);
                }
                received.invalidated = Some(key);
            }
            _ => {}
        }
        self.responder.completed();
        self.counters.rx_send_requests += 1;
        memory.complete_receive(&received);
        Done::Yes
    }

    fn execute_write<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        use Operation::{WriteFirst, WriteLastImmediate, WriteMiddle, WriteOnlyImmediate};
        let header = &packet.header;
        let operation = header.operation;
        let last = !matches!(operation, WriteFirst | WriteMiddle);
        let (remote, length, offset) = match self.responder.incoming {
            Incoming::None if operation.begins() => (remote_of(header), header.reth.length, 0),
            Incoming::Write { remote, length, offset } if !operation.begins() => (remote, length, offset),
            _ => return Done::Refused(Refusal::InvalidRequest),
        };
        let end = offset + packet.payload.len() as u64;
        let whole = if last { end == u64::from(length) } else { end < u64::from(length) };
        if !self.payload_fits(packet, last) || !whole || length > MOST_MESSAGE {
            return Done::Refused(Refusal::InvalidRequest);
        }
        if let Err(refusal) = memory.write(remote, u64::from(length), offset, packet.payload) {
            return refusal.into();
        }
        let immediate = matches!(operation, WriteLastImmediate | WriteOnlyImmediate);
        if immediate {
            // Only the last packet consumes a receive. Without one, the peer sends the packet again, and it is written again.
            if let Err(why) = memory.take_receive() {
                return why.into();
            }
        }
        let responder = &mut self.responder;
        responder.expected += 1;
        if !last {
            responder.incoming = Incoming::Write { remote, length, offset: end };
            return Done::Yes;
        }
        responder.incoming = Incoming::None;
        responder.completed();
        self.counters.rx_write_requests += 1;
        if immediate {
            memory.complete_receive(&Received {
                operation: ReceivedOperation::WriteImmediate,
                length,
                immediate: Some(header.immediate),
                invalidated: None,
                solicited: header.solicited,
            });
        }
        Done::Yes
    }

    fn execute_read<M: Memory>(&mut self, header: &Header, memory: &mut M) -> Done {
        let length = header.reth.length;
        let remote = remote_of(header);
        if self.responder.incoming != Incoming::None || length > MOST_MESSAGE || !self.make_room() {
            return Done::Refused(Refusal::InvalidRequest);
        }
        if let Err(refusal) = memory.read(remote, u64::from(length), 0, &mut []) {
            return refusal.into();
        }
        self.counters.rx_read_requests += 1;
        let packets = packets_of(length, self.config.mtu.bytes());
        self.remember(packets, Answer::Read { remote, length, next: 0, start: 0 });
        Done::Yes
    }

    fn execute_atomic<M: Memory>(&mut self, header: &Header, memory: &mut M) -> Done {
        let remote = remote_of(header);
        let aligned = remote.address.is_multiple_of(8);
        if self.responder.incoming != Incoming::None || !aligned || !self.make_room() {
            return Done::Refused(Refusal::InvalidRequest);
        }
        match memory.atomic(remote, atomic_of(header)) {
            Ok(original) => {
                self.counters.rx_atomic_requests += 1;
                self.remember(1, Answer::Atomic { original });
                Done::Yes
            }
            Err(refusal) => refusal.into(),
        }
    }

    /// Whether one more READ or atomic fits. The oldest is dropped once its response was sent. If it wasn't, the peer exceeds the agreed
    /// limit of outstanding requests.
    fn make_room(&mut self) -> bool {
        let responder = &mut self.responder;
        let room = usize::from(self.config.max_dest_rd_atomic);
        if responder.resources.len() < room {
            return true;
        }
        match responder.resources.front() {
            Some(oldest) if oldest.answered => {
                responder.due -= usize::from(oldest.due);
                responder.resources.pop_front();
                true
            }
            _ => false,
        }
    }

    fn remember(&mut self, packets: u32, answer: Answer) {
        let responder = &mut self.responder;
        let first = responder.expected;
        responder.resources.push_back(Resource { first, packets, answer, answered: false, due: true });
        responder.due += 1;
        responder.expected += u64::from(packets);
        responder.completed();
        // The response acknowledges everything before it.
        responder.tail = Tail::Nothing;
    }
}
