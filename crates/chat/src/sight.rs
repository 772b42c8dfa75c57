//! What looks at pictures for a model, and where in a prompt they are read.

use std::ops::Range;
use std::sync::Arc;

use fornax_engine::{ContentHash, Piece};

use crate::{Error, Fault, Image, Place};

/// Why a model sees nothing whose files have nothing to see with.
pub const READS_NO_IMAGES: &str = "this model reads no images; it reads text";

/// What looks at pictures for a model that reads them.
pub trait Sight: Send + Sync {
    /// The token that a chat template writes once for each picture.
    fn placeholder(&self) -> u32;

    /// How many tokens a picture takes. Its header says so; no pixel is decoded.
    fn tokens(&self, image: &Image) -> Result<usize, Unseen>;

    /// What is read in place of these tokens. It takes a while, and is given up where `go_on` says no.
    fn look(&self, image: &Image, go_on: &dyn Fn() -> bool) -> Result<Seen, Unseen>;
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
    /// By section, where each of its rows is, counted from the first.
    pub offsets: Vec<Vec<u32>>,
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
    pub fn look(&self, sight: &dyn Sight, go_on: &dyn Fn() -> bool) -> Result<Piece, Error> {
        let unseen = |unseen| self.unseen(unseen);
        let Seen { hash, columns, rows, offsets } = sight.look(&self.image, go_on).map_err(unseen)?;
        let tokens = rows.len().checked_div(columns).unwrap_or(0);
        if tokens != self.at.len() {
            // The header was believed.
            let failed = format!("it became {tokens} tokens where its size said {}", self.at.len());
            return Err(unseen(Unseen::Failed(failed)));
        }
        Ok(Piece { at: self.at.start, hash, columns, rows, offsets })
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

/// Makes room in a prompt for its pictures: of each placeholder as many as the picture takes tokens. A template that
/// does not show every picture once is an error.
pub(crate) fn make_room(
    prompt: &[u32],
    images: &[(usize, &Image)],
    sight: &dyn Sight,
) -> Result<(Vec<u32>, Vec<Shown>), Error> {
    let placeholder = sight.placeholder();
    let shown = prompt.iter().filter(|&&token| token == placeholder).count();
    if shown != images.len() {
        let rule = format!("the chat template shows {shown} of the conversation's {} images", images.len());
        let message = images.first().map_or(0, |(message, _)| *message);
        return Err(Error::Asked(vec![Fault::rule(Place::Message(message), rule)]));
    }
    let mut images = images.iter();
    let (mut roomy, mut all) = (Vec::with_capacity(prompt.len()), Vec::with_capacity(shown));
    for &token in prompt {
        if token != placeholder {
            roomy.push(token);
            continue;
        }
        let (message, image) = images.next().expect("counted above");
        let tokens = sight.tokens(image).map_err(|unseen| refusal(*message, unseen))?;
        let at = roomy.len()..roomy.len() + tokens;
        roomy.resize(at.end, placeholder);
        all.push(Shown { message: *message, image: (*image).clone(), at });
    }
    Ok((roomy, all))
}
