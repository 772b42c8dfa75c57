//! Pictures as requests carry them: in base64, alone or in a data URL.

use base64::{Engine as _, engine::general_purpose::STANDARD_PAD_INDIFFERENT as BASE64};
use fornax_chat::Image;

use crate::error::Fault;

/// Why the model reads no pictures; `None` where it does.
pub(crate) type Blind = Option<&'static str>;

/// A picture out of a data URL. No URL of another kind is fetched.
pub(crate) fn of_url(url: &str, field: &str, blind: Blind, faults: &mut Vec<Fault>) -> Option<Image> {
    let data = url.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case("data:")).map(|_| &url[5..]);
    let Some((kind, data)) = data.and_then(|data| data.split_once(',')) else {
        faults.push(Fault::rule(
            field,
            "must be a data URL (data:image/png;base64,...): nothing is fetched here",
        ));
        return None;
    };
    if !kind.to_ascii_lowercase().ends_with(";base64") {
        faults.push(Fault::rule(field, "must be a data URL in base64"));
        return None;
    }
    of_base64(data, field, blind, faults)
}

/// A picture in base64.
pub(crate) fn of_base64(data: &str, field: &str, blind: Blind, faults: &mut Vec<Fault>) -> Option<Image> {
    if let Some(reason) = blind {
        faults.push(Fault::rule(field, reason));
        return None;
    }
    // Some clients break lines.
    let decoded = match data.contains(['\n', '\r', ' ']) {
        true => BASE64.decode(data.replace(['\n', '\r', ' '], "")),
        false => BASE64.decode(data),
    };
    match decoded {
        Ok(bytes) => Some(Image { bytes: bytes.into() }),
        Err(error) => {
            faults.push(Fault::rule(field, format!("is not base64: {error}")));
            None
        }
    }
}
