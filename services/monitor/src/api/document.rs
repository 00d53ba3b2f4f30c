//! The OpenAPI description, generated from the routes and the types of requests and responses.

use std::sync::Arc;

use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::VmControl;
use super::routes as handlers;

/// State shared by all routes: the VM.
pub(super) type Vm = Arc<dyn VmControl>;

#[derive(OpenApi)]
#[openapi(info(
    title = "Causeway VM",
    description = "One running VM. HTTP/1.1 with JSON on a Unix socket; one request per connection.",
    license(name = "Apache-2.0", identifier = "Apache-2.0")
))]
struct Document;

/// The routes and their description, from one list, so that they can't differ.
pub(super) fn router() -> (axum::Router<Vm>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(handlers::summary, handlers::stop))
        .routes(routes!(handlers::inspect))
        .routes(routes!(handlers::pause))
        .routes(routes!(handlers::resume))
        .routes(routes!(handlers::change_nic))
        .routes(routes!(handlers::cancel_migration))
        .routes(routes!(handlers::power_button))
        .routes(routes!(handlers::reset))
        .routes(routes!(handlers::exits))
        .routes(routes!(handlers::metrics))
        .routes(routes!(handlers::openapi_json))
        .split_for_parts()
}

/// The OpenAPI description of the API.
pub fn openapi() -> utoipa::openapi::OpenApi {
    router().1
}
