//! What crosses the wire between ax, its workers and its users.
//!
//! Nothing here does I/O. The scheduler, the worker SDK and the tests share these types, so a name, a limit or a
//! format is written down once.

pub mod definition;
pub mod ids;
pub mod profile;
pub mod subjects;
pub mod time;
pub mod wire;

pub use definition::{FieldError, TaskDefinition};
pub use ids::{Group, Handler, Queue, RunId, TaskId};
pub use profile::Profile;
pub use subjects::{ConsumerName, Prefix, RunAddress};
pub use time::Timestamp;
pub use wire::RunKind;
