//! A grammar in the plainest way, as a table of states: for the simulation and for tests, which must not need text.

use std::{ops::RangeInclusive, sync::Arc};

use crate::grammar::{Constraint, Grammar};

/// A deterministic automaton over tokens; state 0 is the first.
#[derive(Clone)]
pub(crate) struct Automaton {
    states: Arc<[State]>,
    end_token: u32,
    vocab: u32,
    at: usize,
}

/// What may follow in a state.
#[derive(Clone, Default)]
pub(crate) struct State {
    /// Tokens, and the state that each of them leads to.
    pub(crate) edges: Vec<(RangeInclusive<u32>, usize)>,
    pub(crate) may_end: bool,
}

impl Automaton {
    /// Begins in the first of `states`.
    pub(crate) fn new(states: Vec<State>, end_token: u32, vocab: u32) -> Automaton {
        let places = states.iter().flat_map(|state| &state.edges).all(|(_, to)| *to < states.len());
        assert!(places && !states.is_empty(), "every edge leads to a state");
        Automaton { states: states.into(), end_token, vocab, at: 0 }
    }

    /// One token of each of these sets after the other, and then the end.
    #[cfg(test)]
    pub(crate) fn of_sets(sets: &[RangeInclusive<u32>], end_token: u32, vocab: u32) -> Automaton {
        let states =
            (1..).zip(sets).map(|(next, set)| State { edges: vec![(set.clone(), next)], may_end: false });
        let last = State { edges: Vec::new(), may_end: true };
        Automaton::new(states.chain([last]).collect(), end_token, vocab)
    }

    fn step(&self, at: usize, token: u32) -> Option<usize> {
        self.states[at].edges.iter().find(|(tokens, _)| tokens.contains(&token)).map(|(_, to)| *to)
    }
}

impl Constraint for Automaton {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn mask(&mut self) -> Result<Vec<u32>, String> {
        let mut mask = vec![0; self.vocab.div_ceil(32) as usize];
        let State { edges, may_end } = &self.states[self.at];
        let next = edges.iter().flat_map(|(tokens, _)| tokens.clone());
        for token in next.chain(may_end.then_some(self.end_token)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(mask)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.at = self.step(self.at, token).ok_or_else(|| format!("token {token} leads nowhere"))?;
        Ok(())
    }

    fn forced(&mut self) -> Vec<u32> {
        let (mut at, mut forced) = (self.at, Vec::new());
        while let State { edges, may_end: false } = &self.states[at]
            && let [(tokens, to)] = edges.as_slice()
            && tokens.start() == tokens.end()
        {
            forced.push(*tokens.start());
            at = *to;
        }
        forced
    }

    fn may_end(&mut self) -> bool {
        self.states[self.at].may_end
    }

    fn is_over(&self) -> bool {
        let State { edges, may_end } = &self.states[self.at];
        edges.is_empty() && *may_end
    }

    fn copied(&self) -> Grammar {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_automaton_admits_what_its_table_says_and_forces_what_has_no_choice() {
        // a or b, then cd, any number of times; at least once.
        let state =
            |edges: &[(RangeInclusive<u32>, usize)], may_end| State { edges: edges.to_vec(), may_end };
        let states = vec![
            state(&[(0..=1, 1)], false),
            state(&[(2..=2, 2)], false),
            state(&[(3..=3, 3)], false),
            state(&[(0..=1, 1)], true),
        ];
        let mut automaton = Automaton::new(states, 40, 41);
        for (tokens, whole) in [
            (&[0, 2, 3][..], true),
            (&[1, 2, 3, 0, 2, 3], true),
            (&[], false),
            (&[0, 2], false),
            (&[2], false),
        ] {
            assert_eq!(automaton.admits(tokens), whole, "{tokens:?}");
        }
        assert!(automaton.forced().is_empty());
        automaton.accept(1).unwrap();
        assert_eq!(automaton.forced(), [2, 3]);
        automaton.accept(2).unwrap();
        automaton.accept(3).unwrap();
        assert_eq!(
            automaton.mask(),
            Ok(vec![0b11, 1 << 8]),
            "the end token is allowed where the answer is whole"
        );
        assert!(automaton.accept(7).is_err());
        assert!(!automaton.is_over());
        assert!(Automaton::of_sets(&[], 40, 41).is_over());
    }
}
