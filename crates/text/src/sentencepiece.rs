//! A `tokenizer.model`: the pieces of a sentencepiece model, which is a message of protocol buffers.

use std::path::Path;

use crate::Error;

/// Bytes of a file. The largest vocabularies that we know take some five MB.
const BYTES_MAX: u64 = 256 << 20;

/// A model of pieces.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// By id.
    pub(crate) pieces: Vec<Piece>,
    /// Whether a space is put before a text.
    pub(crate) begins_with_space: bool,
}

/// One of them.
#[derive(Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) score: f32,
    /// As GGUF numbers kinds, which is as sentencepiece does.
    pub(crate) kind: i32,
}

/// A field of a message: its number and what it holds.
enum Field<'a> {
    Whole(u64),
    Four([u8; 4]),
    Bytes(&'a [u8]),
    /// Eight bytes, of which no field that is read here is made.
    Eight,
}

impl Pieces {
    /// Reads the file; `None` where there is none.
    pub(crate) fn open(path: &Path) -> Result<Option<Pieces>, Error> {
        let wrong = |reason: &str| Error::TokenizerModel { path: path.to_owned(), reason: reason.to_owned() };
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(wrong(&error.to_string())),
            Ok(file) if file.len() > BYTES_MAX => return Err(wrong("it is larger than 256 MiB")),
            Ok(_) => {}
        }
        let bytes = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        let pieces = Pieces::read(&bytes).ok_or_else(|| wrong("it is no sentencepiece model"))?;
        pieces
            .map(Some)
            .map_err(|kind| wrong(&format!("it is a {kind} model; pieces that are joined by pairs are read")))
    }

    /// `None` where the bytes are no such model, and the kind of model where it is another than that of pairs.
    fn read(bytes: &[u8]) -> Option<Result<Pieces, &'static str>> {
        let mut pieces = Pieces { pieces: Vec::new(), begins_with_space: true };
        // Unless it says otherwise it goes by likelihood.
        let mut kind = 1;
        for field in fields(bytes) {
            match field? {
                (1, Field::Bytes(piece)) => pieces.pieces.push(Piece::read(piece)?),
                (2, Field::Bytes(trainer)) => {
                    for field in fields(trainer) {
                        if let (3, Field::Whole(number)) = field? {
                            kind = number;
                        }
                    }
                }
                (3, Field::Bytes(normalizer)) => {
                    for field in fields(normalizer) {
                        if let (3, Field::Whole(prefix)) = field? {
                            pieces.begins_with_space = prefix != 0;
                        }
                    }
                }
                _ => {}
            }
        }
        if pieces.pieces.is_empty() {
            return None;
        }
        Some(match kind {
            1 => Err("unigram"),
            2 => Ok(pieces),
            3 => Err("word"),
            _ => Err("character"),
        })
    }
}

impl Piece {
    fn read(bytes: &[u8]) -> Option<Piece> {
        let mut piece = Piece { text: String::new(), score: 0.0, kind: 1 };
        for field in fields(bytes) {
            match field? {
                (1, Field::Bytes(text)) => piece.text = String::from_utf8(text.to_vec()).ok()?,
                (2, Field::Four(score)) => piece.score = f32::from_le_bytes(score),
                (3, Field::Whole(kind)) => piece.kind = i32::try_from(kind).ok()?,
                _ => {}
            }
        }
        Some(piece)
    }
}

/// The fields of a message; one `None` and nothing more where the bytes are none.
fn fields(mut bytes: &[u8]) -> impl Iterator<Item = Option<(u64, Field<'_>)>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let field = field(&mut bytes);
        if field.is_none() {
            bytes = &[];
        }
        Some(field)
    })
}

fn field<'a>(bytes: &mut &'a [u8]) -> Option<(u64, Field<'a>)> {
    let tag = whole(bytes)?;
    let held = match tag & 7 {
        0 => Field::Whole(whole(bytes)?),
        1 => {
            *bytes = bytes.get(8..)?;
            Field::Eight
        }
        2 => {
            let length = usize::try_from(whole(bytes)?).ok()?;
            let (held, rest) = bytes.split_at_checked(length)?;
            *bytes = rest;
            Field::Bytes(held)
        }
        5 => {
            let (held, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Field::Four(*held)
        }
        _ => return None,
    };
    Some((tag >> 3, held))
}

/// A whole number, seven bits a byte.
fn whole(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One piece, "ab" with the score -1.5, and a trainer that says which kind it is.
    fn model(kind: u8) -> Vec<u8> {
        let score = (-1.5f32).to_le_bytes();
        let piece = [&[0x0a, 2, b'a', b'b', 0x15][..], &score, &[0x18, 4]].concat();
        [&[0x0a, piece.len() as u8][..], &piece, &[0x12, 2, 0x18, kind], &[0x1a, 2, 0x18, 0]].concat()
    }

    #[test]
    fn pieces_are_read_with_their_scores_and_kinds() {
        let Some(Ok(read)) = Pieces::read(&model(2)) else { panic!("a model of pairs") };
        assert_eq!(read.pieces, [Piece { text: "ab".to_owned(), score: -1.5, kind: 4 }]);
        assert!(!read.begins_with_space);
        assert_eq!(Pieces::read(&model(1)).unwrap().unwrap_err(), "unigram");
    }

    #[test]
    fn bytes_that_are_no_model_are_refused_wherever_they_end() {
        let whole = model(2);
        assert!(Pieces::read(b"").is_none());
        for end in 1..whole.len() {
            // Cut between two fields it is a shorter message; never more than what was read, and never a panic.
            if let Some(Ok(read)) = Pieces::read(&whole[..end]) {
                assert_eq!(read.pieces.len(), 1);
            }
        }
        assert!(Pieces::read(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x7f]).is_none());
        assert!(Pieces::read(&[0xff; 32]).is_none());
    }
}
