//! etcd, by its v3 API.
//!
//! There is one client per member: a request that gets no answer goes to the next member with the next request, and requests that change nothing
//! by being said twice are tried at each. A member that has lost the others refuses at once (`hasleader`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, DeleteOptions, Error, EventType, GetOptions, PutOptions,
    TlsOptions, Txn, TxnOp, WatchOptions,
};
use tokio::runtime::Runtime;
use tonic::Code;
use tonic::transport::{Certificate, Identity};

use crate::etcd_config::{EtcdConfig, EtcdError};
use crate::kv::{Entry, Guard, Kv, KvError, Lease, Operation};

/// Keys that are asked for at once: none is larger than 64 KiB.
const PAGE: i64 = 512;
/// An answer isn't larger.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// Connections are looked after this often, and given up after as long without an answer.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// See the module.
pub struct Etcd {
    runtime: Runtime,
    config: EtcdConfig,
    options: ConnectOptions,
    members: Mutex<Members>,
}

struct Members {
    /// The member that is asked next.
    next: usize,
    clients: Vec<Option<Client>>,
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Etcd").field("members", &self.config.members).finish_non_exhaustive()
    }
}

impl Etcd {
    /// Sets the client up; nothing is connected yet.
    ///
    /// # Errors
    /// When files can't be read, addresses are none, or threads can't be had.
    pub fn new(config: EtcdConfig) -> Result<Self, EtcdError> {
        config.check()?;
        let mut options = ConnectOptions::new()
            .with_require_leader(true)
            .with_connect_timeout(KEEP_ALIVE)
            .with_keep_alive(KEEP_ALIVE, KEEP_ALIVE)
            .with_keep_alive_while_idle(true);
        if let Some((user, password)) = &config.user {
            options = options.with_user(user, password).with_auto_token_refresh(true);
        }
        if let Some(tls) = &config.tls {
            let mut with = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.authority));
            if let Some((certificate, key)) = &tls.identity {
                with = with.identity(Identity::from_pem(certificate, key));
            }
            options = options.with_tls(with);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_io()
            .enable_time()
            .build()
            .map_err(EtcdError::SetUp)?;
        let members = Members { next: 0, clients: vec![None; config.members.len()] };
        Ok(Self { runtime, config, options, members: Mutex::new(members) })
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn away(&self, reason: impl std::fmt::Display) -> KvError {
        KvError::Away { place: self.place(), reason: reason.to_string() }
    }

    /// What an error means.
    fn error(&self, error: &Error) -> KvError {
        match error {
            Error::GRpcStatus(status) => {
                let reason = status.message().to_owned();
                match status.code() {
                    // It says so before it does anything, and keeps to it.
                    Code::InvalidArgument
                    | Code::ResourceExhausted
                    | Code::FailedPrecondition
                    | Code::PermissionDenied
                    | Code::Unauthenticated
                    | Code::Unimplemented
                    | Code::OutOfRange
                    | Code::NotFound => KvError::Refused { place: self.place(), reason },
                    code => self.away(if reason.is_empty() { format!("{code:?}") } else { reason }),
                }
            }
            Error::InvalidArgs(reason) => KvError::Refused { place: self.place(), reason: reason.clone() },
            other => {
                // The transport's own sentence is at the end of the chain.
                let mut cause: &dyn std::error::Error = other;
                while let Some(source) = cause.source() {
                    cause = source;
                }
                self.away(cause)
            }
        }
    }

    /// One request to one member, in the time that is given. Where it doesn't answer, the next request goes to the next member.
    fn once<T>(
        &self,
        within: Duration,
        request: impl AsyncFnOnce(Client) -> Result<T, Error>,
    ) -> Result<T, KvError> {
        let (place, client) = {
            let members = self.members();
            let place = members.next % members.clients.len();
            (place, members.clients[place].clone())
        };
        let result = self.runtime.block_on(async {
            tokio::time::timeout(within, async {
                let client = match client {
                    Some(client) => client,
                    None => {
                        Client::connect([&self.config.members[place]], Some(self.options.clone())).await?
                    }
                };
                self.members().clients[place] = Some(client.clone());
                request(client).await
            })
            .await
        });
        let result = match result {
            Ok(result) => result.map_err(|error| self.error(&error)),
            Err(_) => Err(self.away(format!("nothing came within {within:?}"))),
        };
        if let Err(KvError::Away { .. }) = &result {
            let mut members = self.members();
            // A connection that hangs isn't waited for again.
            members.clients[place] = None;
            if members.next == place {
                members.next = (place + 1) % members.clients.len();
            }
        }
        result
    }

    /// A request that may be said twice, tried at each member until one answers.
    fn any<T>(
        &self,
        within: Duration,
        request: impl AsyncFn(Client) -> Result<T, Error>,
    ) -> Result<T, KvError> {
        let count = u32::try_from(self.config.members.len()).unwrap_or(u32::MAX);
        let mut result = self.once(within / count, &request);
        for _ in 1..count {
            if !matches!(result, Err(KvError::Away { .. })) {
                break;
            }
            result = self.once(within / count, &request);
        }
        result
    }

    fn entry(&self, found: &etcd_client::KeyValue) -> Result<Entry, KvError> {
        let key = String::from_utf8(found.key().to_vec());
        let foreign = |_| KvError::Refused {
            place: self.place(),
            reason: "a key under the prefix is no text".to_owned(),
        };
        Ok(Entry {
            key: key.map_err(foreign)?,
            value: found.value().to_vec(),
            created: found.create_revision(),
            modified: found.mod_revision(),
        })
    }
}

