//! A hierarchical timing wheel: who is due when, for any number of entries.
//!
//! Five levels of 256 slots, one tick a millisecond, after Varghese and Lauck, "Hashed and Hierarchical Timing Wheels"
//! (SOSP 1987). An entry lies at the level of the highest byte in which its time differs from the wheel's, in the slot
//! of that byte; what differs above all levels (more than 34 years) is parked in a list. When the wheel's time enters
//! a slot, the slot's entries are handed out or sink to lower levels. So the cost is that of what is due and what
//! sinks (at most five times in an entry's life), never that of ticks or of what is registered; a jump over years
//! costs no more than a jump over milliseconds.
//!
//! Entries live in a slab, 24 bytes each, and in doubly linked lists; one bit for each slot says whether it is empty.
//! The wheel holds no clock: time moves when [`Wheel::advance`] is told so, and never backward.
//!
//! Invariant: where an entry is linked follows from its time and the wheel's time alone, so it need not be stored.
//! Every occupied slot of a level is ahead of the wheel's own position in that level.

/// Bits of time that one level resolves.
const LEVEL_BITS: u32 = 8;
const SLOTS: usize = 1 << LEVEL_BITS;
const LEVELS: usize = 5;
/// The list of what is due already, after the slots of all levels.
const PAST: usize = LEVELS * SLOTS;
/// The list of what is too far ahead for the top level.
const FAR: usize = PAST + 1;
const LISTS: usize = FAR + 1;
/// No entry.
const NONE: u32 = u32::MAX;

/// Names an inserted entry; stays harmless after the entry has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryId {
    index: u32,
    generation: u32,
}

/// An entry that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// What was given to [`Wheel::insert`].
    pub key: u32,
    /// The instant it was given for, milliseconds since the Unix epoch.
    pub at_ms: i64,
}

#[derive(Debug)]
struct Entry {
    at_ms: i64,
    key: u32,
    /// Odd while the entry is in the wheel.
    generation: u32,
    next: u32,
    previous: u32,
}

const _: () = assert!(size_of::<Entry>() == 24);

/// A timing wheel; see the module's documentation.
#[derive(Debug)]
pub struct Wheel {
    /// The time of construction; times are measured from here.
    origin: i64,
    /// Milliseconds since `origin`: everything due by then has been handed out, or lies in `PAST`.
    elapsed: u64,
    entries: Vec<Entry>,
    /// The first free entry of the slab; free entries are chained by `next`.
    free: u32,
    len: usize,
    heads: Box<[u32; LISTS]>,
    occupied: [[u64; SLOTS / 64]; LEVELS],
    next_due: NextDue,
}

/// What is known of the earliest entry, so that asking again costs nothing.
#[derive(Debug, Clone, Copy)]
enum NextDue {
    Known(Option<i64>),
    /// The earliest entry has left.
    Unknown,
}

impl Wheel {
    /// Makes an empty wheel whose time is `now_ms`, milliseconds since the Unix epoch.
    #[must_use]
    pub fn new(now_ms: i64) -> Self {
        Self {
            origin: now_ms,
            elapsed: 0,
            entries: Vec::new(),
            free: NONE,
            len: 0,
            heads: Box::new([NONE; LISTS]),
            occupied: [[0; SLOTS / 64]; LEVELS],
            next_due: NextDue::Known(None),
        }
    }

    /// How many entries are in the wheel.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the wheel is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry that is due at `at_ms`; one in the past is handed out by the next [`Self::advance`].
    ///
    /// # Panics
    /// With 4,294,967,295 entries.
    pub fn insert(&mut self, key: u32, at_ms: i64) -> EntryId {
        let index = if self.free == NONE {
            let index =
                u32::try_from(self.entries.len()).ok().filter(|index| *index != NONE).expect("the wheel is full");
            self.entries.push(Entry { at_ms, key, generation: 1, next: NONE, previous: NONE });
            index
        } else {
            let index = self.free;
            let entry = &mut self.entries[index as usize];
            self.free = entry.next;
            (entry.at_ms, entry.key, entry.generation) = (at_ms, key, entry.generation.wrapping_add(1));
            index
        };
        self.len += 1;
        self.link(index);
        if let NextDue::Known(next) = self.next_due {
            self.next_due = NextDue::Known(Some(next.map_or(at_ms, |next| next.min(at_ms))));
        }
        EntryId { index, generation: self.entries[index as usize].generation }
    }

