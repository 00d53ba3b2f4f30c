//! Faults of this node's vCPUs, and the guarantee that a granted page stays until an instruction has retired.
//!
//! A grant puts a *hold* on the page for each vCPU that waited. Requests that would revoke the page wait while there is a hold. An
//! instruction that needs several pages may hold one and wait for another. Then, and only then, an older instruction takes the page from it
//! (wound-wait). Ages are kept until an instruction retires, so the oldest instruction of the VM never loses a page. Waits have no cycle.

use super::local::{Hold, Local, Want, WantKind};
use super::{Context, Node};
use crate::config::Plant;
use crate::event::{Action, Fault};
use crate::message::{Body, Intent, Request};
use crate::names::{Access, Mode, NodeSet, Page, Priority, Vcpu};
use crate::pages::Pages;

impl Node {
    /// A vCPU faulted.
    pub(super) fn fault<P: Pages>(&mut self, vcpu: Vcpu, page: Page, fault: Fault, cx: &mut Context<'_, P>) {
        let Some(state) = self.vcpu(vcpu).filter(|state| !state.operating) else {
            self.counters.refused += 1;
            return;
        };
        if state.priority.is_none() {
            self.begin_instruction(vcpu, cx.now);
        }
        let Some(state) = self.vcpu(vcpu) else { return };
        if let Some(other) = state.waiting.replace(page)
            && other != page
        {
            self.local(other).waiting.retain(|(waiting, _)| *waiting != vcpu);
        }
        match fault {
            Fault::Read => self.counters.read_faults += 1,
            Fault::Write | Fault::Atomic => self.counters.write_faults += 1,
        }
        let local = self.local(page);
        // A vCPU that needs more rights than it was granted starts over with the page: with its hold it would wait for itself.
        local.holds.retain(|hold| hold.vcpu != vcpu);
        local.waiting.retain(|(waiting, _)| *waiting != vcpu);
        local.waiting.push((vcpu, fault));
        local.waiting.sort_unstable();
        self.go(page, cx);
        self.serve(page, cx);
        self.try_invalidate(page, cx);
        // The vCPU may hold pages that older instructions wait for, and it now waits itself.
        let held = self.vcpu(vcpu).map(|state| state.held.clone()).unwrap_or_default();
        for page in held {
            self.serve(page, cx);
            self.try_invalidate(page, cx);
        }
    }

    /// Assigns an age at an instruction's first fault: younger than all ages that this node has assigned or received.
    pub(super) fn begin_instruction(&mut self, vcpu: Vcpu, now: u64) {
        let node = self.config.me;
        self.state.latest_age = self.state.latest_age.saturating_add(1);
        let time = if self.config.plant == Plant::HostClockAges { now } else { self.state.latest_age };
        if let Some(state) = self.vcpu(vcpu) {
            state.priority = Some(Priority { time, node, vcpu });
        }
    }

    /// Advances the logical clock to the age in a message.
    pub(super) fn see_age(&mut self, body: &Body) {
        let priority = match body {
            Body::Request(Request { priority, .. })
            | Body::Invalidate { priority, .. }
            | Body::Hurry { priority } => priority,
            _ => return,
        };
        self.advance_clock(priority.time);
    }

