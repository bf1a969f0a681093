//! A node's ties to the outside world, and what may happen to them.
//!
//! A process acts on the world through its ports alone. So a process that was killed is one whose ports never answer
//! again, whatever its tasks may still be doing with their own memory; and a frozen one is a process whose calls wait,
//! unsent or unanswered, while its clocks stand still.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ax_scheduler::bus::memory::MemoryBus;
use ax_scheduler::ports::{BusError, Clock, StoreError};
use ax_shared::Timestamp;
use tokio::time::{Instant, sleep, sleep_until};

use crate::rng::Rng;
use crate::world::World;

/// How well one of a node's connections works. Rates are of a thousand calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Weather {
    /// Nothing comes through.
    pub(crate) cut: bool,
    /// Calls that are lost on their way.
    pub(crate) lost: u64,
    /// Calls that are done and whose answer is lost.
    pub(crate) unanswered: u64,
    /// The longest time that a call takes each way, in milliseconds.
    pub(crate) slow_ms: u64,
}

#[derive(Debug)]
struct State {
    rng: Rng,
    dead: bool,
    /// Since when and until when it stands still.
    frozen: Option<(Instant, Instant)>,
    offset_ms: i64,
    /// The largest offset that its clock ever had.
    most_ms: i64,
    sql: Weather,
    nats: Weather,
    doom: Option<Doom>,
}

/// A process dies at one of its next calls: before it has an effect, or after, with the answer on its way.
#[derive(Debug, Clone, Copy)]
struct Doom {
    /// Calls until then.
    calls: u64,
    /// Whether the last of them is still carried out.
    after: bool,
}

/// The ties of one process.
pub(crate) struct Link {
    pub(crate) world: Arc<World>,
    pub(crate) node: String,
    pub(crate) bus: Arc<MemoryBus>,
    state: Mutex<State>,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Cut,
    Lost,
    Unanswered,
    Good,
}

fn no_database() -> StoreError {
    StoreError::Unavailable(sqlx::Error::PoolTimedOut)
}

fn no_nats() -> BusError {
    BusError::Unavailable("no answer".into())
}

