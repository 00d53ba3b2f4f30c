//! One handler per route.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use control_api::types::{Done, ExitTable, NicBehind, Problem, VmState, VmSummary};
use serde::Deserialize;
use utoipa::IntoParams;

use super::control::{ControlError, VmControl};
use super::document::Vm;
use super::inspect_path;

/// An error response: a status and a [`Problem`].
pub(super) struct Refusal(StatusCode, Problem);

impl Refusal {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self(status, Problem { error: error.into(), causes: Vec::new() })
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        let status = match error {
            ControlError::WrongState { .. } | ControlError::NotNow { .. } => StatusCode::CONFLICT,
            ControlError::Unsupported { .. } => StatusCode::NOT_IMPLEMENTED,
            ControlError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        tracing::warn!(error = %Problem::of(&error), "An API request failed");
        Self(status, Problem::of(&error))
    }
}

fn done(vm: &dyn VmControl, what: &str) -> Json<Done> {
    let state = vm.summary().state;
    tracing::info!(%state, "API: {what}");
    Json(Done { state })
}

/// Returns a summary of the VM.
#[utoipa::path(get, path = "/v1/vm", operation_id = "summary", responses((status = 200, body = VmSummary)))]
pub(super) async fn summary(State(vm): State<Vm>) -> Json<VmSummary> {
    Json(vm.summary())
}

/// Ends the VM at once, like a power cut.
#[utoipa::path(
    delete,
    path = "/v1/vm",
    operation_id = "stop",
    responses((status = 200, body = Done), (status = 500, body = Problem))
)]
pub(super) async fn stop(State(vm): State<Vm>) -> Result<Json<Done>, Refusal> {
    vm.stop()?;
    tracing::info!("API: stop");
    // The request is accepted, even if the end hasn't begun.
    Ok(Json(Done { state: VmState::Stopping }))
}

/// A part of the tree.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct InspectQuery {
    /// Keys and list indices from the root: `disks/disk0`. Default: the whole tree.
    #[serde(default)]
    path: String,
}

/// Returns the live device tree with counters, or the part below a path.
#[utoipa::path(
    get,
    path = "/v1/inspect",
    operation_id = "inspect",
    params(InspectQuery),
    responses((status = 200, body = serde_json::Value), (status = 400, body = Problem), (status = 404, body = Problem))
)]
pub(super) async fn inspect(
    State(vm): State<Vm>,
    query: Result<Query<InspectQuery>, QueryRejection>,
) -> Result<Json<serde_json::Value>, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    inspect_path::select(vm.inspect(), &query.path)
        .map(Json)
        .map_err(|error| Refusal::new(StatusCode::NOT_FOUND, error))
}

/// Pauses vCPUs and devices until `resume`.
#[utoipa::path(
    put,
    path = "/v1/pause",
    operation_id = "pause",
    responses((status = 200, body = Done), (status = 409, body = Problem), (status = 500, body = Problem))
)]
pub(super) async fn pause(State(vm): State<Vm>) -> Result<Json<Done>, Refusal> {
    vm.pause()?;
    Ok(done(&*vm, "pause"))
}

/// Whether to accept a risk.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ForceQuery {
    /// For a VM in doubt: run it here although it may run on the other host. Default: false.
    #[serde(default)]
    force: bool,
}

fn forced(query: Result<Query<ForceQuery>, QueryRejection>) -> Result<bool, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    Ok(query.force)
}

/// Resumes a paused VM.
#[utoipa::path(
    put,
    path = "/v1/resume",
    operation_id = "resume",
    params(ForceQuery),
    responses(
        (status = 200, body = Done),
        (status = 400, body = Problem),
        (status = 409, body = Problem),
        (status = 500, body = Problem)
    )
)]
pub(super) async fn resume(
    State(vm): State<Vm>,
    query: Result<Query<ForceQuery>, QueryRejection>,
) -> Result<Json<Done>, Refusal> {
    vm.resume(forced(query)?)?;
    Ok(done(&*vm, "resume"))
}

