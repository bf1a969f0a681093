//! Named places where a test can kill the process, between two effects that a crash must not tell apart.
//!
//! Only in builds with the feature `failpoints`, and only when the variable `FAILPOINTS` names a place, e.g.
//! `FAILPOINTS='publish.acked=50*off->return'`: the process dies at the 51st pass. Otherwise they cost nothing.

/// Reads `FAILPOINTS`; to be called once, first thing. The guard keeps what it says in force.
#[must_use]
pub fn scenario() -> fail::FailScenario<'static> {
    fail::FailScenario::setup()
}

/// Ends the process without any clean-up if a test wants it to die at `place`.
#[inline]
pub(crate) fn die_at(place: &str) {
    #[cfg(feature = "failpoints")]
    fail::fail_point!(place, |_| std::process::abort());
    #[cfg(not(feature = "failpoints"))]
    let _ = place;
}
