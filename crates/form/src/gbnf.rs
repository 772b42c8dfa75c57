//! Grammars in llama.cpp's own notation (GBNF), written in the compiler's languages.
//!
//! A grammar there is one of characters. The compiler's is one of lexemes, of which it always takes the longest, and
//! never goes back. So a grammar without recursion becomes a single expression, and of any other each lexeme is one
//! character: then there is no longest one, and the parser follows every way at once.

use std::collections::HashMap;

use llguidance::api::TopLevelGrammar;

use crate::FormError;

/// How deep groups may stand in each other, and repetitions of repetitions: reading and writing them recurses.
const DEPTH_MAX: usize = 100;

/// How deep rules may refer to each other in one expression; deeper ones stay a grammar.
const RULES_DEPTH_MAX: usize = 500;

/// The most that a count in braces may be, as in llama.cpp.
const TIMES_MAX: u32 = 2000;

/// Bytes of the one expression that a grammar without recursion becomes; a longer one stays a grammar.
const EXPRESSION_BYTES_MAX: usize = 1 << 16;

/// Whether a grammar is written in this notation: its first rule has `::=`. In Lark a rule has a colon alone.
pub(crate) fn is_meant(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim_start);
    let first = lines.find(|line| !(line.is_empty() || line.starts_with('#') || line.starts_with("//")));
    let Some((name, rest)) =
        first.map(|line| line.split_at(line.find(|c| !is_word(c)).unwrap_or(line.len())))
    else {
        return false;
    };
    !name.is_empty() && rest.trim_start().starts_with("::=")
}

/// The grammar in a language of the compiler's.
pub(crate) fn written(text: &str) -> Result<TopLevelGrammar, FormError> {
    let rules = Reader::read(text)?;
    let mut expressions = Expressions::of(&rules);
    Ok(match expressions.of_rule(0) {
        Some(expression) => TopLevelGrammar::from_regex(&format!("(?:{expression})")),
        None => TopLevelGrammar::from_lark(Lark::of(&rules)),
    })
}

/// Alternatives, each a sequence.
type Alternatives = Vec<Vec<Node>>;

/// What stands in a rule.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    /// These characters, one after the other.
    Text(String),
    /// One character of these ranges, or one of none of them.
    Class {
        ranges: Vec<(char, char)>,
        negated: bool,
    },
    Rule(usize),
    Group(Alternatives),
    /// As often as said; without an upper bound, any number of times more.
    Repeat {
        node: Box<Node>,
        least: u32,
        most: Option<u32>,
    },
}

impl Node {
    /// How many repetitions stand around each other here.
    fn repeats(&self) -> usize {
        let (mut depth, mut inner) = (0, self);
        while let Node::Repeat { node, .. } = inner {
            (depth, inner) = (depth + 1, node);
        }
        depth
    }
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

/// Reads a grammar, whose rules it numbers; the first is `root`.
struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    numbers: HashMap<&'a str, usize>,
    rules: Vec<(&'a str, Option<Alternatives>)>,
}

impl<'a> Reader<'a> {
    fn read(text: &'a str) -> Result<Vec<Alternatives>, FormError> {
        let mut reader = Reader { text, at: 0, depth: 0, numbers: HashMap::new(), rules: Vec::new() };
        reader.number("root");
        reader.space(true);
        while reader.at < text.len() {
            reader.rule()?;
        }
        let defined = reader.rules.into_iter().map(|(name, rule)| {
            rule.ok_or_else(|| FormError::Compile(format!("the grammar has no rule {name:?}")))
        });
        defined.collect()
    }

    fn rule(&mut self) -> Result<(), FormError> {
        let name = self.word()?;
        self.space(false);
        if !self.take("::=") {
            return Err(self.wrong("\"::=\""));
        }
        self.space(true);
        let alternatives = self.alternatives(false)?;
        if !(self.at == self.text.len() || self.rest().starts_with(['\n', '\r'])) {
            return Err(self.wrong("the end of the rule"));
        }
        self.space(true);
        let number = self.number(name);
        // As in llama.cpp, the last rule of a name counts.
        self.rules[number].1 = Some(alternatives);
        Ok(())
    }

    fn alternatives(&mut self, nested: bool) -> Result<Alternatives, FormError> {
        let mut alternatives = vec![self.sequence(nested)?];
        while self.take("|") {
            self.space(true);
            alternatives.push(self.sequence(nested)?);
        }
        Ok(alternatives)
    }

