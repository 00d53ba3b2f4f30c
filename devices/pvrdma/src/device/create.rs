//! Commands that create objects with guest memory. Page lists are copied while the command executes; the driver may free them after the
//! response.

use dma::Dma;
use hca::attributes::QpKind;
use hca::names::{ContextHandle, CqHandle, PdHandle, SrqHandle};
use hca::{Engine, MrInfo, MrPages, QpInit, SrqInit};

use super::commands::{Answer, answer};
use super::error::CommandError;
use super::slices::{Registration, Work};
use super::{Device, QpRecord};
use crate::abi::PAGE;
use crate::abi::commands::{
    CqResponse, CreateCq, CreateMr, CreateQp, CreateSrq, MrResponse, QpResponse, mr_kind, qp_kind,
};
use crate::abi::work::{receive_slot, send_slot};
use crate::completion_queue::PvrdmaCompletionQueue;
use crate::decode::{INLINE_CAPACITY, SendRules};
use crate::page_list::{MAX_PAGES, PageList, read_page_list};
use crate::provider::Pvrdma;
use crate::receive_queue::PvrdmaReceiveQueue;
use crate::ring::{RingError, RingMemory, pages_needed};
use crate::send_queue::PvrdmaSendQueue;

type Result<T> = std::result::Result<T, CommandError>;

/// The guest kernel's context.
pub(super) const KERNEL: ContextHandle = ContextHandle(0);

fn within(what: &'static str, value: u32, from: u32, to: u32) -> Result<()> {
    if (from..=to).contains(&value) { Ok(()) } else { Err(CommandError::invalid(what, value)) }
}

