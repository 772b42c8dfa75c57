//! The console: pages for people, made of the routes that programs use. Everything is in the binary.

use axum::{
    extract::Path,
    http::header,
    response::{IntoResponse, Response},
};

use crate::error::{ApiError, Code};

/// Pages take scripts and styles from this server alone, none from within the page, and reach nothing else: text that
/// slipped into a page as markup could neither run nor send anything. Where a browser knows trusted types, no text can
/// become markup at all.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; manifest-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";
const MANIFEST: &str = "application/manifest+json";
const TEXT: &str = "text/plain; charset=utf-8";

/// By the name below `/console/`: what it is, and its text.
const FILES: &[(&str, &str, &str)] = &[
    ("style.css", STYLE, include_str!("../../page/style.css")),
    ("face.svg", PICTURE, include_str!("../../page/face.svg")),
    ("manifest.webmanifest", MANIFEST, include_str!("../../page/manifest.webmanifest")),
    ("main.js", SCRIPT, include_str!("../../page/main.js")),
    ("api.js", SCRIPT, include_str!("../../page/api.js")),
    ("dom.js", SCRIPT, include_str!("../../page/dom.js")),
    ("theme.js", SCRIPT, include_str!("../../page/theme.js")),
    ("chat.js", SCRIPT, include_str!("../../page/chat.js")),
    ("attachment.js", SCRIPT, include_str!("../../page/attachment.js")),
    ("store.js", SCRIPT, include_str!("../../page/store.js")),
    ("history.js", SCRIPT, include_str!("../../page/history.js")),
    ("settings.js", SCRIPT, include_str!("../../page/settings.js")),
    ("models.js", SCRIPT, include_str!("../../page/models.js")),
    ("message.js", SCRIPT, include_str!("../../page/message.js")),
    ("tokens.js", SCRIPT, include_str!("../../page/tokens.js")),
    ("markdown.js", SCRIPT, include_str!("../../page/markdown.js")),
    ("live.js", SCRIPT, include_str!("../../page/live.js")),
    ("jobs.js", SCRIPT, include_str!("../../page/jobs.js")),
    ("files.js", SCRIPT, include_str!("../../page/files.js")),
];

/// The same, of other people's libraries (`page/bundle/make.mjs`). Formulas and colours are loaded where they are needed.
const LIBRARIES: &[(&str, &str, &str)] = &[
    ("markdown-it.js", SCRIPT, include_str!("../../page/bundle/markdown-it.js")),
    ("temml.js", SCRIPT, include_str!("../../page/bundle/temml.js")),
    ("temml.css", STYLE, include_str!("../../page/bundle/temml.css")),
    ("highlight.js", SCRIPT, include_str!("../../page/bundle/highlight.js")),
    ("licences.txt", TEXT, include_str!("../../page/bundle/licences.txt")),
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
const BATCHES: &str = page!("Fornax: files", "files.js", "files.html");

/// What is below `/console/` under that name.
fn found(name: &str) -> Option<&'static (&'static str, &'static str, &'static str)> {
    FILES.iter().chain(LIBRARIES).find(|file| file.0 == name)
}

/// Whether a path is part of the console itself, which is open to everybody: it holds no secret, and asks for the key.
pub(crate) fn is_page(path: &str) -> bool {
    matches!(path, "/" | "/console/jobs" | "/console/files")
        || path.strip_prefix("/console/").is_some_and(|name| found(name).is_some())
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

/// Files of requests, and the batches that are made of them, for people
///
/// The page itself needs no key; what it shows does.
#[utoipa::path(get, path = "/console/files", tag = "operations", responses(
    (status = 200, content_type = "text/html", body = String, description = "The page"),
    (status = 403, body = crate::openapi::ErrorBody, description = "A page of another site")
))]
pub(crate) async fn files() -> Response {
    file(HTML, BATCHES)
}

/// A script or style of the pages. They are no part of the API, and not of its document.
pub(crate) async fn part(Path(name): Path<String>) -> Response {
    match found(&name) {
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

    /// What a browser loads when the console is opened, with Markdown, and everything there is.
    const FIRST_MAX: usize = 260_000;
    const ALL_MAX: usize = 600_000;

    #[test]
    fn the_console_is_small_and_needs_nothing_from_elsewhere() {
        let pages = [("console", CONSOLE), ("jobs", JOBS), ("files", BATCHES)];
        let own = || FILES.iter().map(|file| (file.0, file.2)).chain(pages);
        let sum =
            |texts: &mut dyn Iterator<Item = (&str, &str)>| texts.map(|(_, text)| text.len()).sum::<usize>();
        let (own_bytes, markdown) = (sum(&mut own()), LIBRARIES[0].2.len());
        assert!(own_bytes + markdown < FIRST_MAX, "{own_bytes} and {markdown} bytes");
        let all = own_bytes + sum(&mut LIBRARIES.iter().map(|file| (file.0, file.2)));
        assert!(all < ALL_MAX, "{all} bytes");
        for (name, text) in own() {
            for foreign in [
                "http://",
                "https://",
                "innerHTML",
                "insertAdjacentHTML",
                "document.write",
                " onclick=",
                " style=",
            ] {
                // The name of a language is an address, too.
                let known = text.matches("http://www.w3.org/2000/svg").count();
                let count = text.matches(foreign).count() - if foreign == "http://" { known } else { 0 };
                assert_eq!(count, 0, "{name} has {foreign}");
            }
            // Whatever a page or a script names is here.
            let named = text.split(['"', '\'']).filter_map(|word| word.strip_prefix("/console/"));
            for named in named.chain(text.split('"').filter_map(|word| word.strip_prefix("./"))) {
                let is_live = named.starts_with("live") && !named.starts_with("live.js");
                assert!(is_page(&format!("/console/{named}")) || is_live, "{name} names {named}");
            }
        }
        // Libraries import nothing: each is one file.
        for (name, _, text) in LIBRARIES {
            for import in ["import(", "from\"./", "from\"/", "from\"http", "@import"] {
                assert!(!text.contains(import), "{name} has {import}");
            }
        }
    }
}
