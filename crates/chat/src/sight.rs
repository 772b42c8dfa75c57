//! What looks at pictures for a model, and where in a prompt they are read.

use std::ops::Range;
use std::sync::Arc;

use fornax_engine::{ContentHash, Piece, Refusal};

use crate::{Error, Fault, Image, Place};

/// Why a model sees nothing whose files have nothing to see with.
pub const READS_NO_IMAGES: &str = "this model reads no images; it reads text";

/// Images of a conversation.
pub const IMAGES_MAX: usize = 1000;

/// What looks at pictures for a model that reads them.
pub trait Sight: Send + Sync {
    /// What a prompt has once for each picture.
    fn placeholder(&self) -> Placeholder;

    /// What is written around each picture, where that is more than what the chat template writes.
    fn frame(&self) -> Option<Frame> {
        None
    }

    /// How many tokens a picture takes. Its header says so; no pixel is decoded.
    fn tokens(&self, image: &Image) -> Result<usize, Unseen>;

    /// Bytes of what is read in place of one token.
    fn row_bytes(&self) -> usize;

    /// What is read in place of these tokens. It takes a while, and is given up where `go_on` says no. What was made for
    /// one owner is found by no other.
    fn look(&self, image: &Image, owner: Option<&str>, go_on: &dyn Fn() -> bool) -> Result<Seen, Unseen>;
}

/// The token that a prompt has once for each picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placeholder {
    /// The token.
    pub token: u32,
    /// Whether it stays, and the picture is read behind it. Else it is read in its place.
    pub stays: bool,
    /// What stands for each of the picture's tokens; nobody reads it.
    pub fill: u32,
}

impl Placeholder {
    /// A token in whose place a picture is read.
    pub fn of(token: u32) -> Placeholder {
        Placeholder { token, stays: false, fill: token }
    }
}

/// What the family's processor makes of the text that a chat template writes for a picture, before it becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What the template writes.
    pub written: &'static str,
    /// What takes its place.
    pub by: &'static str,
}

/// A picture as a model reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// What the picture is.
    pub hash: ContentHash,
    /// Values of a row.
    pub columns: usize,
    /// A row for each token: (tokens, columns).
    pub rows: Arc<[f32]>,
    /// By section, where each of its rows is, counted from the first; empty where they follow each other like tokens.
    pub offsets: Vec<Vec<u32>>,
    /// Whether the model reads its rows in both directions: each sees all of them.
    pub whole: bool,
}

/// Why a picture was not seen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unseen {
    /// The picture cannot be read.
    #[error("{0}")]
    Wrong(String),
    /// Whoever asked gave up.
    #[error("nobody waits for the image any more")]
    GivenUp,
    /// What computes pictures failed.
    #[error("the image could not be computed: {0}")]
    Failed(String),
}

/// A picture, and the tokens of a prompt in whose place it is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// The message that shows it.
    pub message: usize,
    /// As it was sent.
    pub image: Image,
    /// Which tokens.
    pub at: Range<usize>,
}

impl Shown {
    /// What the engine reads there.
    pub fn look(
        &self,
        sight: &dyn Sight,
        owner: Option<&str>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Piece, Error> {
        let unseen = |unseen| self.unseen(unseen);
        let Seen { hash, columns, rows, offsets, whole } =
            sight.look(&self.image, owner, go_on).map_err(unseen)?;
        let tokens = rows.len().checked_div(columns).unwrap_or(0);
        if tokens != self.at.len() {
            // The header was believed.
            let failed = format!("it became {tokens} tokens where its size said {}", self.at.len());
            return Err(unseen(Unseen::Failed(failed)));
        }
        Ok(Piece { at: self.at.start, hash, columns, rows, offsets, whole })
    }

    fn unseen(&self, unseen: Unseen) -> Error {
        refusal(self.message, unseen)
    }
}

fn refusal(message: usize, unseen: Unseen) -> Error {
    match unseen {
        Unseen::Wrong(reason) => Error::Asked(vec![Fault::rule(Place::Message(message), reason)]),
        other => Error::Unseen(other),
    }
}

/// Until when a prompt is written.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// Tokens that it may have with its pictures.
    pub context: usize,
    /// Whether somebody still waits for it.
    pub go_on: &'a dyn Fn() -> bool,
}

impl Bounds<'_> {
    /// None: for whoever bounds what is asked otherwise.
    pub const NONE: Bounds<'static> = Bounds { context: usize::MAX, go_on: &|| true };
}

