//! Stop strings in a stream of text.

use crate::Error;

/// Watches a stream for strings that end it, wherever the stream is cut into pieces. Text that may be the start of
/// a stop string is held back until it is clear; never more than the longest of them.
///
/// The stop that is complete first wins; of two that are complete at the same character, the longer.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<Stop>,
    /// The end of the text so far that some stop string may begin with.
    held: String,
    found: Option<usize>,
}

/// One stop string and how much of it the text ends with: the automaton of Knuth, Morris and Pratt.
#[derive(Debug, Clone)]
struct Stop {
    bytes: Vec<u8>,
    /// For each length of a matched start, the next shorter start that is also its end.
    fallback: Vec<usize>,
    matched: usize,
}

/// What a piece of text released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Text that is before any stop string.
    pub text: String,
    /// The stop string that was found, by its position in the list. Nothing is released after it.
    pub stop: Option<usize>,
}

impl StopStrings {
    /// Watches for `stops`; with none, everything is released at once.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<StopStrings, Error> {
        let stops = stops.into_iter().enumerate().map(|(index, stop)| {
            let stop: String = stop.into();
            if stop.is_empty() { Err(Error::EmptyStop { index }) } else { Ok(Stop::new(stop.into_bytes())) }
        });
        Ok(StopStrings { stops: stops.collect::<Result<_, _>>()?, held: String::new(), found: None })
    }

    /// Takes the next piece of text and releases what can no longer be part of a stop string.
    pub fn push(&mut self, text: &str) -> Released {
        if self.found.is_some() {
            return Released { text: String::new(), stop: self.found };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for end in before + 1..=self.held.len() {
            let byte = self.held.as_bytes()[end - 1];
            let mut longest: Option<(usize, usize)> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && longest.is_none_or(|(len, _)| stop.bytes.len() > len) {
                    longest = Some((stop.bytes.len(), index));
                }
            }
            if let Some((len, index)) = longest {
                self.held.truncate(end - len);
                self.found = Some(index);
                return Released { text: std::mem::take(&mut self.held), stop: self.found };
            }
        }
        // A stop string begins with a whole character, so what is kept does too.
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        Released { text: std::mem::replace(&mut self.held, kept), stop: None }
    }

    /// How many bytes of the text so far are held back.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// The stream has ended: what was held back is text after all.
    pub fn finish(self) -> String {
        self.held
    }
}

impl Stop {
    fn new(bytes: Vec<u8>) -> Stop {
        let mut fallback = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[matched] != bytes[at] {
                matched = fallback[matched - 1];
            }
            if bytes[matched] == bytes[at] {
                matched += 1;
            }
            fallback[at] = matched;
        }
        Stop { bytes, fallback, matched: 0 }
    }

    /// Takes one byte; true if the text now ends with the stop string.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pushes `text` in the given pieces; the text released and the stop found.
    fn watch(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut watch = StopStrings::new(stops.iter().copied()).unwrap();
        let mut text = String::new();
        for piece in pieces {
            let released = watch.push(piece);
            text.push_str(&released.text);
            if released.stop.is_some() {
                return (text, released.stop);
            }
        }
        text.push_str(&watch.finish());
        (text, None)
    }

    /// The same by search: the first end at which a stop is complete, the longest of those.
    fn search(stops: &[&str], text: &str) -> (String, Option<usize>) {
        for end in text.char_indices().map(|(at, c)| at + c.len_utf8()) {
            let complete = (0..stops.len()).filter(|&index| text[..end].ends_with(stops[index]));
            let longest = complete.max_by_key(|&index| (stops[index].len(), std::cmp::Reverse(index)));
            if let Some(index) = longest {
                return (text[..end - stops[index].len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    #[test]
    fn a_stop_across_pieces_is_found_and_nothing_of_it_is_released() {
        let check = |stops: &[&str], pieces: &[&str], text: &str, stop| {
            assert_eq!(watch(stops, pieces), (text.to_owned(), stop), "{stops:?} {pieces:?}");
        };
        check(&["</s>"], &["Hi<", "/s", ">more"], "Hi", Some(0));
        check(&["</s>"], &["Hi<", "/x", ">more"], "Hi</x>more", None);
        check(&["</s>"], &["Hi</s"], "Hi</s", None);
        check(&["\n\n", "###"], &["a\n", "#", "##b"], "a\n", Some(1));
        check(&["aab"], &["aa", "ab"], "a", Some(0));
        check(&["東京"], &["x東", "京y"], "x", Some(0));
        check(&["bc", "abcd"], &["ab", "cd"], "a", Some(0));
        check(&["c", "bc"], &["abc"], "a", Some(1));
        check(&[], &["all", "of it"], "allof it", None);
    }

    #[test]
    fn text_that_cannot_be_a_stop_is_released_at_once() {
        let mut watch = StopStrings::new(["END"]).unwrap();
        assert_eq!(watch.push("the E"), Released { text: "the ".into(), stop: None });
        assert_eq!(watch.push("N"), Released { text: String::new(), stop: None });
        assert_eq!(watch.push("EN"), Released { text: "EN".into(), stop: None });
        assert_eq!(watch.push("D!"), Released { text: String::new(), stop: Some(0) });
        assert_eq!(watch.push("more"), Released { text: String::new(), stop: Some(0) });
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert!(matches!(StopStrings::new(["a", ""]), Err(Error::EmptyStop { index: 1 })));
    }

    proptest! {
        #[test]
        fn any_cutting_finds_what_a_search_finds(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abé]{0,5}", 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(watch(&stops, &pieces), search(&stops, &pieces.concat()));
        }
    }
}
