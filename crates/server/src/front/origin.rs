//! Which web pages may reach a server that asks for no key.
//!
//! A browser on the same machine reaches every port of the loopback, for every page it shows. A page of another site
//! says so in `Origin`; a page that rebinds its own name to 127.0.0.1 shows that name in `Host`. Both are refused.

use axum::http::{HeaderMap, StatusCode, header};

use crate::{
    error::{ApiError, Code},
    options::ServerOptions,
};

/// Refuses requests that a page of another site may have made. A request may name the host in its line, too, and more
/// than once in its headers: all of them are looked at.
pub(crate) fn check(
    uri_host: Option<&str>,
    headers: &HeaderMap,
    options: &ServerOptions,
) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("\u{fffd}"));
    let host = text(header::HOST).unwrap_or_default();
    let named =
        headers.get_all(header::HOST).iter().map(|value| hostname(value.to_str().unwrap_or("\u{fffd}")));
    let foreign = |name: &str| !is_ours(name, options);
    if host.is_empty() || named.chain(uri_host).any(foreign) {
        return Err(refused("Host", "is not a name of this server"));
    }
    match text(header::ORIGIN) {
        None => Ok(()),
        Some(origin) if options.cors_origins.iter().any(|allowed| allowed == origin) => Ok(()),
        Some(origin) => {
            let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            match rest {
                Some(authority) if authority == host => Ok(()),
                _ => Err(refused("Origin", "is another site's")),
            }
        }
    }
}

fn refused(header: &str, what: &str) -> ApiError {
    let message = format!("the {header} header {what}; set keys (--api-key-file) to serve others");
    ApiError { status: Some(StatusCode::FORBIDDEN), ..ApiError::new(Code::Unauthorized, message) }
}

fn is_ours(name: &str, options: &ServerOptions) -> bool {
    matches!(name, "localhost" | "127.0.0.1" | "[::1]") || options.hosts.iter().any(|host| host == name)
}

/// Without the port.
fn hostname(host: &str) -> &str {
    match host.rfind(':') {
        Some(colon) if !host[colon..].contains(']') => &host[..colon],
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_and_pages_pass() {
        let options = ServerOptions {
            cors_origins: vec!["https://app.example".into()],
            hosts: vec!["box.local".into()],
            ..ServerOptions::default()
        };
        let check = |host: Option<&str>, origin: Option<&str>, passes: bool| {
            let mut headers = HeaderMap::new();
            if let Some(host) = host {
                headers.insert(header::HOST, host.parse().unwrap());
            }
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, origin.parse().unwrap());
            }
            assert_eq!(super::check(None, &headers, &options).is_ok(), passes, "{host:?} {origin:?}");
        };
        for host in ["localhost", "localhost:8080", "127.0.0.1:80", "[::1]:8080", "[::1]", "box.local:1"] {
            check(Some(host), None, true);
        }
        for host in ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.", "::1"] {
            check(Some(host), None, false);
        }
        check(None, None, false);
        let local = Some("localhost:8080");
        check(local, Some("http://localhost:8080"), true);
        check(local, Some("https://app.example"), true);
        for origin in ["http://evil.example", "null", "http://localhost:9999", "https://app.example.evil", ""]
        {
            check(local, Some(origin), false);
        }
        let mut two = HeaderMap::new();
        two.append(header::HOST, "localhost".parse().unwrap());
        assert!(super::check(Some("127.0.0.1"), &two, &options).is_ok());
        assert!(super::check(Some("evil.example"), &two, &options).is_err());
        two.append(header::HOST, "evil.example".parse().unwrap());
        assert!(super::check(None, &two, &options).is_err());
    }
}
