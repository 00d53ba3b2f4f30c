//! Commands in guests. A guest's script starts the lab's agent on a vsock port. `lab in NAME SCRIPT`, inside the host,
//! runs a script in the guest with its own standard input, output and status.
//!
//! ```text
//! lab (outside) ── virtio-serial ──▶ agent of the host ── starts ──▶ lab in NAME ── vsock, a connection each ──▶ agent in the guest
//! ```

use crate::channel::{Channel, Session};
use crate::protocol::Kind;
use crate::shell;
use anyhow::{Context, Result, bail};
use std::io::{IsTerminal, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The vsock port of the agent in a guest.
pub const PORT: u32 = 1024;

/// Returns the path in the host of a guest's vsock socket.
pub fn socket(name: &str) -> String {
    format!("/run/lab-{name}.vsock")
}

/// Returns the commands by which a guest starts its agent, the file `agent` beside its script. Guests of a pair accept
/// commands from each other as well, on an address that only they share: `on NAME SCRIPT` runs a script in the other
/// guest, `on NAME` opens a shell there.
pub fn serve(address: &str) -> String {
    format!(
        "printf '#!/bin/sh\\nn=$1; shift; exec /lab/agent in --wait 5 tcp:$n:{PORT} \"$@\"\\n' > /usr/bin/on; chmod +x /usr/bin/on\n\
         socat TCP-LISTEN:{PORT},bind={address},fork,reuseaddr EXEC:'/lab/agent agent -' &\n\
         socat VSOCK-LISTEN:{PORT},fork,reuseaddr EXEC:'/lab/agent agent -'\n"
    )
}

/// Connects to another guest over TCP.
fn connect_tcp(address: &str) -> Result<Channel> {
    let stream = TcpStream::connect(address).with_context(|| format!("Can't connect to {address}"))?;
    // A stream socket of any family is read and written in the same way.
    let channel = Channel::over(UnixStream::from(OwnedFd::from(stream)))?;
    if !channel.wait_hello(Duration::from_secs(20)) {
        bail!("The agent at {address} said nothing within 20 s");
    }
    Ok(channel)
}

/// Makes one attempt. The monitor's answer to `CONNECT` tells whether a process listens in the guest.
fn connect(path: &Path) -> Result<Channel> {
    let mut stream =
        UnixStream::connect(path).with_context(|| format!("Can't connect to {}", path.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(format!("CONNECT {PORT}\n").as_bytes())?;
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < 64 && byte[0] != b'\n' {
        stream.read_exact(&mut byte).with_context(|| format!("Nobody listens on vsock port {PORT}"))?;
        line.push(byte[0]);
    }
    if !line.starts_with(b"OK ") {
        bail!("The monitor answered {:?} to CONNECT {PORT}", String::from_utf8_lossy(&line));
    }
    stream.set_read_timeout(None)?;
    let channel = Channel::over(stream)?;
    if !channel.wait_hello(Duration::from_secs(20)) {
        bail!("The agent in the guest said nothing within 20 s");
    }
    Ok(channel)
}

/// Runs a script in the guest and returns its status. Without a script, opens a shell in this terminal.
pub fn run(guest: &str, script: Option<&str>, patience: Duration) -> Result<i32> {
    let path = if guest.contains('/') { PathBuf::from(guest) } else { PathBuf::from(socket(guest)) };
    let until = Instant::now() + patience;
    let channel = loop {
        let attempt = guest.strip_prefix("tcp:").map_or_else(|| connect(&path), connect_tcp);
        match attempt {
            Ok(channel) => break channel,
            Err(e) if Instant::now() > until => {
                return Err(e.context(format!("Guest {guest} takes no commands")));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(300)),
        }
    };
    let Some(script) = script else {
        let command = format!("export TERM={}; cd /root; exec bash -l", shell::terminal_type());
        return shell::attach("", None, |size, sink| channel.start(guest, &command, Some(size), Some(sink)));
    };
    let session = channel.start(guest, script, None, Some(Box::new(copy)))?;
    if !std::io::stdin().is_terminal() {
        forward_input(&session);
    }
    loop {
        if let Some(code) = session.wait(Duration::from_secs(3600))? {
            return Ok(code);
        }
    }
}

fn copy(kind: Kind, bytes: &[u8]) {
    // The reader may have ended.
    let _ = match kind {
        Kind::Stderr => std::io::stderr().write_all(bytes),
        _ => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
    };
}

/// Forwards standard input to the guest until this process ends.
fn forward_input(session: &Session) {
    let input = session.input_handle();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(n) = std::io::stdin().lock().read(&mut buffer) {
            let sent = if n == 0 { input.end() } else { input.send(&buffer[..n]) };
            if n == 0 || sent.is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_isnt_there_is_named() {
        let error = run("/nonexistent/x.vsock", Some("true"), Duration::ZERO).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/x.vsock"));
    }

    #[test]
    fn a_monitor_that_refuses_is_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            let mut line = [0; 13];
            s.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1024\n");
            s.write_all(b"NO such port\n").unwrap();
        });
        assert!(connect(&path).err().unwrap().to_string().contains("NO such port"));
        server.join().unwrap();
    }
}
