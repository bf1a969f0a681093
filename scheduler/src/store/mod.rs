//! Implementations of [`crate::ports::Store`].
