//! Messages between the two daemons of a connection: the numbers of their devices' queue pairs, and of keys.
//!
//! ```text
//! Hello (A's end)                 ──▶   creates its end, which can receive now
//! A's end can receive now         ◀──   Hello (B's end, I know A's)
//! Hello (A's end, I know B's)     ──▶   B may send
//! Resolve (rkey)                  ──▶   registers with its device
//! caches the number               ◀──   Resolved (rkey is n)
//!                                 ◀──   Invalidate (rkey), when the guest deregisters, repeated until acknowledged
//! Invalidated (rkey)              ──▶
//! Announce (n)                    ──▶   consumes receives of its shared queue for n messages
//! sends up to the n-th            ◀──   Ready (n)
//! ```
//! The last two are only for an end with a shared receive queue: its device may get a receive only once the message that consumes it is
//! known.
//!
//! Messages may be lost, repeated or delayed; a daemon that needs a response repeats its request. `from` and `to` identify the incarnation
//! of an end, so that a message for an earlier one is recognised. They are sent as packets of the fabric, sealed if those are.
//!
//! ```text
//! kind (1) · flags (1) · 0 (2) │ own QPN (4) │ peer's QPN (4) │ from (4) │ to (4) │ body
//! ```

/// Bytes before the body.
const HEAD: usize = 20;
/// Limit of a message's length, bytes.
pub(in crate::transport) const MAX_MESSAGE_BYTES: usize = HEAD + 36;

/// Why a daemon refuses a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in crate::transport) enum Reason {
    #[error("the peer's host has no usable RDMA device, or its daemon isn't told to use it")]
    NoDevice,
    #[error("the peer's shared receive queue has another protection domain than its queue pair")]
    Shared,
    #[error("the peer's queue pair is its guest kernel's")]
    Kernel,
    #[error("the peer's connection goes by fabric already")]
    Fabric,
    #[error("the peer's RDMA device refused")]
    Refused,
}

/// An end of a connection, as the other daemon needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::transport) struct Hello {
    /// GID of the device.
    pub gid: [u8; 16],
    /// Number of the device's queue pair.
    pub number: u32,
    /// First PSN of the device's queue pair.
    pub psn: u32,
    /// Path MTU as a verbs code.
    pub mtu: u8,
    /// Whether the guest's queue pair sends, so that `sq_psn` is valid.
    pub sends: bool,
    /// No response is needed: this end knows the other's numbers, and that the other has these.
    pub settled: bool,
    /// Whether the queue pair has a shared receive queue: messages must be announced.
    pub shared: bool,
    /// First PSN of the guest's queue pair for sending.
    pub sq_psn: u32,
}

/// Body of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::transport) enum Body {
    Hello(Hello),
    Refuse(Reason),
    /// Requests a key's number at the device, with a serial number.
    Resolve {
        rkey: u32,
        serial: u32,
    },
    Resolved {
        rkey: u32,
        serial: u32,
        real: Option<u32>,
    },
    Invalidate {
        rkey: u32,
    },
    Invalidated {
        rkey: u32,
    },
    /// The receiver's device refused a request of the sender: verbs status.
    Failed {
        status: u32,
    },
    /// Total of posted messages that consume a receive, since the connection was established, modulo 2^32.
    Announce {
        total: u32,
    },
    /// Total of these messages that may be sent.
    Ready {
        total: u32,
    },
}

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::transport) struct Message {
    /// Queue pair number of the sender's guest.
    pub own: u32,
    /// Queue pair number of the receiver's guest.
    pub peer: u32,
    /// Incarnation of the sender's end; never 0.
    pub from: u32,
    /// Incarnation of the receiver's end; 0 if unknown.
    pub to: u32,
    pub body: Body,
}