    /// Takes an entry out; `false` if it was handed out or removed before.
    pub fn remove(&mut self, id: EntryId) -> bool {
        // A free entry's generation is even, so only an id of the present use fits.
        let Some(entry) = self.entries.get(id.index as usize).filter(|entry| entry.generation == id.generation) else {
            return false;
        };
        let (at_ms, next, previous) = (entry.at_ms, entry.next, entry.previous);
        if previous == NONE {
            let list = self.list_of(at_ms);
            self.heads[list] = next;
            if next == NONE {
                self.mark_empty(list);
            }
        } else {
            self.entries[previous as usize].next = next;
        }
        if next != NONE {
            self.entries[next as usize].previous = previous;
        }
        self.release(id.index);
        if matches!(self.next_due, NextDue::Known(Some(next)) if next == at_ms) {
            self.next_due = NextDue::Unknown;
        }
        true
    }

    /// The instant of the earliest entry, milliseconds since the Unix epoch. Time does not move by it.
    pub fn next_due(&mut self) -> Option<i64> {
        if let NextDue::Known(next) = self.next_due {
            return next;
        }
        let lists = [PAST].into_iter().chain((0..LEVELS).filter_map(|level| self.first_list(level))).chain([FAR]);
        let next = lists
            .map(|list| self.heads[list])
            .find(|head| *head != NONE)
            .and_then(|head| self.chain(head).map(|entry| entry.at_ms).min());
        self.next_due = NextDue::Known(next);
        next
    }

    /// Moves time to `now_ms` and appends everything due at or before it to `due`, by instant, then by key.
    ///
    /// A time before the wheel's own hands out only what was inserted in the past.
    pub fn advance(&mut self, now_ms: i64, due: &mut Vec<Due>) {
        let already = due.len();
        self.hand_out(PAST, due);
        let now = self.since_origin(now_ms);
        if now > self.elapsed {
            self.advance_to(now, due);
        }
        if due.len() > already {
            due[already..].sort_by_key(|due| (due.at_ms, due.key));
            self.next_due = if self.is_empty() { NextDue::Known(None) } else { NextDue::Unknown };
        }
    }

    /// Every slot whose time has begun by `now` is emptied: what is due is handed out, the rest is linked anew.
    fn advance_to(&mut self, now: u64, due: &mut Vec<Due>) {
        let before = std::mem::replace(&mut self.elapsed, now);
        let mut begun = NONE;
        for level in 0..LEVELS {
            let shift = LEVEL_BITS * level as u32;
            // Where a higher byte has changed, the whole level has been passed.
            let passed = (before ^ now) >> (shift + LEVEL_BITS) != 0;
            let position = (now >> shift) as usize % SLOTS;
            while let Some(list) = self.first_list(level) {
                if !passed && list % SLOTS > position {
                    break;
                }
                if level == 0 {
                    self.hand_out(list, due);
                } else {
                    begun = self.take(list, begun);
                }
            }
        }
        if (before ^ now) >> (LEVEL_BITS * LEVELS as u32) != 0 {
            begun = self.take(FAR, begun);
        }
        while begun != NONE {
            let index = begun;
            let entry = &self.entries[index as usize];
            begun = entry.next;
            if self.since_origin(entry.at_ms) <= now {
                due.push(Due { key: entry.key, at_ms: entry.at_ms });
                self.release(index);
            } else {
                self.link(index);
            }
        }
    }

    /// Milliseconds from the origin, 0 for what is earlier.
    fn since_origin(&self, at_ms: i64) -> u64 {
        u64::try_from(i128::from(at_ms) - i128::from(self.origin)).unwrap_or(0)
    }

    /// The list in which an entry of that time belongs now.
    fn list_of(&self, at_ms: i64) -> usize {
        let at = self.since_origin(at_ms);
        if at <= self.elapsed {
            return PAST;
        }
        let level = ((at ^ self.elapsed).ilog2() / LEVEL_BITS) as usize;
        if level >= LEVELS {
            return FAR;
        }
        level * SLOTS + (at >> (LEVEL_BITS * level as u32)) as usize % SLOTS
    }

