//! String formats of JSON Schema, as patterns.

/// A string format as a pattern, at least as strict as its specification.
pub(crate) struct Format {
    pub(crate) pattern: &'static str,
    pub(crate) length_max: Option<u32>,
}

/// Formats that are enforced. Each pattern is anchored by its user.
pub(crate) fn format(name: &str) -> Option<Format> {
    /// Years that are leap years, then the months with their days.
    macro_rules! date {
        () => {
            concat!(
                "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
                "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
                "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
            )
        };
    }
    /// Without leap seconds: whether a minute has one depends on the day and the offset.
    macro_rules! time {
        () => {
            "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        };
    }
    macro_rules! byte {
        () => {
            "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        };
    }
    macro_rules! ipv4 {
        () => {
            concat!("(?:", byte!(), "\\.){3}", byte!())
        };
    }
    /// Letters, digits and single hyphens: two of them in the third and fourth place would be an encoded label, whose
    /// validity no pattern tells.
    macro_rules! label {
        () => {
            "[a-zA-Z0-9](?:[a-zA-Z0-9]|-[a-zA-Z0-9]){0,30}"
        };
    }
    macro_rules! hostname {
        () => {
            concat!(label!(), "(?:\\.", label!(), "){0,6}")
        };
    }
    let (pattern, length_max) = match name {
        "date" => (date!(), None),
        "time" => (time!(), None),
        "date-time" => (concat!(date!(), "[tT]", time!()), None),
        "duration" => (
            concat!(
                "P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)",
                "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?",
                "|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
            ),
            None,
        ),
        "email" => (concat!("[a-zA-Z0-9_+-]+(?:\\.[a-zA-Z0-9_+-]+){0,3}@", hostname!()), Some(64)),
        "hostname" => (hostname!(), Some(253)),
        "ipv4" => (ipv4!(), None),
        "ipv6" => (
            concat!(
                "(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,5}(?::[0-9a-fA-F]{1,4}){2}",
                "|(?:[0-9a-fA-F]{1,4}:){1,4}(?::[0-9a-fA-F]{1,4}){3}",
                "|(?:[0-9a-fA-F]{1,4}:){1,3}(?::[0-9a-fA-F]{1,4}){4}",
                "|(?:[0-9a-fA-F]{1,4}:){1,2}(?::[0-9a-fA-F]{1,4}){5}",
                "|[0-9a-fA-F]{1,4}:(?::[0-9a-fA-F]{1,4}){6}",
                "|:(?::[0-9a-fA-F]{1,4}){1,7}|(?:[0-9a-fA-F]{1,4}:){1,7}:|::)"
            ),
            None,
        ),
        "uuid" => ("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", None),
        "uri" => (
            concat!(
                "[a-zA-Z][a-zA-Z0-9+.-]*:(?://",
                hostname!(),
                "(?::[0-9]{1,5})?(?:/(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})*)*",
                "|(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})+",
                "(?:/(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})*)*)",
                "(?:\\?(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*)?",
                "(?:#(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})*)?"
            ),
            None,
        ),
        _ => return None,
    };
    Some(Format { pattern, length_max })
}
