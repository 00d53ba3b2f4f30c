//! Peers without VMs: sockets between two pinned threads, with reads and writes of 64 KiB.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, bail};

use crate::outside::link::Link;
use crate::peers::pin;

/// The kind of sockets.
#[derive(Debug, Clone, Copy)]
pub enum Between<'a> {
    /// A pair of Unix stream sockets.
    Unix,
    /// TCP over loopback.
    Loopback,
    /// TCP between two network namespaces.
    Namespaces(&'a Link),
}

/// Measures GB/s of `messages` messages of `length` bytes.
pub fn rate(between: Between<'_>, cpus: [usize; 2], messages: u64, length: u64) -> anyhow::Result<f64> {
    let (to, from) = match between {
        Between::Unix => {
            let (to, from) = UnixStream::pair().context("A pair of Unix sockets could not be had")?;
            return stream(to, from, cpus, messages, length);
        }
        Between::Loopback => {
            let listener = TcpListener::bind("127.0.0.1:0").context("Loopback could not be listened to")?;
            let to = TcpStream::connect(listener.local_addr()?).context("Loopback could not be connected")?;
            (to, listener.accept().context("Loopback could not be accepted")?.0)
        }
        Between::Namespaces(link) => link.connection()?,
    };
    to.set_nodelay(true)?;
    stream(to, from, cpus, messages, length)
}

fn stream(
    mut to: impl Write,
    mut from: impl Read + Send,
    cpus: [usize; 2],
    messages: u64,
    length: u64,
) -> anyhow::Result<f64> {
    let size = usize::try_from(length)?;
    let ready = Barrier::new(2);
    std::thread::scope(|scope| {
        let ready = &ready;
        let reader = scope.spawn(move || -> anyhow::Result<()> {
            let pinned = pin(cpus[1]);
            let mut buffer = vec![0; size];
            ready.wait();
            pinned?;
            for number in 0..messages {
                from.read_exact(&mut buffer)?;
                if buffer.first_chunk() != Some(&number.to_le_bytes()) {
                    bail!("A socket lost message {number}");
                }
            }
            Ok(())
        });
        let pinned = pin(cpus[0]);
        let mut buffer = vec![0; size];
        ready.wait();
        pinned?;
        let began = Instant::now();
        for number in 0..messages {
            if let Some(start) = buffer.first_chunk_mut() {
                *start = number.to_le_bytes();
            }
            to.write_all(&buffer)?;
        }
        match reader.join() {
            Ok(result) => result?,
            Err(_) => bail!("The socket's reader panicked"),
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let rate = (messages * length) as f64 / began.elapsed().as_nanos() as f64;
        Ok(rate)
    })
}
