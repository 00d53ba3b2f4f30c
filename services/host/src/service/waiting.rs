//! Monitors that wait for incoming VMs: their announcement to the cluster service, and their lookup by host name.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use control_api::cluster::{ClusterError, proto as cluster_proto};
use control_api::host::proto;
use tonic::Status;
use tonic::codegen::tokio_stream::Stream;

use crate::cluster::{ClusterDirectory, Waits};

/// Limit of a lookup's retries: the cluster service may not know a monitor yet that has just begun to wait.
const NEW_MONITOR_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn no_cluster() -> Status {
    Status::failed_precondition(
        "This host's daemon has no cluster service, so hosts have no names: start it with --cluster HOST:PORT --name HOST, or use addresses",
    )
}

/// The response stream of a waiting monitor. Its only message has the host name and address under which other hosts find the monitor.
/// The announcement is withdrawn when the stream is dropped, at the latest when the monitor disconnects.
pub struct Announcement {
    first: Option<proto::AwaitVmReply>,
    _waits: Waits,
}

impl Stream for Announcement {
    type Item = Result<proto::AwaitVmReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // No waker is registered for a second message: the stream stays pending until the connection ends and drops it.
        self.first.take().map_or(Poll::Pending, |first| Poll::Ready(Some(Ok(first))))
    }
}

pub(super) fn announce(
    cluster: &Arc<ClusterDirectory>,
    request: &proto::AwaitVmRequest,
) -> Result<Announcement, Status> {
    let wrong = |_| Status::invalid_argument(format!("{:?} is no IP address with a port", request.address));
    let address = request.address.parse().map_err(wrong)?;
    let waits = Waits::begin(cluster, &request.vm, address).map_err(Status::failed_precondition)?;
    let first =
        proto::AwaitVmReply { host: cluster.host_name().to_owned(), address: waits.address.to_string() };
    Ok(Announcement { first: Some(first), _waits: waits })
}

pub(super) async fn find(
    cluster: &ClusterDirectory,
    request: &proto::FindWaitingRequest,
) -> Result<proto::FindWaitingReply, Status> {
    let service = cluster.service();
    let asked = cluster_proto::FindWaitingRequest { vm: request.vm.clone(), host: request.host.clone() };
    let until = Instant::now() + NEW_MONITOR_TIMEOUT;
    loop {
        let found = async {
            let mut client = service.connect().await?;
            service.within("FindWaiting", client.find_waiting(asked.clone())).await
        };
        match found.await {
            Ok(reply) => return Ok(proto::FindWaitingReply { address: reply.address }),
            Err(error) if error.is_refusal() && Instant::now() < until => {
                tokio::time::sleep(RETRY_INTERVAL).await
            }
            Err(ClusterError::Refused { reason, .. }) => return Err(Status::not_found(reason)),
            Err(error) => {
                let text = format!("Where a monitor waits on host {} isn't known: {error}", request.host);
                return Err(Status::failed_precondition(text));
            }
        }
    }
}