    /// Resumes waiting vCPUs that the page's rights satisfy, and requests more rights for the others.
    pub(super) fn go<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        loop {
            let local = self.local(page);
            let list = std::mem::take(&mut local.waiting);
            let (ready, rest): (Vec<_>, Vec<_>) =
                list.into_iter().partition(|(_, fault)| local.satisfies(*fault));
            local.waiting = rest;
            for (vcpu, fault) in ready {
                self.let_go(vcpu, page, fault, cx);
            }
            let local = self.local(page);
            if local.waiting.is_empty() || local.leaving.is_some() || self.state.incoming.contains(&page) {
                return;
            }
            let local = self.local(page);
            if local.is_closed() && local.want.is_none() && local.invalidation.is_none() {
                // The guest still reads the closed copy: it opens without a message.
                local.unread = (0, local.unread.1.saturating_mul(2));
                self.state.incoming.insert(page);
                return;
            }
            if self.local(page).want.is_some() {
                self.hurry_own(page, cx);
                return;
            }
            if !self.ask_for(page, cx) {
                return;
            }
        }
    }

    fn let_go<P: Pages>(&mut self, vcpu: Vcpu, page: Page, fault: Fault, cx: &mut Context<'_, P>) {
        let hold = self.config.policy.hold_ns;
        let until = if hold == 0 { 0 } else { cx.now.saturating_add(hold) };
        let Some(state) = self.vcpu(vcpu) else { return };
        state.waiting = None;
        cx.recheck.extend(&state.held);
        let traps = fault != Fault::Read && self.local(page).access < Access::Write;
        if traps {
            self.counters.traps += 1;
            cx.actions.push(Action::Trap { vcpu, page });
            return;
        }
        if let Some(state) = self.vcpu(vcpu)
            && let Some(priority) = state.priority
        {
            if !state.held.contains(&page) {
                state.held.push(page);
                state.held.sort_unstable();
            }
            let hold = Hold { vcpu, priority, write: fault != Fault::Read, until };
            let local = self.local(page);
            local.holds.push(hold);
            local.holds.sort_unstable_by_key(|hold| hold.vcpu);
        }
        self.counters.resumed += 1;
        cx.actions.push(Action::Resume { vcpu });
    }

    /// Requests the rights that waiting vCPUs need. Returns true if the page's rights changed at once.
    fn ask_for<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) -> bool {
        let priorities = self.priorities(page);
        let me = self.config.me;
        let local = self.local(page);
        let write = local.waiting.iter().any(|(_, fault)| *fault != Fault::Read);
        let atomic = local.waiting.iter().any(|(_, fault)| *fault == Fault::Atomic);
        let intent = if write { Intent::Write } else { Intent::Read };
        let Some(priority) = priorities.into_iter().min() else { return false };
        let mut want = Want {
            kind: WantKind::Remote,
            intent,
            priority,
            needed: None,
            acked: NodeSet::EMPTY,
            granted: None,
            hurried: None,
        };
        let local = self.local(page);
        if local.owner {
            if local.mode.is_update() || local.reverting {
                // A copy of this node is being opened, or the home must learn of the new mode first.
                return false;
            }
            if local.copies.is_empty() {
                self.make_writable(page, cx);
                return true;
            }
            if !write {
                self.set(page, Mode::Invalidate, Access::Read, cx);
                return true;
            }
            let copies = local.copies;
            want.kind = WantKind::Upgrade;
            want.needed = Some(copies);
            local.want = Some(want);
            self.invalidate_copies(page, self.config.me, copies, priority, false, cx);
            self.finish_want(page, cx);
            return false;
        }
        let request = Request {
            requester: me,
            intent,
            priority,
            held: None,
            as_update: false,
            convert: false,
            atomic,
            changed: local.changed,
        };
        let versions = self.config.policy.versions;
        let local = self.local(page);
        let held = (versions && local.kept).then_some(local.version);
        local.want = Some(want);
        self.counters.misses += 1;
        self.send(self.config.home(page), page, Body::Request(Request { held, ..request }), cx);
        false
    }

    /// Ages of the instructions that wait for a page here.
    fn priorities(&self, page: Page) -> Vec<Priority> {
        let waiting = self.state.pages.get(&page).map(|local| local.waiting.as_slice()).unwrap_or_default();
        let state = |vcpu: &Vcpu| self.state.vcpus.get(usize::from(*vcpu));
        waiting.iter().filter_map(|(vcpu, _)| state(vcpu)?.priority).collect()
    }

    /// An older instruction joins the waiting ones: nodes that hold the page must learn of it.
    fn hurry_own<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        if let Some(oldest) = self.priorities(page).into_iter().min() {
            self.hurry_behind(page, oldest, cx);
        }
    }

    /// Sends `Hurry`: an instruction older than the one of the pending request waits for the page.
    pub(super) fn hurry_behind<P: Pages>(&mut self, page: Page, priority: Priority, cx: &mut Context<'_, P>) {
        let Some(want) = &mut self.local(page).want else { return };
        if priority < want.priority && want.hurried.is_none_or(|hurried| priority < hurried) {
            want.hurried = Some(priority);
            self.counters.hurries += 1;
            self.send(self.config.home(page), page, Body::Hurry { priority }, cx);
        }
    }

    /// Makes the page writable, as a new version.
    pub(super) fn make_writable<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        self.keep_twin(page, cx);
        let local = self.local(page);
        local.owner = true;
        local.kept = true;
        local.version = local.version.wrapping_add(1);
        local.copies = NodeSet::EMPTY;
        self.set(page, Mode::Invalidate, Access::Write, cx);
    }

    fn keep_twin<P: Pages>(&mut self, page: Page, cx: &mut Context<'_, P>) {
        let most = self.config.policy.twins;
        let local = self.local(page);
        let version = local.version;
        // A page that no other node has had can't be requested with a version.
        if most == 0 || !local.kept || version == 0 {
            return;
        }
        let old = self.state.twins.iter().position(|(kept, ..)| *kept == page);
        let old = old.or_else(|| (self.state.twins.len() >= most).then_some(0));
        let mut bytes =
            old.and_then(|old| self.state.twins.remove(old)).map(|twin| twin.2).unwrap_or_default();
        bytes.clear();
        cx.pages.read(page, &mut bytes);
        self.state.twins.push_back((page, version, bytes));
    }

    /// An instruction has retired.
    pub(super) fn retired<P: Pages>(&mut self, vcpu: Vcpu, cx: &mut Context<'_, P>) {
        let Some(state) = self.vcpu(vcpu) else {
            self.counters.refused += 1;
            return;
        };
        state.priority = None;
        state.kicked = false;
        let held = std::mem::take(&mut state.held);
        // A fault that already waits belongs to the next instruction, which begins with an age of its own.
        if state.waiting.is_some() {
            self.begin_instruction(vcpu, cx.now);
        }
        for page in held {
            self.local(page).holds.retain(|hold| hold.vcpu != vcpu);
            self.try_invalidate(page, cx);
            self.serve(page, cx);
            self.go(page, cx);
        }
    }

    /// Whether holds protect the page from an instruction of this age. A younger instruction that waits for another page loses its hold;
    /// the
    /// node kicks the others.
    pub(super) fn held_against<P: Pages>(
        &mut self,
        page: Page,
        takes_reads: bool,
        priority: Priority,
        cx: &mut Context<'_, P>,
    ) -> bool {
        let plant = self.config.plant;
        let Some(local) = self.state.pages.get(&page) else { return false };
        if local.holds.is_empty() {
            return false;
        }
        if plant == Plant::ReleaseEarly {
            self.local(page).holds.clear();
            return false;
        }
        let priority = local.hurry.map_or(priority, |hurry| hurry.min(priority));
        let concerned: Vec<Hold> =
            local.holds.iter().filter(|hold| hold.write || takes_reads).cloned().collect();
        let mut held = false;
        for hold in concerned {
            let Some(state) = self.vcpu(hold.vcpu) else { continue };
            let waits = state.waiting.is_some();
            if waits && priority < hold.priority && plant != Plant::NeverYield {
                state.held.retain(|held| *held != page);
                self.local(page).holds.retain(|other| other.vcpu != hold.vcpu);
                self.counters.wounded += 1;
                cx.actions.push(Action::Wounded { vcpu: hold.vcpu, page });
                continue;
            }
            held = true;
            // The fault that waits may belong to a later instruction whose predecessor retired without a report. Then the page may go: the
            // node asks at once.
            if !waits && hold.until > cx.now {
                self.state.alarms.insert((hold.until, page));
            } else if !state.kicked && !state.operating {
                state.kicked = true;
                self.counters.kicks += 1;
                cx.actions.push(Action::Kick { vcpu: hold.vcpu });
            }
        }
        held
    }

    /// The timer expired: retries requests and invalidations whose hold has ended.
    pub(super) fn timer<P: Pages>(&mut self, cx: &mut Context<'_, P>) {
        while let Some((at, page)) = self.state.alarms.first().copied()
            && at <= cx.now
        {
            self.state.alarms.pop_first();
            self.try_invalidate(page, cx);
            self.serve(page, cx);
        }
    }

    /// An older instruction waits for a page that this node may hold.
    pub(super) fn hurry<P: Pages>(&mut self, page: Page, priority: Priority, cx: &mut Context<'_, P>) {
        if self.config.home(page) == self.config.me {
            let others = NodeSet::first(self.config.nodes).without(NodeSet::one(self.config.me));
            for node in others.iter() {
                self.send(node, page, Body::Hurry { priority }, cx);
            }
        }
        let concerned = |local: &&mut Local| local.want.is_some() || !local.holds.is_empty();
        let Some(local) = self.state.pages.get_mut(&page).filter(concerned) else { return };
        local.hurry = Some(local.hurry.map_or(priority, |old| old.min(priority)));
        self.try_invalidate(page, cx);
        self.serve(page, cx);
    }
}
