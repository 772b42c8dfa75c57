//! Regular expressions of JSON Schema (ECMA 262), in the syntax of the compiler.

/// White space in ECMA 262, as the inside of a character class.
const SPACE: &str =
    r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}";

/// A pattern of ECMA 262 (in its unicode mode) in the syntax of the compiler, or what of it is not supported.
pub(crate) fn ecma_262(pattern: &str) -> Result<String, &'static str> {
    let mut out = String::new();
    let mut rest = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(character) = rest.next() {
        match character {
            '\\' => escape(&mut rest, in_class, &mut out)?,
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '-' if in_class && rest.peek() == Some(&'-') => {
                return Err("a double hyphen in a class is not supported");
            }
            '[' | '&' | '~' if in_class => out.extend(['\\', character]),
            _ if in_class => out.push(character),
            '[' => {
                in_class = true;
                out.push('[');
                if rest.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
                if rest.peek() == Some(&']') {
                    return Err("an empty class is not supported");
                }
            }
            '.' => out.push_str(r"[^\n\r\u{2028}\u{2029}]"),
            '(' if rest.peek() == Some(&'?') => {
                let ahead: String = rest.clone().take(3).collect();
                let named =
                    (ahead.starts_with("?<") && !ahead.starts_with("?<=") && !ahead.starts_with("?<!"))
                        || ahead == "?P<";
                if !named && !ahead.starts_with("?:") {
                    return Err("look-around and flags are not supported");
                }
                out.push('(');
            }
            _ => out.push(character),
        }
    }
    if in_class { Err("a class without its end") } else { Ok(out) }
}

/// What follows a backslash.
fn escape(
    rest: &mut std::iter::Peekable<std::str::Chars<'_>>,
    in_class: bool,
    out: &mut String,
) -> Result<(), &'static str> {
    match rest.next() {
        None => return Err("a backslash at its end"),
        Some('s') if in_class => out.push_str(SPACE),
        Some('s') => out.extend(["[", SPACE, "]"]),
        Some('S') => out.extend(["[^", SPACE, "]"]),
        Some('b') if in_class => out.push_str(r"\x08"),
        Some('v') => out.push_str(r"\x0B"),
        Some('0') if !rest.peek().is_some_and(char::is_ascii_digit) => out.push_str(r"\x00"),
        Some('c') => match rest.next() {
            Some(letter) if letter.is_ascii_alphabetic() => {
                out.push_str(&format!(r"\x{:02X}", letter as u32 % 32))
            }
            _ => return Err("a control character without its letter"),
        },
        Some(class @ ('d' | 'D' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'p' | 'P' | 'x' | 'u')) => {
            out.extend(['\\', class]);
        }
        Some(other) if other.is_ascii_alphanumeric() => {
            return Err("a back reference, a word boundary or an unknown escape is not supported");
        }
        Some(other) => out.extend(['\\', other]),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_keep_their_meaning_in_the_other_syntax() {
        let check = |pattern: &str, wanted: Result<&str, ()>| {
            assert_eq!(ecma_262(pattern).as_deref().map_err(|_| ()), wanted, "{pattern}");
        };
        check(r"^a.\d\/$", Ok(r"^a[^\n\r\u{2028}\u{2029}]\d\/$"));
        check(r"[[a&&b~.]]", Ok(r"[\[a\&\&b\~.]]"));
        check(r"[\s\b\cJ]\0\v", Ok(&format!(r"[{SPACE}\x08\x0A]\x00\x0B")));
        check(r"(?:a)(?<n>b)(?P<m>c)", Ok(r"(?:a)(?<n>b)(?P<m>c)"));
        for refused in [
            r"\bword\b",
            r"(a)\1",
            r"(?=a)",
            r"(?!a)",
            r"(?<=a)",
            r"(?<!a)",
            r"(?i)a",
            r"\A",
            r"\Z",
            r"[]",
            r"[^]",
            "[a",
            "a\\",
            "[a--b]",
        ] {
            check(refused, Err(()));
        }
    }
}