    fn sequence(&mut self, nested: bool) -> Result<Vec<Node>, FormError> {
        let mut sequence: Vec<Node> = Vec::new();
        loop {
            let node = match self.rest().chars().next() {
                Some('"') => self.string()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Node::Class { ranges: vec![('\0', char::MAX)], negated: false }
                }
                Some('(') => self.group()?,
                Some('<' | '!') => {
                    let reason = "tokens (<...>) in a grammar are not supported; write their text";
                    return Err(FormError::Compile(reason.to_owned()));
                }
                Some(character) if is_word(character) => {
                    let name = self.word()?;
                    Node::Rule(self.number(name))
                }
                Some('*' | '+' | '?' | '{') => {
                    let Some(node) = sequence.pop() else { return Err(self.wrong("something to repeat")) };
                    if node.repeats() >= DEPTH_MAX {
                        let what = "depth of repetitions in the grammar";
                        return Err(FormError::TooLarge { what, max: DEPTH_MAX });
                    }
                    let (least, most) = self.times()?;
                    Node::Repeat { node: Box::new(node), least, most }
                }
                _ => return Ok(sequence),
            };
            sequence.push(node);
            self.space(nested);
        }
    }

    fn group(&mut self) -> Result<Node, FormError> {
        self.at += 1;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(FormError::TooLarge { what: "depth of groups in the grammar", max: DEPTH_MAX });
        }
        self.space(true);
        let alternatives = self.alternatives(true)?;
        if !self.take(")") {
            return Err(self.wrong("\")\""));
        }
        self.depth -= 1;
        Ok(Node::Group(alternatives))
    }

    fn string(&mut self) -> Result<Node, FormError> {
        self.at += 1;
        let mut text = String::new();
        while !self.take("\"") {
            text.push(self.character()?);
        }
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Result<Node, FormError> {
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.character()?;
            let mut last = first;
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                last = self.character()?;
            }
            if last < first {
                return Err(self.wrong("a range that runs upwards"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() {
            return Err(self.wrong("a character between the brackets"));
        }
        Ok(Node::Class { ranges, negated })
    }

    /// One character, perhaps written with a backslash.
    fn character(&mut self) -> Result<char, FormError> {
        let Some(character) = self.rest().chars().next() else { return Err(self.wrong("a character")) };
        self.at += character.len_utf8();
        if character != '\\' {
            return Ok(character);
        }
        let escape = self.rest().chars().next();
        self.at += escape.map_or(0, char::len_utf8);
        let digits = match escape {
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('n') => return Ok('\n'),
            Some(character @ ('\\' | '"' | '[' | ']')) => return Ok(character),
            _ => return Err(self.wrong("a known escape before it")),
        };
        let code = self.rest().get(..digits).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let Some(character) = code.and_then(char::from_u32) else {
            return Err(self.wrong(&format!("{digits} hexadecimal digits of a character")));
        };
        self.at += digits;
        Ok(character)
    }

    /// How often what stands before it is repeated.
    fn times(&mut self) -> Result<(u32, Option<u32>), FormError> {
        let operator = self.text.as_bytes()[self.at];
        self.at += 1;
        match operator {
            b'*' => return Ok((0, None)),
            b'+' => return Ok((1, None)),
            b'?' => return Ok((0, Some(1))),
            _ => {}
        }
        self.space(true);
        let least = self.count()?;
        self.space(true);
        let mut most = Some(least);
        if self.take(",") {
            self.space(true);
            most = if self.rest().starts_with('}') { None } else { Some(self.count()?) };
            self.space(true);
        }
        if !self.take("}") {
            return Err(self.wrong("\"}\""));
        }
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("a range of counts that runs upwards"));
        }
        Ok((least, most))
    }

    fn count(&mut self) -> Result<u32, FormError> {
        let digits = self.rest().len() - self.rest().trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if digits == 0 {
            return Err(self.wrong("a count"));
        }
        let count = self.rest()[..digits].parse().ok().filter(|count| *count <= TIMES_MAX);
        let too_large = FormError::TooLarge { what: "count in the grammar", max: TIMES_MAX as usize };
        self.at += digits;
        count.ok_or(too_large)
    }

    fn word(&mut self) -> Result<&'a str, FormError> {
        let rest = self.rest();
        let word = &rest[..rest.find(|character| !is_word(character)).unwrap_or(rest.len())];
        if word.is_empty() {
            return Err(self.wrong("the name of a rule"));
        }
        self.at += word.len();
        Ok(word)
    }

    fn number(&mut self, name: &'a str) -> usize {
        let next = self.rules.len();
        *self.numbers.entry(name).or_insert_with(|| {
            self.rules.push((name, None));
            next
        })
    }

    /// Passes over blanks and comments, and over ends of lines where a rule goes on behind them.
    fn space(&mut self, newlines: bool) {
        loop {
            let rest = self.rest();
            let blank = rest.find(|c| !(matches!(c, ' ' | '\t') || newlines && matches!(c, '\r' | '\n')));
            self.at += blank.unwrap_or(rest.len());
            if !self.rest().starts_with('#') {
                return;
            }
            let comment = self.rest().find(['\r', '\n']).unwrap_or(self.rest().len());
            self.at += comment;
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn take(&mut self, text: &str) -> bool {
        let taken = self.rest().starts_with(text);
        self.at += if taken { text.len() } else { 0 };
        taken
    }

    fn wrong(&self, expected: &str) -> FormError {
        let read = &self.text[..self.at];
        let line = read.matches('\n').count() + 1;
        let column = read.chars().rev().take_while(|character| *character != '\n').count() + 1;
        FormError::Compile(format!("line {line}, column {column} of the grammar: expected {expected}"))
    }
}

/// Writes rules that do not refer to themselves as expressions.
struct Expressions<'a> {
    rules: &'a [Alternatives],
    /// None of a rule that is being written, or that cannot be.
    known: HashMap<usize, Option<String>>,
    /// Rules that are being written, each for another.
    depth: usize,
}