impl<M: Dma + Clone + 'static> Device<M> {
    fn context_of_pd(&self, pd: u32) -> Result<ContextHandle> {
        self.pds.get(&pd).copied().ok_or_else(|| CommandError::invalid("The protection domain", pd))
    }

    pub(super) fn create_mr(&mut self, engine: &mut Engine<Pvrdma<M>>, command: &CreateMr) -> Result<Answer> {
        let pd = PdHandle(command.pd.get());
        let context = self.context_of_pd(pd.0)?;
        let access = command.access.get();
        let MrInfo { handle, lkey, rkey } = match command.kind.get() {
            mr_kind::USER => {
                let (start, length) = (command.start.get(), command.length.get());
                if length == 0 || length > self.config.capabilities.max_mr_size {
                    return Err(CommandError::invalid("The length of a memory region", length));
                }
                start
                    .checked_add(length)
                    .ok_or_else(|| CommandError::invalid("The start of a memory region", start))?;
                let needed = (start % PAGE + length).div_ceil(PAGE);
                let needed = u32::try_from(needed)
                    .ok()
                    .filter(|needed| *needed <= command.pages.get() && *needed <= MAX_PAGES)
                    .ok_or_else(|| {
                        CommandError::invalid("The number of pages of a memory region", command.pages.get())
                    })?;
                let list = PageList::open(&self.memory, command.directory.get(), needed)?;
                let pages = MrPages::new(start);
                let registration = Registration { pd, start, length, access, list, pages };
                return Ok(Answer::Unfinished(Work::Registration(Box::new(registration))));
            }
            // Only the kernel may create regions of all memory, and regions for fast registration.
            mr_kind::DMA if context == KERNEL => engine.register_dma_mr(self.id, pd, access)?,
            mr_kind::FAST if context == KERNEL => {
                engine.allocate_fast_mr(self.id, pd, command.pages.get())?
            }
            kind => return Err(CommandError::invalid("The kind of a memory region", kind)),
        };
        Ok(answer(&MrResponse { handle: handle.0.into(), lkey: lkey.into(), rkey: rkey.into() }))
    }

    pub(super) fn create_cq(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        command: &CreateCq,
    ) -> Result<CqResponse> {
        let context = ContextHandle(command.context.get());
        let entries = command.entries.get();
        within("The size of a completion queue", entries, 1, self.config.capabilities.max_cqe)?;
        let ring = PvrdmaCompletionQueue::read(
            &self.memory,
            command.directory.get(),
            command.pages.get(),
            entries,
            context == KERNEL,
        )?;
        let handle = engine.create_cq(self.id, context, entries, ring)?;
        // The guest's driver uses the number as the ring's size: it must be the requested one.
        Ok(CqResponse { handle: handle.0.into(), entries: command.entries })
    }

    pub(super) fn create_srq(&mut self, engine: &mut Engine<Pvrdma<M>>, command: &CreateSrq) -> Result<u32> {
        let capabilities = &self.config.capabilities;
        let pd = PdHandle(command.pd.get());
        self.context_of_pd(pd.0)?;
        let (max_wr, max_sge) = (command.max_wr.get(), command.max_sge.get());
        within("The size of a shared receive queue", max_wr, 1, capabilities.max_srq_wr)?;
        within("The elements of a shared request", max_sge, 1, capabilities.max_srq_sge)?;
        if command.kind != 0 {
            return Err(CommandError::invalid("The type of a shared receive queue", command.kind));
        }
        let ring = RingMemory::read(
            &self.memory,
            command.directory.get(),
            command.pages.get(),
            max_wr,
            receive_slot(max_sge),
        )?;
        let init = SrqInit { max_wr, max_sge, limit: command.limit.get() };
        let queue = PvrdmaReceiveQueue::from_ring(ring, max_sge);
        Ok(engine.create_srq(self.id, pd, init, queue)?.0)
    }

    pub(super) fn create_qp(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        command: &CreateQp,
    ) -> Result<QpResponse> {
        let capabilities = &self.config.capabilities;
        let pd = PdHandle(command.pd.get());
        let context = self.context_of_pd(pd.0)?;
        let kind = match command.kind {
            qp_kind::GSI if context == KERNEL => QpKind::Gsi,
            qp_kind::RC => QpKind::Rc,
            qp_kind::UD => QpKind::Ud,
            other => return Err(CommandError::invalid("The type of a queue pair", other)),
        };
        let srq = (command.has_srq != 0).then(|| SrqHandle(command.srq.get()));
        let (send_cq, receive_cq) = (CqHandle(command.send_cq.get()), CqHandle(command.receive_cq.get()));
        for cq in [send_cq, receive_cq] {
            if engine.context_of_cq(self.id, cq) != Some(context) {
                return Err(CommandError::Context { what: "completion queue" });
            }
        }
        if srq.is_some_and(|srq| engine.context_of_srq(self.id, srq) != Some(context)) {
            return Err(CommandError::Context { what: "shared receive queue" });
        }
        let record = QpRecord {
            pd: pd.0,
            context,
            kind,
            max_send_wr: command.max_send_wr.get(),
            max_send_sge: command.max_send_sge.get(),
            max_receive_wr: if srq.is_some() { 0 } else { command.max_receive_wr.get() },
            max_receive_sge: if srq.is_some() { 0 } else { command.max_receive_sge.get() },
        };
        within("The size of a send queue", record.max_send_wr, 1, capabilities.max_qp_wr)?;
        within("The elements of a send request", record.max_send_sge, 1, capabilities.max_sge)?;
        if srq.is_none() {
            within("The size of a receive queue", record.max_receive_wr, 1, capabilities.max_qp_wr)?;
            within("The elements of a receive request", record.max_receive_sge, 1, capabilities.max_sge)?;
        }
        let (send, receive) = self.queues(command, &record, srq.is_some())?;
        let info = engine.create_qp(
            self.id,
            QpInit {
                pd,
                kind,
                send_cq,
                receive_cq,
                srq,
                signal_all: command.signal_all != 0,
                max_send_wr: record.max_send_wr,
                max_receive_wr: record.max_receive_wr,
                max_send_sge: record.max_send_sge,
                max_receive_sge: record.max_receive_sge,
            },
            send,
            receive,
        )?;
        self.qps.insert(info.handle.0, record);
        Ok(QpResponse {
            qpn: info.qpn.0.into(),
            handle: info.handle.0.into(),
            max_send_wr: command.max_send_wr,
            max_receive_wr: command.max_receive_wr,
            max_send_sge: command.max_send_sge,
            max_receive_sge: command.max_receive_sge,
            max_inline_data: u32::try_from(INLINE_CAPACITY).unwrap_or(0).into(),
        })
    }

    /// The rings of a queue pair. The first page holds both pairs of indices; the send queue's pages follow, then the receive queue's.
    fn queues(
        &self,
        command: &CreateQp,
        record: &QpRecord,
        shared: bool,
    ) -> Result<(PvrdmaSendQueue, Option<PvrdmaReceiveQueue>)> {
        let given = u32::from(command.total_pages.get());
        let send_pages = u32::from(command.send_pages.get());
        let (send_size, receive_size) =
            (send_slot(record.max_send_sge), receive_slot(record.max_receive_sge));
        let send_needed = pages_needed(record.max_send_wr, send_size)?;
        let receive_needed = if shared { 0 } else { pages_needed(record.max_receive_wr, receive_size)? };
        if send_pages < send_needed {
            return Err(RingError::TooFewPages { given: send_pages, needed: send_needed }.into());
        }
        let used = 1 + send_pages + receive_needed;
        if given < used {
            return Err(RingError::TooFewPages { given, needed: used }.into());
        }
        let pages = read_page_list(&self.memory, command.directory.get(), used)?;
        let (send, receive) = pages[1..].split_at(send_pages as usize);
        let rules =
            SendRules { kind: record.kind, kernel: record.context == KERNEL, max_sge: record.max_send_sge };
        let send_queue = PvrdmaSendQueue::new(pages[0], send, record.max_send_wr, send_size, rules)?;
        let receive_queue = if shared {
            None
        } else {
            let (slots, max_sge) = (record.max_receive_wr, record.max_receive_sge);
            Some(PvrdmaReceiveQueue::new(pages[0], receive, slots, receive_size, max_sge)?)
        };
        Ok((send_queue, receive_queue))
    }
}
