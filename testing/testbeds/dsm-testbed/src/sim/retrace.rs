//! The simulator, driven by recordings of live nodes, each in its recorded order. [`super::replay`] has links and deadlines of its own, and
//! may take another course where the order of arrival matters. Here each simulated node gets its live node's events at the recorded times.
//! A recording names the senders of messages, not the contents: messages are those of the simulated nodes.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

use dsm::config::{Config, ConfigError};
use dsm::event::{Action, Event};
use dsm::message::Message;
use dsm::names::NodeId;
use dsm::node::Node;
use dsm::trace::Entry;

use super::replay::{Memory, Replayed, Shared};

/// An input of a node.
#[derive(Debug)]
enum Told {
    By(Event),
    /// The next message of that node.
    Message(NodeId),
}

struct Host {
    me: NodeId,
    node: Node,
    memory: RefCell<Memory>,
    /// Times, ns, and inputs.
    script: VecDeque<(u64, Told)>,
}

/// Messages in flight, by sender and receiver.
type Links = BTreeMap<(NodeId, NodeId), VecDeque<Message>>;

/// Replays the traces of all nodes, one for each, in their recorded order.
///
/// [`Replayed::skipped`] counts messages that a live node received and no simulated node sends.
///
/// # Errors
/// See [`Config::check`].
pub fn retrace(nodes: Vec<(Config, Vec<Entry>)>) -> Result<Replayed, ConfigError> {
    let mut hosts = nodes
        .into_iter()
        .map(|(config, entries)| Host::new(config, entries))
        .collect::<Result<Vec<_>, _>>()?;
    let (mut links, mut result) = (Links::new(), Replayed::default());
    loop {
        let before = result.done;
        for host in &mut hosts {
            host.go_on(&mut links, &mut result);
        }
        if result.done > before {
            continue;
        }
        // All nodes wait for messages that aren't sent, or have finished.
        let Some(host) = hosts.iter_mut().find(|host| !host.script.is_empty()) else { break };
        host.script.pop_front();
        result.skipped += 1;
    }
    result.refused = hosts.iter().map(|host| host.node.counters().refused).sum();
    Ok(result)
}

impl Host {
    fn new(config: Config, entries: Vec<Entry>) -> Result<Self, ConfigError> {
        let (mut memory, mut script) = (Memory::default(), VecDeque::new());
        for entry in entries {
            match entry {
                Entry::Event { at, event } => script.push_back((at, Told::By(event))),
                Entry::Timer { at } => script.push_back((at, Told::By(Event::Timer))),
                Entry::Arrived { at, from } => script.push_back((at, Told::Message(from))),
                Entry::Content { page, reading, changes } => memory.will_change(page, reading, changes),
                // The simulated node produces these itself.
                Entry::Go { .. } => {}
            }
        }
        Ok(Self { me: config.me, node: Node::new(config)?, memory: RefCell::new(memory), script })
    }

    /// Feeds the recorded inputs, up to the first message that hasn't been sent yet.
    fn go_on(&mut self, links: &mut Links, result: &mut Replayed) {
        while let Some((at, told)) = self.script.pop_front() {
            let event = match told {
                Told::By(event) => event,
                Told::Message(from) => match links.get_mut(&(from, self.me)).and_then(VecDeque::pop_front) {
                    Some(message) => Event::Message(message),
                    None => return self.script.push_front((at, Told::Message(from))),
                },
            };
            result.done += 1;
            let mut actions = Vec::new();
            self.node.step(event, at, &mut Shared(&self.memory), &mut actions);
            for action in actions {
                // The recording contains the answers to all other actions.
                if let Action::Send(message) = action {
                    result.count(&message);
                    links.entry((message.from, message.to)).or_default().push_back(message);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsm::config::Policy;
    use dsm::event::Fault;

    /// A recording in an impossible order is detected, and the replay ends.
    #[test]
    fn a_message_that_nobody_sends_is_counted_and_the_rest_goes_on() {
        // The home of page 1 is node 1.
        let config = |me| Config::new(me, 2, Policy::IVY);
        let fault = Event::Fault { vcpu: 0, page: 1, fault: Fault::Read };
        let asks = vec![
            Entry::Arrived { at: 1, from: NodeId(1) },
            Entry::Event { at: 2, event: fault },
            Entry::Arrived { at: 4, from: NodeId(1) },
        ];
        let answers = vec![Entry::Arrived { at: 3, from: NodeId(0) }];
        let found = retrace(vec![(config(0), asks), (config(1), answers)]).unwrap();
        assert_eq!((found.done, found.skipped, found.refused), (3, 1, 0));
        assert_eq!(found.kinds.keys().copied().collect::<Vec<_>>(), ["grant", "request"]);
    }
}
