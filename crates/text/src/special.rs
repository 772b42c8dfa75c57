//! Finding whole tokens (control, user-defined) in text, and deciding who may write them.

use std::ops::Range;

/// Which parts of a text may spell control tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trust<'a> {
    /// None: user text.
    Nothing,
    /// All of it: text written by a template, or by whoever asked for parsing.
    Everything,
    /// All but the characters at these byte offsets (ascending): a rendered chat. One such character inside a
    /// control token's text makes it plain text.
    Except(&'a [usize]),
}

impl Trust<'_> {
    pub(crate) fn covers(self, range: &Range<usize>) -> bool {
        match self {
            Trust::Nothing => false,
            Trust::Everything => true,
            Trust::Except(marks) => {
                let next = marks.partition_point(|&mark| mark < range.start);
                marks.get(next).is_none_or(|&mark| mark >= range.end)
            }
        }
    }
}

/// A token that is matched as a whole before anything else looks at the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Whole {
    pub(crate) id: u32,
    /// Only trusted text may spell it.
    pub(crate) reserved: bool,
    /// Swallows the whitespace before it.
    pub(crate) strip_before: bool,
    /// Swallows the whitespace after it.
    pub(crate) strip_after: bool,
    /// Matches only where no letter or digit touches it.
    pub(crate) single_word: bool,
}

impl Whole {
    pub(crate) fn new(id: u32, reserved: bool) -> Whole {
        Whole { id, reserved, strip_before: false, strip_after: false, single_word: false }
    }
}

/// A stretch of text: ordinary, or one whole token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) range: Range<usize>,
    pub(crate) token: Option<u32>,
}

/// A trie of all whole tokens. Matching is leftmost, then longest among the tokens that are allowed there.
#[derive(Debug)]
pub(crate) struct WholeTokens {
    /// Node 0 is the root.
    nodes: Vec<Node>,
    /// Which bytes can start a token: most of a text is skipped by this table alone.
    starts: [bool; 256],
}

#[derive(Debug, Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, u32)>,
    token: Option<Whole>,
}

impl WholeTokens {
    pub(crate) fn new<'t>(tokens: impl IntoIterator<Item = (&'t [u8], Whole)>) -> WholeTokens {
        let mut trie = WholeTokens { nodes: vec![Node::default()], starts: [false; 256] };
        for (bytes, token) in tokens {
            let Some(&first) = bytes.first() else { continue };
            trie.starts[usize::from(first)] = true;
            let mut node = 0;
            for &byte in bytes {
                node = match trie.child(node, byte) {
                    Some(child) => child,
                    None => trie.add_child(node, byte),
                };
            }
            trie.nodes[node].token = Some(token);
        }
        trie
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    fn add_child(&mut self, node: usize, byte: u8) -> usize {
        let child = self.nodes.len();
        self.nodes.push(Node::default());
        let children = &mut self.nodes[node].children;
        let at = children.partition_point(|&(other, _)| other < byte);
        // Node counts stay below the vocabulary's byte count, which fits 32 bits.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by the vocabulary's bytes")]
        children.insert(at, (byte, child as u32));
        child
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        let children = &self.nodes[node].children;
        let at = children.binary_search_by_key(&byte, |&(other, _)| other).ok()?;
        Some(children[at].1 as usize)
    }

    /// Cuts `text` into ordinary stretches and whole tokens, in order, covering all of it.
    /// `trusted` is asked only about reserved tokens.
    pub(crate) fn cut(&self, text: &str, trusted: impl Fn(&Range<usize>) -> bool) -> Vec<Stretch> {
        let mut stretches = Vec::new();
        let mut done = 0;
        let mut at = 0;
        while let Some(skip) = text.as_bytes()[at..].iter().position(|&byte| self.starts[usize::from(byte)]) {
            at += skip;
            let Some((token, end)) = self.longest(text, at, &trusted) else {
                at += 1;
                continue;
            };
            let (mut start, mut end) = (at, end);
            if token.strip_before {
                start = done + text[done..start].trim_end().len();
            }
            if token.strip_after {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                stretches.push(Stretch { range: done..start, token: None });
            }
            stretches.push(Stretch { range: start..end, token: Some(token.id) });
            (done, at) = (end, end);
        }
        if done < text.len() {
            stretches.push(Stretch { range: done..text.len(), token: None });
        }
        stretches
    }

    /// The longest allowed token that starts at byte `at`, and where it ends.
    fn longest(
        &self,
        text: &str,
        at: usize,
        trusted: &impl Fn(&Range<usize>) -> bool,
    ) -> Option<(&Whole, usize)> {
        let mut best = None;
        let mut node = 0;
        for (end, &byte) in (at + 1..).zip(&text.as_bytes()[at..]) {
            let Some(child) = self.child(node, byte) else { break };
            node = child;
            let Some(token) = &self.nodes[node].token else { continue };
            let allowed = !token.reserved || trusted(&(at..end));
            if allowed && !(token.single_word && touches_word(text, at, end)) {
                best = Some((token, end));
            }
        }
        best
    }

    /// Byte offsets of the characters of `text` at which a reserved token starts, or could start if more text
    /// followed. Distrusting these keeps every reserved token out of `text`, wherever it is put.
    pub(crate) fn reserved_starts(&self, text: &str) -> Vec<usize> {
        let bytes = text.as_bytes();
        let starts_reserved = |at: usize| {
            let mut node = 0;
            for &byte in &bytes[at..] {
                let Some(child) = self.child(node, byte) else { return false };
                node = child;
                if self.nodes[node].token.as_ref().is_some_and(|token| token.reserved) {
                    return true;
                }
            }
            true
        };
        (0..bytes.len()).filter(|&at| self.starts[usize::from(bytes[at])] && starts_reserved(at)).collect()
    }
}

