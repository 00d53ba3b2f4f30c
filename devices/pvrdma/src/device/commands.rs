//! The command slot. When the write to REQUEST returns, the command is complete: executed, its response written, its interrupt raised. Long
//! commands are executed in slices ([`super::slices`]).

use dma::Dma;
use dma::access::read_array;
use hca::Engine;
use hca::names::{ContextHandle, CqHandle, Gid, MrHandle, PdHandle, QpHandle, SrqHandle};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::create::KERNEL;
use super::error::{CommandError, REFUSED};
use super::slices::{AfterTeardown, Unfinished, Work};
use super::{Device, Interrupts, Phase, attributes, events};
use crate::abi::attributes::{Port, port_state};
use crate::abi::commands::{
    ACKNOWLEDGE, COMMAND_SIZE, CommandHeader, CreateBind, CreateContext, DestroyBind, HEADER_SIZE, Handle,
    ModifyQp, ModifySrq, PkeyResponse, PortResponse, QueryPort, QueryQpResponse, RESPONSE_SIZE,
    ResponseHeader, SRQ_LIMIT, SrqResponse, number,
};
use crate::abi::pci::VECTOR_RESPONSE;
use crate::abi::registers::CAUSE_RESPONSE;
use crate::abi::rings::event;
use crate::abi::shared_region::GID_TYPE_ROCE_V2;
use crate::provider::Pvrdma;

type Result<T> = std::result::Result<T, CommandError>;

/// RoCE's only P_Key.
const DEFAULT_PKEY: u16 = 0xFFFF;

/// The copy of a command slot. Each part is read from it at most once.
struct Command {
    bytes: [u8; COMMAND_SIZE],
}

impl Command {
    fn header(&self) -> CommandHeader {
        let bytes: [u8; HEADER_SIZE] = std::array::from_fn(|i| self.bytes[i]);
        transmute!(bytes)
    }

    /// The command's body, which follows the header. All layouts fit the slot, as verified below.
    fn body<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T> {
        T::read_from_prefix(&self.bytes[HEADER_SIZE..]).map(|(body, _)| body).map_err(|_| CommandError::Slot)
    }
}

const _: () = assert!(size_of::<ModifyQp>() + HEADER_SIZE == COMMAND_SIZE);
const _: () = assert!(size_of::<QueryQpResponse>() + HEADER_SIZE == RESPONSE_SIZE);

/// The result of a successful command.
pub(super) enum Answer {
    /// No response; the driver doesn't wait for one.
    Silent,
    /// Not complete yet: more slices follow.
    Unfinished(Work),
    /// A response, with the error code that only MODIFY_QP has.
    Response { error: u8, body: [u8; RESPONSE_SIZE - HEADER_SIZE] },
}

pub(super) fn answer(response: &(impl IntoBytes + Immutable)) -> Answer {
    let mut body = [0; RESPONSE_SIZE - HEADER_SIZE];
    let bytes = response.as_bytes();
    body[..bytes.len()].copy_from_slice(bytes);
    Answer::Response { error: 0, body }
}

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Executed {
    /// The command is complete.
    Done {
        /// Whether a response was written.
        responded: bool,
    },
    /// A slice was executed.
    Unfinished,
}

