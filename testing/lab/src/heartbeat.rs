//! Prints a line every five seconds during a long silent operation. The previous output may be some seconds old at its
//! start, so at most ten seconds pass without a line.

use crate::progress;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// Prints progress lines until it is dropped.
#[derive(Debug)]
pub struct Heartbeat {
    step: Arc<Mutex<String>>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Starts to print `what` with the elapsed seconds.
    pub fn start(what: String) -> Self {
        let (end, ended) = channel();
        let begin = Instant::now();
        let step = Arc::new(Mutex::new(String::new()));
        let said = Arc::clone(&step);
        let thread = std::thread::spawn(move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let step = said.lock().map(|step| step.clone()).unwrap_or_default();
                progress!("{what}: {step}{:.0} s", begin.elapsed().as_secs_f64());
            }
        });
        Heartbeat { step, end: Some(end), thread: Some(thread) }
    }

    /// Sets the progress in the lines.
    pub fn step(&self, step: &str) {
        if let Ok(mut said) = self.step.lock() {
            *said = format!("{step}, ");
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            // The thread only prints.
            let _ = thread.join();
        }
    }
}
