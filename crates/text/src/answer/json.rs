//! JSON as it arrives: where a value ends, character by character.

/// A value on its way.
#[derive(Clone, Debug, Default)]
pub(super) struct Value {
    kind: Kind,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// As written so far.
    pub(super) text: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// Only white space so far.
    #[default]
    Nothing,
    Text,
    /// An object or an array.
    Nested,
    /// A number, true, false or null.
    Word,
}

/// What a character did to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// It is its last.
    Ended,
    /// The one before was its last.
    EndedBefore,
    /// No value begins so.
    Wrong,
}

impl Value {
    pub(super) fn push(&mut self, c: char) -> Progress {
        match self.kind {
            Kind::Nothing if c.is_whitespace() => return Progress::More,
            Kind::Nothing => {
                self.kind = match c {
                    '"' => Kind::Text,
                    '{' | '[' => Kind::Nested,
                    '-' | '0'..='9' | 't' | 'f' | 'n' => Kind::Word,
                    _ => return Progress::Wrong,
                };
            }
            Kind::Word if matches!(c, ',' | '}' | ']') || c.is_whitespace() => return Progress::EndedBefore,
            Kind::Word if !(c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-')) => {
                return Progress::Wrong;
            }
            Kind::Text | Kind::Nested | Kind::Word => {}
        }
        self.text.push(c);
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => return Progress::More,
            }
            return self.ended_if(!self.in_string && self.depth == 0);
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.ended_if(self.depth == 0 && self.kind == Kind::Nested);
            }
            _ => {}
        }
        Progress::More
    }

    fn ended_if(&self, ended: bool) -> Progress {
        if ended { Progress::Ended } else { Progress::More }
    }

    /// Whether it is an object, as far as can be seen.
    pub(super) fn is_object(&self) -> bool {
        self.text.starts_with('{')
    }
}

/// An object on its way, field by field.
#[derive(Clone, Debug, Default)]
pub(super) struct Object {
    place: Place,
    value: Value,
    pub(super) key: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    BeforeKey,
    Key,
    Colon,
    Value,
}

/// What a character did to an object whose brace was read before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Field {
    More,
    /// A key is complete.
    Key,
    /// The value of the key has so far this text, of which the last character is new.
    Value {
        is_object: bool,
    },
    /// The value of the key is complete.
    Complete {
        text: String,
    },
    /// The object is.
    Ended,
    Wrong,
}

impl Object {
    /// The events of one character: at most two, since what ends a number may end the object.
    pub(super) fn push(&mut self, c: char) -> [Field; 2] {
        let one = |field| [field, Field::More];
        match self.place {
            Place::BeforeKey => one(match c {
                '"' => {
                    (self.place, self.value) = (Place::Key, Value::default());
                    self.value.push(c);
                    Field::More
                }
                '}' => Field::Ended,
                ',' => Field::More,
                _ if c.is_whitespace() => Field::More,
                _ => Field::Wrong,
            }),
            Place::Key => one(match self.value.push(c) {
                Progress::Ended => match serde_json::from_str(&self.value.text) {
                    Ok(key) => {
                        (self.key, self.place) = (key, Place::Colon);
                        Field::Key
                    }
                    Err(_) => Field::Wrong,
                },
                _ => Field::More,
            }),
            Place::Colon => one(match c {
                ':' => {
                    (self.place, self.value) = (Place::Value, Value::default());
                    Field::More
                }
                _ if c.is_whitespace() => Field::More,
                _ => Field::Wrong,
            }),
            Place::Value => match self.value.push(c) {
                Progress::More if self.value.text.is_empty() => one(Field::More),
                Progress::More => one(Field::Value { is_object: self.value.is_object() }),
                Progress::Ended => {
                    let is_object = self.value.is_object();
                    [Field::Value { is_object }, self.complete()]
                }
                Progress::EndedBefore => {
                    let complete = self.complete();
                    let [then, _] = self.push(c);
                    [complete, then]
                }
                Progress::Wrong => one(Field::Wrong),
            },
        }
    }

    fn complete(&mut self) -> Field {
        self.place = Place::BeforeKey;
        Field::Complete { text: std::mem::take(&mut self.value).text }
    }
}