    /// Puts an entry in front of the list where it belongs.
    fn link(&mut self, index: u32) {
        let list = self.list_of(self.entries[index as usize].at_ms);
        let next = std::mem::replace(&mut self.heads[list], index);
        if next == NONE {
            if list < PAST {
                self.occupied[list / SLOTS][list % SLOTS / 64] |= 1 << (list % 64);
            }
        } else {
            self.entries[next as usize].previous = index;
        }
        let entry = &mut self.entries[index as usize];
        (entry.next, entry.previous) = (next, NONE);
    }

    /// Empties a list and returns its entries, chained by `next`, with `rest` behind them.
    fn take(&mut self, list: usize, rest: u32) -> u32 {
        let head = std::mem::replace(&mut self.heads[list], NONE);
        self.mark_empty(list);
        if head == NONE {
            return rest;
        }
        let mut last = head;
        while self.entries[last as usize].next != NONE {
            last = self.entries[last as usize].next;
        }
        self.entries[last as usize].next = rest;
        head
    }

    /// Empties a list whose entries are all due.
    fn hand_out(&mut self, list: usize, due: &mut Vec<Due>) {
        let mut index = std::mem::replace(&mut self.heads[list], NONE);
        self.mark_empty(list);
        while index != NONE {
            let entry = &self.entries[index as usize];
            due.push(Due { key: entry.key, at_ms: entry.at_ms });
            let next = entry.next;
            self.release(index);
            index = next;
        }
    }

    /// Gives an unlinked entry back to the slab.
    fn release(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.next = std::mem::replace(&mut self.free, index);
        self.len -= 1;
    }

    fn mark_empty(&mut self, list: usize) {
        if list < PAST {
            self.occupied[list / SLOTS][list % SLOTS / 64] &= !(1 << (list % 64));
        }
    }

    /// The first occupied slot of a level.
    fn first_list(&self, level: usize) -> Option<usize> {
        let words = &self.occupied[level];
        let word = words.iter().position(|word| *word != 0)?;
        Some(level * SLOTS + word * 64 + words[word].trailing_zeros() as usize)
    }

