//! The driver's state of the objects that it created.

use dma::Dma;

use pvrdma::abi::PAGE;
use pvrdma::abi::commands::qp_kind;

/// A completion queue.
#[derive(Debug, Clone)]
pub struct Cq {
    /// Handle from CREATE_CQ's response.
    pub handle: u32,
    /// UAR page of its context.
    pub uar: u32,
    /// Number of entries.
    pub entries: u32,
    /// Index page, then the pages of entries.
    pub pages: Vec<u64>,
}

/// A queue pair.
#[derive(Debug, Clone)]
pub struct Qp {
    /// Handle from CREATE_QP's response.
    pub handle: u32,
    /// Queue pair number.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// UAR page of its context.
    pub uar: u32,
    /// Index page, then the send queue's, then the receive queue's.
    pub pages: Vec<u64>,
    /// Number of pages of the send queue.
    pub send_pages: u32,
    /// Number of slots of the send queue.
    pub max_send_wr: u32,
    /// Number of slots of the receive queue.
    pub max_receive_wr: u32,
    /// Size of a send slot, bytes.
    pub send_size: u64,
    /// Size of a receive slot, bytes.
    pub receive_size: u64,
}

/// A shared receive queue.
#[derive(Debug, Clone)]
pub struct Srq {
    /// Handle from CREATE_SRQ's response.
    pub handle: u32,
    /// UAR page of its context.
    pub uar: u32,
    /// Index page, then pages of slots.
    pub pages: Vec<u64>,
    /// Number of slots.
    pub max_wr: u32,
    /// Size of a slot, bytes.
    pub size: u64,
}

/// A registered buffer.
#[derive(Debug, Clone)]
pub struct Region {
    /// Handle from CREATE_MR's response.
    pub handle: u32,
    /// Address in the process.
    pub address: u64,
    /// Its pages.
    pub pages: Vec<u64>,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

impl Region {
    /// Guest address of the byte at `offset`.
    #[must_use]
    pub fn guest(&self, offset: u64) -> u64 {
        let byte = self.address % PAGE + offset;
        self.pages[usize::try_from(byte / PAGE).unwrap()] + byte % PAGE
    }

    /// Pieces of a range that lie within one page each: guest address and range.
    fn pieces(&self, offset: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == length {
                return None;
            }
            let guest = self.guest(offset + at as u64);
            let piece = (length - at).min(usize::try_from(PAGE - guest % PAGE).unwrap());
            let range = at..at + piece;
            at += piece;
            Some((guest, range))
        })
    }

    /// Writes to the buffer as the process does.
    pub fn write(&self, memory: &impl Dma, offset: u64, bytes: &[u8]) {
        for (guest, range) in self.pieces(offset, bytes.len()) {
            memory.write(guest, &bytes[range]).unwrap();
        }
    }

    /// Reads the buffer.
    #[must_use]
    pub fn read(&self, memory: &impl Dma, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        for (guest, range) in self.pieces(offset, bytes.len()) {
            memory.read(guest, &mut bytes[range]).unwrap();
        }
        bytes
    }
}

/// Parameters of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QpOptions {
    /// See [`qp_kind`].
    pub kind: u8,
    /// Number of slots of the send queue.
    pub max_send_wr: u32,
    /// Number of slots of the receive queue.
    pub max_receive_wr: u32,
    /// Limit of elements per send request.
    pub max_send_sge: u32,
    /// Limit of elements per receive request.
    pub max_receive_sge: u32,
    /// Whether every send request produces a completion.
    pub signal_all: bool,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            kind: qp_kind::RC,
            max_send_wr: 64,
            max_receive_wr: 64,
            max_send_sge: 2,
            max_receive_sge: 2,
            signal_all: true,
        }
    }
}
