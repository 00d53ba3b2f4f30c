//! Seccomp filters for threads that other crates start: each hook runs first on the new thread.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use virtio_devices::transport::DeviceThreads;

use crate::sandbox::{Sandbox, ThreadFilter, ThreadKind};

/// Runs on a new thread before anything else.
pub type ThreadHook = Arc<dyn Fn() + Send + Sync>;

/// The hook for a kind of thread.
pub fn hook(sandbox: &Sandbox, kind: ThreadKind) -> ThreadHook {
    let filter = sandbox.thread_filter(kind);
    Arc::new(move || filter.apply_or_end())
}

/// A job for the device-thread maker.
type Job = Box<dyn FnOnce() + Send>;

/// The thread that activates devices, so that their threads inherit its filter and not a vCPU's. It ends when this value is dropped.
pub struct DeviceThreadMaker {
    jobs: Mutex<mpsc::Sender<(Job, mpsc::SyncSender<()>)>>,
}

impl DeviceThreadMaker {
    /// Starts it, confined by `filter`.
    pub fn start(filter: ThreadFilter) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<(Job, mpsc::SyncSender<()>)>();
        std::thread::Builder::new().name("devices".to_owned()).spawn(move || {
            filter.apply_or_end();
            for (job, done) in queue {
                // The caller reports a device that panics while it starts, because it gets no answer. The program's panic hook has logged
                // the panic.
                let _ = telemetry::containment::contain(job);
                let _ = done.send(());
            }
        })?;
        Ok(Self { jobs: Mutex::new(jobs) })
    }
}

impl DeviceThreads for DeviceThreadMaker {
    fn run(&self, job: Job) {
        let (done, finished) = mpsc::sync_channel(1);
        let sent = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send((job, done));
        if sent.is_ok() {
            // An error means that the thread has ended, and the job with it.
            let _ = finished.recv();
        }
    }
}
