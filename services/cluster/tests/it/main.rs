//! Integration tests of `cluster`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod common;
mod etcd;
mod etcd_failover;
mod indexes;
mod killed;
mod service;
mod several;
mod shared_store;
mod store;
mod tls;
