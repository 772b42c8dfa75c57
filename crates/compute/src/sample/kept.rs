//! The candidates that are left, in their order.

use super::draw;
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

/// What has a logit.
pub(super) trait Logit: Copy {
    fn logit(self) -> f32;
}

impl Logit for f32 {
    #[inline(always)]
    fn logit(self) -> f32 {
        self
    }
}

/// A key.
impl Logit for u64 {
    #[inline(always)]
    fn logit(self) -> f32 {
        logit(self)
    }
}

impl Ordered<'_, u64> {
    /// The first of all; there is one.
    fn first(&self) -> u64 {
        let smallest = || self.items.iter().copied().min().expect("the most likely is always kept");
        if self.sorted > 0 { self.items[0] } else { smallest() }
    }
}

/// Logarithms of weights at which the likely are told from the others.
pub(super) const NEAR: [f64; 3] = [-2.0, -5.0, -9.0];

/// What may be drawn, and how hot.
pub(super) struct Kept<'a> {
    pub(super) logits: &'a [f32],
    /// At least one.
    pub(super) order: Ordered<'a, u64>,
    pub(super) temperature: f64,
}

impl Kept<'_> {
    /// The token that a random number gives.
    pub(super) fn draw(&self, random: u64, scratch: &mut draw::Scratch) -> usize {
        // A dynamic temperature may come down to 0.
        if self.temperature == 0.0 {
            return id(self.order.first());
        }
        draw::of_keys(self.order.items(), self.temperature, random, scratch)
    }

    /// How likely a token was that is among them; the temperature is above 0.
    pub(super) fn probability(&self, token: usize) -> f64 {
        let weights = Weights::new(logit(self.order.first()), self.temperature);
        weights.of(self.logits[token]) / weights.total_of_keys(self.order.items())
    }
}
