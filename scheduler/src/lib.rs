//! ax scheduler
