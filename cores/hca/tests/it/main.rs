//! Integration tests of `hca`: one binary, since linking takes most of the time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod common;
mod connected;
mod datagrams;
mod elsewhere;
mod hostile;
mod inbound;
mod late;
mod many;
mod model;
mod moving;
mod notifications;
mod objects;
mod paths;
mod rules;
mod teardown;
mod unanswered;
