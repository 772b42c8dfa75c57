//! Exact products mod 2^32, against sums in 128 bits.

use std::fmt;

use crate::{Error, Ring};

use super::random::Random;
use super::{CaseResult, Failure, Op, Report};

/// Runs every case of exact ring products; `on_case` hears each result as it comes.
pub fn run_ring<R: Ring>(ring: &R, on_case: &mut dyn FnMut(&CaseResult)) -> Report {
    let mut report = Report::default();
    let mut conclude = |case: String, outcome: Result<(), Failure>| {
        let outcome = outcome.map(|()| 0.0).map_err(|failure| failure.0);
        let result = CaseResult { op: Op::Ring, case, outcome };
        on_case(&result);
        report.add(result);
    };
    for case in cases() {
        conclude(case.to_string(), case.check(ring));
    }
    conclude("operands of the wrong length".to_owned(), refusals(ring));
    conclude("a dropped matrix gives its bytes back".to_owned(), bytes(ring));
    report
}

/// What weights or words are drawn from.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Any.
    Random,
    /// Only those at the ends of their ranges, at zero and where a limb carries into the next.
    Edges,
    /// The same everywhere: sums grow as far as they can.
    All(i64),
}

impl Values {
    fn weight(self, random: &mut Random) -> i8 {
        match self {
            Values::Random => random.below(256).wrapping_sub(128) as i8,
            Values::Edges => [-128, -127, -1, 0, 1, 127][random.below(6)],
            Values::All(value) => value as i8,
        }
    }

    fn word(self, random: &mut Random) -> u32 {
        const EDGES: [u32; 12] = [
            0,
            1,
            0x7f,
            0x80,
            0xff,
            0x7fff,
            0x8000,
            0xffff,
            0x7fff_8000,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
        ];
        match self {
            Values::Random => random.below(1 << 32) as u32,
            Values::Edges => EDGES[random.below(EDGES.len())],
            Values::All(value) => value.cast_unsigned() as u32,
        }
    }
}

struct Product {
    rows: usize,
    columns: usize,
    tokens: usize,
    weights: Values,
    words: Values,
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Product { rows, columns, tokens, weights, words } = self;
        write!(f, "{rows}x{columns}, {tokens} rows, weights {weights:?}, words {words:?}")
    }
}

fn cases() -> Vec<Product> {
    let product = |rows, columns, tokens, weights, words| Product { rows, columns, tokens, weights, words };
    let mut cases = Vec::new();
    // One value alone, tails of every vector width, and the widths of real models.
    for (rows, columns) in
        [(1, 1), (1, 3), (2, 5), (15, 17), (16, 16), (17, 64), (33, 127), (515, 33), (49, 576), (130, 896)]
    {
        for tokens in [1, 2, 3, 5, 7, 16, 33] {
            cases.push(product(rows, columns, tokens, Values::Random, Values::Random));
        }
        for tokens in [1, 9, 65] {
            cases.push(product(rows, columns, tokens, Values::Edges, Values::Edges));
        }
    }
    for weight in [-128, 127, -1, 1] {
        for word in [0, 1, 0xff, 0x8000, 0xffff, 1 << 31, (1 << 31) - 1, (1 << 32) - 1] {
            for tokens in [1, 20] {
                cases.push(product(37, 1030, tokens, Values::All(weight), Values::All(word)));
            }
        }
    }
    // A product that a device may cut into passes, and nothing at all.
    cases.push(product(70, 4100, 150, Values::Random, Values::Random));
    cases.push(product(5, 7, 0, Values::Random, Values::Random));
    cases.push(product(5, 0, 3, Values::Random, Values::Random));
    cases.push(product(0, 7, 3, Values::Random, Values::Random));
    cases
}

impl Product {
    fn check<R: Ring>(&self, ring: &R) -> Result<(), Failure> {
        let mut random = Random::of(self);
        let weights: Vec<i8> =
            (0..self.rows * self.columns).map(|_| self.weights.weight(&mut random)).collect();
        let x: Vec<u32> = (0..self.tokens * self.columns).map(|_| self.words.word(&mut random)).collect();
        let matrix = ring.matrix(self.rows, self.columns, &weights)?;
        // Twice: what the first product left behind must not reach the second.
        for round in 0..2 {
            let mut out = vec![0xdead_beef; self.tokens * self.rows];
            ring.multiply(&matrix, &x, self.tokens, &mut out)?;
            for (at, got) in out.into_iter().enumerate() {
                let (token, row) = (at / self.rows, at % self.rows);
                let sum: i128 = (0..self.columns)
                    .map(|column| {
                        i128::from(weights[row * self.columns + column])
                            * i128::from(x[token * self.columns + column])
                    })
                    .sum();
                let wanted = sum.rem_euclid(1 << 32);
                if i128::from(got) != wanted {
                    return Err(Failure(format!(
                        "round {round}, token {token} row {row} is {got:#010x}, wanted {wanted:#010x}"
                    )));
                }
            }
        }
        Ok(())
    }
}

fn refusals<R: Ring>(ring: &R) -> Result<(), Failure> {
    let refused = |what: &str, done: Result<(), Error>| match done {
        Err(Error::OperandLength { .. }) => Ok(()),
        Err(other) => Err(Failure(format!("{what}: refused for another reason: {other}"))),
        Ok(()) => Err(Failure(format!("{what}: accepted"))),
    };
    refused("5 weights for 2 x 3", ring.matrix(2, 3, &[1; 5]).map(drop))?;
    refused("rows that overflow", ring.matrix(usize::MAX, 2, &[1; 6]).map(drop))?;
    let matrix = ring.matrix(2, 3, &[1; 6])?;
    refused("5 words for 2 x 3", ring.multiply(&matrix, &[1; 5], 2, &mut [0; 4]))?;
    refused("room for 3 words of 4", ring.multiply(&matrix, &[1; 6], 2, &mut [0; 3]))?;
    refused("tokens that overflow", ring.multiply(&matrix, &[1; 6], usize::MAX, &mut [0; 4]))
}

fn bytes<R: Ring>(ring: &R) -> Result<(), Failure> {
    let before = ring.usage();
    let matrix = ring.matrix(100, 300, &[1; 30_000])?;
    let held = ring.usage().total() - before.total();
    drop(matrix);
    match (held, ring.usage() == before) {
        (30_000..=60_000, true) => Ok(()),
        (held, after) => Err(Failure(format!("30000 weights take {held} bytes; back to before: {after}"))),
    }
}
