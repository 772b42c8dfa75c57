//! The candidates that are left, in their order, and the draw among them.

use super::weights::Weights;

/// Items that are sorted only as far as somebody looks: most draws end within the first few of 150,000.
pub(super) struct Ordered<'a, T> {
    items: &'a mut [T],
    sorted: usize,
}

impl<'a, T: Copy + Ord> Ordered<'a, T> {
    pub(super) fn new(items: &'a mut [T]) -> Ordered<'a, T> {
        Ordered { items, sorted: 0 }
    }

    /// All of them, in no promised order.
    pub(super) fn items(&self) -> &[T] {
        self.items
    }

    /// The one with this rank.
    pub(super) fn get(&mut self, rank: usize) -> Option<T> {
        if rank >= self.items.len() {
            return None;
        }
        while rank >= self.sorted {
            let rest = &mut self.items[self.sorted..];
            let more = (self.sorted * 7).max(64).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable(more);
            }
            rest[..more].sort_unstable();
            self.sorted += more;
        }
        Some(self.items[rank])
    }

    /// Keeps the first `count`.
    pub(super) fn truncate(&mut self, count: usize) {
        if count < self.items.len() {
            // Looking that far sorts that far.
            self.get(count);
            self.items = &mut std::mem::take(&mut self.items)[..count];
            self.sorted = count;
        }
    }

    /// Puts some of them, in any order, in place of all.
    pub(super) fn replace(&mut self, some: impl ExactSizeIterator<Item = T>) {
        let items = std::mem::take(&mut self.items);
        let items = &mut items[..some.len()];
        items.iter_mut().zip(some).for_each(|(item, other)| *item = other);
        *self = Ordered::new(items);
    }

    /// Drops the first `count`, which were looked at.
    pub(super) fn skip(&mut self, count: usize) {
        assert!(count <= self.sorted, "{count} of {} are known to be the first", self.sorted);
        self.items = &mut std::mem::take(&mut self.items)[count..];
        self.sorted -= count;
    }
}

/// Ascending keys are descending logits, then ascending ids.
pub(super) fn key(logit: f32, id: usize) -> u64 {
    // Adding zero makes -0 equal to 0. Flipping the sign bit, or all bits of a negative number, makes the order of
    // the bits the order of the numbers.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!ascending) << 32 | id as u64 & u64::from(u32::MAX)
}

/// The logit in a key, but for the sign of a zero.
#[inline(always)]
pub(super) fn logit(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

/// The id in a key.
pub(super) fn id(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

/// Of so many a sorted search is as fast as any.
const FEW: usize = 64;

impl Ordered<'_, u64> {
    /// The first of all; there is one.
    fn first(&self) -> u64 {
        let smallest = || self.items.iter().copied().min().expect("the most likely is always kept");
        if self.sorted > 0 { self.items[0] } else { smallest() }
    }

    /// The first whose running sum of weights exceeds `wanted`, as a share of `total`.
    pub(super) fn draw(mut self, wanted: f64, weights: Weights, total: f64) -> Drawn {
        let key = self.exceeding(wanted, weights).unwrap_or_else(|| {
            // Rounding left the running sum a hair below at the end: then the last that can be drawn is it.
            let possible = self.items.iter().copied().filter(|&key| weights.of(logit(key)) > 0.0);
            possible.max().unwrap_or_else(|| self.first())
        });
        Drawn { token: id(key), probability: weights.of(logit(key)) / total }
    }

    /// The first whose running sum of weights exceeds `wanted`. Nothing is sorted that need not be: most draws end among
    /// the few likeliest, and whole parts of the others are passed by their sum.
    fn exceeding(&mut self, wanted: f64, weights: Weights) -> Option<u64> {
        let mut sum = 0.0;
        let (first, mut rest) = self.items.split_at_mut(self.sorted);
        let found = |keys: &[u64], sum: &mut f64| {
            keys.iter().copied().find(|&key| {
                *sum += weights.of(logit(key));
                *sum > wanted
            })
        };
        if let Some(key) = found(first, &mut sum) {
            return Some(key);
        }
        // Takes the part of `rest` that has it: its first `count`, or the others.
        let narrow = |rest: &mut &mut [u64], count: usize, sum: &mut f64| {
            let (likely, others) = std::mem::take(rest).split_at_mut(count);
            let passed = *sum + weights.total_of_keys(likely);
            let is_likely = passed > wanted;
            (*rest, *sum) = if is_likely { (likely, *sum) } else { (others, passed) };
            is_likely
        };
        // Where most of the weight is in few tokens, a bound finds them sooner than a rank.
        for distance in NEAR {
            let bound = key(weights.logit_at(distance), usize::MAX);
            let count = move_to_front(rest, bound);
            if narrow(&mut rest, count, &mut sum) {
                break;
            }
        }
        while rest.len() > FEW {
            let half = rest.len() / 2;
            rest.select_nth_unstable(half);
            narrow(&mut rest, half, &mut sum);
        }
        rest.sort_unstable();
        found(rest, &mut sum)
    }
}

/// Logarithms of weights at which the likely are told from the others.
pub(super) const NEAR: [f64; 3] = [-2.0, -5.0, -9.0];

/// Brings the keys up to `bound` to the front; how many there are.
fn move_to_front(keys: &mut [u64], bound: u64) -> usize {
    let mut count = 0;
    for at in 0..keys.len() {
        // No branch to predict wrongly.
        let is_near = usize::from(keys[at] <= bound);
        keys.swap(count, at);
        count += is_near;
    }
    count
}

/// What may be drawn, and how hot.
pub(super) struct Kept<'a> {
    pub(super) logits: &'a [f32],
    /// At least one.
    pub(super) order: Ordered<'a, u64>,
    pub(super) temperature: f64,
}

/// A token and how likely it was among those kept.
pub(super) struct Drawn {
    pub(super) token: usize,
    pub(super) probability: f64,
}

impl Kept<'_> {
    /// The first whose running sum exceeds `random`, which lies in [0, 1).
    pub(super) fn draw(self, random: f64) -> Drawn {
        let Kept { logits, order, temperature } = self;
        let first = id(order.first());
        // A dynamic temperature may come down to 0.
        if temperature == 0.0 {
            return Drawn { token: first, probability: 1.0 };
        }
        let weights = Weights::new(logits[first], temperature);
        let total = weights.total_of_keys(order.items());
        order.draw(random * total, weights, total)
    }
}