pub(super) fn handle(value: u32) -> Answer {
    answer(&Handle { handle: value.into() })
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Handles a write to REQUEST.
    pub(super) fn request(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        value: u32,
        interrupts: &impl Interrupts,
    ) {
        let absences = self.memory.absences();
        let executed = match self.unfinished.take() {
            Some(unfinished) => self.resume(engine, unfinished),
            None => self.execute(engine, value),
        };
        if executed.is_err() && self.memory.absences() != absences {
            // Memory of the command isn't present. The command has changed nothing, or continues later where it stopped.
            self.postponed = true;
            return;
        }
        if matches!(executed, Ok(Executed::Unfinished)) {
            return;
        }
        self.counters.commands += 1;
        match executed {
            Ok(Executed::Unfinished) => {}
            Ok(Executed::Done { responded }) => {
                self.error = 0;
                if responded {
                    self.cause = CAUSE_RESPONSE;
                    if !self.masked {
                        interrupts.raise(VECTOR_RESPONSE);
                        self.counters.count_interrupt(VECTOR_RESPONSE);
                    }
                }
            }
            Err((command, error)) => {
                self.counters.failed_commands += 1;
                self.error = error.code();
                telemetry::guest_warn!(
                    self.log,
                    device = self.config.name.as_str(),
                    command,
                    error = &error as &dyn std::error::Error,
                    "A command of the guest fails"
                );
            }
        }
    }

    /// Executes the command in the slot, or its first slice. An error includes the command's number if it could be read.
    fn execute(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        value: u32,
    ) -> std::result::Result<Executed, (Option<u32>, CommandError)> {
        let unread = |error| (None, error);
        if value != 0 {
            return Err(unread(CommandError::invalid("The request register", value)));
        }
        let (Phase::Active, Some(region)) = (self.phase, self.region) else {
            return Err(unread(CommandError::NotActive));
        };
        if !self.bus_master {
            return Err(unread(CommandError::Slot));
        }
        let bytes = read_array(&self.memory, region.command_slot).map_err(|_| unread(CommandError::Slot))?;
        let command = Command { bytes };
        let header = command.header();
        let code = header.command.get();
        // Checked before the command executes: it must not create an object whose handle can't be returned to the guest.
        self.memory
            .check(region.response_slot, RESPONSE_SIZE as u64)
            .map_err(|_| (Some(code), CommandError::Slot))?;
        let done = self.dispatch(engine, code, &command).map_err(|error| (Some(code), error))?;
        match done {
            Answer::Unfinished(work) => {
                self.resume(engine, Unfinished { code, response: header.response, work })
            }
            done => self.respond(code, header.response, &done),
        }
    }

    /// Continues a command in progress.
    fn resume(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        mut unfinished: Unfinished,
    ) -> std::result::Result<Executed, (Option<u32>, CommandError)> {
        let code = unfinished.code;
        if !self.bus_master {
            return Err((Some(code), CommandError::Slot));
        }
        let absences = self.memory.absences();
        match self.slice(engine, &mut unfinished.work) {
            Ok(None) => {
                self.unfinished = Some(unfinished);
                Ok(Executed::Unfinished)
            }
            Ok(Some(done)) => self.respond(code, unfinished.response, &done),
            Err(error) => {
                if self.memory.absences() != absences {
                    self.unfinished = Some(unfinished);
                }
                Err((Some(code), error))
            }
        }
    }

    /// Writes the response of a complete command, if it has one.
    fn respond(
        &self,
        code: u32,
        response: U64,
        done: &Answer,
    ) -> std::result::Result<Executed, (Option<u32>, CommandError)> {
        let Answer::Response { error, body } = done else { return Ok(Executed::Done { responded: false }) };
        let region = self.region.ok_or((Some(code), CommandError::NotActive))?;
        let mut bytes = [0; RESPONSE_SIZE];
        let (head, tail) = bytes.split_at_mut(HEADER_SIZE);
        let header = ResponseHeader {
            response,
            acknowledge: (ACKNOWLEDGE | code).into(),
            error: *error,
            reserved: [0; 3],
        };
        head.copy_from_slice(header.as_bytes());
        tail.copy_from_slice(body);
        self.memory.write(region.response_slot, &bytes).map_err(|_| (Some(code), CommandError::Slot))?;
        Ok(Executed::Done { responded: true })
    }

    fn dispatch(&mut self, engine: &mut Engine<Pvrdma<M>>, code: u32, command: &Command) -> Result<Answer> {
        let id = self.id;
        let given = || command.body::<Handle>().map(|body| body.handle.get());
        match code {
            number::QUERY_PORT => self.query_port(&command.body()?),
            number::QUERY_PKEY => query_pkey(&command.body()?),
            number::CREATE_PD => {
                let context = ContextHandle(given()?);
                let pd = engine.create_pd(id, context)?;
                self.pds.insert(pd.0, context);
                Ok(handle(pd.0))
            }
            number::DESTROY_PD => {
                let pd = given()?;
                let teardown = engine.begin_destroy_pd(id, PdHandle(pd))?;
                Ok(Answer::Unfinished(Work::Teardown(teardown, AfterTeardown::Pd(pd))))
            }
            number::CREATE_MR => self.create_mr(engine, &command.body()?),
            number::DESTROY_MR => {
                engine.deregister_mr(id, MrHandle(given()?))?;
                Ok(Answer::Silent)
            }
            number::CREATE_CQ => Ok(answer(&self.create_cq(engine, &command.body()?)?)),
            number::DESTROY_CQ => {
                let cq = given()?;
                engine.destroy_cq(id, CqHandle(cq))?;
                self.events.forget(|kind, object| kind == event::CQ_ERROR && object == cq);
                Ok(Answer::Silent)
            }
            number::CREATE_QP => Ok(answer(&self.create_qp(engine, &command.body()?)?)),
            number::MODIFY_QP => self.modify_qp(engine, &command.body()?),
            number::QUERY_QP => self.query_qp(engine, given()?),
            number::DESTROY_QP => {
                let qp = given()?;
                engine.destroy_qp(id, QpHandle(qp))?;
                self.qps.remove(&qp);
                self.events.forget(|kind, object| events::about_qp(kind) && object == qp);
                Ok(Answer::Silent)
            }
            number::CREATE_UC => self.create_context(engine, &command.body()?),
            number::DESTROY_UC => {
                let context = ContextHandle(given()?);
                if context == KERNEL {
                    return Err(CommandError::invalid("The context", context.0));
                }
                let teardown = engine.begin_destroy_context(id, context)?;
                Ok(Answer::Unfinished(Work::Teardown(teardown, AfterTeardown::Context(context))))
            }
            number::CREATE_BIND => {
                let body: CreateBind = command.body()?;
                if body.gid_type != GID_TYPE_ROCE_V2 {
                    return Err(CommandError::invalid("The type of a GID", body.gid_type));
                }
                engine.bind_gid(id, body.index.get(), Gid(body.gid), self.config.mac)?;
                Ok(Answer::Silent)
            }
            number::DESTROY_BIND => {
                let body: DestroyBind = command.body()?;
                engine.unbind_gid(id, body.index.get(), Gid(body.gid))?;
                Ok(Answer::Silent)
            }
            number::CREATE_SRQ | number::MODIFY_SRQ | number::QUERY_SRQ | number::DESTROY_SRQ => {
                self.dispatch_srq(engine, code, command)
            }
            // Includes RESIZE_CQ, which Linux never issues.
            _ => Err(CommandError::Unknown(code)),
        }
    }

    /// Commands on shared receive queues.
    fn dispatch_srq(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        code: u32,
        command: &Command,
    ) -> Result<Answer> {
        let id = self.id;
        let given = || command.body::<Handle>().map(|body| SrqHandle(body.handle.get()));
        match code {
            number::CREATE_SRQ => Ok(handle(self.create_srq(engine, &command.body()?)?)),
            number::MODIFY_SRQ => {
                let body: ModifySrq = command.body()?;
                if body.mask.get() != SRQ_LIMIT {
                    let what = "The attribute mask of a shared receive queue";
                    return Err(CommandError::invalid(what, body.mask.get()));
                }
                engine.modify_srq(id, SrqHandle(body.handle.get()), body.limit.get())?;
                Ok(Answer::Silent)
            }
            number::QUERY_SRQ => {
                let found = engine.query_srq(id, given()?)?;
                Ok(answer(&SrqResponse {
                    max_wr: found.max_wr.into(),
                    max_sge: found.max_sge.into(),
                    limit: found.limit.into(),
                }))
            }
            number::DESTROY_SRQ => {
                let srq = given()?;
                engine.destroy_srq(id, srq)?;
                self.events.forget(|kind, object| {
                    matches!(kind, event::SRQ_ERROR | event::SRQ_LIMIT_REACHED) && object == srq.0
                });
                Ok(Answer::Silent)
            }
            _ => Err(CommandError::Unknown(code)),
        }
    }

    fn query_port(&self, query: &QueryPort) -> Result<Answer> {
        if query.port != 1 {
            return Err(CommandError::invalid("The port", query.port));
        }
        Ok(answer(&PortResponse {
            port: Port {
                state: port_state::ACTIVE.into(),
                max_mtu: 5.into(),
                active_mtu: attributes::active_mtu(self.mtu).into(),
                // Must equal the capabilities' number: the driver's table has that many entries.
                gid_table_len: self.config.capabilities.gid_table_len.into(),
                flags: 0.into(),
                max_message: self.config.capabilities.max_message_bytes.into(),
                bad_pkeys: 0.into(),
                qkey_violations: 0.into(),
                pkey_table_len: 1.into(),
                lid: 0.into(),
                sm_lid: 0.into(),
                lmc: 0,
                max_vl: 1,
                sm_sl: 0,
                subnet_timeout: 0,
                init_type_reply: 0,
                active_width: 2,
                active_speed: 32,
                // Link up.
                physical_state: 5,
                reserved: [0; 2],
            },
        }))
    }

    fn create_context(&mut self, engine: &mut Engine<Pvrdma<M>>, body: &CreateContext) -> Result<Answer> {
        let pfn = body.pfn.get();
        let page = self
            .region
            .and_then(|region| region.uar_page(pfn, self.config.max_uar))
            .ok_or_else(|| CommandError::invalid("The page frame of a UAR page", pfn))?;
        // The driver gave up a context whose creation was interrupted by a signal or a timeout, and uses its page again.
        if let Some(leaked) = self.pages.iter().find(|live| live.page == page).copied() {
            if leaked.context == KERNEL {
                return Err(CommandError::invalid("The page frame of a UAR page", pfn));
            }
            let teardown = engine.begin_destroy_context(self.id, leaked.context)?;
            let after = AfterTeardown::Recreate(leaked.context, page);
            return Ok(Answer::Unfinished(Work::Teardown(teardown, after)));
        }
        self.open_context(engine, page)
    }

    /// The only command that reports a failure in its response.
    fn modify_qp(&mut self, engine: &mut Engine<Pvrdma<M>>, body: &ModifyQp) -> Result<Answer> {
        let modified =
            attributes::decode(body.mask.get(), &body.attributes).and_then(|(mask, attributes)| {
                let qp = QpHandle(body.handle.get());
                Ok(engine.modify_qp(self.id, qp, mask, &attributes, &mut self.events)?)
            });
        let mut body = [0; RESPONSE_SIZE - HEADER_SIZE];
        let error = match modified {
            Ok(()) => 0,
            Err(error) => {
                self.counters.failed_commands += 1;
                telemetry::guest_warn!(
                    self.log,
                    device = self.config.name.as_str(),
                    error = &error as &dyn std::error::Error,
                    "A queue pair can't be modified as the guest asks"
                );
                u8::try_from(REFUSED).unwrap_or(u8::MAX)
            }
        };
        body.fill(0);
        Ok(Answer::Response { error, body })
    }

    fn query_qp(&self, engine: &Engine<Pvrdma<M>>, qp: u32) -> Result<Answer> {
        let (found, draining) = engine.query_qp(self.id, QpHandle(qp))?;
        let record = self.qps.get(&qp).ok_or_else(|| CommandError::invalid("The queue pair", qp))?;
        Ok(answer(&QueryQpResponse { attributes: attributes::encode(&found, draining, record) }))
    }
}

fn query_pkey(query: &QueryPort) -> Result<Answer> {
    if query.port != 1 || query.index != 0 {
        return Err(CommandError::invalid("The index of a P_Key", query.index));
    }
    Ok(answer(&PkeyResponse { pkey: DEFAULT_PKEY.into() }))
}
