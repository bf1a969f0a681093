//! Names that become tokens of NATS subjects, and the identity of a run.
//!
//! Invariant: whatever is inside one of these types is safe in a subject, a KV key, a consumer name and a URL path:
//! no wildcard, no space, no empty segment.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::Timestamp;

/// A name that breaks the rule of its kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{shown:?} is not a valid {kind}: {rule}")]
pub struct InvalidName {
    /// What the name was meant to be, e.g. `task_id`.
    pub kind: &'static str,
    /// The rule that it breaks, in words.
    pub rule: &'static str,
    shown: String,
}

impl InvalidName {
    fn new(kind: &'static str, rule: &'static str, value: &str) -> Self {
        let mut shown: String = value.chars().take(60).collect();
        if shown.len() < value.len() {
            shown.push('…');
        }
        Self { kind, rule, shown }
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $pattern:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `value` against the rule of this kind of name.
            ///
            /// # Errors
            /// [`InvalidName`] with the rule that it breaks.
            pub fn new(value: &str) -> Result<Self, InvalidName> {
                let check: fn(&str) -> Result<(), &'static str> = $check;
                match check(value) {
                    Ok(()) => Ok(Self(value.into())),
                    Err(rule) => Err(InvalidName::new($kind, rule, value)),
                }
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;
            fn from_str(s: &str) -> Result<Self, Self::Err> {
                Self::new(s)
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                let text = utoipa::openapi::ObjectBuilder::new().schema_type(utoipa::openapi::schema::Type::String);
                text.pattern(Some($pattern)).into()
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Self::new(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

name_type!(
    /// The id of a task: 1–8 segments of `[A-Za-z0-9_-]+` joined by `.`, at most 128 bytes, case-sensitive.
    TaskId, "task_id", "^[A-Za-z0-9_-]+(\\.[A-Za-z0-9_-]+){0,7}$", dotted
);
name_type!(
    /// The name under which a worker registers a handler: same form as a [`TaskId`].
    Handler, "handler", "^[A-Za-z0-9_-]+(\\.[A-Za-z0-9_-]+){0,7}$", dotted
);
name_type!(
    /// An executor group: `[A-Za-z0-9_-]{1,64}`.
    Group, "executor_group", "^[A-Za-z0-9_-]{1,64}$",
    |s| plain(s, 64, true).then_some(()).ok_or("1 to 64 characters out of A–Z a–z 0–9 _ -")
);
name_type!(
    /// A lane in a group: `[A-Za-z0-9_]{1,32}`; no `-`, so that consumer names can be read from the right.
    Queue, "queue_label", "^[A-Za-z0-9_]{1,32}$",
    |s| plain(s, 32, false).then_some(()).ok_or("1 to 32 characters out of A–Z a–z 0–9 _ (no \"-\")")
);

fn plain(s: &str, max: usize, dash: bool) -> bool {
    !s.is_empty() && s.len() <= max && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || (dash && b == b'-'))
}

fn dotted(s: &str) -> Result<(), &'static str> {
    if s.is_empty() {
        return Err("it must not be empty");
    }
    if s.len() > 128 {
        return Err("at most 128 bytes");
    }
    if s.split('.').count() > 8 {
        return Err("at most 8 segments");
    }
    if !s.split('.').all(|segment| plain(segment, 128, true)) {
        return Err("segments of A–Z a–z 0–9 _ - joined by single dots");
    }
    Ok(())
}

impl Handler {
    /// The handler of a task that names none: the task's own id.
    #[must_use]
    pub fn of_task(id: &TaskId) -> Self {
        Self(id.0.clone())
    }
}

impl Queue {
    /// The lane of a task that names none: `default`.
    #[must_use]
    pub fn default_lane() -> Self {
        Self("default".into())
    }
}

/// The identity of a run, stable over attempts: a time-ordered UUID, and the key for idempotent handlers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RunId(pub Uuid);

impl RunId {
    /// The id of the scheduled run of `task` at `trigger`: UUIDv8 of 48 bits of trigger milliseconds, then the head
    /// of SHA-256 over task id, NUL and the trigger milliseconds in decimal. The same instant has the same id on
    /// every node and in every life of the scheduler, which is what makes it exist once.
    #[must_use]
    pub fn scheduled(task: &TaskId, trigger: Timestamp) -> Self {
        Self::derived("", task, trigger)
    }

    /// The id of the row that stands for a stretch of instants of `task` beginning at `from`; never equal to that of
    /// the scheduled run at `from`.
    #[must_use]
    pub fn stretch(task: &TaskId, from: Timestamp) -> Self {
        Self::derived("stretch\0", task, from)
    }

    fn derived(domain: &str, task: &TaskId, at: Timestamp) -> Self {
        let ms = at.as_millis();
        let mut hash = Sha256::new();
        hash.update(domain.as_bytes());
        hash.update(task.as_str().as_bytes());
        hash.update([0]);
        hash.update(ms.to_string().as_bytes());
        let digest = hash.finalize();
        let mut bytes = [0u8; 16];
        // Instants before 1970 sort first; no scheduled fire lies there.
        bytes[..6].copy_from_slice(&ms.max(0).to_be_bytes()[2..]);
        bytes[6..].copy_from_slice(&digest[..10]);
        Self(uuid::Builder::from_custom_bytes(bytes).into_uuid())
    }

    /// The id as the trace id of the run's trace: the same 128 bits in hex, so that either finds the other.
    #[must_use]
    pub fn trace_id(self) -> String {
        self.0.simple().to_string()
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.as_hyphenated(), f)
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RunId {
    type Err = uuid::Error;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.parse().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_could_widen_a_subscription_or_break_a_key_are_refused() {
        let long = "x".repeat(300);
        for bad in [
            "",
            "a b",
            "a*",
            "a>",
            "a/b",
            "a:b",
            "Ä-任务-🙂",
            "..",
            "%2F",
            &long,
            "a.",
            ".a",
            " a",
            "a..b",
            "*",
            ">",
            "a.b.c.d.e.f.g.h.i",
            "a\0",
            "a\n",
        ] {
            assert!(TaskId::new(bad).is_err(), "{bad:?} must be refused");
        }
        for good in ["a.b", "123", "job", "Job", "sync_order_to_ods", "a-b.c_d", &"x".repeat(128)] {
            assert_eq!(TaskId::new(good).unwrap().as_str(), good);
        }
        assert_ne!(TaskId::new("job").unwrap(), TaskId::new("Job").unwrap());
        assert!(Queue::new("a-b").is_err());
        assert!(Group::new("data-sync").is_ok());
        assert!(Group::new("data.sync").is_err());
    }

    #[test]
    fn a_scheduled_run_has_one_id_per_task_and_instant() {
        let a = TaskId::new("a").unwrap();
        let t = Timestamp::from_millis(1_790_000_000_000);
        let id = RunId::scheduled(&a, t);
        assert_eq!(id, RunId::scheduled(&a, t));
        assert_eq!(id.0.get_version_num(), 8);
        assert_eq!(id.to_string(), "01a0c450-6c00-87fd-80a1-7d7022967b9c", "the derivation is a contract");
        assert_ne!(id, RunId::scheduled(&TaskId::new("b").unwrap(), t));
        assert_ne!(id, RunId::scheduled(&a, t.plus_millis(1)));
        assert_ne!(id, RunId::stretch(&a, t));
        assert!(id < RunId::scheduled(&a, t.plus_millis(1)), "ids are ordered by time");
    }
}
