//! Events that enter a node and actions that leave it.

use crate::message::Message;
use crate::names::{Mode, NodeId, Page, Vcpu};
use crate::operation::Operation;

/// Access that an instruction needed when it faulted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An atomic read-modify-write.
    Atomic,
}

/// An event for a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A vCPU stopped: its instruction needs more rights to the page than it has.
    Fault {
        /// The vCPU that stopped.
        vcpu: Vcpu,
        /// The page.
        page: Page,
        /// The access that it needs.
        fault: Fault,
    },
    /// The operation of a trapped instruction (see [`Action::Trap`]).
    Operate {
        /// The vCPU of the instruction.
        vcpu: Vcpu,
        /// The page.
        page: Page,
        /// The decoded store or atomic.
        operation: Operation,
    },
    /// The instruction that faulted has retired. The monitor must report this at the latest when [`Action::Kick`] asks for it. A node also
    /// kicks a vCPU that waits for another page, since that fault may be a later instruction's. Until the report, the node counts later
    /// instructions as part of this one.
    Retired {
        /// The vCPU of the instruction.
        vcpu: Vcpu,
    },
    /// A message arrives. Messages of one sender must arrive once each, in the order in which they were sent.
    Message(Message),
    /// The time of [`crate::Node::deadline`] has passed.
    Timer,
    /// The node may drop its copy of the page.
    Discard {
        /// The page.
        page: Page,
    },
    /// Requests another mode for the page. Pages of code and page tables must be [`Mode::Invalidate`].
    Advise {
        /// The page.
        page: Page,
        /// The requested mode.
        mode: Mode,
    },
    /// Requests that the sequencer's role moves. A node ignores it unless it is the sequencer and nothing binds the role to it now.
    MoveToken {
        /// The new sequencer.
        to: NodeId,
    },
}

/// An action that a node requests. The monitor performs actions in their order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends the message.
    Send(Message),
    /// Resumes the vCPU, which executes its instruction (again).
    Resume {
        /// The vCPU to resume.
        vcpu: Vcpu,
    },
    /// Keeps the vCPU stopped. The monitor decodes its instruction and answers with [`Event::Operate`].
    Trap {
        /// The vCPU that is trapped.
        vcpu: Vcpu,
        /// The page that the instruction writes to.
        page: Page,
    },
    /// An operation is complete, and its instruction retires: the monitor advances the vCPU past it.
    Completed {
        /// The vCPU of the instruction.
        vcpu: Vcpu,
        /// The value before an atomic.
        old: u64,
    },
    /// Other nodes wait for a page that this vCPU was granted. The monitor makes the vCPU retire its instruction, by running or emulating
    /// it, and
    /// reports [`Event::Retired`].
    Kick {
        /// The vCPU to kick.
        vcpu: Vcpu,
    },
    /// A page that this vCPU was granted goes to an older instruction (wound-wait). The vCPU's instruction will fault again.
    Wounded {
        /// The vCPU that loses the page.
        vcpu: Vcpu,
        /// The page.
        page: Page,
    },
}
