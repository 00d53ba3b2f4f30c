//! A peer whose bytes a test chooses, written without the daemon's code.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster_key::ClusterKey;
use cluster_key::stream::{HANDSHAKE_BYTES, Handshake, Opening, Purpose, Sealing};
use host::Daemon;
use nomad::Message;

use crate::common::wait_until;

/// The key of the cluster.
pub const KEY: &[u8; 32] = b"thirty-two bytes that are a key!";
const PURPOSE: Purpose = Purpose { magic: *b"CWpm", version: 1, prologue: b"causeway peer messages 1" };
/// A hang limit.
const LIMIT: Duration = Duration::from_secs(60);

/// Connects from an address of this host.
pub fn connect_from(from: &str, to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from.parse().unwrap(), 0)).unwrap();
        socket.connect(to).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Reads until the other side has closed; a reset is an end as well.
pub fn read_until_closed(mut stream: TcpStream) {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("it isn't closed: {error}"),
        }
    }
}

/// The first handshake message with a key.
pub fn first_message(key: &[u8; 32]) -> [u8; HANDSHAKE_BYTES] {
    let mut key = *key;
    key[0] ^= 1;
    let key = ClusterKey::new(key).unwrap();
    Handshake::initiator(PURPOSE, &key).unwrap().put().unwrap()
}

/// The payload of a Hello.
pub fn hello(from: u32, to: u32, incarnation: u64, known: u64) -> [u8; 32] {
    let mut payload = [0; 32];
    payload[0] = nomad::wire::VERSION;
    payload[8..12].copy_from_slice(&from.to_le_bytes());
    payload[12..16].copy_from_slice(&to.to_le_bytes());
    payload[16..24].copy_from_slice(&incarnation.to_le_bytes());
    payload[24..].copy_from_slice(&known.to_le_bytes());
    payload
}

/// A frame with a message.
pub fn message_frame(message: &Message) -> Vec<u8> {
    let mut payload = Vec::new();
    nomad::wire::encode(message, &mut payload);
    let mut frame = vec![2, 0, 0, 0];
    frame.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    frame.extend_from_slice(&payload);
    frame
}

/// A peer that has the key, before the daemon has answered its Hello.
pub struct Client {
    stream: TcpStream,
    sealing: Sealing,
    opening: Opening,
}

impl Client {
    /// Connects, and shows that it has the key.
    pub fn shake(from: &str, to: SocketAddr) -> Self {
        let mut stream = connect_from(from, to);
        let mut handshake = Handshake::initiator(PURPOSE, &ClusterKey::new(*KEY).unwrap()).unwrap();
        stream.write_all(&handshake.put().unwrap()).unwrap();
        let mut answer = [0; HANDSHAKE_BYTES];
        stream.read_exact(&mut answer).unwrap();
        handshake.take(&answer).unwrap();
        let (sealing, opening) = handshake.finish().unwrap();
        Self { stream, sealing, opening }
    }

    pub fn hello(mut self, payload: &[u8; 32]) -> Self {
        let mut frame = vec![1, 0, 0, 0, 32, 0, 0, 0];
        frame.extend_from_slice(payload);
        self.sealing.write(&frame, &mut self.stream).unwrap();
        self
    }

    /// Reads the daemon's Hello. From here on a thread acknowledges what comes.
    pub fn join(self) -> Member {
        let Self { mut stream, sealing, mut opening } = self;
        let (kind, payload) = frame(&mut opening, &mut stream).expect("a Hello");
        assert_eq!((kind, payload.len()), (1, 32));
        let word = |at: usize| u32::from_le_bytes(payload[at..at + 4].try_into().unwrap());
        let (host, to) = (word(8), word(12));
        let incarnation = u64::from_le_bytes(payload[16..24].try_into().unwrap());
        let sends = Arc::new(Mutex::new((sealing, stream.try_clone().unwrap())));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let (answers, seen) = (Arc::clone(&sends), Arc::clone(&acknowledged));
        let reader = std::thread::spawn(move || {
            let mut came = 0_u64;
            while let Some((kind, payload)) = frame(&mut opening, &mut stream) {
                match kind {
                    2 | 3 => {
                        came += 1;
                        let answer = [&[4, 0, 0, 0, 8, 0, 0, 0][..], &came.to_le_bytes()].concat();
                        let (sealing, stream) = &mut *answers.lock().unwrap();
                        // The daemon may have closed the connection.
                        let _ = sealing.write(&answer, stream);
                    }
                    _ => {
                        let count = u64::from_le_bytes(payload.try_into().unwrap());
                        seen.store(count, Ordering::SeqCst);
                    }
                }
            }
        });
        Member { host, to, incarnation, sends, acknowledged, reader }
    }

    pub fn into_stream(self) -> TcpStream {
        self.stream
    }
}

/// The next frame; `None` when the connection has ended.
fn frame(opening: &mut Opening, stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut read = |bytes: &mut [u8]| {
        let mut at = 0;
        while at < bytes.len() {
            match opening.read(&mut bytes[at..], stream) {
                Ok(count) if count > 0 => at += count,
                _ => return None,
            }
        }
        Some(())
    };
    let mut header = [0; 8];
    read(&mut header)?;
    let length = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    let mut payload = vec![0; usize::try_from(length).unwrap()];
    read(&mut payload)?;
    Some((header[0], payload))
}

/// A peer that the daemon has accepted: numbers of both, and incarnation, of the daemon's Hello.
pub struct Member {
    pub host: u32,
    pub to: u32,
    pub incarnation: u64,
    sends: Arc<Mutex<(Sealing, TcpStream)>>,
    acknowledged: Arc<AtomicU64>,
    reader: JoinHandle<()>,
}

impl Member {
    pub fn send(&self, bytes: &[u8]) {
        let (sealing, stream) = &mut *self.sends.lock().unwrap();
        let mut rest = bytes;
        while !rest.is_empty() {
            let sent = sealing.write(rest, stream).unwrap();
            rest = &rest[sent..];
        }
    }

    /// Waits until the daemon has acknowledged so many messages.
    pub fn wait_for_acknowledgement(&self, count: u64) {
        wait_until("an acknowledgement", || self.acknowledged.load(Ordering::SeqCst) >= count);
    }

    /// Waits until the daemon has closed the connection.
    pub fn wait_until_closed(self) {
        wait_until("the end of the connection", || self.reader.is_finished());
        self.reader.join().unwrap();
    }
}

/// A daemon's metrics.
pub fn metrics(daemon: &Daemon) -> String {
    let socket = daemon.socket().with_extension("d").join("metrics");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}
