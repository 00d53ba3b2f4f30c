//! `--net user`: a network without root privileges, by the program passt.
//!
//! passt carries Ethernet over a stream socket: each frame after its length, four bytes, big-endian. It has no offloads. It ends when the
//! socket closes or the monitor signals it at the end of the VM. If the monitor dies, the kernel signals it.
#![allow(unsafe_code)] // Preparing the child between fork and exec is unsafe in the standard library.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketFlags, SocketType};

use super::backend::{NetBackend, NetChannel, Received, Sent};
use super::error::NetError;
use super::frame::{FrameSink, FrameSource};
use super::header::{FRAME_MAX, FRAME_MIN, VnetHeader};
use super::mac::MacAddress;

/// System calls of the threads of a device with this backend, after it was opened.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_close,
    // For the reason why passt has ended.
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_lseek,
    libc::SYS_statx,
    libc::SYS_read,
    libc::SYS_clock_nanosleep,
];

/// System calls when the device is dropped and passt ends.
pub const END_SYSCALLS: &[i64] = &[
    libc::SYS_shutdown,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_kill,
    libc::SYS_pidfd_send_signal,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
];

/// Length of the prefix of each frame, bytes.
pub const PREFIX: usize = 4;
/// Limit of bytes that one read receives from the socket.
const READ_BUFFER: usize = 256 * 1024;
/// Limit of bytes of its output that are kept.
const OUTPUT_MAX: u64 = 8192;
/// Time to wait for an early failure of passt, which first examines interfaces and routes.
const START_TIME: Duration = Duration::from_millis(25);
/// Time for passt to end by itself.
const END_TIME: Duration = Duration::from_millis(250);

/// A running passt process.
pub struct Passt {
    child: Mutex<Child>,
    socket: OwnedFd,
    output: Mutex<File>,
}

impl Passt {
    /// Starts passt for one guest, to which it announces `mtu` by DHCP.
    ///
    /// The kernel ends passt together with the *thread* that called this, so call it from one that lives as long as the VM.
    pub fn start(name: &str, mtu: Option<u16>) -> Result<Self, NetError> {
        Self::start_program("passt", name, mtu, START_TIME)
    }

    fn start_program(
        program: &str,
        name: &str,
        mtu: Option<u16>,
        start_time: Duration,
    ) -> Result<Self, NetError> {
        let failed = |what: &str, source: io::Error| NetError::Host {
            name: name.to_owned(),
            what: what.to_owned(),
            source,
        };
        let (ours, theirs) = socket_pair().map_err(|error| failed("make a socket pair for passt", error))?;
        let output = bounded_file().map_err(|error| failed("make a file for the output of passt", error))?;
        let output_for_child = || output.try_clone().map(Stdio::from);

        let mut command = Command::new(program);
        command.args(["--foreground", "--quiet", "--fd", &theirs.as_raw_fd().to_string()]);
        if let Some(mtu) = mtu {
            command.args(["--mtu", &mtu.to_string()]);
        }
        let prepare = |error| failed("prepare the start of passt", error);
        command
            .stdin(Stdio::null())
            .stdout(output_for_child().map_err(prepare)?)
            .stderr(output_for_child().map_err(prepare)?);
        let (parent, socket) = (rustix::process::getpid(), theirs.as_raw_fd());
        // SAFETY: only system calls are made between fork and exec, nothing allocates or locks; `socket` is open.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
                if rustix::process::getppid() != Some(parent) {
                    // The monitor died before the signal was set.
                    return Err(io::ErrorKind::Interrupted.into());
                }
                // The closure's creator holds this descriptor open across the spawn.
                let socket = BorrowedFd::borrow_raw(socket);
                Ok(rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty())?)
            });
        }
        let child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => NetError::PasstMissing,
            _ => failed("start passt", error),
        })?;
        drop(theirs);
        let passt = Self { child: Mutex::new(child), socket: ours, output: Mutex::new(output) };
        passt.check_start(start_time)?;
        Ok(passt)
    }

    /// Detects a failed start: passt then closes the socket soon.
    fn check_start(&self, start_time: Duration) -> Result<(), NetError> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let timeout = Timespec::try_from(start_time).ok();
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready == 0) {
            return Ok(());
        }
        match self.wait_for_end(END_TIME) {
            Some(status) => Err(NetError::PasstEnded { status, output: self.output() }),
            None => Ok(()),
        }
    }

    fn wait_for_end(&self, limit: Duration) -> Option<std::process::ExitStatus> {
        let mut child = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let start = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }

    /// The output of passt, on one line.
    fn output(&self) -> String {
        let mut file = self.output.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut bytes = Vec::new();
        let read = file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes));
        if read.is_err() {
            return "its output can't be read".to_owned();
        }
        let text = String::from_utf8_lossy(&bytes);
        let said: Vec<_> = text
            .lines()
            .map(|line| line.trim_matches(['\0', ' ']))
            .filter(|line| !line.is_empty() && !line.ends_with("to syslog"))
            .collect();
        if said.is_empty() { "it printed nothing".to_owned() } else { said.join("; ") }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner).id()
    }

    /// Its only channel.
    pub fn channel(&self) -> io::Result<Box<dyn NetChannel>> {
        Ok(Box::new(StreamChannel::new(self.socket.try_clone()?)))
    }
}