const SENDS: u8 = 1;
const SETTLED: u8 = 2;
const SHARED: u8 = 4;

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(MAX_MESSAGE_BYTES);
        let mut flags = 0;
        let kind = match self.body {
            Body::Hello(hello) => {
                flags = (u8::from(hello.sends) * SENDS)
                    | (u8::from(hello.settled) * SETTLED)
                    | (u8::from(hello.shared) * SHARED);
                body.extend(hello.gid);
                body.extend(hello.number.to_be_bytes());
                body.extend(hello.psn.to_be_bytes());
                body.extend(hello.sq_psn.to_be_bytes());
                body.push(hello.mtu);
                1
            }
            Body::Refuse(reason) => {
                body.push(match reason {
                    Reason::NoDevice => 1,
                    Reason::Shared => 2,
                    Reason::Kernel => 3,
                    Reason::Fabric => 4,
                    Reason::Refused => 5,
                });
                2
            }
            Body::Resolve { rkey, serial } => {
                body.extend(rkey.to_be_bytes());
                body.extend(serial.to_be_bytes());
                3
            }
            Body::Resolved { rkey, serial, real } => {
                body.extend(rkey.to_be_bytes());
                body.extend(serial.to_be_bytes());
                body.push(u8::from(real.is_some()));
                body.extend(real.unwrap_or(0).to_be_bytes());
                4
            }
            Body::Invalidate { rkey } => {
                body.extend(rkey.to_be_bytes());
                5
            }
            Body::Invalidated { rkey } => {
                body.extend(rkey.to_be_bytes());
                6
            }
            Body::Failed { status } => {
                body.extend(status.to_be_bytes());
                7
            }
            Body::Announce { total } => {
                body.extend(total.to_be_bytes());
                8
            }
            Body::Ready { total } => {
                body.extend(total.to_be_bytes());
                9
            }
        };
        let mut bytes = vec![kind, flags, 0, 0];
        for number in [self.own, self.peer, self.from, self.to] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(body);
        bytes
    }

    /// Decodes a message; `None` if it is invalid. The bytes may be hostile.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let [kind, flags, 0, 0] = reader.take()? else { return None };
        let (own, peer, from, to) = (reader.number()?, reader.number()?, reader.number()?, reader.number()?);
        let known = if kind == 1 { SENDS | SETTLED | SHARED } else { 0 };
        if from == 0 || flags & !known != 0 {
            return None;
        }
        let body = match kind {
            1 => {
                let gid = reader.take()?;
                let (number, psn, sq_psn) = (reader.number()?, reader.number()?, reader.number()?);
                let [mtu] = reader.take()?;
                if !(1..=5).contains(&mtu) || [number, psn, sq_psn].iter().any(|it| *it > 0xFF_FFFF) {
                    return None;
                }
                let [sends, settled, shared] = [SENDS, SETTLED, SHARED].map(|flag| flags & flag != 0);
                Body::Hello(Hello { gid, number, psn, mtu, sends, settled, shared, sq_psn })
            }
            2 => Body::Refuse(match reader.take()? {
                [1] => Reason::NoDevice,
                [2] => Reason::Shared,
                [3] => Reason::Kernel,
                [4] => Reason::Fabric,
                [5] => Reason::Refused,
                _ => return None,
            }),
            3 => Body::Resolve { rkey: reader.number()?, serial: reader.number()? },
            4 => {
                let (rkey, serial) = (reader.number()?, reader.number()?);
                let found = reader.take()?;
                let real = reader.number()?;
                let real = match found {
                    [0] => None,
                    [1] => Some(real),
                    _ => return None,
                };
                Body::Resolved { rkey, serial, real }
            }
            5 => Body::Invalidate { rkey: reader.number()? },
            6 => Body::Invalidated { rkey: reader.number()? },
            7 => Body::Failed { status: reader.number()? },
            8 => Body::Announce { total: reader.number()? },
            9 => Body::Ready { total: reader.number()? },
            _ => return None,
        };
        reader.0.is_empty().then_some(Self { own, peer, from, to, body })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn body() -> impl Strategy<Value = Body> {
        let number = 0..=0xFF_FFFFu32;
        let hello = (any::<[u8; 16]>(), number.clone(), number.clone(), number, 1..=5u8, any::<[bool; 3]>());
        let reasons = [Reason::NoDevice, Reason::Shared, Reason::Kernel, Reason::Fabric, Reason::Refused];
        prop_oneof![
            hello.prop_map(|(gid, number, psn, sq_psn, mtu, [sends, settled, shared])| {
                Body::Hello(Hello { gid, number, psn, mtu, sends, settled, shared, sq_psn })
            }),
            (0..reasons.len()).prop_map(move |at| Body::Refuse(reasons[at])),
            any::<[u32; 2]>().prop_map(|[rkey, serial]| Body::Resolve { rkey, serial }),
            (any::<[u32; 2]>(), any::<Option<u32>>()).prop_map(|([rkey, serial], real)| Body::Resolved {
                rkey,
                serial,
                real
            }),
            any::<u32>().prop_map(|rkey| Body::Invalidate { rkey }),
            any::<u32>().prop_map(|rkey| Body::Invalidated { rkey }),
            any::<u32>().prop_map(|status| Body::Failed { status }),
            any::<u32>().prop_map(|total| Body::Announce { total }),
            any::<u32>().prop_map(|total| Body::Ready { total }),
        ]
    }

    proptest! {
        /// Decoding is the inverse of encoding; no part of a message and nothing longer decodes.
        #[test]
        fn messages_are_read_as_written(
            body in body(), own: u32, peer: u32, from in 1..u32::MAX, to: u32
        ) {
            let message = Message { own, peer, from, to, body };
            let mut bytes = message.encode();
            prop_assert!(bytes.len() <= MAX_MESSAGE_BYTES);
            prop_assert_eq!(Message::decode(&bytes), Some(message));
            for len in 0..bytes.len() {
                prop_assert_eq!(Message::decode(&bytes[..len]), None);
            }
            bytes.push(0);
            prop_assert_eq!(Message::decode(&bytes), None);
        }

        /// Any bytes decode without a panic, and only to what encodes to the same bytes.
        #[test]
        fn strange_bytes_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(message) = Message::decode(&bytes) {
                // `real` may differ where it has no meaning.
                prop_assert_eq!(Message::decode(&message.encode()), Some(message));
            }
        }
    }
}
