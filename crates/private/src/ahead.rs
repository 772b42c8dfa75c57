//! Party 1 ahead of its client. Its products need nothing but the seed, and an answer is written a token at a time by
//! steps that are all alike. So after two equal steps it guesses that more will come, and multiplies the masks of
//! several at once: each weight is read once for all of them. Nothing of a guess leaves the server before the client
//! asks for just that product. A wrong guess costs the work: its masks are those of the products that come instead.

use zeroize::Zeroizing;

use crate::frame::{Draw, Shapes};
use crate::mask::{Masks, Pads, Seed};
use crate::queue::{Pending, Queue};

/// Rows of a guess with one matrix.
const ROWS_MAX: usize = 16;
/// Bytes of masks and products that one session may have guessed.
const BYTES_MAX: usize = 24 << 20;

/// The mask stream of a session, and what is known of its products already.
pub(crate) struct Ahead {
    masks: Masks,
    /// Masks that were drawn for a guess; those before `used` are gone.
    drawn: Zeroizing<Vec<u32>>,
    used: usize,
    /// What the last step asked for: matrices and rows.
    step: Vec<(u32, u32)>,
    /// How many steps the next guess is for, were it to be made.
    steps: usize,
    guess: Option<Guess>,
}

/// Several steps like the last one.
struct Guess {
    /// For each product of a step: those of all steps, one after the other.
    products: Vec<Batch>,
    steps: usize,
    /// Products that were asked for, in the order of the stream.
    asked: usize,
}

enum Batch {
    Waiting(Pending),
    Known(Vec<u32>),
    Failed,
}

/// A product that was asked for.
pub(crate) enum Product {
    /// It is computed.
    Waiting(Pending),
    /// It was guessed.
    Known(Vec<u32>),
}

impl Product {
    /// Its words, or why there are none.
    pub(crate) fn wait(self) -> Result<Vec<u32>, String> {
        match self {
            Product::Waiting(pending) => pending.wait(),
            Product::Known(words) => Ok(words),
        }
    }
}

impl Ahead {
    pub(crate) fn new(seed: &Seed) -> Ahead {
        Ahead {
            masks: Masks::new(seed),
            drawn: Zeroizing::default(),
            used: 0,
            step: Vec::new(),
            steps: 0,
            guess: None,
        }
    }

    /// The product with the next masks of the stream.
    pub(crate) fn product(&mut self, draw: &Draw, shapes: &Shapes, queue: &Queue) -> Result<Product, String> {
        if let Some(guess) = &mut self.guess {
            if let Some(words) = guess.take((draw.matrix, draw.rows), &self.step, shapes) {
                self.used += draw.pad_words(shapes);
                if guess.asked == guess.steps * self.step.len() {
                    self.guess = None;
                }
                return words.map(Product::Known);
            }
            self.guess = None;
        }
        let words = self.draw(draw.pad_words(shapes))?;
        Ok(Product::Waiting(queue.submit(draw.matrix as usize, draw.rows as usize, words)))
    }

    /// To be called when a step was answered: begins the steps that may come next.
    pub(crate) fn guess(&mut self, draws: &[Draw], shapes: &Shapes, queue: &Queue) {
        let step = draws.iter().map(|draw| (draw.matrix, draw.rows));
        if !step.clone().eq(self.step.iter().copied()) {
            self.step = step.collect();
            self.steps = 1;
            self.guess = None;
            return;
        }
        if self.guess.is_some() {
            return;
        }
        // Twice as many as before: an answer that ends leaves at most as much undone as was of use.
        self.steps = (2 * self.steps).min(steps_max(draws, shapes));
        let words: usize = draws.iter().map(|draw| draw.pad_words(shapes)).sum();
        if self.steps == 0 || self.reserve(self.steps * words).is_err() {
            return;
        }
        let mut from = self.used;
        let batch = |draw: &Draw| {
            let len = draw.pad_words(shapes);
            let mut pads = Vec::with_capacity(self.steps * len);
            for step in 0..self.steps {
                pads.extend_from_slice(&self.drawn[from + step * words..][..len]);
            }
            from += len;
            Batch::Waiting(queue.guess(draw.matrix as usize, self.steps * draw.rows as usize, pads))
        };
        let products = draws.iter().map(batch).collect();
        self.guess = Some(Guess { products, steps: self.steps, asked: 0 });
    }

    /// The next words of the stream: those of a guess that was wrong first.
    fn draw(&mut self, words: usize) -> Result<Vec<u32>, String> {
        self.reserve(words)?;
        let drawn = self.drawn[self.used..][..words].to_vec();
        self.used += words;
        Ok(drawn)
    }

    /// Sees to it that so many words are drawn and not used.
    fn reserve(&mut self, words: usize) -> Result<(), String> {
        let unused = self.drawn.len() - self.used;
        if unused >= words {
            return Ok(());
        }
        self.drawn.copy_within(self.used.., 0);
        self.used = 0;
        self.drawn.resize(words, 0);
        let drawn = self.masks.draw(&mut self.drawn[unused..]);
        drawn.map(drop).map_err(|error| {
            self.drawn.truncate(unused);
            error.to_string()
        })
    }
}

/// How many such steps may be guessed.
fn steps_max(draws: &[Draw], shapes: &Shapes) -> usize {
    let rows = draws.iter().map(|draw| draw.rows as usize).max().unwrap_or(usize::MAX);
    let words: usize = draws.iter().map(|draw| draw.pad_words(shapes) + draw.answer_words(shapes)).sum();
    (ROWS_MAX / rows.max(1)).min(BYTES_MAX / (4 * words.max(1)))
}

