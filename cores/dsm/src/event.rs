//! What goes into a node and what comes out.

use crate::message::Message;
use crate::names::{Mode, NodeId, Page, Vcpu};
use crate::operation::Operation;

/// What an instruction wanted when it faulted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// To load.
    Read,
    /// To store.
    Write,
    /// To read and write as one.
    Atomic,
}

/// What happens to a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A virtual CPU can't go on: its instruction needs more of a page than it has.
    Fault {
        /// Which.
        vcpu: Vcpu,
        /// The page.
        page: Page,
        /// What for.
        fault: Fault,
    },
    /// The instruction that was trapped (see [`Action::Trap`]) does this to the page.
    Operate {
        /// Which virtual CPU.
        vcpu: Vcpu,
        /// The page.
        page: Page,
        /// What it does.
        operation: Operation,
    },
    /// The instruction that faulted has retired. To be told at the latest when [`Action::Kick`] asks, which it also does while the virtual CPU
    /// waits for another page: that may be a later instruction's. Until it is told, later instructions count as part of this one.
    Retired {
        /// Which virtual CPU.
        vcpu: Vcpu,
    },
    /// A message arrives. Messages of one sender must arrive in the order they were sent, each once.
    Message(Message),
    /// The time of [`crate::Node::deadline`] has come.
    Timer,
    /// The page is not needed here for now.
    Discard {
        /// The page.
        page: Page,
    },
    /// The page should be kept in another mode: code and page tables must be [`Mode::Invalidate`].
    Advise {
        /// The page.
        page: Page,
        /// The mode.
        mode: Mode,
    },
    /// The token should go to another node. Nothing happens unless this node has it and can part with it now.
    MoveToken {
        /// To which.
        to: NodeId,
    },
}

/// What is to be done, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send it.
    Send(Message),
    /// The virtual CPU can go on: its instruction is to be carried out (again).
    Resume {
        /// Which.
        vcpu: Vcpu,
    },
    /// The virtual CPU stays stopped; its instruction is to be decoded and given back as [`Event::Operate`].
    Trap {
        /// Which.
        vcpu: Vcpu,
        /// The page that it writes to.
        page: Page,
    },
    /// An operation is done, which retires its instruction: step over it. `old` is the value before.
    Completed {
        /// Which virtual CPU.
        vcpu: Vcpu,
        /// The value before an atomic.
        old: u64,
    },
    /// Others wait for what this virtual CPU was granted: make it retire its instruction, by running or by emulating it, and tell
    /// [`Event::Retired`].
    Kick {
        /// Which.
        vcpu: Vcpu,
    },
    /// A page that was granted to this virtual CPU goes to an older instruction; its own will fault again.
    Wounded {
        /// Which.
        vcpu: Vcpu,
        /// The page.
        page: Page,
    },
}