impl<'a> Expressions<'a> {
    fn of(rules: &'a [Alternatives]) -> Expressions<'a> {
        Expressions { rules, known: HashMap::new(), depth: 0 }
    }

    fn of_rule(&mut self, number: usize) -> Option<String> {
        if let Some(known) = self.known.get(&number) {
            return known.clone();
        }
        if self.depth == RULES_DEPTH_MAX {
            return None;
        }
        self.known.insert(number, None);
        self.depth += 1;
        let expression = self.of_alternatives(&self.rules[number]);
        self.depth -= 1;
        self.known.insert(number, expression.clone());
        expression
    }

    fn of_alternatives(&mut self, alternatives: &Alternatives) -> Option<String> {
        let mut expression = String::from("(?:");
        for (index, sequence) in alternatives.iter().enumerate() {
            if index > 0 {
                expression.push('|');
            }
            for node in sequence {
                expression += &self.of_node(node)?;
                if expression.len() > EXPRESSION_BYTES_MAX {
                    return None;
                }
            }
        }
        expression.push(')');
        Some(expression)
    }

    fn of_node(&mut self, node: &Node) -> Option<String> {
        match node {
            Node::Text(text) => {
                Some(text.chars().map(|character| class(&[(character, character)], false)).collect())
            }
            Node::Class { ranges, negated } => Some(class(ranges, *negated)),
            Node::Rule(number) => self.of_rule(*number),
            Node::Group(alternatives) => self.of_alternatives(alternatives),
            Node::Repeat { node, least, most } => {
                let repeated = self.of_node(node)?;
                let most = most.map_or(String::new(), |most| most.to_string());
                Some(format!("(?:{repeated}){{{least},{most}}}"))
            }
        }
    }
}

/// One character, as an expression.
fn class(ranges: &[(char, char)], negated: bool) -> String {
    let mut class = String::from(if negated { "[^" } else { "[" });
    for &(first, last) in ranges {
        class += &format!("\\x{{{:X}}}", u32::from(first));
        if first != last {
            class += &format!("-\\x{{{:X}}}", u32::from(last));
        }
    }
    class.push(']');
    class
}

/// Writes rules in Lark, each on a line, with a rule of its own for each group.
struct Lark {
    lines: String,
    groups: usize,
}

impl Lark {
    fn of(rules: &[Alternatives]) -> String {
        let mut lark = Lark { lines: "start: r0\n".to_owned(), groups: 0 };
        for (number, rule) in rules.iter().enumerate() {
            lark.rule(&format!("r{number}"), rule);
        }
        lark.lines
    }