impl Link {
    pub(crate) fn new(world: Arc<World>, node: String, rng: Rng, offset_ms: i64) -> Arc<Self> {
        let bus = world.server.bus();
        let state = State {
            rng,
            dead: false,
            frozen: None,
            offset_ms,
            most_ms: offset_ms,
            sql: Weather::default(),
            nats: Weather::default(),
            doom: None,
        };
        Arc::new(Self { world, node, bus, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("link")
    }

    /// The process is gone.
    pub(crate) fn kill(&self) {
        self.state().dead = true;
        self.bus.cut();
    }

    /// The process will die at its call number `calls` from now: before that has an effect, or after.
    pub(crate) fn doom(&self, calls: u64, after: bool) {
        self.state().doom = Some(Doom { calls, after });
    }

    /// The process will live on.
    pub(crate) fn spare(&self) {
        self.state().doom = None;
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.state().dead
    }

    /// A call is about to have its effect, or has had it (`done`).
    async fn pass(&self, done: bool) {
        let dies = {
            let mut state = self.state();
            match &mut state.doom {
                None => false,
                Some(doom) => {
                    doom.calls = doom.calls.saturating_sub(u64::from(!done));
                    doom.calls == 0 && (doom.after == done)
                }
            }
        };
        if dies {
            self.state().doom = None;
            self.world.died(&self.node);
            self.kill();
        }
        self.alive().await;
    }

    /// The process stands still for a while.
    pub(crate) fn freeze(self: &Arc<Self>, length: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        if state.dead || state.frozen.is_some_and(|(_, until)| until > now) {
            return;
        }
        state.frozen = Some((now, now + length));
        drop(state);
        self.bus.freeze(true);
        let link = self.clone();
        tokio::spawn(async move {
            sleep(length).await;
            link.bus.freeze(false);
            link.world.say(format_args!("{} thaws", link.node));
        });
    }

    pub(crate) fn set_sql(&self, weather: Weather) {
        self.state().sql = weather;
    }

    pub(crate) fn set_nats(&self, weather: Weather) {
        let mut state = self.state();
        if state.dead {
            return;
        }
        let was = std::mem::replace(&mut state.nats, weather);
        drop(state);
        match (was.cut, weather.cut) {
            (false, true) => self.bus.cut(),
            (true, false) => self.bus.mend(),
            _ => {}
        }
    }

    pub(crate) fn set_clock(&self, offset_ms: i64) {
        let mut state = self.state();
        state.offset_ms = offset_ms;
        state.most_ms = state.most_ms.max(state.offset_ms);
    }

    /// What this node's clock would show had it never stepped back.
    pub(crate) fn latest(&self, shown: Timestamp) -> Timestamp {
        let state = self.state();
        shown.plus_millis(state.most_ms - state.offset_ms)
    }

    pub(crate) fn offset_ms(&self) -> i64 {
        self.state().offset_ms
    }

    /// Waits until the process is not frozen; for ever when it is dead.
    pub(crate) async fn alive(&self) {
        loop {
            let until = {
                let state = self.state();
                if state.dead {
                    None
                } else {
                    match state.frozen {
                        Some((_, until)) if until > Instant::now() => Some(until),
                        _ => return,
                    }
                }
            };
            match until {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        }
    }

    async fn travel(&self, of: fn(&State) -> Weather) {
        let ms = {
            let mut state = self.state();
            let slow = of(&state).slow_ms;
            match state.rng.between(0, 9) {
                0..=5 => 0,
                6..=8 => 1,
                _ => state.rng.between(1, slow.max(2)),
            }
        };
        if ms > 0 {
            sleep(Duration::from_millis(ms)).await;
        }
        self.alive().await;
    }

    fn fate(&self, of: fn(&State) -> Weather) -> Fate {
        let mut state = self.state();
        let weather = of(&state);
        if weather.cut {
            Fate::Cut
        } else if state.rng.permille(weather.lost) {
            Fate::Lost
        } else if state.rng.permille(weather.unanswered) {
            Fate::Unanswered
        } else {
            Fate::Good
        }
    }

    /// A call to the database.
    pub(crate) async fn sql<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        self.alive().await;
        self.travel(|s| s.sql).await;
        match self.fate(|s| s.sql) {
            Fate::Cut => {
                sleep(Duration::from_millis(300)).await;
                self.alive().await;
                return Err(no_database());
            }
            Fate::Lost => return Err(no_database()),
            Fate::Unanswered => {
                let done = work.await;
                self.world.say(format_args!("{} {what}: answer lost ({})", self.node, done.is_ok()));
                self.travel(|s| s.sql).await;
                return Err(no_database());
            }
            Fate::Good => {}
        }
        self.pass(false).await;
        let answer = work.await;
        self.pass(true).await;
        self.travel(|s| s.sql).await;
        if self.state().sql.cut { Err(no_database()) } else { answer }
    }

    /// A call to NATS.
    pub(crate) async fn nats<T>(&self, work: impl Future<Output = Result<T, BusError>> + Send) -> Result<T, BusError> {
        self.alive().await;
        self.travel(|s| s.nats).await;
        match self.fate(|s| s.nats) {
            Fate::Cut | Fate::Lost => {
                sleep(Duration::from_millis(200)).await;
                self.alive().await;
                return Err(no_nats());
            }
            Fate::Unanswered => {
                let _ = work.await;
                sleep(Duration::from_millis(400)).await;
                self.alive().await;
                return Err(no_nats());
            }
            Fate::Good => {}
        }
        self.pass(false).await;
        let answer = work.await;
        self.pass(true).await;
        self.travel(|s| s.nats).await;
        if self.state().nats.cut { Err(no_nats()) } else { answer }
    }

    /// A publish or deletion on its way: what becomes of it.
    pub(crate) async fn send(&self) -> Fate {
        self.alive().await;
        self.travel(|s| s.nats).await;
        self.pass(false).await;
        self.fate(|s| s.nats)
    }

    /// Its answer on its way.
    pub(crate) async fn receive(&self) {
        self.pass(true).await;
        self.travel(|s| s.nats).await;
    }
}

/// The corrected clock of a node.
pub(crate) struct NodeClock(pub(crate) Arc<Link>);

impl NodeClock {
    fn standing_ms(&self) -> u64 {
        let now = Instant::now();
        match self.0.state().frozen {
            Some((since, until)) if until > now => (now - since).as_millis() as u64,
            _ => 0,
        }
    }
}

impl Clock for NodeClock {
    fn now(&self) -> Timestamp {
        self.0.world.time.now().plus_millis(self.0.offset_ms() - self.standing_ms() as i64)
    }

    fn boot(&self) -> Duration {
        self.0.world.time.boot() - Duration::from_millis(self.standing_ms())
    }
}
