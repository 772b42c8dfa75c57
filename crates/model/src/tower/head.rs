//! How a tower's heads lie when they are computed.

use super::facts::Pairs;

/// Values that attention takes at once.
const LANES: usize = 16;

/// By place of a head, which of the stored values is there. Pairs that turn are brought half a head apart, and a head
/// whose size is no multiple of what attention takes at once is filled up with zeros, which change no score and no
/// sum.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HeadLayout {
    /// `None` is a zero.
    places: Vec<Option<usize>>,
    /// Stored values of a head.
    stored: usize,
}

impl HeadLayout {
    pub(super) fn new(stored: usize, pairs: Option<Pairs>) -> HeadLayout {
        let padded = stored.next_multiple_of(LANES);
        let (half, quarter) = (stored / 2, stored / 4);
        // The first values of the pairs, those that turn by rows before those that turn by columns; then the second.
        let of_pair = |at: usize, second: usize| match pairs {
            _ if at >= half => None,
            Some(Pairs::ByHalf) if at < quarter => Some(half + at + second * quarter),
            Some(Pairs::ByHalf) => Some(at - quarter + second * quarter),
            _ => Some(at + second * half),
        };
        let place = |at: usize| match pairs {
            None => (at < stored).then_some(at),
            Some(_) => of_pair(at % (padded / 2), at / (padded / 2)),
        };
        HeadLayout { places: (0..padded).map(place).collect(), stored }
    }

    /// Values of a head as it is stored.
    pub(super) fn stored(&self) -> usize {
        self.stored
    }

    /// Values of a head as it is computed.
    pub(super) fn padded(&self) -> usize {
        self.places.len()
    }

    /// By place of as many heads as have these stored values, which of them is there; `None` where all stay.
    pub(super) fn order(&self, values: usize) -> Option<Vec<Option<usize>>> {
        if self.places.iter().enumerate().all(|(at, stored)| *stored == Some(at)) {
            return None;
        }
        let head = |head: usize| self.places.iter().map(move |at| at.map(|at| head * self.stored + at));
        Some((0..values / self.stored).flat_map(head).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_half_a_head_apart_and_zeros_behind_them() {
        let places = |stored, pairs| HeadLayout::new(stored, pairs).order(stored);
        assert_eq!(places(16, None), None);
        assert_eq!(places(32, Some(Pairs::Together)), None);
        let some = |range: std::ops::Range<usize>| range.map(Some).collect::<Vec<_>>();
        let none = vec![None; 6];
        assert_eq!(places(20, None), Some([some(0..20), none.clone(), none.clone()].concat()));
        let together = [some(0..10), none.clone(), some(10..20), none.clone()].concat();
        assert_eq!(places(20, Some(Pairs::Together)), Some(together));
        let by_half = [some(10..15), some(0..5), none.clone(), some(15..20), some(5..10), none].concat();
        assert_eq!(places(20, Some(Pairs::ByHalf)), Some(by_half));
        let two = HeadLayout::new(4, None).order(8).unwrap();
        assert_eq!((two.len(), two[16..20].to_vec()), (32, some(4..8)));
    }
}
