//! Integration tests of `host`: one binary, since linking takes most of the time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod bad_link;
mod cluster;
mod common;
mod end_to_end;
mod late_hostile;
mod migrate;
mod migrate_doubt;
mod migrate_group;
mod migrate_lost;
mod migrate_pace;
mod migrate_peers;
mod moving;
mod moving_hostile;
mod peer_messages;
mod several;
mod verbs;
mod waiting;
