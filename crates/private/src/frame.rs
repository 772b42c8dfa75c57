//! What crosses a connection: typed frames, bounded and versioned.
//!
//! A frame is its length (u32, of what follows), its kind (u8) and its body; numbers are little-endian. Each party has
//! a request type of its own, and neither can carry two shares: party 0 is sent blinded words and never a seed, party 1
//! a seed once and never words. A product is named by its matrix, its rows and the place of its pad in the mask stream
//! (`counter`, in words), which both sides count for themselves.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};

use crate::mask::{SEED_BYTES, Seed};

/// The protocol's name.
pub const PROTOCOL: &str = "blind2";
/// Its version; another one is refused.
pub const VERSION: u32 = 1;
/// The largest body: a hundred rows of the widest matrices. A server holds a few of them for each session.
pub const FRAME_BYTES_MAX: usize = 16 << 20;
/// Products that one frame may announce to party 1: those of a step.
pub const DRAWS_MAX: usize = 1 << 14;
/// Rows that a frame may ask to multiply by every matrix, or by some of them as many more as is the same work. Chosen
/// well above the tokens of a client's step.
const STEP_ROWS_MAX: u32 = 1024;
/// Longest text of a refusal.
const REASON_BYTES_MAX: usize = 512;

const INFO: u8 = 1;
const OPEN: u8 = 2;
const LINEAR: u8 = 3;
const CLOSE: u8 = 4;
const REPLY_INFO: u8 = 129;
const REPLY_OPENED: u8 = 130;
const REPLY_PRODUCT: u8 = 131;
const REPLY_REFUSED: u8 = 132;

/// Bytes of a frame before its body.
const HEAD_BYTES: usize = 5;
/// Bytes of a product's name.
const LINEAR_BYTES: usize = 16;

/// Which of the two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Party {
    /// Gets blinded words.
    Zero,
    /// Gets the seed that the blinding words come from.
    One,
}

impl Party {
    /// 0 or 1.
    pub fn number(self) -> u8 {
        match self {
            Party::Zero => 0,
            Party::One => 1,
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

/// Why bytes are no frame, or not one that belongs here.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A body longer than any may be here.
    #[error("a frame of kind {kind} announces {announced} bytes, at most {limit} are allowed")]
    TooLarge {
        /// Its kind.
        kind: u8,
        /// What it says.
        announced: usize,
        /// What is allowed.
        limit: usize,
    },
    /// A body that is not as long as its own numbers imply.
    #[error("a frame of kind {kind} announces {announced} bytes, its content is {implied}")]
    Length {
        /// Its kind.
        kind: u8,
        /// What it says.
        announced: usize,
        /// What its numbers imply.
        implied: usize,
    },
    /// A kind that is not of this direction.
    #[error("a frame of kind {kind} does not belong here")]
    Kind {
        /// The kind.
        kind: u8,
    },
    /// A product with a matrix that does not exist, or of too many rows or none.
    #[error(
        "a product of {rows} rows with matrix {matrix}: there are {matrices} matrices, and {rows_max} rows at most"
    )]
    Product {
        /// The matrix.
        matrix: u32,
        /// The rows.
        rows: u32,
        /// How many matrices there are.
        matrices: usize,
        /// Most rows with that matrix.
        rows_max: usize,
    },
    /// Text or JSON that is none.
    #[error("a frame's text cannot be read: {0}")]
    Text(String),
}

/// Rows and columns of every matrix: what both sides know of each other's frames before they come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shapes(pub Vec<(u32, u32)>);

impl Shapes {
    /// Most rows of one product with a matrix: request and answer both fit a frame.
    pub fn rows_max(&self, matrix: usize) -> usize {
        let Some(&(rows, columns)) = self.0.get(matrix) else { return 0 };
        (FRAME_BYTES_MAX - LINEAR_BYTES) / (4 * rows.max(columns).max(1) as usize)
    }

    /// Output rows of a matrix; panics if there is none.
    pub fn rows(&self, matrix: usize) -> usize {
        self.0[matrix].0 as usize
    }

