//! What a network back end is: where frames go and come from.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::frame::{FrameSink, FrameSource};
use super::header::{HEADER_LEN, VnetHeader};
use super::mac::MacAddress;

/// A frame that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Its offload header.
    pub header: VnetHeader,
    /// Its bytes, without the header.
    pub length: usize,
}

/// What became of a frame that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It was passed on or copied: its buffers are the guest's again.
    Passed,
    /// Its buffers are still read; [`NetChannel::returned`] says this number when they no longer are.
    Lent(u32),
}

/// A back end as a whole. Called from the device's thread 0 and the transport's threads.
pub trait NetBackend: Send + Sync {
    /// One line for displays, for example `tap tap0`.
    fn description(&self) -> String;
    /// Offload features (`VIRTIO_NET_F_*` bits) that it can take part in.
    fn offload_features(&self) -> u64;
    /// Applies the negotiated features: which offloads the guest accepts in frames it receives.
    fn set_guest_offloads(&self, features: u64) -> io::Result<()>;
    /// Frames come and go through the first `pairs` channels only.
    fn set_active_pairs(&self, pairs: u16) -> io::Result<()>;
    /// Tells the host side whether the guest's link is up. Best effort where the host has no such notion.
    fn set_carrier(&self, up: bool) -> io::Result<()>;
    /// Tells switches behind it where `mac` is now, after a VM has come from elsewhere. Nothing to tell where no switch
    /// is.
    fn announce(&self, mac: MacAddress) -> io::Result<()>;
    /// Why it has gone, after a channel reported that it has, as far as it is known.
    fn end_reason(&self) -> Option<String>;
}

/// One queue pair's way to the back end; belongs to that pair's thread. Never blocks.
pub trait NetChannel: Send {
    /// Readable when frames wait, writable when [`NetChannel::send`] or [`NetChannel::flush`] can go on.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Takes the next frame. `WouldBlock` when there is none, `UnexpectedEof` when the other side has gone.
    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received>;
    /// Sends a frame whose header was sanitised. `WouldBlock`: nothing was taken, try again when writable.
    fn send(&mut self, header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent>;
    /// Sends the rest of a frame that was taken but not yet passed on whole. `WouldBlock`: there still is one.
    fn flush(&mut self) -> io::Result<()>;
    /// Whether [`NetChannel::fd`] is an event that says that anything may have changed: frames, room, frames that came back. It is
    /// always waited for then, and emptied by [`NetChannel::drain`] before the channel is looked at.
    fn is_event(&self) -> bool {
        false
    }
    /// Empties the event.
    fn drain(&mut self) {}
    /// Bytes of the frame that [`NetChannel::receive`] gives next, as far as that is known beforehand.
    fn waiting(&mut self) -> Option<usize> {
        None
    }
    /// A lent frame that has come back. Each is said once.
    fn returned(&mut self) -> Option<u32> {
        None
    }
    /// The device stops: waits a moment for lent frames, and takes back those that don't come. After it, [`NetChannel::returned`] says all
    /// that were lent.
    fn recall(&mut self) {}
}

/// A channel that carries the 12-byte header in front of each frame and keeps message boundaries: a tap
/// queue, or a sequenced-packet socket.
pub struct PacketChannel {
    fd: OwnedFd,
}

impl PacketChannel {
    /// `fd` is non-blocking.
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
            // A tap queue that was detached, perhaps just now by another thread; a tap that was deleted shows as a
            // hang-up besides.
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
