//! Which part this instance has: it leads, or another does.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use control_api::cluster::{LEADER, proto};
use tonic::Status;
use tonic::metadata::MetadataValue;

use crate::keeper::Handle;

/// The part, for those who answer requests. It is changed by whoever runs for leader.
#[derive(Debug)]
pub(crate) struct Roles {
    /// Own address, as others reach it.
    instance: String,
    store: &'static str,
    place: String,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    /// Whose answers count, while its term holds.
    leading: Option<Handle>,
    /// Who leads, as far as is known.
    leader: Option<String>,
    /// The last term that was seen.
    term: u64,
    terms_led: u64,
    /// What the store has said instead of an answer.
    trouble: Option<String>,
}

impl Roles {
    /// An instance that has no others beside it.
    pub fn alone(instance: String, place: String, handle: Handle) -> Arc<Self> {
        let leader = Some(instance.clone());
        let now = Now { leading: Some(handle), leader, ..Now::default() };
        Arc::new(Self { instance, store: "redb", place, now: Mutex::new(now) })
    }

    /// One of several, that doesn't lead yet.
    pub fn one_of_several(instance: String, place: String) -> Arc<Self> {
        Arc::new(Self { instance, store: "etcd", place, now: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It leads from now on.
    pub fn lead(&self, handle: Handle) {
        let mut now = self.lock();
        now.term = handle.term.number();
        now.leader = Some(self.instance.clone());
        now.terms_led += 1;
        now.leading = Some(handle);
    }

    /// It doesn't lead; who does. Whether that is news.
    pub fn follow(&self, leader: Option<(String, u64)>) -> bool {
        let mut now = self.lock();
        let was = now.leading.take().is_some();
        let (leader, term) = leader.map_or((None, now.term), |(leader, term)| (Some(leader), term));
        let news = was || now.leader != leader;
        (now.leader, now.term) = (leader, term);
        news
    }

    /// What the store has said instead of an answer; `None`: it has answered. Whether that is news.
    pub fn trouble(&self, trouble: Option<String>) -> bool {
        let mut now = self.lock();
        let news = now.trouble.is_some() != trouble.is_some();
        now.trouble = trouble;
        news
    }

    /// The keeper, where this instance leads.
    ///
    /// # Errors
    /// Where it doesn't: who does, for people and in the metadata.
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

    /// Nothing was done, because another instance leads: its address, or nothing where none is known.
    pub fn not_leading(text: String, leader: &str) -> Status {
        let mut status = Status::unavailable(text);
        // An address is ASCII.
        let address = leader.parse().unwrap_or_else(|_| MetadataValue::from_static(""));
        status.metadata_mut().insert(LEADER, address);
        status
    }

    /// For whoever asks.
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
