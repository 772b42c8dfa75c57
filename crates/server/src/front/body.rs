//! The bytes of a request, bounded in size, time and number.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};
use futures_util::StreamExt;

use crate::{
    app::App,
    error::{ApiError, Code, Fault},
    front::keys::{Caller, Tenant},
    shares::Share,
};

/// A whole body, and its share of what all bodies together may take.
pub(crate) struct RawBody {
    pub(crate) bytes: Bytes,
    pub(crate) share: Share,
}

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<RawBody, ApiError> {
        RawBody::read(request, app, app.options.body_bytes_max).await
    }
}

impl RawBody {
    /// Reads a body of at most this many bytes.
    pub(super) async fn read(request: Request, app: &Arc<App>, most: usize) -> Result<RawBody, ApiError> {
        let too_large = || ApiError::new(Code::BodyTooLarge, format!("a body may have {most} bytes"));
        let announced = request.headers().get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let kib = announced.unwrap_or(most) / 1024 + 1;
        let tenant: Tenant = request.extensions().get::<Caller>().and_then(|caller| caller.tenant().clone());
        let read = async {
            let share = app.bodies.take(&tenant, kib).await;
            app.check_memory(announced.unwrap_or(most))?;
            let bytes = collect(request.into_body(), announced, most).await?.ok_or_else(too_large)?;
            Ok(RawBody { bytes, share })
        };
        tokio::time::timeout(app.options.read_timeout, read).await.map_err(|_| ApiError {
            status: Some(StatusCode::REQUEST_TIMEOUT),
            ..ApiError::new(Code::InvalidInput, "the body did not arrive in time")
        })?
    }
}

/// `None` when there is more than `most`.
async fn collect(body: Body, announced: Option<usize>, most: usize) -> Result<Option<Bytes>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    // What was announced is not believed further than to the first part of a megabyte.
    room(&mut whole, announced.unwrap_or(0).min(1 << 20))?;
    while let Some(part) = stream.next().await {
        let part = part.map_err(|_| ApiError::fault(Fault::rule("body", "did not arrive whole")))?;
        if whole.len() + part.len() > most {
            return Ok(None);
        }
        room(&mut whole, part.len())?;
        whole.extend_from_slice(&part);
    }
    Ok(Some(whole.into()))
}

/// Makes room, or refuses: the client decides how much, so it is its request that ends.
fn room(whole: &mut Vec<u8>, more: usize) -> Result<(), ApiError> {
    let none = |_| ApiError::new(Code::OutOfMemory, "there is no memory for this body now");
    whole.try_reserve(more).map_err(none)
}