/// The new backend of a NIC.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct NicQuery {
    /// The card, or the card's emulation with a tap.
    behind: NicBehind,
}

/// Changes the backend of a commodity NIC while its guest runs.
#[utoipa::path(
    put,
    path = "/v1/nics/{nic}",
    operation_id = "change_nic",
    params(("nic" = String, Path, description = "Name of the NIC: `nic0`"), NicQuery),
    responses(
        (status = 200, body = Done),
        (status = 400, body = Problem),
        (status = 409, body = Problem),
        (status = 500, body = Problem),
        (status = 501, body = Problem)
    )
)]
pub(super) async fn change_nic(
    State(vm): State<Vm>,
    Path(nic): Path<String>,
    query: Result<Query<NicQuery>, QueryRejection>,
) -> Result<Json<Done>, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    vm.change_nic(&nic, query.behind)?;
    Ok(done(&*vm, "change NIC"))
}

/// Cancels the running migration; the guest stays here.
#[utoipa::path(
    delete,
    path = "/v1/migration",
    operation_id = "cancel_migration",
    responses((status = 200, body = Done), (status = 409, body = Problem))
)]
pub(super) async fn cancel_migration(State(vm): State<Vm>) -> Result<Json<Done>, Refusal> {
    vm.cancel_migration()?;
    Ok(done(&*vm, "cancel migration"))
}

/// Presses the ACPI power button.
#[utoipa::path(
    put,
    path = "/v1/power-button",
    operation_id = "power_button",
    responses(
        (status = 200, body = Done),
        (status = 409, body = Problem),
        (status = 500, body = Problem),
        (status = 501, body = Problem)
    )
)]
pub(super) async fn power_button(State(vm): State<Vm>) -> Result<Json<Done>, Refusal> {
    vm.power_button()?;
    Ok(done(&*vm, "power button"))
}

/// Resets the machine at once.
#[utoipa::path(
    put,
    path = "/v1/reset",
    operation_id = "reset",
    params(ForceQuery),
    responses(
        (status = 200, body = Done),
        (status = 400, body = Problem),
        (status = 409, body = Problem),
        (status = 500, body = Problem),
        (status = 501, body = Problem)
    )
)]
pub(super) async fn reset(
    State(vm): State<Vm>,
    query: Result<Query<ForceQuery>, QueryRejection>,
) -> Result<Json<Done>, Refusal> {
    vm.reset(forced(query)?)?;
    Ok(done(&*vm, "reset"))
}

/// Returns VM exits since the start, by cause and address range.
#[utoipa::path(get, path = "/v1/exits", operation_id = "exits", responses((status = 200, body = ExitTable)))]
pub(super) async fn exits(State(vm): State<Vm>) -> Json<ExitTable> {
    Json(vm.exits())
}

/// Returns counters as Prometheus text.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4"), (status = 500, body = Problem))
)]
pub(super) async fn metrics(State(vm): State<Vm>) -> Result<Response, Refusal> {
    let name = vm.summary().name;
    let text = telemetry::metrics::encode(&vm.metrics(), &[("vm", &name)])
        .map_err(|error| Refusal(StatusCode::INTERNAL_SERVER_ERROR, Problem::of(&error)))?;
    Ok(([(header::CONTENT_TYPE, telemetry::metrics::CONTENT_TYPE)], text).into_response())
}

/// Returns this description.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "openapi",
    responses((status = 200, body = serde_json::Value))
)]
pub(super) async fn openapi_json() -> Json<utoipa::openapi::OpenApi> {
    // Generated for each request: requests are rare, and caching isn't worth the memory.
    Json(super::document::openapi())
}

/// Response for an unknown path.
pub(super) async fn not_found(uri: Uri) -> Refusal {
    let error = format!("There is no {}; GET /openapi.json lists what exists", uri.path());
    Refusal::new(StatusCode::NOT_FOUND, error)
}

/// Response for a path that doesn't support the method.
pub(super) async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let error = format!("{} doesn't support {method}; GET /openapi.json lists what it supports", uri.path());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, error)
}