fn compare(guard: &Guard) -> Compare {
    match guard {
        Guard::Created(key, revision) => Compare::create_revision(key.as_str(), CompareOp::Equal, *revision),
        Guard::Modified(key, revision) => Compare::mod_revision(key.as_str(), CompareOp::Equal, *revision),
    }
}

fn operation(operation: &Operation) -> TxnOp {
    match operation {
        Operation::Put { key, value, lease } => {
            let options = lease.map(|lease| PutOptions::new().with_lease(lease));
            TxnOp::put(key.as_str(), value.as_slice(), options)
        }
        Operation::Delete(key) => TxnOp::delete(key.as_str(), None),
        Operation::DeleteAll(prefix) => {
            TxnOp::delete(prefix.as_str(), Some(DeleteOptions::new().with_prefix()))
        }
    }
}

/// Whole seconds, at least as long.
fn seconds(lasts: Duration) -> i64 {
    i64::try_from(lasts.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
}

impl Kv for Etcd {
    fn place(&self) -> String {
        self.config.members.join(",")
    }

    fn grant(&self, lasts: Duration, within: Duration) -> Result<Lease, KvError> {
        // Said twice, the one that isn't used ends by itself.
        let given = self.any(within, async |mut client| client.lease_grant(seconds(lasts), None).await)?;
        let lasts = Duration::from_secs(u64::try_from(given.ttl()).unwrap_or(0));
        Ok(Lease { id: given.id(), lasts })
    }

    fn renew(&self, lease: i64, within: Duration) -> Result<Option<Duration>, KvError> {
        let left = self.any(within, async |mut client| {
            let (mut keeper, mut answers) = match client.lease_keep_alive(lease).await {
                Ok(opened) => opened,
                // What the client makes of an answer that leaves no time.
                Err(Error::LeaseKeepAliveError(reason)) if reason == "lease not found" => return Ok(0),
                Err(error) => return Err(error),
            };
            // The client keeps the first answer, in which the time is, for itself.
            keeper.keep_alive().await?;
            let answer = answers.message().await?;
            let none = || Error::LeaseKeepAliveError("no answer came".to_owned());
            answer.map(|answer| answer.ttl()).ok_or_else(none)
        })?;
        Ok(u64::try_from(left).ok().filter(|left| *left > 0).map(Duration::from_secs))
    }

    fn revoke(&self, lease: i64, within: Duration) -> Result<(), KvError> {
        match self.any(within, async |mut client| client.lease_revoke(lease).await) {
            Err(KvError::Refused { reason, .. }) if reason.contains("lease not found") => Ok(()),
            other => other.map(drop),
        }
    }

    fn get(&self, key: &str, within: Duration) -> Result<Option<Entry>, KvError> {
        let found = self.any(within, async |mut client| client.get(key, None).await)?;
        found.kvs().first().map(|found| self.entry(found)).transpose()
    }

    fn range(&self, prefix: &str, within: Duration) -> Result<Vec<Entry>, KvError> {
        // The first key that doesn't begin so: prefixes end with a slash.
        let mut end = prefix.as_bytes().to_vec();
        if let Some(last) = end.last_mut() {
            *last = last.wrapping_add(1);
        }
        let (mut from, mut revision, mut entries) = (prefix.as_bytes().to_vec(), 0, Vec::new());
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE).with_revision(revision);
            let page = self.any(within, async |client| {
                let mut keys = client.kv_client().max_decoding_message_size(MAX_RESPONSE_BYTES);
                keys.get(from.clone(), Some(options.clone())).await
            })?;
            for found in page.kvs() {
                entries.push(self.entry(found)?);
            }
            revision = page
                .header()
                .map_or(revision, |header| if revision == 0 { header.revision() } else { revision });
            match page.kvs().last() {
                Some(last) if page.more() => {
                    from = last.key().to_vec();
                    // The next key in order.
                    from.push(0);
                }
                _ => return Ok(entries),
            }
        }
    }

    fn transact(
        &self,
        guards: &[Guard],
        operations: &[Operation],
        within: Duration,
    ) -> Result<Option<i64>, KvError> {
        let compares: Vec<_> = guards.iter().map(compare).collect();
        let operations: Vec<_> = operations.iter().map(operation).collect();
        let transaction = Txn::new().when(compares).and_then(operations);
        // Once: said again it could be refused by what it did itself.
        let done = self.once(within, async |mut client| client.txn(transaction).await)?;
        let revision = done.header().map_or(0, etcd_client::ResponseHeader::revision);
        Ok(done.succeeded().then_some(revision))
    }

    fn wait_gone(&self, key: &str, since: i64, within: Duration) -> Result<bool, KvError> {
        self.once(within * 2, async |mut client| {
            let options = WatchOptions::new().with_start_revision(since + 1);
            let until = tokio::time::Instant::now() + within;
            let watch = async {
                let mut events = client.watch(key, Some(options)).await?;
                while let Some(answer) = events.message().await? {
                    if answer.canceled() {
                        // What it has missed is compacted: looked at anew.
                        return Ok(true);
                    }
                    if answer.events().iter().any(|event| event.event_type() == EventType::Delete) {
                        return Ok(true);
                    }
                }
                Err(Error::WatchError("the watch has ended".to_owned()))
            };
            match tokio::time::timeout_at(until, watch).await {
                Ok(gone) => gone,
                Err(_) => Ok(false),
            }
        })
    }
}
