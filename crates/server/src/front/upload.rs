//! A form with a file in it (`multipart/form-data`), bounded as bodies are.

use std::{convert::Infallible, sync::Arc};

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::header,
};
use futures_util::stream;
use multer::Multipart;

use super::{body::RawBody, keys::Caller};
use crate::{
    app::{App, Entry, FORM_BYTES},
    ask::prepare::blocking,
    error::{ApiError, Code, Fault},
    shares::Share,
};

/// Fields of a form, and characters of a file's name: more is nobody's form.
const FIELDS_MAX: usize = 16;
const NAME_CHARS_MAX: usize = 512;

/// What was sent.
pub(crate) struct Upload {
    /// Each field that is no file, in its order.
    pub(crate) fields: Vec<(String, String)>,
    /// What the client calls the file.
    pub(crate) name: String,
    /// What is in it.
    pub(crate) text: String,
    /// Counts as a request, and as bytes that are held, until it is kept.
    pub(crate) held: (Entry, Share),
}

impl FromRequest<Arc<App>> for Upload {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Upload, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let boundary = kind.and_then(|kind| multer::parse_boundary(kind).ok()).ok_or_else(|| {
            ApiError::fault(Fault::rule("body", "must be multipart/form-data with a boundary"))
        })?;
        let caller = request.extensions().get::<Caller>().cloned();
        let caller = caller.ok_or_else(|| ApiError::new(Code::Unauthorized, "this needs a key"))?;
        let entry = app.enter_without_model(&caller)?;
        let most = app.options.file_bytes_max.saturating_add(FORM_BYTES);
        let RawBody { bytes, share } = RawBody::read(request, app, most).await?;
        let most = app.options.file_bytes_max;
        // As many bytes as nobody else sends: not on a thread that serves sockets.
        let form = blocking(app, caller.tenant(), move |_| {
            tokio::runtime::Handle::current().block_on(Form::read(bytes, boundary, most))
        });
        let Form { fields, name, text } = form.await?;
        Ok(Upload { fields, name, text, held: (entry, share) })
    }
}

/// What a form says.
struct Form {
    fields: Vec<(String, String)>,
    name: String,
    text: String,
}

impl Form {
    async fn read(bytes: Bytes, boundary: String, most: usize) -> Result<Form, ApiError> {
        let bytes = stream::once(std::future::ready(Ok::<_, Infallible>(bytes)));
        let mut form = Multipart::new(bytes, boundary);
        let (mut fields, mut file) = (Vec::new(), None);
        // What the form looks like is the client's; its reader's messages may repeat it.
        let wrong = |_| ApiError::fault(Fault::rule("body", "must be a form that is whole"));
        let mut parts = 0;
        while let Some(field) = form.next_field().await.map_err(wrong)? {
            parts += 1;
            if parts > FIELDS_MAX {
                let rule = format!("must have at most {FIELDS_MAX} fields");
                return Err(ApiError::fault(Fault::rule("body", rule)));
            }
            let field_name = field.name().unwrap_or_default().to_owned();
            let name = field.file_name().map(|name| name.chars().take(NAME_CHARS_MAX).collect::<String>());
            let bytes = field.bytes().await.map_err(wrong)?;
            let text = String::from_utf8(bytes.into()).ok().filter(|text| !text.contains('\0'));
            // PostgreSQL keeps no zero byte in a text, and no line of JSON has one.
            let Some(text) = text else {
                return Err(ApiError::fault(Fault::rule(
                    field_name,
                    "must be UTF-8 text without zero bytes",
                )));
            };
            match field_name.as_str() {
                "file" => file = Some((name.unwrap_or_else(|| "file".to_owned()), text)),
                _ => fields.push((field_name, text)),
            }
        }
        let Some((name, text)) = file else {
            return Err(ApiError::fault(Fault::rule("file", "is required")));
        };
        if text.len() > most {
            return Err(ApiError::new(Code::BodyTooLarge, format!("a file may have {most} bytes")));
        }
        Ok(Form { fields, name, text })
    }
}