    /// Columns of a matrix; panics if there is none.
    pub fn columns(&self, matrix: usize) -> usize {
        self.0[matrix].1 as usize
    }

    /// Words of masks that one position takes: a row of every matrix.
    pub fn position_words(&self) -> u64 {
        self.0.iter().map(|&(_, columns)| u64::from(columns)).sum()
    }

    /// Most multiplications that one frame may ask for: those of a long step, or of one product where that is more.
    pub fn multiplications_max(&self) -> u128 {
        let weights = |&(rows, columns): &(u32, u32)| u128::from(rows) * u128::from(columns);
        let step = u128::from(STEP_ROWS_MAX) * self.0.iter().map(weights).sum::<u128>();
        let products =
            self.0.iter().enumerate().map(|(at, shape)| self.rows_max(at) as u128 * weights(shape));
        products.fold(step, u128::max)
    }

    fn check(&self, matrix: u32, rows: u32) -> Result<(), FrameError> {
        let rows_max = self.rows_max(matrix as usize);
        if (1..=rows_max).contains(&(rows as usize)) {
            return Ok(());
        }
        Err(FrameError::Product { matrix, rows, matrices: self.0.len(), rows_max })
    }
}

/// A product by name: everything of it that is public.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Where its pad begins in the mask stream, in words.
    pub counter: u64,
    /// Which matrix, in the order in which the model loads them.
    pub matrix: u32,
    /// Rows of activations.
    pub rows: u32,
}

/// A product with its blinded words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its name.
    pub draw: Draw,
    /// (rows, columns), uniform to whoever does not know the masks.
    pub words: Vec<u32>,
}

/// What party 0 can be asked. There is no place for a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestZero {
    /// Who are you?
    Info,
    /// A session.
    Open {
        /// The client's version.
        version: u32,
        /// Rows that any matrix may be multiplied with.
        positions_max: u32,
    },
    /// A product.
    Linear(Share),
    /// No more.
    Close,
}

/// What party 1 can be asked. There is no place for words.
pub enum RequestOne {
    /// Who are you?
    Info,
    /// A session.
    Open {
        /// The client's version.
        version: u32,
        /// Rows that any matrix may be multiplied with.
        positions_max: u32,
        /// What the masks come from.
        seed: Seed,
    },
    /// Products, in this order; each is answered when it is ready.
    Linear(Vec<Draw>),
    /// No more.
    Close,
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Who it is.
    Info(Box<Info>),
    /// The session is open.
    Opened {
        /// What the server calls it: public, and nothing is derived from it.
        session: u64,
    },
    /// A product.
    Product {
        /// The place of its pad.
        counter: u64,
        /// (rows, output rows) mod 2^32.
        words: Vec<u32>,
    },
    /// No, and why.
    Refused(String),
}

/// What a server says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// [`PROTOCOL`].
    pub protocol: String,
    /// [`VERSION`].
    pub version: u32,
    /// 0 or 1.
    pub party: u8,
    /// Products are exact modulo two to this.
    pub ring_bits: u32,
    /// What it multiplies by.
    pub weights: Weights,
    /// Rows and columns of each matrix.
    pub dims: Shapes,
    /// Rows that a session may have in all.
    pub positions_max: u32,
    /// What it learns all the same.
    pub leaks: Vec<String>,
    /// Under which assumptions it learns no more.
    pub assumes: Vec<String>,
    /// Both parties are on one machine: no privacy is provided.
    pub demo_single_host: bool,
    /// A random number of this process.
    pub instance: String,
}

/// Which weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weights {
    /// Over shapes, weights and scales of all matrices in order.
    pub sha256: String,
    /// How they are quantised.
    pub quant: String,
}

impl Draw {
    /// Words of its pad.
    pub fn pad_words(&self, shapes: &Shapes) -> usize {
        self.rows as usize * shapes.columns(self.matrix as usize)
    }

    /// Multiplications that it takes; panics if there is no such matrix.
    pub fn multiplications(&self, shapes: &Shapes) -> u128 {
        self.pad_words(shapes) as u128 * shapes.rows(self.matrix as usize) as u128
    }

