//! Pictures as models read them.
//!
//! A [`Picture`] comes of the bytes of a file whose size is known, and bounded, before a pixel is decoded. A
//! [`Processor`] says what a family of models makes of it: which size it is brought to, how pixels become numbers, in
//! which order they are cut into patches, and how many tokens the picture then takes. All of it is what the family's
//! processor in transformers does, which tests compare.
//!
//! This crate knows pixels. It must never know a model's weights, a token, a file's name or a network.

mod picture;
mod processor;
mod resize;

pub use picture::{BYTES_MAX, PIXELS_MAX, Picture, SIDE_MAX, Size};
pub use processor::{Fit, Grid, Patches, Processor};
pub use resize::Kernel;

/// Why a picture is not read.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// There are no bytes.
    #[error("the image is empty")]
    Empty,
    /// A file of another kind, which is known.
    #[error("the image is {found}; wanted {wanted}", wanted = picture::KINDS)]
    Kind {
        /// What it is.
        found: &'static str,
    },
    /// A file of no kind that is known.
    #[error("the image is of no known kind (its bytes begin with {begins}); wanted {wanted}", wanted = picture::KINDS)]
    UnknownKind {
        /// Its first bytes, in hexadecimal.
        begins: String,
    },
    /// A file of more bytes than are read.
    #[error("the image has {bytes} bytes; at most {BYTES_MAX} are read")]
    TooManyBytes {
        /// Its bytes.
        bytes: usize,
    },
    /// More pixels than are decoded.
    #[error("the image is {size} pixels; at most {PIXELS_MAX} are decoded, and at most {SIDE_MAX} on a side")]
    TooManyPixels {
        /// As its header says.
        size: Size,
    },
    /// No pixel at all.
    #[error("the image is {size} pixels")]
    NoPixels {
        /// As its header says.
        size: Size,
    },
    /// The file contradicts itself, or ends too early.
    #[error("the image cannot be decoded: {reason}")]
    Damaged {
        /// What the decoder says.
        reason: String,
    },
    /// A side that is much longer than the other one, which the model's processor does not take.
    #[error("the image is {size} pixels: one side is more than {most} times the other")]
    Slender {
        /// Its size.
        size: Size,
        /// The bound.
        most: u32,
    },
    /// A processor's file asks for what is not done here, or says what cannot be.
    #[error("the image processor's {name} is {value}; wanted {wanted}")]
    Processor {
        /// The field.
        name: String,
        /// Its value, printed.
        value: String,
        /// The rule.
        wanted: &'static str,
    },
}
