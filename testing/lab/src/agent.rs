//! The lab's agent inside an emulated host: starts processes, and transports their input, output and exit status.

use crate::protocol::{Frame, Kind, Start, receive, send};
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// VMADDR_CID_ANY: accepts connections to any CID of this machine.
const ANY_CID: u32 = u32::MAX;

type Port = Arc<Mutex<File>>;
type Sessions = Arc<Mutex<HashMap<u32, Running>>>;

struct Running {
    group: Pid,
    input: Option<std::sync::mpsc::Sender<Vec<u8>>>,
    terminal: Option<OwnedFd>,
}

fn tell(port: &Port, session: u32, kind: Kind, data: &[u8]) {
    if let Ok(mut port) = port.lock() {
        // Fails only if the lab has ended, and this host ends with it.
        let _ = send(&mut *port, session, kind, data);
    }
}

/// Prefix of a port that is a vsock port to listen on.
pub(crate) const VSOCK: &str = "vsock:";

/// Serves a port until it closes. `-` is standard input and output. `vsock:NUMBER` accepts connections forever.
pub fn serve(port: &Path) -> Result<()> {
    if let Some(number) = port.to_str().and_then(|name| name.strip_prefix(VSOCK)) {
        let number = number.parse().with_context(|| format!("{number:?} is no vsock port"))?;
        return serve_vsock(number);
    }
    if port == Path::new("-") {
        let reader = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        // A connection ends with its only command.
        let _ = serve_over(reader, File::from(std::io::stdout().as_fd().try_clone_to_owned()?));
        return Ok(());
    }
    let file = OpenOptions::new().read(true).write(true).open(port);
    let reader = file.with_context(|| format!("Can't open the port {}", port.display()))?;
    let writer = reader.try_clone()?;
    // A port closes only after an error.
    serve_over(reader, writer)
}

/// Listens on vsock, for guests without socat.
fn serve_vsock(port: u32) -> Result<()> {
    let listener = Socket::new(Domain::VSOCK, Type::STREAM, None)
        .and_then(|socket| {
            socket.bind(&SockAddr::vsock(ANY_CID, port))?;
            socket.listen(16)?;
            Ok(socket)
        })
        .with_context(|| format!("Can't listen on vsock port {port}"))?;
    loop {
        let (connection, _) =
            listener.accept().with_context(|| format!("Can't accept on vsock port {port}"))?;
        let reader = File::from(OwnedFd::from(connection));
        let writer = reader.try_clone()?;
        std::thread::spawn(move || {
            // Ends when the peer closes the connection.
            let _ = serve_over(reader, writer);
        });
    }
}

fn serve_over(mut reader: File, writer: File) -> Result<()> {
    let port: Port = Arc::new(Mutex::new(writer));
    let sessions = Sessions::default();
    let ended = listen(&mut reader, &port, &sessions);
    // No receiver is left for their output.
    for running in lock(&sessions).values() {
        let _ = kill_process_group(running.group, Signal::KILL);
    }
    ended
}

fn lock(sessions: &Sessions) -> std::sync::MutexGuard<'_, HashMap<u32, Running>> {
    sessions.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn listen(reader: &mut File, port: &Port, sessions: &Sessions) -> Result<()> {
    tell(port, 0, Kind::Hello, &[]);
    loop {
        let frame = receive(reader)?;
        let Frame { session, kind, data } = frame;
        match kind {
            Kind::Ping => tell(port, session, Kind::Pong, &[]),
            // The session is registered before its process can end.
            Kind::Start => {
                let mut entered = lock(sessions);
                match start(port, session, &data, sessions) {
                    Ok(running) => drop(entered.insert(session, running)),
                    Err(e) => tell(port, session, Kind::Failed, format!("{e:#}").as_bytes()),
                }
            }
            Kind::Stdin => {
                if let Some(input) = lock(sessions).get(&session).and_then(|s| s.input.as_ref()) {
                    let _ = input.send(data);
                }
            }
            Kind::StdinEnd => {
                if let Some(s) = lock(sessions).get_mut(&session) {
                    s.input = None;
                }
            }
            Kind::Resize => {
                if let (Some(s), [a, b, c, d]) = (lock(sessions).get(&session), data.as_slice())
                    && let Some(terminal) = &s.terminal
                {
                    let (rows, cols) = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
                    let _ = tcsetwinsize(
                        terminal,
                        Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 },
                    );
                }
            }
            Kind::Signal => {
                if let (Some(s), Ok(four)) =
                    (lock(sessions).get(&session), <[u8; 4]>::try_from(data.as_slice()))
                    && let Some(signal) = Signal::from_named_raw(i32::from_le_bytes(four))
                {
                    let _ = kill_process_group(s.group, signal);
                }
            }
            _ => {}
        }
    }
}