    /// Words of its answer.
    pub fn answer_words(&self, shapes: &Shapes) -> usize {
        self.rows as usize * shapes.rows(self.matrix as usize)
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.counter.to_le_bytes());
        out.extend_from_slice(&self.matrix.to_le_bytes());
        out.extend_from_slice(&self.rows.to_le_bytes());
    }

    fn read(from: &mut impl Read, shapes: &Shapes) -> Result<Draw, FrameError> {
        let draw = Draw { counter: u64_of(from)?, matrix: u32_of(from)?, rows: u32_of(from)? };
        shapes.check(draw.matrix, draw.rows)?;
        Ok(draw)
    }
}

impl RequestZero {
    /// Appends the frame.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            RequestZero::Info => frame(out, INFO, |_| {}),
            RequestZero::Open { version, positions_max } => frame(out, OPEN, |out| {
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&positions_max.to_le_bytes());
            }),
            RequestZero::Linear(share) => frame(out, LINEAR, |out| {
                share.draw.write(out);
                words(&share.words, out);
            }),
            RequestZero::Close => frame(out, CLOSE, |_| {}),
        }
    }

    /// Reads one frame. Nothing is allocated before its length is known to be right.
    pub fn read(from: &mut impl Read, shapes: &Shapes) -> Result<RequestZero, FrameError> {
        let head = Head::read(from)?;
        Ok(match head.kind {
            INFO => head.exactly(0).map(|()| RequestZero::Info)?,
            OPEN => {
                head.exactly(8)?;
                RequestZero::Open { version: u32_of(from)?, positions_max: u32_of(from)? }
            }
            LINEAR => {
                head.at_least(LINEAR_BYTES)?;
                let draw = Draw::read(from, shapes)?;
                let count = draw.pad_words(shapes);
                head.exactly(LINEAR_BYTES + 4 * count)?;
                RequestZero::Linear(Share { draw, words: words_of(from, count)? })
            }
            CLOSE => head.exactly(0).map(|()| RequestZero::Close)?,
            kind => return Err(FrameError::Kind { kind }),
        })
    }
}

impl RequestOne {
    /// Appends the frame.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            RequestOne::Info => frame(out, INFO, |_| {}),
            RequestOne::Open { version, positions_max, seed } => frame(out, OPEN, |out| {
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(&positions_max.to_le_bytes());
                out.extend_from_slice(seed.bytes());
            }),
            RequestOne::Linear(draws) => frame(out, LINEAR, |out| {
                for draw in draws {
                    draw.write(out);
                }
            }),
            RequestOne::Close => frame(out, CLOSE, |_| {}),
        }
    }

    /// Reads one frame. Nothing is allocated before its length is known to be right.
    pub fn read(from: &mut impl Read, shapes: &Shapes) -> Result<RequestOne, FrameError> {
        let head = Head::read(from)?;
        Ok(match head.kind {
            INFO => head.exactly(0).map(|()| RequestOne::Info)?,
            OPEN => {
                head.exactly(8 + SEED_BYTES)?;
                let (version, positions_max) = (u32_of(from)?, u32_of(from)?);
                let mut seed = [0; SEED_BYTES];
                from.read_exact(&mut seed)?;
                RequestOne::Open { version, positions_max, seed: Seed::new(seed) }
            }
            LINEAR => {
                let (count, rest) = (head.len / LINEAR_BYTES, head.len % LINEAR_BYTES);
                if count > DRAWS_MAX {
                    let limit = DRAWS_MAX * LINEAR_BYTES;
                    return Err(FrameError::TooLarge { kind: LINEAR, announced: head.len, limit });
                }
                head.exactly(head.len - rest)?;
                RequestOne::Linear((0..count).map(|_| Draw::read(from, shapes)).collect::<Result<_, _>>()?)
            }
            CLOSE => head.exactly(0).map(|()| RequestOne::Close)?,
            kind => return Err(FrameError::Kind { kind }),
        })
    }
}

/// What an answer must be like to be the awaited one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Info, a session, or a refusal.
    Control,
    /// A product of this many words, or a refusal.
    Product {
        /// How many.
        words: usize,
    },
}

