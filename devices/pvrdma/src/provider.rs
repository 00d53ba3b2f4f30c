//! The guest ABI as the engine's provider.

use std::marker::PhantomData;

use dma::Dma;
use hca::provider::Provider;

use crate::completion_queue::PvrdmaCompletionQueue;
use crate::receive_queue::PvrdmaReceiveQueue;
use crate::send_queue::PvrdmaSendQueue;

/// PVRDMA's rings over guest memory `M`.
#[derive(Debug)]
pub struct Pvrdma<M>(PhantomData<M>);

impl<M: Dma + Clone + 'static> Provider for Pvrdma<M> {
    type Memory = M;
    type SendQueue = PvrdmaSendQueue;
    type ReceiveQueue = PvrdmaReceiveQueue;
    type CompletionQueue = PvrdmaCompletionQueue;
}
