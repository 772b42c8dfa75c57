//! A request to the engine, and how its answers are read.

use std::fmt::Debug;
use std::sync::Arc;

use fornax_engine::Request;
use fornax_text::StopStrings;

use crate::Reading;

/// A prompt and everything asked about its continuation: checked, encoded and compiled.
#[derive(Clone, Debug)]
pub struct Ask {
    /// As the engine takes it.
    pub request: Request,
    /// Texts that end an answer.
    pub stops: StopStrings,
    /// The answer is a text of its own, not the end of the prompt's last word.
    pub starts_text: bool,
    /// How the parts of the answer are told apart; without it, it is text.
    pub reading: Option<Reading>,
    /// Tell every token by itself ([`Piece::Token`](crate::Piece::Token)), whether text comes of it or not.
    pub tells_tokens: bool,
    /// What whoever asked counts the question by: kept by whoever hands it over until it is answered.
    pub held: Option<Arc<dyn Debug + Send + Sync>>,
}

impl Ask {
    /// To continue a text until it ends.
    pub fn new(request: Request) -> Ask {
        let stops = StopStrings::new([""; 0]).expect("none of no stop strings is empty");
        Ask { request, stops, starts_text: false, reading: None, tells_tokens: false, held: None }
    }
}