fn start(port: &Port, session: u32, data: &[u8], sessions: &Sessions) -> Result<Running> {
    let what: Start = serde_json::from_slice(data).context("Can't read what to start")?;
    let mut terminal = None;
    let mut command;
    if let Some((rows, cols)) = what.terminal {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&control)?;
        unlockpt(&control)?;
        tcsetwinsize(&control, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })?;
        let name = ptsname(&control, Vec::new())?;
        let side =
            OpenOptions::new().read(true).write(true).open(std::ffi::OsStr::from_bytes(name.as_bytes()))?;
        command = Command::new("setsid");
        command.args(["--ctty", "--wait", "/bin/sh", "-c", &what.script]);
        command.stdin(side.try_clone()?).stdout(side.try_clone()?).stderr(side);
        terminal = Some(control);
    } else {
        command = Command::new("/bin/sh");
        command.args(["-c", &what.script]).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    let mut child = command.spawn().context("Can't start /bin/sh")?;
    drop(command);
    let group = Pid::from_raw(i32::try_from(child.id())?).context("A process without an id")?;
    let (input, bytes) = channel::<Vec<u8>>();
    let mut readers = Vec::new();
    if let Some(control) = &terminal {
        let sink = File::from(control.try_clone()?);
        readers.push(pump(port, session, Kind::Stdout, File::from(control.try_clone()?)));
        feed(sink, bytes);
    } else {
        if let Some(out) = child.stdout.take() {
            readers.push(pump(port, session, Kind::Stdout, out));
        }
        if let Some(err) = child.stderr.take() {
            readers.push(pump(port, session, Kind::Stderr, err));
        }
        if let Some(sink) = child.stdin.take() {
            feed(sink, bytes);
        }
    }
    reap(port, session, child, readers, sessions);
    Ok(Running { group, input: Some(input), terminal })
}

fn feed(mut sink: impl Write + Send + 'static, bytes: Receiver<Vec<u8>>) {
    std::thread::spawn(move || {
        while let Ok(some) = bytes.recv() {
            if sink.write_all(&some).is_err() {
                return;
            }
        }
    });
}

/// Forwards output until its end, which it signals on the returned channel.
fn pump(port: &Port, session: u32, kind: Kind, mut from: impl Read + Send + 'static) -> Receiver<()> {
    let (done, finished) = channel();
    let port = Arc::clone(port);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 32 << 10];
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
            }
            tell(&port, session, kind, &buffer[..n]);
        }
        let _ = done.send(());
    });
    finished
}

fn reap(port: &Port, session: u32, mut child: Child, readers: Vec<Receiver<()>>, sessions: &Sessions) {
    let (port, sessions) = (Arc::clone(port), Arc::clone(sessions));
    std::thread::spawn(move || {
        let code = match child.wait() {
            Ok(status) => status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            Err(_) => 255,
        };
        // The input is closed. The process group stays known, since background processes may remain.
        if let Some(ended) = lock(&sessions).get_mut(&session) {
            (ended.input, ended.terminal) = (None, None);
        }
        // A background process may hold the pipes open: don't wait for its output.
        for reader in readers {
            let _ = reader.recv_timeout(Duration::from_millis(300));
        }
        tell(&port, session, Kind::Exit, &code.to_le_bytes());
    });
}