impl NetBackend for Passt {
    fn announce(&self, _mac: MacAddress) -> io::Result<()> {
        // passt is the guest's only neighbour, so there is no switch.
        Ok(())
    }

    fn description(&self) -> String {
        format!("passt, process {}", self.pid())
    }

    fn offload_features(&self) -> u64 {
        0
    }

    fn set_guest_offloads(&self, _features: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_active_pairs(&self, _pairs: u16) -> io::Result<()> {
        Ok(())
    }

    fn set_carrier(&self, _up: bool) -> io::Result<()> {
        Ok(())
    }

    fn end_reason(&self) -> Option<String> {
        let status = self.wait_for_end(END_TIME)?;
        Some(format!("passt ended ({status}): {}", self.output()))
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        if self.wait_for_end(END_TIME).is_none() {
            let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The monitor's end, which never blocks, and passt's, which does. When the socket accepts only part of a frame, passt sends the rest in a
/// blocking call. If that call failed for lack of room, the rest would be lost, and the stream out of sync.
fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let flags = rustix::fs::fcntl_getfl(&ours)?;
    rustix::fs::fcntl_setfl(&ours, flags | OFlags::NONBLOCK)?;
    Ok((ours, theirs))
}

/// A file in memory that can't grow, so that passt's output is bounded.
fn bounded_file() -> io::Result<File> {
    let fd = rustix::fs::memfd_create("passt-output", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, OUTPUT_MAX)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(File::from(fd))
}

/// An invalid length in the stream: the stream is out of sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("passt sent a frame of {0} bytes; the stream can't be followed any more")]
pub struct BadLength(pub u32);

/// Splits a byte stream into frames.
pub struct FrameReader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for FrameReader {
    fn default() -> Self {
        Self { buffer: vec![0; READ_BUFFER].into_boxed_slice(), start: 0, end: 0 }
    }
}

impl FrameReader {
    /// The buffer for the next bytes of the stream; never empty after [`FrameReader::frame`] returned `None`.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.buffer.len() - self.start < PREFIX + FRAME_MAX {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// Records that `count` bytes were put into the space.
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
    }

    /// Consumes and returns the next whole frame, if there is one.
    pub fn frame(&mut self) -> Result<Option<&[u8]>, BadLength> {
        let waiting = &self.buffer[self.start..self.end];
        let Some((prefix, rest)) = waiting.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let announced = u32::from_be_bytes(*prefix);
        let length = usize::try_from(announced).unwrap_or(usize::MAX);
        if !(FRAME_MIN..=FRAME_MAX).contains(&length) {
            return Err(BadLength(announced));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let at = self.start + PREFIX;
        self.start = at + length;
        Ok(Some(&self.buffer[at..at + length]))
    }
}

/// Frames over a stream socket.
pub struct StreamChannel {
    socket: OwnedFd,
    reader: FrameReader,
    /// The rest of a frame that the socket accepted partly; at most one frame.
    pending: Vec<u8>,
    sent: usize,
}

impl StreamChannel {
    /// `socket` must be non-blocking.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, reader: FrameReader::default(), pending: Vec::new(), sent: 0 }
    }
}

impl NetChannel for StreamChannel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received> {
        loop {
            let frame = self
                .reader
                .frame()
                .map_err(|error| io::Error::new(io::ErrorKind::ConnectionAborted, error))?;
            if let Some(frame) = frame {
                if !sink.fill(frame) {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                return Ok(Received { header: VnetHeader::default(), length: frame.len() });
            }
            let (count, _) = rustix::net::recv(&self.socket, self.reader.space(), RecvFlags::DONTWAIT)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.reader.filled(count);
        }
    }

    fn send(&mut self, _header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent> {
        self.flush()?;
        let length = u32::try_from(frame.length()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let prefix = length.to_be_bytes();
        let sent = frame.send_to(self.socket.as_fd(), &prefix)?;
        if sent < PREFIX + frame.length() {
            self.pending.clear();
            self.sent = 0;
            self.pending.extend_from_slice(&prefix[sent.min(PREFIX)..]);
            frame.copy_to(sent.saturating_sub(PREFIX), &mut self.pending);
        }
        Ok(Sent::Passed)
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.pending.len() {
            let rest = &self.pending[self.sent..];
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            self.sent += rustix::net::send(&self.socket, rest, flags)?;
        }
        self.pending.clear();
        self.sent = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error =
            Passt::start_program("/nonexistent/passt", "net0", None, START_TIME).err().map(|e| e.to_string());
        let text = "--net user needs the program passt, which isn't installed; install it with: apt-get install passt";
        assert_eq!(error.as_deref(), Some(text));
    }

    #[test]
    fn a_program_that_ends_at_once_is_an_error_with_its_status() {
        let error = Passt::start_program("/bin/false", "net0", None, Duration::from_secs(20)).err();
        assert!(matches!(error, Some(NetError::PasstEnded { .. })), "{error:?}");
    }

    #[test]
    fn passt_starts_and_ends_with_the_device() {
        let passt = match Passt::start("net0", Some(1400)) {
            Ok(passt) => passt,
            Err(NetError::PasstMissing) => {
                facilities::missing(facilities::Facility::Passt, "the program is not installed");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let pid = passt.pid();
        assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
        drop(passt);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "passt {pid} still runs");
    }

    #[test]
    fn passts_end_of_the_socket_blocks_and_ours_does_not() {
        let (ours, theirs) = socket_pair().unwrap();
        let blocks = |fd: &OwnedFd| !rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK);
        assert!(!blocks(&ours) && blocks(&theirs));
    }

    #[test]
    fn a_partly_taken_frame_is_finished_before_the_next() {
        use crate::queue::{GuestIoVecs, Segment};
        use machine::memory::{Bytes, GuestAddress, GuestAddressSpace};

        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None)
                .unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 16 * 1024).unwrap();
        let mut channel = StreamChannel::new(ours);
        let memory = virtio_devices_testbed::memory(&[(0, 0x20000)]).memory().into_inner();
        let frame: Vec<u8> = (0u32..60_000).map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect();
        memory.write_slice(&frame, GuestAddress(0x100)).unwrap();
        let segments = [
            Segment { address: GuestAddress(0x100), len: 33 },
            Segment { address: GuestAddress(0x121), len: 59_967 },
        ];
        let mut reader = FrameReader::default();
        let (mut sent, mut received) = (0, 0);
        while received < 20 {
            while sent < 20 {
                let vecs = GuestIoVecs::new(&memory, &segments).unwrap();
                match channel.send(&VnetHeader::default(), &FrameSource::new(&vecs, &[]).unwrap()) {
                    Ok(_) => sent += 1,
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                        break;
                    }
                }
            }
            if let Err(error) = channel.flush() {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            }
            while let Ok((count, _)) = rustix::net::recv(&theirs, reader.space(), RecvFlags::DONTWAIT) {
                reader.filled(count);
                while let Some(got) = reader.frame().unwrap() {
                    assert!(got == frame, "frame {received} differs");
                    received += 1;
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn frames_come_out_as_they_went_in_however_the_stream_is_cut(
            frames in prop::collection::vec((FRAME_MIN..3000usize, any::<u8>()), 1..40),
            big in FRAME_MIN..=FRAME_MAX,
            cuts in prop::collection::vec(1..70_000usize, 1..20),
        ) {
            let mut frames: Vec<Vec<u8>> = frames.into_iter().map(|(len, byte)| vec![byte; len]).collect();
            frames.push(vec![7; big]);
            let stream: Vec<u8> = frames
                .iter()
                .flat_map(|f| u32::try_from(f.len()).unwrap().to_be_bytes().into_iter().chain(f.iter().copied()))
                .collect();
            let (mut reader, mut rest, mut out) = (FrameReader::default(), &stream[..], Vec::new());
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let space = reader.space();
                prop_assert!(!space.is_empty());
                let now = rest.len().min(space.len()).min(*cuts.next().unwrap());
                space[..now].copy_from_slice(&rest[..now]);
                reader.filled(now);
                rest = &rest[now..];
                while let Some(frame) = reader.frame().unwrap() {
                    out.push(frame.to_vec());
                }
            }
            prop_assert_eq!(out, frames);
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut reader = FrameReader::default();
            reader.space()[..bytes.len()].copy_from_slice(&bytes);
            reader.filled(bytes.len());
            let mut taken = 0;
            while let Ok(Some(frame)) = reader.frame() {
                taken += PREFIX + frame.len();
            }
            prop_assert!(taken <= bytes.len());
        }
    }
}
