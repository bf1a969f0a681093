//! The delivery queues: which run is published next.
//!
//! One queue per executor group, by priority, then by due instant, with a window of outstanding messages. Groups take
//! turns, so that one with a long queue or a full window holds up nobody.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use ax_shared::{Group, RunId, Timestamp};

/// Outstanding messages of a group without a setting and without registered workers.
pub const DEFAULT_WINDOW: usize = 1000;

type Place = (Reverse<u8>, Timestamp, RunId);

#[derive(Debug, Default)]
struct GroupQueue {
    waiting: BTreeSet<Place>,
    outstanding: HashSet<RunId>,
    window: Option<usize>,
    in_turn: bool,
}

impl GroupQueue {
    fn is_ready(&self) -> bool {
        !self.waiting.is_empty() && self.outstanding.len() < self.window.unwrap_or(DEFAULT_WINDOW)
    }
}

/// All delivery queues.
#[derive(Debug, Default)]
pub struct DeliveryQueues {
    groups: BTreeMap<Group, GroupQueue>,
    turn: VecDeque<Group>,
}

/// What a group's queue holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLength {
    /// Runs that are due and not published.
    pub waiting: usize,
    /// Messages published and not ended.
    pub outstanding: usize,
}

impl DeliveryQueues {
    /// Puts a due run into its group's queue.
    pub fn push(&mut self, group: &Group, priority: u8, publish_at: Timestamp, run_id: RunId) {
        let queue = self.groups.entry(group.clone()).or_default();
        queue.waiting.insert((Reverse(priority), publish_at, run_id));
        self.wake(group);
    }

    /// Takes a run out of its queue, if it is there.
    pub fn remove(&mut self, group: &Group, priority: u8, publish_at: Timestamp, run_id: RunId) -> bool {
        self.groups.get_mut(group).is_some_and(|q| q.waiting.remove(&(Reverse(priority), publish_at, run_id)))
    }

    /// The next run to publish; it is outstanding from now on.
    pub fn pop(&mut self) -> Option<RunId> {
        while let Some(group) = self.turn.pop_front() {
            let queue = self.groups.get_mut(&group).expect("a group in turn exists");
            queue.in_turn = false;
            if !queue.is_ready() {
                continue;
            }
            let (_, _, run_id) = queue.waiting.pop_first()?;
            queue.outstanding.insert(run_id);
            self.wake(&group);
            return Some(run_id);
        }
        None
    }

    /// A message counts against its group's window (again).
    pub fn begin(&mut self, group: &Group, run_id: RunId) {
        self.groups.entry(group.clone()).or_default().outstanding.insert(run_id);
    }

    /// A message does not count against its group's window any more: it ended, or backs off.
    pub fn end(&mut self, group: &Group, run_id: RunId) {
        if self.groups.get_mut(group).is_some_and(|q| q.outstanding.remove(&run_id)) {
            self.wake(group);
        }
    }

    /// Sets how many messages of a group may be outstanding; None = [`DEFAULT_WINDOW`].
    pub fn set_window(&mut self, group: &Group, window: Option<usize>) {
        self.groups.entry(group.clone()).or_default().window = window;
        self.wake(group);
    }

    /// What each group's queue holds.
    pub fn lengths(&self) -> impl Iterator<Item = (&Group, QueueLength)> {
        self.groups.iter().map(|(g, q)| (g, QueueLength { waiting: q.waiting.len(), outstanding: q.outstanding.len() }))
    }

    fn wake(&mut self, group: &Group) {
        if let Some(queue) = self.groups.get_mut(group)
            && !queue.in_turn
            && queue.is_ready()
        {
            queue.in_turn = true;
            self.turn.push_back(group.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> RunId {
        RunId(uuid::Uuid::from_u128(n))
    }

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    #[test]
    fn urgent_runs_overtake_and_equals_keep_their_order() {
        let g = Group::new("g").unwrap();
        let mut queues = DeliveryQueues::default();
        queues.push(&g, 5, at(2), id(1));
        queues.push(&g, 5, at(1), id(2));
        queues.push(&g, 9, at(3), id(3));
        assert_eq!(
            [queues.pop(), queues.pop(), queues.pop(), queues.pop()],
            [Some(id(3)), Some(id(2)), Some(id(1)), None]
        );
    }

    #[test]
    fn a_blocked_group_holds_up_nobody_and_goes_on_when_its_window_opens() {
        let (slow, fast) = (Group::new("slow").unwrap(), Group::new("fast").unwrap());
        let mut queues = DeliveryQueues::default();
        queues.set_window(&slow, Some(1));
        for n in 0..3 {
            queues.push(&slow, 5, at(n), id(n as u128));
            queues.push(&fast, 5, at(n), id(100 + n as u128));
        }
        let mut out = Vec::new();
        while let Some(run) = queues.pop() {
            out.push(run);
        }
        assert_eq!(out, [id(0), id(100), id(101), id(102)]);
        queues.end(&slow, id(0));
        assert_eq!((queues.pop(), queues.pop()), (Some(id(1)), None));
    }
}