impl Guess {
    /// The product that was asked for, if it is the next one of the guess.
    fn take(
        &mut self,
        asked: (u32, u32),
        step: &[(u32, u32)],
        shapes: &Shapes,
    ) -> Option<Result<Vec<u32>, String>> {
        let place = self.asked % step.len();
        if step[place] != asked {
            return None;
        }
        let words = match std::mem::replace(&mut self.products[place], Batch::Failed) {
            Batch::Waiting(pending) => match pending.wait() {
                Ok(words) => words,
                Err(error) => return Some(Err(error)),
            },
            Batch::Known(words) => words,
            Batch::Failed => return Some(Err("the product could not be computed".to_owned())),
        };
        let own = asked.1 as usize * shapes.rows(asked.0 as usize);
        let part = words[self.asked / step.len() * own..][..own].to_vec();
        self.products[place] = Batch::Known(words);
        self.asked += 1;
        Some(Ok(part))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use fornax_compute::Ring;
    use fornax_compute::cpu::{CpuRing, CpuRingOptions};

    use super::*;
    use crate::frame::Weights;
    use crate::server::Loaded;

    const SHAPES: [(u32, u32); 2] = [(3, 2), (1, 5)];
    const WEIGHTS: [&[i8]; 2] = [&[1, -2, 3, 4, 5, -6], &[7, -8, 9, 10, 11]];

    /// Asks for steps of (matrix, rows) and returns the answers, and how many products were computed.
    fn ask(seed: &Seed, steps: &[&[(u32, u32)]]) -> (Vec<Vec<u32>>, u64) {
        let (queue, shapes) = (Queue::default(), Shapes(SHAPES.to_vec()));
        let worker = queue.clone();
        let worker = thread::spawn(move || {
            let ring = CpuRing::new(&CpuRingOptions { threads: 1, ..CpuRingOptions::default() }).unwrap();
            let matrix = |((rows, columns), weights): ((u32, u32), &[i8])| {
                ring.matrix(rows as usize, columns as usize, weights).unwrap()
            };
            let matrices: Vec<_> = SHAPES.into_iter().zip(WEIGHTS).map(matrix).collect();
            let weights = Weights { sha256: String::new(), quant: String::new() };
            worker.work(&Loaded { ring, matrices, shapes: Shapes(SHAPES.to_vec()), weights });
        });
        let (mut ahead, mut answers, mut counter) = (Ahead::new(seed), Vec::new(), 0);
        for step in steps {
            let mut draws = Vec::new();
            for &(matrix, rows) in *step {
                let draw = Draw { counter, matrix, rows };
                counter += draw.pad_words(&shapes) as u64;
                answers.push(ahead.product(&draw, &shapes, &queue).unwrap().wait().unwrap());
                draws.push(draw);
            }
            ahead.guess(&draws, &shapes, &queue);
        }
        drop(ahead);
        let computed = queue.counts().1;
        queue.close();
        worker.join().unwrap();
        (answers, computed)
    }

    /// The same from the stream and the weights, one word at a time.
    fn expected(seed: &Seed, steps: &[&[(u32, u32)]]) -> Vec<Vec<u32>> {
        let mut masks = Masks::new(seed);
        let mut product = |&(matrix, rows): &(u32, u32)| {
            let (columns, weights) = (SHAPES[matrix as usize].1 as usize, WEIGHTS[matrix as usize]);
            let mut pad = vec![0; rows as usize * columns];
            masks.draw(&mut pad).unwrap();
            let dot = |weights: &[i8], pad: &[u32]| {
                let terms =
                    weights.iter().zip(pad).map(|(&w, &x)| i32::from(w).cast_unsigned().wrapping_mul(x));
                terms.fold(0, u32::wrapping_add)
            };
            pad.chunks(columns)
                .flat_map(|pad| weights.chunks(columns).map(move |row| dot(row, pad)))
                .collect()
        };
        steps.iter().copied().flatten().map(&mut product).collect()
    }

    #[test]
    fn right_and_wrong_guesses_give_the_products_of_the_stream() {
        let (one, two, other): (&[_], &[_], &[_]) = (&[(0, 1), (1, 1)], &[(0, 2), (1, 2)], &[(1, 1), (0, 1)]);
        let seed = Seed::new([5; 32]);
        let many = vec![one; 40];
        let check = |steps: &[&[(u32, u32)]]| assert_eq!(ask(&seed, steps).0, expected(&seed, steps));
        check(&[one]);
        check(&many);
        // A guess that is wrong from its beginning, in the middle of a step, and after some steps.
        check(&[one, one, two, two, two, two, one, one]);
        check(&[one, one, one, one, &[(0, 1), (0, 1)], one, one, one, other, other, other]);
        check(&[one, one, &[(0, 1)], &[(1, 1)], one, one, one, one, one, one, one, &[(1, 7)], one]);
    }

    #[test]
    fn equal_steps_are_computed_together() {
        let step: &[(u32, u32)] = &[(0, 1), (1, 1)];
        let (_, computed) = ask(&Seed::new([5; 32]), &vec![step; 64]);
        // Two alone, then guesses of 2, 4, 8, 16, 16 and 16 steps, the last for nothing unless it was computed soon.
        let products = 2 * (2 + 6);
        assert!((products..=products + 2).contains(&computed), "{computed} products");
    }

    #[test]
    fn wide_steps_are_not_guessed() {
        let shapes = Shapes(SHAPES.to_vec());
        let draw = |rows| Draw { counter: 0, matrix: 1, rows };
        assert_eq!(steps_max(&[draw(1)], &shapes), 16);
        assert_eq!(steps_max(&[draw(1), draw(3)], &shapes), 5);
        assert_eq!(steps_max(&[draw(64)], &shapes), 0);
        let wide = Shapes(vec![(1, 1), (1 << 20, 1)]);
        assert_eq!(steps_max(&[draw(1)], &wide), 5, "24 MiB");
    }
}