impl Reply {
    /// Appends the frame.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Reply::Info(info) => {
                let json = serde_json::to_vec(info).expect("numbers and strings become JSON");
                frame(out, REPLY_INFO, |out| out.extend_from_slice(&json));
            }
            Reply::Opened { session } => {
                frame(out, REPLY_OPENED, |out| out.extend_from_slice(&session.to_le_bytes()));
            }
            Reply::Product { counter, words: answer } => frame(out, REPLY_PRODUCT, |out| {
                out.extend_from_slice(&counter.to_le_bytes());
                words(answer, out);
            }),
            Reply::Refused(reason) => {
                let cut = reason.floor_char_boundary(REASON_BYTES_MAX);
                frame(out, REPLY_REFUSED, |out| out.extend_from_slice(&reason.as_bytes()[..cut]));
            }
        }
    }

    /// Reads one frame, which must be one of those awaited, and as long. `room` is used for a product's words.
    pub fn read(from: &mut impl Read, awaited: Awaited, mut room: Vec<u32>) -> Result<Reply, FrameError> {
        /// Dims of ten thousand matrices.
        const INFO_BYTES_MAX: usize = 1 << 20;
        let head = Head::read(from)?;
        Ok(match (head.kind, awaited) {
            (REPLY_INFO, Awaited::Control) => {
                head.at_most(INFO_BYTES_MAX)?;
                let info: Info = serde_json::from_slice(&bytes_of(from, head.len)?)
                    .map_err(|error| FrameError::Text(error.to_string()))?;
                Reply::Info(Box::new(info))
            }
            (REPLY_OPENED, Awaited::Control) => {
                head.exactly(8)?;
                Reply::Opened { session: u64_of(from)? }
            }
            (REPLY_PRODUCT, Awaited::Product { words }) => {
                head.exactly(8 + 4 * words)?;
                let counter = u64_of(from)?;
                room.resize(words, 0);
                read_words(from, &mut room)?;
                Reply::Product { counter, words: room }
            }
            (REPLY_REFUSED, _) => {
                head.at_most(REASON_BYTES_MAX)?;
                let reason = String::from_utf8(bytes_of(from, head.len)?);
                Reply::Refused(reason.map_err(|error| FrameError::Text(error.to_string()))?)
            }
            (kind, _) => return Err(FrameError::Kind { kind }),
        })
    }
}

/// The beginning of a frame.
struct Head {
    kind: u8,
    /// Bytes of the body.
    len: usize,
}

impl Head {
    fn read(from: &mut impl Read) -> Result<Head, FrameError> {
        let mut bytes = [0; HEAD_BYTES];
        from.read_exact(&mut bytes)?;
        let [a, b, c, d, kind] = bytes;
        let head = Head { kind, len: u32::from_le_bytes([a, b, c, d]) as usize };
        head.at_most(FRAME_BYTES_MAX)?;
        Ok(head)
    }

    fn at_most(&self, limit: usize) -> Result<(), FrameError> {
        if self.len <= limit {
            return Ok(());
        }
        Err(FrameError::TooLarge { kind: self.kind, announced: self.len, limit })
    }

    fn at_least(&self, implied: usize) -> Result<(), FrameError> {
        if self.len >= implied {
            return Ok(());
        }
        Err(FrameError::Length { kind: self.kind, announced: self.len, implied })
    }

    fn exactly(&self, implied: usize) -> Result<(), FrameError> {
        if self.len == implied {
            return Ok(());
        }
        Err(FrameError::Length { kind: self.kind, announced: self.len, implied })
    }
}

fn frame(out: &mut Vec<u8>, kind: u8, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0, 0, 0, 0, kind]);
    body(out);
    let len = u32::try_from(out.len() - start - HEAD_BYTES).expect("bodies are bounded below 2^32");
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
}

