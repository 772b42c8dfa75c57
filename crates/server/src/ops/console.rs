//! The console: pages for people, made of the routes that programs use. Everything is in the binary.

use axum::{
    extract::Path,
    http::header,
    response::{IntoResponse, Response},
};

use crate::error::{ApiError, Code};

/// Pages take scripts and styles from this server alone, none from within the page, and reach nothing else: text that
/// slipped into a page as markup could neither run nor send anything.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
    form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// By the name below `/console/`: what it is, and its text.
const FILES: &[(&str, &str, &str)] = &[
    ("style.css", STYLE, include_str!("../../page/style.css")),
    ("main.js", SCRIPT, include_str!("../../page/main.js")),
    ("api.js", SCRIPT, include_str!("../../page/api.js")),
    ("chat.js", SCRIPT, include_str!("../../page/chat.js")),
    ("markdown.js", SCRIPT, include_str!("../../page/markdown.js")),
    ("live.js", SCRIPT, include_str!("../../page/live.js")),
    ("theme.js", SCRIPT, include_str!("../../page/theme.js")),
    ("jobs.js", SCRIPT, include_str!("../../page/jobs.js")),
];

/// A page: its own part between what all of them have.
macro_rules! page {
    ($title:literal, $script:literal, $own:literal) => {
        concat!(
            include_str!("../../page/top.html"),
            "<title>",
            $title,
            "</title>\n<script type=\"module\" src=\"/console/",
            $script,
            "\"></script>\n",
            include_str!("../../page/bar.html"),
            include_str!(concat!("../../page/", $own)),
            include_str!("../../page/foot.html")
        )
    };
}

const CONSOLE: &str = page!("Fornax", "main.js", "console.html");
const JOBS: &str = page!("Fornax: jobs", "jobs.js", "jobs.html");

/// Whether a path is part of the console itself, which is open to everybody: it holds no secret, and asks for the key.
pub(crate) fn is_page(path: &str) -> bool {
    matches!(path, "/" | "/console/jobs")
        || path.strip_prefix("/console/").is_some_and(|name| FILES.iter().any(|file| file.0 == name))
}

/// Chat with the model, and how the engine stands, for people
///
/// The page itself needs no key; what it shows does.
#[utoipa::path(get, path = "/", tag = "operations", responses(
    (status = 200, content_type = "text/html", body = String, description = "The page"),
    (status = 403, body = crate::openapi::ErrorBody, description = "A page of another site")
))]
pub(crate) async fn console() -> Response {
    file(HTML, CONSOLE)
}

/// The queue, its jobs and what became of each, for people
///
/// The page itself needs no key; what it shows does.
#[utoipa::path(get, path = "/console/jobs", tag = "operations", responses(
    (status = 200, content_type = "text/html", body = String, description = "The page"),
    (status = 403, body = crate::openapi::ErrorBody, description = "A page of another site")
))]
pub(crate) async fn jobs() -> Response {
    file(HTML, JOBS)
}

/// A script or style of the pages. They are no part of the API, and not of its document.
pub(crate) async fn part(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|file| file.0 == name) {
        Some((_, kind, text)) => file(kind, text),
        None => ApiError::new(Code::UnknownEndpoint, "there is nothing at this path").into_response(),
    }
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the server has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_is_small_and_needs_nothing_from_elsewhere() {
        let all = FILES.iter().map(|file| (file.0, file.2)).chain([("console", CONSOLE), ("jobs", JOBS)]);
        let bytes: usize = all.clone().map(|(_, text)| text.len()).sum();
        assert!(bytes < 300_000, "{bytes} bytes");
        for (name, text) in all {
            for foreign in
                ["http://", "https://", "innerHTML", "insertAdjacentHTML", "document.write", " onclick="]
            {
                // An address of the web that is compared with, and the name of a language.
                let known = text.matches("http://www.w3.org/2000/svg").count();
                let count = text.matches(foreign).count() - if foreign == "http://" { known } else { 0 };
                assert_eq!(count, 0, "{name} has {foreign}");
            }
            // Whatever a page or a script names is here.
            for named in text.split(['"', '\'']).filter_map(|word| word.strip_prefix("/console/")) {
                assert!(is_page(&format!("/console/{named}")) || named == "live", "{name} names {named}");
            }
        }
    }
}
