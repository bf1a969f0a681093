//! Implementations of [`crate::ports::Bus`].
