//! Random numbers as a function: Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", 2011). A counter goes in, 128 random bits come out, so a number has no history: a request that was
//! preempted, resumed or moved to another device draws what it would have drawn.

/// The random bits that a request with `seed` draws for the token at `position`; `draw` tells several draws for the
/// same position apart (0 chooses the token).
pub fn random_bits(seed: u64, position: u32, draw: u32) -> u64 {
    let [low, high] = halves(seed);
    let [a, b, _, _] = philox4x32([position, draw, 0, 0], [low, high]);
    u64::from(a) << 32 | u64::from(b)
}

/// The same as a number in [0, 1). 53 bits, so that also a tail of 1e-12 can be reached.
pub fn uniform(seed: u64, position: u32, draw: u32) -> f64 {
    (random_bits(seed, position, draw) >> 11) as f64 / (1u64 << 53) as f64
}

/// Ten rounds over one counter.
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [low0, high0] = halves(0xD251_1F53 * u64::from(counter[0]));
        let [low1, high1] = halves(0xCD9E_8D57 * u64::from(counter[2]));
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        // The golden ratio and the square root of three, less one: a Weyl sequence of round keys.
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The three vectors that Random123 publishes for philox4x32-10 (tests/kat_vectors).
    #[test]
    fn published_vectors_are_reproduced() {
        for (counter, key, wanted) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), wanted);
        }
    }

    #[test]
    fn each_of_seed_position_and_draw_changes_the_number() {
        let base = uniform(7, 3, 0);
        for other in [uniform(8, 3, 0), uniform(7 | 1 << 40, 3, 0), uniform(7, 4, 0), uniform(7, 3, 1)] {
            assert_ne!(base, other);
        }
        assert_eq!(base, uniform(7, 3, 0));
    }
}
