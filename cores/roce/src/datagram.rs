//! Datagrams, UD (IBTA volume 1, 9.8.3). The only state is the PSN, which no receiver checks.

use crate::output::Output;
use crate::packet::{Deth, Header, Operation, Packet, Service};

/// A datagram without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// Destination queue pair.
    pub destination: u32,
    /// Sender's queue pair.
    pub source: u32,
    /// Q_Key: that of the work request, or the queue pair's own where bit 31 of the former is set (the caller's choice).
    pub qkey: u32,
    /// Partition key.
    pub pkey: u16,
    /// PSN, 24 bits.
    pub psn: u32,
    /// Solicited event.
    pub solicited: bool,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
}

impl Datagram {
    /// Sends a datagram. `fill` writes the `length` bytes of payload. The caller ensures that they don't exceed the port's MTU, since a
    /// longer datagram isn't sent at all.
    ///
    /// Returns `Ok(false)` when `out` is full.
    ///
    /// # Errors
    /// That of `fill`; nothing is sent then.
    pub fn send<O: Output, E>(
        &self,
        length: usize,
        out: &mut O,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let operation = match self.immediate {
            Some(_) => Operation::SendOnlyImmediate,
            None => Operation::SendOnly,
        };
        let mut header = Header::new(Service::Ud, operation, self.destination, self.psn);
        header.pkey = self.pkey;
        header.solicited = self.solicited;
        header.deth = Deth { qkey: self.qkey, source: self.source };
        header.immediate = self.immediate.unwrap_or_default();
        let Some(packet) = out.reserve(header.packet_len(length)) else { return Ok(false) };
        fill(header.write(packet, length))?;
        out.commit();
        Ok(true)
    }

    /// The datagram in a packet; `None` for packets of another service. The receiver checks Q_Key and P_Key, and drops a datagram that
    /// doesn't match without a response.
    #[must_use]
    pub fn receive<'a>(packet: &Packet<'a>) -> Option<(Self, &'a [u8])> {
        let header = &packet.header;
        if header.service != Service::Ud {
            return None;
        }
        let immediate = (header.operation == Operation::SendOnlyImmediate).then_some(header.immediate);
        let datagram = Self {
            destination: header.destination,
            source: header.deth.source,
            qkey: header.deth.qkey,
            pkey: header.pkey,
            psn: header.psn,
            solicited: header.solicited,
            immediate,
        };
        Some((datagram, packet.payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Batch;

    #[test]
    fn a_datagram_arrives_as_it_was_sent() {
        for (length, immediate) in [(0, None), (5, Some([1, 2, 3, 4])), (1024, None), (1, None)] {
            let sent = Datagram {
                destination: 1,
                source: 0x00AB_CDEF,
                qkey: 0x8001_0000,
                pkey: 0xFFFF,
                psn: 77,
                solicited: true,
                immediate,
            };
            let mut buffer = [0xEE; 2048];
            let mut lengths = Vec::new();
            let mut out = Batch::new(&mut buffer, &mut lengths, 0, 0, 1);
            let fill = |into: &mut [u8]| {
                into.fill(0x5A);
                Ok::<_, ()>(())
            };
            assert_eq!(sent.send(length, &mut out, fill), Ok(true));
            assert_eq!(sent.send(length, &mut out, |_| Ok::<_, ()>(())), Ok(false), "one packet at most");
            let len = lengths[0] as usize;
            assert_eq!(len % 4, 0);
            let packet = Packet::parse(&buffer[..len]).unwrap();
            let (got, payload) = Datagram::receive(&packet).unwrap();
            assert_eq!(got, sent);
            assert_eq!(payload, vec![0x5A; length]);
        }
    }
}
