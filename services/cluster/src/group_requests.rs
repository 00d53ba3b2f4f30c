//! VMs that are to move together, each with a request of its own: the requests, and their outcome. They are in memory only: nothing begins
//! before all are there, and they are repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nomad::MigrationId;
use nomad::config::MAX_VMS_PER_MIGRATION;

use crate::refusal::Refusal;

/// A VM whose last request is older doesn't take part any more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// An outcome is kept for so long, for members that repeat their requests.
const OUTCOME_RETENTION: Duration = Duration::from_secs(30);
/// Groups that gather at a time.
const MAX_PENDING_GROUPS: usize = 1024;

/// The migration, or why it can't begin.
type Outcome = Result<MigrationId, String>;

/// A member's request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MemberRequest {
    host: String,
    /// Which attempt of the VM's it is.
    attempt: u64,
    last: Instant,
}

/// A group that gathers.
#[derive(Debug, Default)]
struct Group {
    asked: BTreeMap<String, MemberRequest>,
    /// For requests that are repeated in the same attempt.
    outcome: Option<(Outcome, Instant)>,
}

/// The answer to a VM's request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Requested {
    /// These haven't asked.
    Missing(Vec<String>),
    /// All have: the caller begins the migration, of these VMs to these hosts, and reports its outcome to [`GroupRequests::ended`].
    Complete(Vec<(String, String)>),
    /// It has begun.
    Begun(MigrationId),
}

/// All groups that gather, by their members' names.
#[derive(Debug, Default)]
pub(crate) struct GroupRequests(BTreeMap<BTreeSet<String>, Group>);

impl GroupRequests {
    /// A VM asks to move to a host, together with others. The caller has checked the names against the cluster. A repeated request of the same
    /// attempt gets the same outcome; another attempt is of another migration.
    ///
    /// # Errors
    /// When the names can't be a group, another group with one of them gathers, or the migration couldn't begin.
    pub fn request(
        &mut self,
        vm: &str,
        host: &str,
        attempt: u64,
        together: &[String],
        now: Instant,
    ) -> Result<Requested, Refusal> {
        let names: BTreeSet<String> = together.iter().cloned().collect();
        if names.len() != together.len() || names.len() > MAX_VMS_PER_MIGRATION || !names.contains(vm) {
            return Err(Refusal::Invalid(format!(
                "VMs that move together are 1 to {MAX_VMS_PER_MIGRATION}, each named once, and the one that asks is one of them"
            )));
        }
        self.forget(now);
        if let Some(other) = self.0.iter().find_map(|(others, group)| {
            let open = *others != names && group.outcome.is_none();
            group.asked.keys().find(|asked| open && names.contains(*asked))
        }) {
            return Err(Refusal::Conflict(format!(
                "VM {vm} can't move in this group: VM {other} has asked to move together with others"
            )));
        }
        if self.0.len() >= MAX_PENDING_GROUPS && !self.0.contains_key(&names) {
            return Err(Refusal::TooMany(format!(
                "{MAX_PENDING_GROUPS} groups of VMs wait to move already; try again later"
            )));
        }
        let group = self.0.entry(names.clone()).or_default();
        if let Some((outcome, _)) = &group.outcome {
            if group.asked.get(vm).is_some_and(|member| member.attempt == attempt) {
                return outcome.clone().map(Requested::Begun).map_err(Refusal::Conflict);
            }
            *group = Group::default();
        }
        group.asked.insert(vm.to_owned(), MemberRequest { host: host.to_owned(), attempt, last: now });
        let missing: Vec<String> =
            names.iter().filter(|name| !group.asked.contains_key(*name)).cloned().collect();
        if missing.is_empty() {
            let requests = group.asked.iter().map(|(vm, member)| (vm.clone(), member.host.clone()));
            return Ok(Requested::Complete(requests.collect()));
        }
        Ok(Requested::Missing(missing))
    }

    /// What came of a complete group.
    pub fn ended(&mut self, together: &[String], outcome: Outcome, now: Instant) {
        let names: BTreeSet<String> = together.iter().cloned().collect();
        if let Some(group) = self.0.get_mut(&names) {
            group.outcome = Some((outcome, now));
        }
    }

    /// The migration of a complete group couldn't be written: it begins with the next request of a member.
    pub fn retract(&mut self, together: &[String]) {
        let names: BTreeSet<String> = together.iter().cloned().collect();
        if let Some(group) = self.0.get_mut(&names) {
            group.outcome = None;
        }
    }

    /// A VM doesn't ask any more. Nothing where its group is complete.
    pub fn withdraw(&mut self, vm: &str) {
        self.0.retain(|_, group| {
            if group.outcome.is_none() {
                group.asked.remove(vm);
            }
            !group.asked.is_empty()
        });
    }