fn words(words: &[u32], out: &mut Vec<u8>) {
    if cfg!(target_endian = "little") {
        out.extend_from_slice(bytemuck::cast_slice(words));
    } else {
        out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
}

fn words_of(from: &mut impl Read, count: usize) -> Result<Vec<u32>, FrameError> {
    let mut words = vec![0; count];
    read_words(from, &mut words)?;
    Ok(words)
}

fn read_words(from: &mut impl Read, words: &mut [u32]) -> Result<(), FrameError> {
    from.read_exact(bytemuck::cast_slice_mut(words))?;
    if cfg!(target_endian = "big") {
        words.iter_mut().for_each(|word| *word = u32::from_le(*word));
    }
    Ok(())
}

fn bytes_of(from: &mut impl Read, count: usize) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u32_of(from: &mut impl Read) -> Result<u32, FrameError> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn u64_of(from: &mut impl Read) -> Result<u64, FrameError> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shapes() -> Shapes {
        Shapes(vec![(3, 2), (1, 4)])
    }

    /// The message with which bytes are refused as a request of party 0.
    fn refused(bytes: &[u8]) -> String {
        RequestZero::read(&mut &bytes[..], &shapes()).expect_err("not a frame").to_string()
    }

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes);
        bytes
    }

    fn bytes(request: &RequestZero) -> Vec<u8> {
        written(|out| request.write(out))
    }

    fn linear() -> RequestZero {
        let draw = Draw { counter: 7, matrix: 1, rows: 2 };
        RequestZero::Linear(Share { draw, words: vec![1, 2, 3, 4, 5, 6, 7, u32::MAX] })
    }

    #[test]
    fn requests_and_replies_come_back_as_they_went() {
        for request in [
            RequestZero::Info,
            RequestZero::Open { version: 1, positions_max: 9 },
            linear(),
            RequestZero::Close,
        ] {
            assert_eq!(RequestZero::read(&mut &bytes(&request)[..], &shapes()).unwrap(), request);
        }
        let draws = vec![Draw { counter: 0, matrix: 0, rows: 1 }, Draw { counter: 2, matrix: 1, rows: 5 }];
        let mut out = Vec::new();
        RequestOne::Linear(draws.clone()).write(&mut out);
        let read = RequestOne::read(&mut &out[..], &shapes()).unwrap();
        assert!(matches!(read, RequestOne::Linear(read) if read == draws));
        let reply = Reply::Product { counter: 3, words: vec![8, 9] };
        out.clear();
        reply.write(&mut out);
        assert_eq!(Reply::read(&mut &out[..], Awaited::Product { words: 2 }, Vec::new()).unwrap(), reply);
    }

    #[test]
    fn a_frame_that_is_not_as_long_as_its_numbers_imply_is_refused() {
        let mut longer = bytes(&linear());
        longer[0] += 4;
        longer.extend_from_slice(&[0; 4]);
        assert_eq!(refused(&longer), "a frame of kind 3 announces 52 bytes, its content is 48");
        let mut huge = bytes(&RequestZero::Info);
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(
            refused(&huge),
            "a frame of kind 1 announces 4294967295 bytes, at most 16777216 are allowed"
        );
        let mut cut = bytes(&linear());
        cut.truncate(20);
        assert_eq!(refused(&cut), "failed to fill whole buffer");
    }

    #[test]
    fn a_product_that_does_not_exist_is_refused_before_its_words_are_read() {
        let mut other = bytes(&linear());
        other[HEAD_BYTES + 8] = 2;
        assert_eq!(
            refused(&other),
            "a product of 2 rows with matrix 2: there are 2 matrices, and 0 rows at most"
        );
        let mut none = bytes(&linear());
        none[HEAD_BYTES + 12] = 0;
        assert_eq!(
            refused(&none),
            "a product of 0 rows with matrix 1: there are 2 matrices, and 1048575 rows at most"
        );
    }

    #[test]
    fn a_reply_of_another_length_than_awaited_is_refused() {
        let mut out = Vec::new();
        Reply::Product { counter: 3, words: vec![8, 9] }.write(&mut out);
        let error = Reply::read(&mut &out[..], Awaited::Product { words: 3 }, Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "a frame of kind 131 announces 16 bytes, its content is 20");
        let error = Reply::read(&mut &out[..], Awaited::Control, Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "a frame of kind 131 does not belong here");
    }

    /// Every field of every request is named here: a field that could carry a second share does not compile.
    #[test]
    fn no_request_can_carry_two_shares() {
        match linear() {
            RequestZero::Info | RequestZero::Close => {}
            RequestZero::Open { version: _, positions_max: _ } => {}
            RequestZero::Linear(Share { draw: Draw { counter: _, matrix: _, rows: _ }, words }) => {
                assert_eq!(words.len(), 8, "exactly one row of words for each row of the product");
            }
        }
        match RequestOne::Close {
            RequestOne::Info | RequestOne::Close => {}
            RequestOne::Open { version: _, positions_max: _, seed: _ } => {}
            RequestOne::Linear(draws) => for Draw { counter: _, matrix: _, rows: _ } in draws {},
        }
        // What party 0 can be sent has no room for a seed, and what party 1 can be sent has none for words.
        let mut open = Vec::new();
        RequestOne::Open { version: 1, positions_max: 1, seed: Seed::new([7; SEED_BYTES]) }.write(&mut open);
        assert_eq!(refused(&open), "a frame of kind 2 announces 40 bytes, its content is 8");
        let error = RequestOne::read(&mut &bytes(&linear())[..], &shapes()).err().unwrap();
        assert!(matches!(error, FrameError::Product { .. }), "words are read as products: {error}");
    }

    /// A frame that somebody wrote over: some bytes are others, its end is missing or more follows.
    fn spoilt(frame: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
        let (length, changes) = (frame.len(), prop::collection::vec((0..frame.len(), any::<u8>()), 0..6));
        (changes, 0..=length, prop::collection::vec(any::<u8>(), 0..40)).prop_map(
            move |(changes, keep, more)| {
                let mut bytes = frame.clone();
                changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
                bytes.truncate(keep);
                bytes.extend(more);
                bytes
            },
        )
    }

    /// Whatever bytes come: those that are read as a frame are the ones that it is written as, so nothing is guessed.
    fn check_bytes(bytes: &[u8]) -> Result<(), TestCaseError> {
        let same = |rest: &[u8], written: Vec<u8>| {
            prop_assert_eq!(&bytes[..bytes.len() - rest.len()], &written[..]);
            Ok(())
        };
        let (mut rest, mut written) = (bytes, Vec::new());
        if let Ok(request) = RequestZero::read(&mut rest, &shapes()) {
            request.write(&mut written);
            same(rest, written)?;
        }
        let (mut rest, mut written) = (bytes, Vec::new());
        if let Ok(request) = RequestOne::read(&mut rest, &shapes()) {
            request.write(&mut written);
            same(rest, written)?;
        }
        for awaited in [Awaited::Control, Awaited::Product { words: 2 }] {
            let (mut rest, mut written) = (bytes, Vec::new());
            match Reply::read(&mut rest, awaited, Vec::new()) {
                // Their texts have more than one spelling.
                Ok(Reply::Info(_) | Reply::Refused(_)) | Err(_) => {}
                Ok(reply) => {
                    reply.write(&mut written);
                    same(rest, written)?;
                }
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_bytes_are_a_frame_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            check_bytes(&bytes)?;
        }

        #[test]
        fn spoilt_frames_are_other_frames_or_refused(
            bytes in prop_oneof![
                spoilt(bytes(&linear())),
                spoilt(bytes(&RequestZero::Open { version: 1, positions_max: 9 })),
                spoilt(written(|out| {
                    RequestOne::Open { version: 1, positions_max: 9, seed: Seed::new([7; SEED_BYTES]) }.write(out);
                })),
                spoilt(written(|out| {
                    RequestOne::Linear(vec![Draw { counter: 2, matrix: 1, rows: 5 }; 3]).write(out);
                })),
                spoilt(written(|out| Reply::Product { counter: 3, words: vec![8, 9] }.write(out))),
                spoilt(written(|out| Reply::Opened { session: 3 }.write(out))),
            ],
        ) {
            check_bytes(&bytes)?;
        }
    }
}
