//! The bytes of a request, bounded in size, time and number.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};
use futures_util::StreamExt;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    app::App,
    error::{ApiError, Code, Fault},
};

/// A whole body, and its share of what all bodies together may take.
pub(crate) struct RawBody {
    pub(crate) bytes: Bytes,
    _share: OwnedSemaphorePermit,
}

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<RawBody, ApiError> {
        RawBody::read(request, app, app.options.body_bytes_max).await
    }
}

impl RawBody {
    /// Reads a body of at most so many bytes.
    pub(super) async fn read(request: Request, app: &Arc<App>, most: usize) -> Result<RawBody, ApiError> {
        let too_large = || ApiError::new(Code::BodyTooLarge, format!("a body may have {most} bytes"));
        let announced = request.headers().get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let kib = u32::try_from(announced.unwrap_or(most) / 1024 + 1).unwrap_or(u32::MAX);
        let read = async {
            let bodies = Arc::clone(&app.bodies);
            let share = bodies.acquire_many_owned(kib).await.map_err(|_| too_large())?;
            let bytes = collect(request.into_body(), most).await?.ok_or_else(too_large)?;
            Ok(RawBody { bytes, _share: share })
        };
        tokio::time::timeout(app.options.read_timeout, read).await.map_err(|_| ApiError {
            status: Some(StatusCode::REQUEST_TIMEOUT),
            ..ApiError::new(Code::InvalidInput, "the body did not arrive in time")
        })?
    }
}

/// `None` when there is more than `most`.
async fn collect(body: Body, most: usize) -> Result<Option<Bytes>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(part) = stream.next().await {
        let part = part.map_err(|_| ApiError::fault(Fault::rule("body", "did not arrive whole")))?;
        if whole.len() + part.len() > most {
            return Ok(None);
        }
        whole.extend_from_slice(&part);
    }
    Ok(Some(whole.into()))
}
