//! The keys of a session: seals sent packets, opens received ones.
//!
//! AES-256-GCM with 96-bit nonces of 32 zero bits and a counter of 64 bits, as in Noise (chapter 12). The counter's upper byte is the lane
//! (a socket of the sender), and each lane is counted and checked for replays separately. Packets of two sockets may overtake each other by
//! as much as a socket's buffer holds; packets of one socket seldom do.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::replay::Window;
use super::{DATA_HEADER, Dropped, TAG};

/// Limit of sockets of a host.
pub(super) const LANES: usize = 16;
const LANE_SHIFT: u32 = 56;
/// Number of packets after which a session is replaced. With packets of 4 KiB AES-GCM's bounds of RFC 9001 (appendix B.1) permit 2^27.
pub(super) const REKEY_AFTER_PACKETS: u64 = 1 << 26;
/// Limit of packets that one key seals.
pub(super) const MOST_PACKETS: u64 = 1 << 27;
/// Number of forged packets after which a key opens nothing any more; the bound of RFC 9001 (section 6.6) is 2^52.
const MOST_FORGED: u64 = 1 << 36;

/// A session's keys and their limits.
pub(super) struct Session {
    /// The peer's number of the session.
    pub remote: u32,
    /// When it was established, nanoseconds.
    pub born: u64,
    /// Whether this host began it, and so replaces it.
    pub initiator: bool,
    seal: LessSafeKey,
    open: LessSafeKey,
    sent: [u64; LANES],
    sealed: u64,
    windows: [Window; LANES],
    forged: u64,
}

fn key(bytes: &[u8; 32]) -> Option<LessSafeKey> {
    UnboundKey::new(&AES_256_GCM, bytes).ok().map(LessSafeKey::new)
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Session {
    pub fn new(remote: u32, born: u64, initiator: bool, seal: &[u8; 32], open: &[u8; 32]) -> Option<Self> {
        Some(Self {
            remote,
            born,
            initiator,
            seal: key(seal)?,
            open: key(open)?,
            sent: [0; LANES],
            sealed: 0,
            windows: std::array::from_fn(|_| Window::default()),
            forged: 0,
        })
    }

    /// Number of packets sealed.
    pub fn sealed(&self) -> u64 {
        self.sealed
    }

    /// Uses up the key, as after the limit of packets.
    #[cfg(test)]
    pub fn use_up(&mut self) {
        self.sealed = MOST_PACKETS;
    }

    /// Writes session and counter to a packet's header and seals the rest; the last [`TAG`] bytes are for the tag. `None`: this key has
    /// reached its limit, or the packet is too short.
    pub fn seal(&mut self, lane: usize, packet: &mut [u8]) -> Option<()> {
        let sent = self.sent.get_mut(lane)?;
        if self.sealed >= MOST_PACKETS {
            return None;
        }
        let counter = (lane as u64) << LANE_SHIFT | *sent;
        let (header, rest) = packet.split_first_chunk_mut::<DATA_HEADER>()?;
        let (body, tag) = rest.split_last_chunk_mut::<TAG>()?;
        let (_, place) = header.split_last_chunk_mut::<12>()?;
        place[..4].copy_from_slice(&self.remote.to_be_bytes());
        place[4..].copy_from_slice(&counter.to_be_bytes());
        // Counted even if sealing should fail: no counter is used twice.
        *sent += 1;
        self.sealed += 1;
        let made = self.seal.seal_in_place_separate_tag(nonce(counter), Aad::from(&header[..]), body).ok()?;
        tag.copy_from_slice(made.as_ref());
        Some(())
    }

    /// Opens a packet; returns the part after its header. The header is authenticated as well.
    pub fn open<'a>(&mut self, packet: &'a mut [u8]) -> Result<&'a [u8], Dropped> {
        let (header, body) = packet.split_first_chunk_mut::<DATA_HEADER>().ok_or(Dropped::Malformed)?;
        let (_, counter) = header.split_last_chunk::<8>().ok_or(Dropped::Malformed)?;
        let counter = u64::from_be_bytes(*counter);
        let (lane, number) = (counter >> LANE_SHIFT, counter & ((1 << LANE_SHIFT) - 1));
        let window = usize::try_from(lane).ok().and_then(|lane| self.windows.get_mut(lane));
        let window = window.ok_or(Dropped::Malformed)?;
        if self.forged >= MOST_FORGED {
            return Err(Dropped::Forged);
        }
        if !window.is_new(number) {
            return Err(Dropped::Replayed);
        }
        let opened = self.open.open_in_place(nonce(counter), Aad::from(&header[..]), body);
        let Ok(opened) = opened else {
            self.forged += 1;
            return Err(Dropped::Forged);
        };
        if window.take(number) { Ok(opened) } else { Err(Dropped::Replayed) }
    }
}