/// Makes room in a prompt for its pictures: of each placeholder as many as the picture takes tokens. A template that
/// does not show every picture once is an error. Headers can claim far more than the context holds, so nothing is written
/// before all have been counted.
pub(crate) fn make_room(
    prompt: &[u32],
    images: &[(usize, &Image)],
    sight: &dyn Sight,
    bounds: Bounds<'_>,
) -> Result<(Vec<u32>, Vec<Shown>), Error> {
    if let Some((message, _)) = images.get(IMAGES_MAX) {
        let rule = format!("the conversation has {} images, and may have {IMAGES_MAX}", images.len());
        return Err(Error::Asked(vec![Fault::rule(Place::Message(*message), rule)]));
    }
    let placeholder = sight.placeholder();
    let shown = prompt.iter().filter(|&&token| token == placeholder.token).count();
    if shown != images.len() {
        let rule = format!("the chat template shows {shown} of the conversation's {} images", images.len());
        let message = images.first().map_or(0, |(message, _)| *message);
        return Err(Error::Asked(vec![Fault::rule(Place::Message(message), rule)]));
    }
    let mut counted = Vec::with_capacity(shown);
    // Each takes the place of its placeholder, unless that stays.
    let mut length = if placeholder.stays { prompt.len() } else { prompt.len() - shown };
    for &(message, image) in images {
        if !(bounds.go_on)() {
            return Err(Error::Unseen(Unseen::GivenUp));
        }
        let tokens = sight.tokens(image).map_err(|unseen| refusal(message, unseen))?;
        length = length.saturating_add(tokens);
        counted.push((message, image, tokens));
    }
    if length > bounds.context {
        return Err(Refusal::PromptTooLong { prompt: length, context: bounds.context }.into());
    }
    let mut counted = counted.into_iter();
    let (mut roomy, mut all) = (Vec::with_capacity(length), Vec::with_capacity(shown));
    for &token in prompt {
        if token != placeholder.token || placeholder.stays {
            roomy.push(token);
        }
        if token != placeholder.token {
            continue;
        }
        let (message, image, tokens) = counted.next().expect("as many as placeholders");
        let at = roomy.len()..roomy.len() + tokens;
        roomy.resize(at.end, placeholder.fill);
        all.push(Shown { message, image: image.clone(), at });
    }
    Ok((roomy, all))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A picture of so many tokens, as its header claims.
    struct Claims {
        stays: bool,
        tokens: usize,
        read: AtomicUsize,
    }

    impl Claims {
        fn of(tokens: usize) -> Claims {
            Claims { stays: false, tokens, read: AtomicUsize::new(0) }
        }
    }

    impl Sight for Claims {
        fn placeholder(&self) -> Placeholder {
            Placeholder { stays: self.stays, fill: 8, ..Placeholder::of(7) }
        }

        fn tokens(&self, _: &Image) -> Result<usize, Unseen> {
            self.read.fetch_add(1, Ordering::Relaxed);
            Ok(self.tokens)
        }

        fn row_bytes(&self) -> usize {
            4
        }

        fn look(&self, _: &Image, _: Option<&str>, _: &dyn Fn() -> bool) -> Result<Seen, Unseen> {
            Err(Unseen::Failed("only headers are read".to_owned()))
        }
    }

    fn room(
        sight: &Claims,
        count: usize,
        context: usize,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Vec<u32>, Error> {
        let image = Image { bytes: [0][..].into() };
        let images = vec![(3, &image); count];
        let prompt = [&[1, 2][..], &vec![7; count]].concat();
        make_room(&prompt, &images, sight, Bounds { context, go_on }).map(|(prompt, _)| prompt)
    }

    #[test]
    fn what_headers_claim_is_counted_before_anything_is_written() {
        assert_eq!(room(&Claims::of(3), 2, 8, &|| true).unwrap(), [1, 2, 8, 8, 8, 8, 8, 8]);
        let behind = Claims { stays: true, ..Claims::of(3) };
        assert_eq!(room(&behind, 2, 10, &|| true).unwrap(), [1, 2, 7, 8, 8, 8, 7, 8, 8, 8]);
        assert!(room(&behind, 2, 9, &|| true).is_err());
        // The latter two no memory holds.
        for (tokens, prompt) in
            [(3, 8), (usize::MAX / 64, 2 + 2 * (usize::MAX / 64)), (usize::MAX, usize::MAX)]
        {
            match room(&Claims::of(tokens), 2, 7, &|| true).unwrap_err() {
                Error::Refused(refusal) => {
                    assert_eq!(refusal, Refusal::PromptTooLong { prompt, context: 7 });
                }
                error => panic!("{error}"),
            }
        }
    }

    #[test]
    fn images_are_bounded_in_number_and_nobody_reads_headers_for_who_has_left() {
        let sight = Claims::of(1);
        assert!(room(&sight, IMAGES_MAX, usize::MAX, &|| true).is_ok());
        assert_eq!(sight.read.swap(0, Ordering::Relaxed), IMAGES_MAX);
        let many = room(&sight, IMAGES_MAX + 1, usize::MAX, &|| true).unwrap_err().to_string();
        assert_eq!(many, "message 3: the conversation has 1001 images, and may have 1000");
        assert_eq!(sight.read.load(Ordering::Relaxed), 0);
        let asked = AtomicUsize::new(0);
        let left = room(&sight, 9, usize::MAX, &|| asked.fetch_add(1, Ordering::Relaxed) < 4).unwrap_err();
        assert!(matches!(left, Error::Unseen(Unseen::GivenUp)), "{left}");
        assert_eq!(sight.read.load(Ordering::Relaxed), 4);
    }
}
