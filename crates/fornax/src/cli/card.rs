//! GPUs that a plan can be made for wherever they are.

/// What a driver and a context of its own leave of a card: half a GiB less.
const DRIVER_BYTES: u64 = 512 << 20;

/// Names, and the MiB that `nvidia-smi` shows as the total of each.
const CARDS: [(&str, u64); 22] = [
    ("a10", 23_028),
    ("a100", 40_960),
    ("a100-80", 81_920),
    ("a40", 46_068),
    ("a6000", 49_140),
    ("b200", 183_359),
    ("h100", 81_559),
    ("h200", 143_771),
    ("l4", 23_034),
    ("l40s", 46_068),
    ("rtx3060", 12_288),
    ("rtx3080", 10_240),
    ("rtx3090", 24_576),
    ("rtx4060", 8_188),
    ("rtx4070", 12_282),
    ("rtx4080", 16_376),
    ("rtx4090", 24_564),
    ("rtx5070", 12_227),
    ("rtx5080", 16_303),
    ("rtx5090", 32_607),
    ("rtx6000-ada", 49_140),
    ("rtx-pro-6000", 97_887),
];

/// Bytes that are free on an idle card of this name.
pub(crate) fn free_bytes(name: &str) -> Option<u64> {
    let name = name.to_ascii_lowercase().replace(' ', "");
    let (_, mebibytes) = CARDS.iter().find(|(known, _)| *known == name)?;
    Some((mebibytes << 20) - DRIVER_BYTES)
}

/// All names, for people.
pub(crate) fn names() -> String {
    CARDS.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_known_in_any_letters_and_is_no_device() {
        assert_eq!(free_bytes("H100"), Some((81_559 << 20) - DRIVER_BYTES));
        assert_eq!(free_bytes("RTX 4090"), free_bytes("rtx4090"));
        assert_eq!(free_bytes("cuda:0"), None);
        assert!(CARDS.iter().all(|(name, _)| fornax::Device::named(name).is_none()));
    }
}
