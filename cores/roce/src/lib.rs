//! RoCEv2 without I/O.
