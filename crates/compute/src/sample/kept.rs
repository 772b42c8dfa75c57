//! The candidates that are left, in their order, and the draw among them.

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
    u64::from(!ascending) << 32 | id as u64
}

/// The id in a key.
pub(super) fn id(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
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
        let Kept { logits, mut order, temperature } = self;
        let first = order.get(0).map(id).expect("the most likely is always kept");
        // A dynamic temperature may come down to 0.
        if temperature == 0.0 {
            return Drawn { token: first, probability: 1.0 };
        }
        // A probability times a constant: the most likely weighs 1.
        let largest = f64::from(logits[first]);
        let weight = |key: u64| ((f64::from(logits[id(key)]) - largest) / temperature).exp();
        let total: f64 = order.items().iter().map(|key| weight(*key)).sum();
        let wanted = random * total;
        let mut drawn = Drawn { token: first, probability: 1.0 / total };
        let (mut sum, mut rank) = (0.0, 0);
        while sum <= wanted
            && let Some(key) = order.get(rank)
        {
            let weight = weight(key);
            // Rounding may leave the running sum a hair below `wanted` at the end: then the last that can be drawn
            // is it.
            if weight == 0.0 {
                break;
            }
            drawn = Drawn { token: id(key), probability: weight / total };
            sum += weight;
            rank += 1;
        }
        drawn
    }
}