    fn chain(&self, head: u32) -> impl Iterator<Item = &Entry> {
        std::iter::successors(self.entries.get(head as usize), |entry| self.entries.get(entry.next as usize))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const SECOND: i64 = 1_000;
    const DAY: i64 = 86_400 * SECOND;
    const YEAR: i64 = 365 * DAY + DAY / 4;

    fn advanced(wheel: &mut Wheel, now: i64) -> Vec<(i64, u32)> {
        let mut due = Vec::new();
        wheel.advance(now, &mut due);
        due.into_iter().map(|due| (due.at_ms, due.key)).collect()
    }

    #[test]
    fn delays_beyond_32_bits_of_milliseconds_wait_their_time() {
        let start = 1_800_000_000_000;
        for delay in [2_147_483_648, 25 * DAY, 30 * DAY, 4_294_967_296, 400 * DAY, 35 * YEAR, 100 * YEAR, 290 * YEAR] {
            let mut wheel = Wheel::new(start);
            wheel.insert(7, start + delay);
            assert_eq!(wheel.next_due(), Some(start + delay));
            assert_eq!(advanced(&mut wheel, start + delay / 2), []);
            assert_eq!(wheel.next_due(), Some(start + delay));
            assert_eq!(advanced(&mut wheel, start + delay - 1), []);
            assert_eq!(advanced(&mut wheel, start + delay), [(start + delay, 7)]);
            assert_eq!((wheel.len(), wheel.next_due()), (0, None));
        }
    }

    #[test]
    fn the_extremes_of_time_are_accepted() {
        let mut wheel = Wheel::new(i64::MIN);
        wheel.insert(1, i64::MAX);
        wheel.insert(2, i64::MIN);
        assert_eq!(wheel.next_due(), Some(i64::MIN));
        assert_eq!(advanced(&mut wheel, i64::MIN), [(i64::MIN, 2)]);
        assert_eq!(advanced(&mut wheel, i64::MAX - 1), []);
        assert_eq!(advanced(&mut wheel, i64::MAX), [(i64::MAX, 1)]);
    }

    #[test]
    fn the_past_is_handed_out_at_the_next_advance_even_if_time_stands_or_steps_back() {
        let mut wheel = Wheel::new(1_000);
        wheel.insert(1, 1_000);
        wheel.insert(2, -5);
        wheel.insert(3, 1_001);
        assert_eq!(wheel.next_due(), Some(-5));
        assert_eq!(advanced(&mut wheel, 400), [(-5, 2), (1_000, 1)]);
        assert_eq!(advanced(&mut wheel, 1_000), []);
        assert_eq!(wheel.next_due(), Some(1_001));
    }

    #[test]
    fn a_stale_id_removes_nothing() {
        let mut wheel = Wheel::new(0);
        let first = wheel.insert(1, 10);
        assert!(wheel.remove(first));
        assert!(!wheel.remove(first));
        let second = wheel.insert(2, 10);
        assert!(!wheel.remove(first));
        assert_eq!(advanced(&mut wheel, 10), [(10, 2)]);
        assert!(!wheel.remove(second));
        assert_eq!(wheel.next_due(), None);
    }

    #[test]
    fn fifty_thousand_tasks_due_in_one_second_come_out_whole_and_in_order() {
        let mut wheel = Wheel::new(0);
        for key in 0..50_000 {
            wheel.insert(key, 3_600_000);
        }
        assert_eq!(advanced(&mut wheel, 3_599_999), []);
        let due = advanced(&mut wheel, 3_600_000);
        assert!(due.iter().copied().eq((0..50_000).map(|key| (3_600_000, key))));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Insert(i64),
        Remove(prop::sample::Index),
        Advance(i64),
    }

    /// Spans of all sizes, those around the levels' borders most.
    fn span() -> impl Strategy<Value = i64> {
        let named = prop::sample::select(vec![
            1,
            255,
            256,
            257,
            65_535,
            65_536,
            1 << 24,
            2_147_483_647,
            2_147_483_648,
            1 << 32,
            (1 << 40) - 1,
            1 << 40,
            (1 << 40) + 1,
            1 << 41,
            1 << 42,
            30 * DAY,
            400 * DAY,
            100 * YEAR,
        ]);
        prop_oneof![
            0..300i64,
            0..100_000i64,
            0..(100 * DAY),
            0..(150 * YEAR),
            (named, -2..3i64).prop_map(|(n, d)| n + d)
        ]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => span().prop_map(Step::Insert),
            1 => (0..5_000i64).prop_map(|ago| Step::Insert(-ago)),
            2 => any::<prop::sample::Index>().prop_map(Step::Remove),
            3 => span().prop_map(Step::Advance),
            1 => (0..5_000i64).prop_map(|back| Step::Advance(-back)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn behaves_like_a_sorted_map(start in -DAY..2_000_000_000_000i64, steps in prop::collection::vec(step(), 1..120)) {
            let (mut wheel, mut now) = (Wheel::new(start), start);
            let mut model: BTreeMap<(i64, u32), EntryId> = BTreeMap::new();
            let mut gone: Vec<EntryId> = Vec::new();
            for (key, step) in (0u32..).zip(steps) {
                match step {
                    Step::Insert(delay) => {
                        model.insert((now + delay, key), wheel.insert(key, now + delay));
                    }
                    Step::Remove(index) => {
                        if !model.is_empty() {
                            let (&at, &id) = model.iter().nth(index.index(model.len())).unwrap();
                            prop_assert!(wheel.remove(id));
                            model.remove(&at);
                            gone.push(id);
                        }
                    }
                    Step::Advance(by) => {
                        let to = now + by;
                        now = now.max(to);
                        // What was inserted in the past is due even if time steps back.
                        let later = model.split_off(&(now + 1, 0));
                        let due = std::mem::replace(&mut model, later);
                        let due_by_model: Vec<_> = due.keys().copied().collect();
                        gone.extend(due.values());
                        prop_assert_eq!(advanced(&mut wheel, to), due_by_model);
                    }
                }
                prop_assert_eq!(wheel.len(), model.len());
                prop_assert_eq!(wheel.next_due(), model.keys().next().map(|(at, _)| *at));
                for id in &gone {
                    prop_assert!(!wheel.remove(*id));
                }
            }
        }
    }
}
