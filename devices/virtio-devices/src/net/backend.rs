//! Traits of network backends, which send and receive a device's frames.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::frame::{FrameSink, FrameSource};
use super::header::{HEADER_LEN, VnetHeader};
use super::mac::MacAddress;

/// A received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Its offload header.
    pub header: VnetHeader,
    /// Length in bytes, without the header.
    pub length: usize,
}

/// Result of sending a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It was passed on or copied: its buffers can be completed.
    Passed,
    /// The backend still reads its buffers; [`NetChannel::returned`] returns this number when it no longer does.
    Lent(u32),
}

/// A backend as a whole. The device's thread 0 and the transport's threads call it.
pub trait NetBackend: Send + Sync {
    /// One line for reports, for example `tap tap0`.
    fn description(&self) -> String;
    /// Offload features (`VIRTIO_NET_F_*` bits) that it supports.
    fn offload_features(&self) -> u64;
    /// Applies the negotiated features: the offloads that the guest accepts in received frames.
    fn set_guest_offloads(&self, features: u64) -> io::Result<()>;
    /// Limits the active channels to the first `pairs`.
    fn set_active_pairs(&self, pairs: u16) -> io::Result<()>;
    /// Sets the carrier of the host side to the guest's link state. No effect where the host has no carrier.
    fn set_carrier(&self, up: bool) -> io::Result<()>;
    /// Announces `mac` to the switches of this host, after a VM has migrated here. No effect without switches.
    fn announce(&self, mac: MacAddress) -> io::Result<()>;
    /// Why the backend has ended, if known, after a channel reported that it has.
    fn end_reason(&self) -> Option<String>;
}

/// The channel of one queue pair to the backend; owned by that pair's thread. Never blocks.
pub trait NetChannel: Send {
    /// Readable when frames wait, writable when [`NetChannel::send`] or [`NetChannel::flush`] can continue.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Receives the next frame. `WouldBlock` when there is none, `UnexpectedEof` when the other side has ended.
    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received>;
    /// Sends a frame with a sanitised header. `WouldBlock`: nothing was accepted, retry when writable.
    fn send(&mut self, header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent>;
    /// Sends the rest of a frame that was accepted partly. `WouldBlock`: a rest is left.
    fn flush(&mut self) -> io::Result<()>;
    /// Whether [`NetChannel::fd`] is an event for any change: frames, room, returned frames. The thread then always waits for it, and
    /// empties it by [`NetChannel::drain`] before it uses the channel.
    fn is_event(&self) -> bool {
        false
    }
    /// Empties the event.
    fn drain(&mut self) {}
    /// Length of the frame that [`NetChannel::receive`] returns next, in bytes, if known in advance.
    fn waiting(&mut self) -> Option<usize> {
        None
    }
    /// A lent frame that the backend has returned. Each is reported once.
    fn returned(&mut self) -> Option<u32> {
        None
    }
    /// Recalls lent frames when the device stops: waits a moment for them, and revokes the others. Afterwards [`NetChannel::returned`]
    /// reports all of them.
    fn recall(&mut self) {}
}

/// A channel with the 12-byte header before each frame and message boundaries: a tap queue, or a sequenced-packet socket.
pub struct PacketChannel {
    fd: OwnedFd,
}

impl PacketChannel {
    /// `fd` must be non-blocking.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl NetChannel for PacketChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received> {
        let mut header = [0; HEADER_LEN];
        let total = sink.read_from(self.fd.as_fd(), &mut header).map_err(|error| {
            // A tap queue that was detached, perhaps just now by another thread. A deleted tap reports a hang-up as well.
            let detached = error.raw_os_error() == Some(libc::EBADFD);
            if detached { io::ErrorKind::WouldBlock.into() } else { error }
        })?;
        if total == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let length = total.checked_sub(HEADER_LEN).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Received { header: VnetHeader::parse(&header), length })
    }

    fn send(&mut self, header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent> {
        let sent = frame.write_to(self.fd.as_fd(), &header.to_bytes())?;
        if sent < HEADER_LEN + frame.length() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(Sent::Passed)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