    fn rule(&mut self, name: &str, alternatives: &Alternatives) {
        let written: Vec<String> = alternatives
            .iter()
            .map(|sequence| sequence.iter().map(|node| self.node(node)).collect::<Vec<_>>().join(" "))
            .collect();
        self.lines += &format!("{name}: {}\n", written.join(" | "));
    }

    fn node(&mut self, node: &Node) -> String {
        match node {
            Node::Text(text) => {
                let each = |character| format!("/{}/", class(&[(character, character)], false));
                text.chars().map(each).collect::<Vec<_>>().join(" ")
            }
            Node::Class { ranges, negated } => format!("/{}/", class(ranges, *negated)),
            Node::Rule(number) => format!("r{number}"),
            Node::Group(alternatives) => {
                let name = format!("g{}", self.groups);
                self.groups += 1;
                self.rule(&name, alternatives);
                name
            }
            // The compiler knows no such count.
            Node::Repeat { most: Some(0), .. } => String::new(),
            Node::Repeat { node, least, most } => {
                let node = match &**node {
                    Node::Text(_) | Node::Repeat { .. } => format!("({})", self.node(node)),
                    node => self.node(node),
                };
                match (least, most) {
                    (0, None) => format!("{node}*"),
                    (1, None) => format!("{node}+"),
                    (0, Some(1)) => format!("{node}?"),
                    (least, None) => format!("{node}{{{least},}}"),
                    (least, Some(most)) => format!("{node}{{{least},{most}}}"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notations_are_told_apart_by_their_first_rule() {
        for text in ["root ::= \"a\"", "# comment\n\n  Item-2::= x", "root\t::=\n  \"a\""] {
            assert!(is_meant(text), "{text:?}");
        }
        for text in ["start: \"::=\"", "", "# root ::= x", "%llguidance {}\nstart: x", "// a\nstart: /::=/"] {
            assert!(!is_meant(text), "{text:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let check = |text: &str, reason: &str| {
            let told = Reader::read(text).unwrap_err().to_string();
            assert!(told.contains(reason), "{text:?}: {told}");
        };
        check("root ::= other", "no rule \"other\"");
        check("other ::= \"a\"", "no rule \"root\"");
        check("root ::= \"a\n\nb", "line 3, column 2 of the grammar: expected a character");
        check("root ::= [", "a character");
        check("root ::= []", "a character between the brackets");
        check("root ::= [b-a]", "upwards");
        check("root ::= \"\\q\"", "known escape");
        check("root ::= \"\\uD800\"", "4 hexadecimal digits");
        check("root ::= *", "something to repeat");
        check("root ::= \"a\"{2,1}", "upwards");
        check("root ::= \"a\"{2001}", "the count in the grammar is more than 2000");
        check("root ::= (\"a\"", "expected \")\"");
        check("root ::= <think>", "tokens");
        check("root = \"a\"", "expected \"::=\"");
        check("root ::= \"a\" ]", "the end of the rule");
        check(&format!("root ::= {}", "(".repeat(101)), "depth of groups");
        check(&format!("root ::= \"a\"{}", "*".repeat(1 << 20)), "depth of repetitions");
        assert!(Reader::read(&format!("root ::= \"a\"{}", "*".repeat(100))).is_ok());
    }

    #[test]
    fn a_grammar_that_multiplies_itself_stays_a_grammar() {
        let mut text = String::from("root ::= a0\n");
        for number in 0..40 {
            text += &format!("a{number} ::= a{} a{}\n", number + 1, number + 1);
        }
        text += "a40 ::= \"x\"";
        let rules = Reader::read(&text).unwrap();
        assert_eq!(Expressions::of(&rules).of_rule(0), None);
        // Or goes on and on: some hundred thousand calls in each other would end the process.
        let chain = |length: usize| {
            let rule = |number: usize| format!("a{number} ::= a{}\n", number + 1);
            let rules: String = (0..length).map(rule).collect();
            let text = format!("root ::= a0\n{rules}a{length} ::= \"x\"");
            let rules = Reader::read(&text).unwrap();
            Expressions::of(&rules).of_rule(0).is_some()
        };
        assert!(chain(400) && !chain(100_000));
    }
}
