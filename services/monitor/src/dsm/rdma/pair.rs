//! A connected queue pair: sends, waits, and its end.

#![allow(unsafe_code)] // Reads memory that a device has written, and waits for a descriptor of the library's.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ibverbs::abi::{self, Wc};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::RecvFlags;

use super::flow::{Failure, Flow};
use super::queue_pair::{BATCH, Objects, RECEIVES, Ready};

/// Messages received in one poll, at most: a peer that sends endlessly must not delay this side's sends.
const MAX_MESSAGES_PER_POLL: usize = 2 * RECEIVES.count as usize;

impl Ready {
    /// Adds the TCP connection, which closes when the peer's process ends.
    pub(super) fn over(self, stream: TcpStream) -> Pair {
        let Self { objects, flow } = self;
        Pair { state: Mutex::new(State { flow, objects, broken: None, ended: false }), stream }
    }
}

struct State {
    // Before the objects, since it has the state of their buffers.
    flow: Flow,
    objects: Objects,
    /// Why the queue pair is broken.
    broken: Option<(io::ErrorKind, String)>,
    /// The TCP connection was closed, by the peer's process or here.
    ended: bool,
}

impl State {
    /// Polls completions and processes them. Returns true if there may be more.
    fn reap(&mut self) -> io::Result<bool> {
        match &self.broken {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
            None => {
                let result = self.look();
                if let Err(error) = &result {
                    self.broken = Some((error.kind(), error.to_string()));
                }
                result
            }
        }
    }

    fn look(&mut self) -> io::Result<bool> {
        let Self { flow, objects, .. } = self;
        let mut batch = [Wc::default(); BATCH];
        // Sends first, since receives are only flushed after a send has failed.
        loop {
            let count = objects.poll(objects.send_cq, &mut batch)?;
            for completion in batch.iter().take(count) {
                if completion.status != 0 {
                    return Err(io::Error::other(failed(completion.status)));
                }
                flow.sent(buffer_of(completion)?).map_err(io::Error::other)?;
            }
            if count < BATCH {
                break;
            }
        }
        let mut taken = 0;
        let mut more = true;
        while more && flow.has_room() && taken < MAX_MESSAGES_PER_POLL {
            let count = objects.poll(objects.receive_cq, &mut batch)?;
            taken += count;
            more = count == BATCH;
            for completion in batch.into_iter().take(count) {
                if completion.status != 0 {
                    // A failed send has the reason.
                    let count = objects.poll(objects.send_cq, &mut batch)?;
                    let mut all = batch.iter().take(count).map(|completion| completion.status);
                    let reason = all.find(|status| ![0, abi::WC_FLUSHED].contains(status));
                    return Err(io::Error::other(failed(reason.unwrap_or(abi::WC_FLUSHED))));
                }
                let buffer = buffer_of(&completion)?;
                let message = objects.message(buffer, completion.byte_len)?;
                // SAFETY: the message lies within the memory. The device doesn't write the buffer until it is reposted, which happens after
                // the
                // message was copied.
                let message = unsafe { &*message };
                flow.received(buffer, message, objects).map_err(|failure| match failure {
                    Failure::Violation(violation) => {
                        io::Error::new(io::ErrorKind::InvalidData, violation.to_string())
                    }
                    Failure::Port(error) => error,
                })?;
            }
        }
        flow.settle(objects)?;
        Ok(more)
    }

    /// Arms a wakeup of the reader by the next completed send, if bytes wait for one. Returns whether it did.
    fn arm_sends(&mut self) -> io::Result<bool> {
        let starved = self.flow.take_starved();
        if starved {
            self.objects.arm(self.objects.send_cq)?;
        }
        Ok(starved)
    }
}

fn buffer_of(completion: &Wc) -> io::Result<u16> {
    u16::try_from(completion.wr_id)
        .map_err(|_| io::Error::other("its RDMA device reports a request that it wasn't given"))
}

/// Text for a completion's status.
fn failed(status: u32) -> String {
    match status {
        abi::WC_RETRY_EXCEEDED => {
            "the other host's RDMA device acknowledges nothing: its host is down, or the path to it is cut"
                .to_owned()
        }
        abi::WC_RNR_RETRY_EXCEEDED => {
            "the node at the other end had no buffer for a message that it had given leave for".to_owned()
        }
        abi::WC_FLUSHED => {
            "the RDMA device has ended the connection, as it does when its interface goes down".to_owned()
        }
        status => format!("the RDMA device has failed it (status {status} of enum ibv_wc_status)"),
    }
}

