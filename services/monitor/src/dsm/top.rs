//! A socket that serves reports of all nodes while the VM runs.

use std::io::{self, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::engine::Engine;
use super::link::Control;

/// Timeout of the nodes' answers, and of the client's reads.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A socket that is served until this is dropped.
pub(super) struct Served {
    socket: PathBuf,
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Binds the socket, and starts the thread that serves it.
pub(super) fn serve(engine: &Arc<Engine>, socket: &Path) -> io::Result<Served> {
    let listener = UnixListener::bind(socket)?;
    let quit = Arc::new(AtomicBool::new(false));
    let (mine, until) = (Arc::clone(engine), Arc::clone(&quit));
    let body = move || {
        for stream in listener.incoming() {
            if until.load(Ordering::Relaxed) {
                return;
            }
            // The client is gone or doesn't read, which doesn't concern the VM.
            let _ = stream.and_then(|stream| answer(&mine, stream));
        }
    };
    let thread = std::thread::Builder::new().name("dsm-top".to_owned()).spawn(body)?;
    Ok(Served { socket: socket.to_owned(), quit, thread: Some(thread) })
}

impl Drop for Served {
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Relaxed);
        // Wakes the thread. Without the socket file, the thread sleeps until the process ends.
        let woken = UnixStream::connect(&self.socket).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken)
            && thread.join().is_err()
        {
            tracing::error!("The thread that serves counts panicked; this is a bug");
        }
        // Fails if somebody has removed it, which is as good.
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn answer(engine: &Engine, mut stream: UnixStream) -> io::Result<()> {
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let until = Instant::now() + ANSWER_TIMEOUT;
    engine.peer_states().answers.clear();
    let peers: Vec<u8> = engine.links().map(|link| link.peer).collect();
    for peer in &peers {
        engine.send_control(*peer, &Control::Ask);
    }
    let own = engine.lock().as_ref().map(|core| core.report(engine.me)).unwrap_or_default();
    let mut states = engine.peer_states();
    while !peers.iter().all(|peer| states.answers.contains_key(peer)) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        states = engine.wait_for_peer_states(states, left);
    }
    let parsed = states.answers.values().filter_map(|answer| serde_json::from_slice(answer).ok());
    let all: Vec<Value> = std::iter::once(own).chain(parsed).collect();
    drop(states);
    stream.write_all(Value::Array(all).to_string().as_bytes())
}
