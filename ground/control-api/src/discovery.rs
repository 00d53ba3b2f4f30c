//! Discovery.
