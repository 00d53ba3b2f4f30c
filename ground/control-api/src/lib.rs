//! The API of a running VM as its clients see it: the types that travel ([`types`]), how running VMs are found
//! ([`discovery`]) and a client ([`Client`]).
//!
//! The API is HTTP/1.1 with JSON on a Unix socket, one socket per VM. The server is in the crate `monitor`, which
//! generates the OpenAPI description from these types and its own routes.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/vm` | [`types::VmSummary`] |
//! | `DELETE /v1/vm` | stops the VM at once, as pulling the plug does |
//! | `GET /v1/inspect?path=a/b` | the live device tree, or what is below a path |
//! | `PUT /v1/pause`, `/v1/resume`, `/v1/power-button`, `/v1/reset` | [`types::Done`] |
//! | `DELETE /v1/migration` | cancels a migration; how one is begun: [`migration`] |
//! | `GET /v1/exits` | [`types::ExitTable`] |
//! | `GET /metrics` | Prometheus text |
//! | `GET /openapi.json` | the description of all this |
//!
//! An error is an HTTP status and a [`types::Problem`].
//!
//! Beside it: the gRPC services of a host daemon ([`host`]) and of the cluster ([`cluster`]), and the names that all use ([`names`]).

pub mod client;
pub mod cluster;
pub mod discovery;
pub mod host;
pub mod migration;
pub mod names;
pub mod types;

pub use client::{Client, ClientError};
