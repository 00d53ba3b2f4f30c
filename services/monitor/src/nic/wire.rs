//! The wire of an emulated card: a tap.

use std::os::fd::OwnedFd;

use device_models::reference::{self, Card};
use serde_json::{Value, json};
use virtio_devices::net::tap::Tap;

/// Bytes of the header before each frame of a tap.
const HEADER: usize = virtio_devices::net::header::HEADER_LEN;
/// Longest frame, with a VLAN tag, without CRC, bytes.
const MAX_FRAME_BYTES: usize = 1518;
/// Frames to read from a tap before the lock is released.
const BATCH: usize = 16;

/// The wire of an emulated card.
pub(super) struct Wire {
    /// Name of the interface.
    pub name: String,
    /// Messages of a header and a frame, non-blocking.
    pub queue: OwnedFd,
    /// Keeps the interface, if it was created here.
    pub _interface: Option<Tap>,
}

/// Counters of an emulated card's frames.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Frames {
    pub sent: u64,
    pub sent_bytes: u64,
    pub received: u64,
    pub received_bytes: u64,
    pub send_drops: u64,
    pub receive_drops: u64,
}

impl Wire {
    /// Sends the frames that the card has queued.
    pub fn take_sent(&self, card: &mut (impl Card + ?Sized), frames: &mut Frames) {
        card.tick();
        for frame in card.take_sent() {
            if self.send(&frame) {
                frames.sent += 1;
                frames.sent_bytes += u64::try_from(frame.len()).unwrap_or(0);
            } else {
                frames.send_drops += 1;
            }
        }
    }

    /// Sends a frame. Returns false if the tap accepts none now.
    fn send(&self, frame: &[u8]) -> bool {
        if frame.len() > MAX_FRAME_BYTES {
            return false;
        }
        let mut whole = vec![0; HEADER];
        whole.extend_from_slice(frame);
        rustix::io::write(&self.queue, &whole).is_ok()
    }

    /// Delivers received frames to the card, up to [`BATCH`].
    pub fn feed(&self, card: &mut (impl Card + ?Sized), frames: &mut Frames) {
        let mut buffer = vec![0; 65536];
        for _ in 0..BATCH {
            let Ok(length) = rustix::io::read(&self.queue, &mut buffer) else { return };
            let Some(frame) = buffer.get(HEADER..length) else { return };
            let mut frame = frame.to_vec();
            if frame.len() < reference::SHORTEST {
                frame.resize(reference::SHORTEST, 0);
            }
            if frame.len() <= MAX_FRAME_BYTES && card.receive(&frame) {
                frames.received += 1;
                frames.received_bytes += u64::try_from(frame.len()).unwrap_or(0);
            } else {
                frames.receive_drops += 1;
            }
        }
    }
}

/// Counters as JSON, for the device tree.
pub(super) fn counted(frames: &Frames) -> Value {
    json!({
        "transmit_packets": frames.sent,
        "transmit_bytes": frames.sent_bytes,
        "transmit_drop": frames.send_drops,
        "receive_packets": frames.received,
        "receive_bytes": frames.received_bytes,
        "receive_drop": frames.receive_drops,
    })
}
