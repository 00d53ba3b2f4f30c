//! The role of this instance: it leads, or it follows another instance.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use control_api::cluster::{LEADER, proto};
use tonic::Status;
use tonic::metadata::MetadataValue;

use crate::keeper::Handle;

/// The role, for tasks that answer requests. The election's thread changes it.
#[derive(Debug)]
pub(crate) struct Roles {
    /// This instance's address, as hosts and clients reach it.
    instance: String,
    store: &'static str,
    place: String,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    /// The keeper, the thread of the registry, if this instance leads. Its answers count while its term holds.
    leading: Option<Handle>,
    /// The leader's address; `None`: not known.
    leader: Option<String>,
    /// The last known term.
    term: u64,
    terms_led: u64,
    /// The store's last error; `None`: its last request succeeded.
    trouble: Option<String>,
}

impl Roles {
    /// The only instance of a service, on a store of its own.
    pub fn alone(instance: String, place: String, handle: Handle) -> Arc<Self> {
        let leader = Some(instance.clone());
        let now = Now { leading: Some(handle), leader, ..Now::default() };
        Arc::new(Self { instance, store: "redb", place, now: Mutex::new(now) })
    }

    /// One of several instances on a shared store. It doesn't lead yet.
    pub fn one_of_several(instance: String, place: String) -> Arc<Self> {
        Arc::new(Self { instance, store: "etcd", place, now: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to lead.
    pub fn lead(&self, handle: Handle) {
        let mut now = self.lock();
        now.term = handle.term.number();
        now.leader = Some(self.instance.clone());
        now.terms_led += 1;
        now.leading = Some(handle);
    }

    /// Stops to lead. `leader` is the leading instance's address and term, if known. Returns whether the leader
    /// changed.
    pub fn follow(&self, leader: Option<(String, u64)>) -> bool {
        let mut now = self.lock();
        let was = now.leading.take().is_some();
        let (leader, term) = leader.map_or((None, now.term), |(leader, term)| (Some(leader), term));
        let news = was || now.leader != leader;
        (now.leader, now.term) = (leader, term);
        news
    }

    /// Records the store's error; `None`: a request succeeded. Returns whether the store became unreachable, or
    /// reachable again.
    pub fn trouble(&self, trouble: Option<String>) -> bool {
        let mut now = self.lock();
        let news = now.trouble.is_some() != trouble.is_some();
        now.trouble = trouble;
        news
    }

    /// The keeper, the thread of the registry, if this instance leads.
    ///
    /// # Errors
    /// If it doesn't lead: the message and the metadata have the leader's address, if known.
    pub fn leading(&self) -> Result<Handle, Status> {
        let now = self.lock();
        if let Some(handle) = now.leading.as_ref().filter(|handle| handle.term.holds()) {
            return Ok(handle.clone());
        }
        let leader = now.leader.as_deref().filter(|leader| *leader != self.instance);
        let text = match (leader, &now.trouble) {
            (Some(leader), _) => {
                format!("This instance of the cluster service doesn't lead: {leader} does, ask there")
            }
            (None, Some(trouble)) => {
                format!(
                    "No instance of the cluster service leads, as far as this one knows, and it can't: {trouble}"
                )
            }
            (None, None) => {
                "No instance of the cluster service leads at the moment: one will in some seconds, ask again"
                    .to_owned()
            }
        };
        Err(Self::not_leading(text, leader.unwrap_or_default()))
    }

    /// The error of a request to an instance that doesn't lead. Nothing was changed. `leader` may be empty.
    pub fn not_leading(text: String, leader: &str) -> Status {
        let mut status = Status::unavailable(text);
        // An invalid header value can't occur: an address is ASCII.
        let address = leader.parse().unwrap_or_else(|_| MetadataValue::from_static(""));
        status.metadata_mut().insert(LEADER, address);
        status
    }

    /// This instance's role, as `causeway cluster status` shows it.
    pub fn role(&self) -> proto::Role {
        let now = self.lock();
        let handle = now.leading.as_ref().filter(|handle| handle.term.holds());
        let left = handle.and_then(|handle| handle.term.left()).unwrap_or_default();
        let leader = now.leader.clone().filter(|leader| handle.is_some() || *leader != self.instance);
        proto::Role {
            leads: handle.is_some(),
            instance: self.instance.clone(),
            leader: leader.unwrap_or_default(),
            store: self.store.to_owned(),
            store_place: self.place.clone(),
            store_answers: now.trouble.is_none(),
            store_error: now.trouble.clone().unwrap_or_default(),
            term: now.term,
            lease_milliseconds: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
            terms_led: now.terms_led,
        }
    }
}