/// A connected queue pair, with its TCP connection. Thread-safe; one thread reads.
pub(in crate::dsm) struct Pair {
    // Dropped before the connection: nothing may arrive after the peer has learned of the end.
    state: Mutex<State>,
    stream: TcpStream,
}

impl Pair {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends as many bytes as possible without blocking. Returns their number. On a broken queue pair it returns the full length, since the
    /// reader
    /// detects the end.
    pub(in crate::dsm) fn offer(&self, bytes: &[u8]) -> usize {
        let mut state = self.state();
        match Self::offer_to(&mut state, bytes) {
            Ok(taken) => taken,
            Err(error) => {
                state.broken.get_or_insert_with(|| (error.kind(), error.to_string()));
                drop(state);
                self.shutdown();
                bytes.len()
            }
        }
    }

    fn offer_to(state: &mut State, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        if let Some((kind, text)) = &state.broken {
            return Err(io::Error::new(*kind, text.clone()));
        }
        loop {
            let State { flow, objects, .. } = state;
            taken += flow.offer(bytes.get(taken..).unwrap_or_default(), objects)?;
            if taken == bytes.len() {
                return Ok(taken);
            }
            // Unprocessed completions may bring credits, since the reader may be busy.
            state.reap()?;
            if !state.flow.take_unblocked() {
                if !state.arm_sends()? {
                    return Ok(taken);
                }
                // A completion before the arming wakes no thread.
                state.reap()?;
                if !state.flow.take_unblocked() {
                    return Ok(taken);
                }
            }
        }
    }

    /// Blocks for bytes of the peer, and copies as many as fit. Returns 0 if none have arrived and sends are possible again.
    ///
    /// # Errors
    /// `InvalidData` for a message that violates the protocol. `UnexpectedEof` after the peer's process has closed the connection and all
    /// its
    /// bytes were read. Other errors are the device's. Each error is returned again by later calls.
    pub(in crate::dsm) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            {
                let mut state = self.state();
                let mut armed = false;
                loop {
                    let looked = state.reap();
                    // Bytes that arrived before an error are delivered first.
                    let taken = state.flow.take(into);
                    if taken > 0 || state.flow.take_unblocked() {
                        return Ok(taken);
                    }
                    if looked? {
                        continue;
                    }
                    if state.ended {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    if armed {
                        break;
                    }
                    state.arm_sends()?;
                    state.objects.arm(state.objects.receive_cq)?;
                    // A completion before the arming wakes no thread.
                    armed = true;
                }
            }
            self.sleep()?;
        }
    }

    /// Blocks until a completion event, or an event of the TCP connection.
    fn sleep(&self) -> io::Result<()> {
        let channel = {
            let state = self.state();
            // SAFETY: the descriptor stays open as long as `self`, whose borrow outlives this use.
            unsafe { BorrowedFd::borrow_raw(state.objects.fd().as_raw_fd()) }
        };
        let mut fds =
            [PollFd::from_borrowed_fd(channel, PollFlags::IN), PollFd::new(&self.stream, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [completions, process] = fds.map(|fd| !fd.revents().is_empty());
        let mut state = self.state();
        if completions {
            state.objects.take_events();
        }
        if process {
            match rustix::net::recv(self.stream.as_fd(), &mut [0], RecvFlags::DONTWAIT) {
                Ok((0, _)) => state.ended = true,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // A reset: the process was killed with unread bytes.
                Err(_) => state.ended = true,
                Ok(_) => {
                    let text = "bytes came by TCP after the queue pair was ready";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
            }
        }
        Ok(())
    }

    /// Whether no message is in flight to the peer's device, or none can arrive there any more.
    pub(in crate::dsm) fn is_done(&self) -> bool {
        let mut state = self.state();
        state.reap().is_err() || state.ended || state.flow.is_idle()
    }

    /// Closes the TCP connection, which notifies the peer and wakes the reader.
    pub(in crate::dsm) fn shutdown(&self) {
        // Fails if it is shut down already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}
