//! Endless traffic inside guests: streams of checked records over TCP, and records written to and read back from a block device. Each
//! reports progress, interruptions and wrong bytes in a file.
//!
//! A record contains its run and its number, so that an old, misplaced or torn one is distinguished from the right one
//! ([`crate::records`]).

use crate::records::{RECORD, is_record, record};
use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Records per block: 32 KiB, a large frame or several pages of a request.
const TOGETHER: u64 = 8;
const TOGETHER_BYTES: usize = 8 * RECORD;
/// Slots of a device that are written in turn.
const SLOTS: u64 = 64;
/// Pause between two blocks: the emulated CPU is needed for the guests' other work, too.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of writes to the file.
const TELL: Duration = Duration::from_millis(250);
/// Time-out without progress, after which a stream is restarted.
const STALLED: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(3);

/// One stream's progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Correct blocks.
    pub blocks: u64,
    /// Interruptions: a connection that ended or stalled, a request that failed.
    pub breaks: u64,
    /// Blocks with a wrong byte.
    pub wrong: u64,
}

impl Done {
    /// Formats the line of the file.
    pub fn line(self) -> String {
        format!("{} {} {}", self.blocks, self.breaks, self.wrong)
    }

    /// Parses a line of the file.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(|word| word.parse().ok());
        let done = Done { blocks: words.next()??, breaks: words.next()??, wrong: words.next()?? };
        words.next().is_none().then_some(done)
    }
}

/// The file with the report.
struct Told {
    path: PathBuf,
    done: Done,
    last: Option<Instant>,
}

impl Told {
    fn new(path: &Path) -> Self {
        Told { path: path.to_path_buf(), done: Done::default(), last: None }
    }

    /// Writes the file atomically.
    fn tell(&mut self, now: bool) -> Result<()> {
        if !now && self.last.is_some_and(|last| last.elapsed() < TELL) {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        fs::write(&new, self.done.line())
            .and_then(|()| fs::rename(&new, &self.path))
            .with_context(|| format!("Can't write {}", self.path.display()))?;
        self.last = Some(Instant::now());
        Ok(())
    }
}

fn block(run: u64, number: u64) -> Vec<u8> {
    (0..TOGETHER).flat_map(|at| record(run, number * TOGETHER + at)).collect()
}

fn is_block(bytes: &[u8], run: u64, number: u64) -> bool {
    bytes.len() == TOGETHER_BYTES
        && bytes
            .chunks_exact(RECORD)
            .zip(number * TOGETHER..)
            .all(|(bytes, number)| is_record(bytes, run, number))
}

/// Receives streams on a TCP port forever. Answers each block with its number, or with all ones if a byte is wrong.
pub fn receive(port: u16) -> Result<()> {
    let listener =
        TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("Can't listen on port {port}"))?;
    for stream in listener.incoming() {
        let stream = stream.context("Can't accept a connection")?;
        std::thread::spawn(move || {
            // The sender sees the outcome.
            let _ = serve(stream);
        });
    }
    Ok(())
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_nodelay(true)?;
    let mut bytes = vec![0; TOGETHER_BYTES];
    let mut run = [0; 8];
    stream.read_exact(&mut run)?;
    for number in 0_u64.. {
        stream.read_exact(&mut bytes)?;
        let right = is_block(&bytes, u64::from_le_bytes(run), number);
        stream.write_all(&if right { number } else { u64::MAX }.to_le_bytes())?;
    }
    Ok(())
}

/// Sends a stream to `address` forever. Restarts it after each interruption.
pub fn send(address: SocketAddr, state: &Path) -> Result<()> {
    let mut told = Told::new(state);
    let mut run = 0;
    loop {
        run += 1;
        told.tell(true)?;
        let before = told.done.blocks;
        let ended = stream(address, run, &mut told);
        match ended {
            Err(error) if error.downcast_ref::<io::Error>().is_none() => return Err(error),
            // A stream that never started isn't an interruption.
            _ if told.done.blocks > before => told.done.breaks += 1,
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn stream(address: SocketAddr, run: u64, told: &mut Told) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))?;
    stream.set_nodelay(true)?;
    stream.write_all(&run.to_le_bytes())?;
    for number in 0_u64.. {
        stream.write_all(&block(run, number))?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if u64::from_le_bytes(answer) == number {
            told.done.blocks += 1;
        } else {
            told.done.wrong += 1;
        }
        told.tell(false)?;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Writes blocks to a device, bypassing the page cache, reads each back, and reads an earlier one, forever.
pub fn disk(device: &Path, state: &Path) -> Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(device)
        .with_context(|| format!("Can't open {}", device.display()))?;
    let mut told = Told::new(state);
    let mut memory = vec![0; TOGETHER_BYTES + RECORD];
    // The kernel requires aligned memory.
    let start = memory.as_ptr().align_offset(RECORD);
    let Some(bytes) = memory.get_mut(start..start + TOGETHER_BYTES) else {
        bail!("Memory can't be aligned to {RECORD} bytes")
    };
    for number in 0_u64.. {
        bytes.copy_from_slice(&block(1, number));
        if retried(&mut told, || write_at(&file, bytes, number))? {
            told.done.blocks += 1;
        }
        let earlier = if number % 3 == 0 { number.saturating_sub(SLOTS / 2) } else { number };
        if retried(&mut told, || read_at(&file, bytes, earlier))? && !is_block(bytes, 1, earlier) {
            told.done.wrong += 1;
        }
        told.tell(false)?;
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn place(number: u64) -> u64 {
    number % SLOTS * TOGETHER_BYTES as u64
}

fn write_at(file: &File, bytes: &[u8], number: u64) -> io::Result<()> {
    file.write_all_at(bytes, place(number))
}

fn read_at(file: &File, bytes: &mut [u8], number: u64) -> io::Result<()> {
    file.read_exact_at(bytes, place(number))
}

/// Retries until success, and counts failures. Returns false if the device is gone for good.
fn retried(told: &mut Told, mut what: impl FnMut() -> io::Result<()>) -> Result<bool> {
    loop {
        match what() {
            Ok(()) => return Ok(true),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => {
                return Err(error).context("The device is gone");
            }
            Err(_) => {
                told.done.breaks += 1;
                told.tell(true)?;
                std::thread::sleep(Duration::from_millis(500));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_reads_back() {
        let done = Done { blocks: 7, breaks: 1, wrong: 0 };
        assert_eq!(Done::parse(&done.line()), Some(done));
        assert_eq!(Done::parse("7 1"), None);
        assert_eq!(Done::parse("7 1 0 4"), None);
    }

    /// A block with another number, and one with a wrong byte, are detected.
    #[test]
    fn a_wrong_byte_is_seen() {
        let mut bytes = block(3, 9);
        assert!(is_block(&bytes, 3, 9) && !is_block(&bytes, 3, 8) && !is_block(&bytes, 2, 9));
        bytes[20_000] ^= 1;
        assert!(!is_block(&bytes, 3, 9));
    }

    /// A stream over loopback makes progress and reports it.
    #[test]
    fn a_stream_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || serve(listener.accept().unwrap().0));
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let path = state.clone();
        std::thread::spawn(move || send(address, &path));
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let done =
                fs::read_to_string(&state).ok().and_then(|text| Done::parse(&text)).unwrap_or_default();
            assert_eq!(done.wrong, 0);
            if done.blocks > 3 {
                break;
            }
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
