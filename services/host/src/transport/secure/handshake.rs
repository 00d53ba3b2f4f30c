//! Hello and Answer, which establish a session.

use std::net::SocketAddr;

use snow::{Builder, HandshakeState};

use super::session::Session;
use super::{ALIVE, ANSWER, DATA_HEADER, Dropped, HELLO, Secure, TAG};
use crate::transport::header::{HEADER, Header, SEALED};

/// The prologue, which both sides must share; changes with this module's format.
const PROLOGUE: &str = "causeway fabric 2";
/// Bytes of handshake messages: 4 or 8 bytes of header, ephemeral key, payload, tag.
const HELLO_LEN: usize = 4 + 32 + 12 + TAG;
const ANSWER_LEN: usize = 8 + 32 + 4 + TAG;

/// A handshake as initiator.
pub(super) struct Attempt {
    state: HandshakeState,
    local: u32,
}

impl Secure {
    fn prologue(initiator: SocketAddr, responder: SocketAddr) -> String {
        format!("{PROLOGUE} {initiator} {responder}")
    }

    /// An unused session number.
    fn number(&self) -> Result<u32, snow::Error> {
        loop {
            let mut bytes = [0; 4];
            cluster_key::fill_random(&mut bytes).map_err(|_| snow::Error::Rng)?;
            let number = u32::from_ne_bytes(bytes);
            if !self.sessions.contains_key(&number) {
                return Ok(number);
            }
        }
    }

    pub(super) fn hello(&mut self, to: SocketAddr) -> Result<(Attempt, Vec<u8>), snow::Error> {
        let local = self.number()?;
        // Greater each time, even if the clock stands.
        self.last_hello = (self.clock)().max(self.last_hello + 1);
        let mut payload = [0; 12];
        payload[..4].copy_from_slice(&local.to_be_bytes());
        payload[4..].copy_from_slice(&self.last_hello.to_be_bytes());
        let prologue = Self::prologue(self.own, to);
        let builder = Builder::new(self.params.clone()).psk(0, self.key.bytes())?;
        let mut state = builder.prologue(prologue.as_bytes())?.build_initiator()?;
        let mut message = vec![0; HELLO_LEN];
        message[..4].copy_from_slice(&[SEALED, HELLO, 0, 0]);
        let written = state.write_message(&payload, &mut message[4..])?;
        debug_assert_eq!(written + 4, HELLO_LEN);
        Ok((Attempt { state, local }, message))
    }

    pub(super) fn take_hello(&mut self, index: usize, message: &[u8], now: u64) -> Result<(), Dropped> {
        let address = self.peers.get(index).ok_or(Dropped::Stranger)?.address;
        let noise = message.get(4..).filter(|_| message.len() == HELLO_LEN).ok_or(Dropped::Malformed)?;
        let prologue = Self::prologue(address, self.own);
        let state = Builder::new(self.params.clone())
            .psk(0, self.key.bytes())
            .and_then(|builder| builder.prologue(prologue.as_bytes()))
            .and_then(Builder::build_responder);
        let mut state = state.map_err(|_| Dropped::Handshake)?;
        let mut payload = [0; 12];
        let read = state.read_message(noise, &mut payload);
        if read != Ok(payload.len()) {
            return Err(Dropped::Handshake);
        }
        let (remote, time) = payload.split_first_chunk::<4>().ok_or(Dropped::Malformed)?;
        let time = u64::from_be_bytes(time.try_into().map_err(|_| Dropped::Malformed)?);
        let remote = u32::from_be_bytes(*remote);
        let peer = self.peers.get_mut(index).filter(|peer| time > peer.newest_hello);
        peer.ok_or(Dropped::OldHandshake)?.newest_hello = time;
        let local = self.number().map_err(|_| Dropped::Handshake)?;
        let mut answer = vec![0; ANSWER_LEN];
        answer[..4].copy_from_slice(&[SEALED, ANSWER, 0, 0]);
        answer[4..8].copy_from_slice(&remote.to_be_bytes());
        let written = state.write_message(&local.to_be_bytes(), &mut answer[8..]);
        if written != Ok(ANSWER_LEN - 8) {
            return Err(Dropped::Handshake);
        }
        let (theirs, ours) = state.dangerously_get_raw_split();
        let session = Session::new(remote, now, false, &ours, &theirs).ok_or(Dropped::Handshake)?;
        self.due.set(None);
        self.counters.handshakes_answered += 1;
        self.sessions.insert(local, (index, session));
        let old = self.peers.get_mut(index).and_then(|peer| peer.next.replace(local));
        old.map(|old| self.sessions.remove(&old));
        self.outbox.push((address, answer));
        Ok(())
    }

    pub(super) fn take_answer(&mut self, index: usize, message: &[u8], now: u64) -> Result<(), Dropped> {
        let peer = self.peers.get_mut(index).ok_or(Dropped::Stranger)?;
        let (head, noise) = message.split_first_chunk::<8>().ok_or(Dropped::Malformed)?;
        if message.len() != ANSWER_LEN {
            return Err(Dropped::Malformed);
        }
        let [.., a, b, c, d] = *head;
        let number = u32::from_be_bytes([a, b, c, d]);
        let attempt = peer.attempt.as_mut().filter(|attempt| attempt.local == number);
        // The response to an earlier Hello.
        let attempt = attempt.ok_or(Dropped::OldHandshake)?;
        let mut remote = [0; 4];
        // A failed message leaves the state unchanged: the right one may still arrive.
        if attempt.state.read_message(noise, &mut remote) != Ok(remote.len()) {
            return Err(Dropped::Handshake);
        }
        let (ours, theirs) = attempt.state.dangerously_get_raw_split();
        peer.attempt = None;
        let session = Session::new(u32::from_be_bytes(remote), now, true, &ours, &theirs);
        self.due.set(None);
        self.sessions.insert(number, (index, session.ok_or(Dropped::Handshake)?));
        self.put_to_use(index, number, now);
        // The other side uses the session only after it receives a packet.
        let alive = Header::between_daemons(ALIVE);
        let mut packet = [0; DATA_HEADER + TAG];
        packet[..HEADER].copy_from_slice(&alive);
        if let Some((_, session)) = self.sessions.get_mut(&number)
            && session.seal(0, &mut packet).is_some()
            && let Some(peer) = self.peers.get(index)
        {
            self.outbox.push((peer.address, packet.to_vec()));
        }
        Ok(())
    }
}
