//! Metrics over HTTP, gathered when asked for.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use control_api::cluster::proto;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use nomad::HostId;
use telemetry::metrics::{Family, encode};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::keeper::Keeper;
use crate::roles::Roles;

/// Readers at once.
const READERS: usize = 16;
/// No connection lasts longer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until the runtime ends.
pub(crate) async fn serve(listener: TcpListener, roles: Arc<Roles>) {
    let readers = Arc::new(Semaphore::new(READERS));
    loop {
        let Ok(permit) = Arc::clone(&readers).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "A connection for metrics can't be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let roles = Arc::clone(&roles);
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let roles = Arc::clone(&roles);
                async move { Ok::<_, Infallible>(respond(&request, &roles).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(5))
                .max_buf_size(16 << 10)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            // What a reader does wrong is its own affair.
            let _ = tokio::time::timeout(CONNECTION_TIMEOUT, connection).await;
            drop(permit);
        });
    }
}

async fn respond(request: &Request<hyper::body::Incoming>, roles: &Roles) -> Response<Full<Bytes>> {
    let (status, kind, text) = if request.method() != Method::GET || request.uri().path() != "/metrics" {
        (StatusCode::NOT_FOUND, "text/plain", "There is GET /metrics and nothing else\n".to_owned())
    } else {
        let mut all = of_role(&roles.role());
        // Hosts and VMs are shown by the instance that leads.
        if let Ok(keeper) = roles.leading()
            && let Ok(families) = keeper.question(|keeper, _| families(keeper)).await
        {
            all.extend(families);
        }
        match encode(&all, &[]) {
            Ok(text) => (StatusCode::OK, telemetry::metrics::CONTENT_TYPE, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{error}\n")),
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// What every instance shows.
fn of_role(role: &proto::Role) -> Vec<Family> {
    let mut families = Vec::new();
    let labels = [("store", role.store.as_str()), ("instance", role.instance.as_str())];
    for (name, help, value) in [
        ("causeway_cluster_leads", "Whether this instance leads.", u64::from(role.leads)),
        (
            "causeway_cluster_leader_known",
            "Whether this instance knows one that leads.",
            u64::from(!role.leader.is_empty()),
        ),
        (
            "causeway_cluster_term",
            "The last term of leadership that this instance has seen; 0: it is alone.",
            role.term,
        ),
        (
            "causeway_cluster_store_answers",
            "Whether the store answered when it was asked last.",
            u64::from(role.store_answers),
        ),
        (
            "causeway_cluster_lease_milliseconds",
            "How much longer this instance leads without a renewal of its lease.",
            role.lease_milliseconds,
        ),
    ] {
        let mut family = Family::gauge(name, help);
        family.add_count(&labels, value);
        families.push(family);
    }
    let mut family =
        Family::counter("causeway_cluster_terms_led_total", "How often this instance has become leader.");
    family.add_count(&labels, role.terms_led);
    families.push(family);
    families
}

fn families(keeper: &mut Keeper) -> Vec<Family> {
    let (registry, state) = (&keeper.registry, keeper.registry.state());
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let known = state.hosts.iter().filter(|(_, about)| !about.is_forgotten()).map(|(host, _)| *host);
    let hosts: Vec<HostId> = known.collect();
    let mut families = Vec::new();
    let mut gauge = |name: &str, help: &str, value: u64| {
        let mut family = Family::gauge(name, help);
        family.add_count(&[], value);
        families.push(family);
    };
    let heard = hosts.iter().filter(|host| registry.has_lease(**host)).count();
    gauge("causeway_cluster_hosts", "Hosts that have ever registered.", count(hosts.len()));
    gauge("causeway_cluster_hosts_heard", "Hosts whose lease runs.", count(heard));
    let alive = state.ledger.vms.values().filter(|owner| owner.alive).count();
    gauge("causeway_cluster_vms", "VMs that run, as far as their hosts have reported.", count(alive));
    gauge(
        "causeway_cluster_vms_lost",
        "VMs whose host was started again since, and that haven't come back.",
        count(state.ledger.vms.len() - alive),
    );
    gauge(
        "causeway_cluster_links",
        "Pairs of VMs on different hosts with connections.",
        count(state.ledger.links.len()),
    );
    gauge(
        "causeway_cluster_migrations",
        "Migrations that aren't over.",
        count(state.ledger.migrations.len()),
    );
    gauge("causeway_cluster_watchers", "Clients that follow changes.", count(keeper.watchers()));
    families.extend(counters(keeper));
    let (registry, state) = (&keeper.registry, keeper.registry.state());
    let mut up = Family::gauge("causeway_cluster_host_heard", "Whether a host's lease runs.");
    for (host, about) in state.hosts.iter().filter(|(_, about)| !about.is_forgotten()) {
        up.add_count(&[("host", about.name.as_str())], u64::from(registry.has_lease(*host)));
    }
    families.push(up);
    families
}

fn counters(keeper: &Keeper) -> Vec<Family> {
    let registry = &keeper.registry;
    let counters = [
        (
            "causeway_cluster_transactions_total",
            "Changes of the database by requests and timers.",
            registry.state().revision,
        ),
        (
            "causeway_cluster_writes_total",
            "Writes of the database since this instance began to lead; each brings all changes that waited for it.",
            registry.writes(),
        ),
        (
            "causeway_cluster_leases_lost_total",
            "Leases of hosts that have run out since this instance began to lead.",
            registry.leases_lost(),
        ),
        (
            "causeway_cluster_slow_watchers_total",
            "Watchers that were dropped because they took nothing.",
            keeper.slow_watchers,
        ),
        (
            "causeway_cluster_lost_messages_total",
            "Messages to hosts that weren't there or took nothing.",
            keeper.lost_messages,
        ),
    ];
    let family = |(name, help, value)| {
        let mut family = Family::counter(name, help);
        family.add_count(&[], value);
        family
    };
    counters.into_iter().map(family).collect()
}