    fn forget(&mut self, now: Instant) {
        self.0.retain(|_, group| match &group.outcome {
            Some((_, at)) => now.duration_since(*at) < OUTCOME_RETENTION,
            None => {
                group.asked.retain(|_, member| now.duration_since(member.last) < REQUEST_TIMEOUT);
                !group.asked.is_empty()
            }
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    /// It begins when all have asked, each with its own host, in whatever order the names are; each hears of it as often as it asks in that try.
    #[test]
    fn a_group_is_complete_when_all_have_asked() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        let reply = group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["b"])));
        let reply = group_requests.request("b", "h1", 5, &names(&["b", "a"]), now).unwrap();
        let requests = vec![("a".to_owned(), "h2".to_owned()), ("b".to_owned(), "h1".to_owned())];
        assert_eq!(reply, Requested::Complete(requests));
        group_requests.ended(&names(&["b", "a"]), Ok(MigrationId(7)), now);
        for (vm, host, attempt) in [("a", "h2", 1), ("a", "h2", 1), ("b", "h1", 5)] {
            let reply = group_requests.request(vm, host, attempt, &names(&["a", "b"]), now).unwrap();
            assert_eq!(reply, Requested::Begun(MigrationId(7)), "an answer may be lost");
        }
        // The next one of the same VMs is another one, for either of them.
        let reply = group_requests.request("b", "h1", 6, &names(&["a", "b"]), now).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["a"])));
        let reply = group_requests.request("a", "h2", 2, &names(&["a", "b"]), now).unwrap();
        assert!(matches!(reply, Requested::Complete(_)), "{reply:?}");
    }

    /// A refusal is everybody's, and nobody's who tries again.
    #[test]
    fn all_members_get_the_refusal() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        group_requests.request("b", "h2", 1, &names(&["a", "b"]), now).unwrap();
        group_requests.ended(&names(&["a", "b"]), Err("no".to_owned()), now);
        let error = group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap_err();
        assert_eq!(error.to_string(), "no");
        let reply = group_requests.request("b", "h2", 2, &names(&["a", "b"]), now).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["a"])), "what came of the try before isn't this one's");
        let reply =
            group_requests.request("a", "h2", 1, &names(&["a", "b"]), now + OUTCOME_RETENTION).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["b"])), "nothing is kept for ever");
    }

    /// Who stops asking isn't taken for one that wants to move, and keeps no others from it.
    #[test]
    fn a_member_without_recent_requests_does_not_take_part() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        let error = group_requests.request("b", "h2", 1, &names(&["b", "a", "c"]), now).unwrap_err();
        assert!(error.to_string().contains("VM a has asked"), "{error}");
        let reply = group_requests.request("b", "h2", 1, &names(&["a", "b"]), now + REQUEST_TIMEOUT).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["a"])));
        let reply =
            group_requests.request("a", "h2", 2, &names(&["a", "c"]), now + REQUEST_TIMEOUT * 2).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["c"])));
    }

    /// A withdrawn request no longer counts. Once the group's migration has begun, a withdrawal changes nothing: only the coordinator ends
    /// it.
    #[test]
    fn a_withdrawn_request_does_not_count() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        group_requests.withdraw("a");
        let reply = group_requests.request("b", "h2", 1, &names(&["a", "b"]), now).unwrap();
        assert_eq!(reply, Requested::Missing(names(&["a"])));
        group_requests.request("a", "h2", 2, &names(&["a", "b"]), now).unwrap();
        group_requests.ended(&names(&["a", "b"]), Ok(MigrationId(7)), now);
        group_requests.withdraw("a");
        let reply = group_requests.request("b", "h2", 1, &names(&["a", "b"]), now).unwrap();
        assert_eq!(reply, Requested::Begun(MigrationId(7)));
    }

    /// A migration that couldn't be written has not begun: the next request begins it.
    #[test]
    fn a_migration_that_is_not_written_begins_with_the_next_request() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        group_requests.request("b", "h2", 1, &names(&["a", "b"]), now).unwrap();
        group_requests.ended(&names(&["a", "b"]), Ok(MigrationId(7)), now);
        group_requests.retract(&names(&["b", "a"]));
        let reply = group_requests.request("a", "h2", 1, &names(&["a", "b"]), now).unwrap();
        assert!(matches!(reply, Requested::Complete(_)), "{reply:?}");
    }

    #[test]
    fn what_is_no_group_is_refused() {
        let (mut group_requests, now) = (GroupRequests::default(), Instant::now());
        for all in [&[][..], &["b"], &["a", "a"]] {
            assert!(group_requests.request("a", "h2", 1, &names(all), now).is_err(), "{all:?}");
        }
    }
}
