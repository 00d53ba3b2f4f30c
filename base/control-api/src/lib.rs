//! The API of a running VM from the client's side: the message types ([`types`]), the discovery of running VMs
//! ([`discovery`]) and a client ([`Client`]).
//!
//! The API is HTTP/1.1 with JSON on a Unix socket, one socket per VM. The crate `monitor` has the server, which
//! generates the OpenAPI description from these types and its own routes.
//!
//! | request | response |
//! |---|---|
//! | `GET /v1/vm` | [`types::VmSummary`] |
//! | `DELETE /v1/vm` | stops the VM immediately, like a power cut |
//! | `GET /v1/inspect?path=a/b` | the live device tree, or the part below a path |
//! | `PUT /v1/pause`, `/v1/resume`, `/v1/power-button`, `/v1/reset` | [`types::Done`] |
//! | `DELETE /v1/migration` | cancels a migration; [`migration`] starts one |
//! | `GET /v1/exits` | [`types::ExitTable`] |
//! | `GET /metrics` | Prometheus text |
//! | `GET /openapi.json` | the OpenAPI description |
//!
//! An error is an HTTP status and a [`types::Problem`].
//!
//! The crate also has the gRPC services of a host daemon ([`host`]) and of the cluster ([`cluster`]), and the rules for
//! names ([`names`]).

pub mod backoff;
pub mod client;
pub mod cluster;
pub mod discovery;
pub mod host;
pub mod migration;
pub mod names;
pub mod types;

pub use client::{Client, ClientError};
