//! What is claimed, from whom it protects, and what it does not: the text that `private info` prints, and the lists
//! that servers tell.

/// What a server learns all the same.
pub const LEAKS: [&str; 3] = [
    "how many rows each round has, and so how many tokens prompt and answer have",
    "when each round happens, and so how long the client chooses a token: that shows its settings, its form, and how undecided the model is",
    "which model is used",
];

/// Under which assumptions it learns no more.
pub const ASSUMES: [&str; 4] = [
    "the two servers do not collude",
    "the client's machine is honest",
    "the connections are TLS to the right servers",
    "ChaCha20 cannot be told from chance",
];

/// The whole claim in words; it is a section of the documentation, which stands there once.
pub fn text() -> &'static str {
    const DOCUMENT: &str = include_str!("../../../docs/private.md");
    let (_, after) = DOCUMENT.split_once("<!-- info -->\n").unwrap_or(("", DOCUMENT));
    after.split_once("<!-- end of info -->").map_or(after, |(text, _)| text)
}

/// What is to be said where both parties are on one machine.
pub const SINGLE_HOST: &str = "NO PRIVACY IS PROVIDED: both parties are on one host, whose owner can put the two shares together. \
    This is a demonstration of the protocol.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_what_servers_tell() {
        let text = text().split_whitespace().collect::<Vec<_>>().join(" ");
        for said in LEAKS.iter().chain(&ASSUMES) {
            assert!(text.contains(said), "{said:?} is not in docs/private.md");
        }
        assert!(text.contains("NO PRIVACY IS PROVIDED"), "what a single host means");
        assert!(text.len() > 500 && !text.contains("<!--"));
    }
}