fn touches_word(text: &str, start: usize, end: usize) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text[..start].chars().next_back().is_some_and(is_word) || text[end..].chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> WholeTokens {
        let end = Whole::new(1, true);
        let stripping = Whole { strip_before: true, strip_after: true, ..Whole::new(4, true) };
        let word = Whole { single_word: true, ..Whole::new(5, false) };
        WholeTokens::new([
            (&b"<|end|>"[..], end),
            (b"<|end|>!", Whole::new(2, true)),
            (b"  ", Whole::new(3, false)),
            (b"<mask>", stripping),
            (b"cat", word),
        ])
    }

    fn check(text: &str, trust: Trust, want: &[(&str, Option<u32>)]) {
        let cut = tokens().cut(text, |range| trust.covers(range));
        let got: Vec<_> = cut.iter().map(|s| (&text[s.range.clone()], s.token)).collect();
        assert_eq!(got, want, "{text:?} with {trust:?}");
    }

    #[test]
    fn the_longest_allowed_token_wins() {
        check("a<|end|>!b", Trust::Everything, &[("a", None), ("<|end|>!", Some(2)), ("b", None)]);
        check("a<|end|>", Trust::Everything, &[("a", None), ("<|end|>", Some(1))]);
        check("", Trust::Everything, &[]);
    }

    #[test]
    fn user_text_keeps_user_defined_tokens_and_yields_no_reserved_one() {
        check("a  <|end|>", Trust::Nothing, &[("a", None), ("  ", Some(3)), ("<|end|>", None)]);
    }

    #[test]
    fn one_distrusted_character_makes_a_control_token_text() {
        check("<|end|>x<|end|>", Trust::Except(&[8]), &[("<|end|>", Some(1)), ("x<|end|>", None)]);
        // The template wrote <|end|>, the message goes on with "!": the shorter token stands.
        check("<|end|>!", Trust::Except(&[7]), &[("<|end|>", Some(1)), ("!", None)]);
    }

    #[test]
    fn tokens_strip_whitespace_and_stand_alone_as_declared() {
        check("a \n<mask>\tb", Trust::Everything, &[("a", None), (" \n<mask>\t", Some(4)), ("b", None)]);
        check("cat cats", Trust::Nothing, &[("cat", Some(5)), (" cats", None)]);
    }

    #[test]
    fn starts_of_reserved_tokens_are_found_also_when_cut_off_by_the_end() {
        let check = |text: &str, want: &[usize]| assert_eq!(tokens().reserved_starts(text), want, "{text:?}");
        check("no < token <|here|>", &[]);
        check("é<|end|> and <|en", &[2, 14]);
        check("<<|end|>", &[1]);
    }
}
