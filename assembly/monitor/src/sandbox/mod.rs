//! Confinement of the monitor process.
