//! Pictures that somebody changed at random: each is decoded within its bounds or refused in a line. A few seconds of
//! cases here; `cargo xtask prove fuzz-images` runs ten million, or an hour.
#![expect(clippy::print_stdout, reason = "a test says how much it did")]

use std::path::Path;

use fornax_image::{Fit, PIXELS_MAX, Picture, Processor};
use serde_json::json;

#[path = "../../../fuzz/src/mutate.rs"]
#[expect(unreachable_pub, dead_code, reason = "other tests include it, too")]
mod mutate;

/// What stands in headers of all kinds.
const WORDS: &[&[u8]] = &[
    b"\x89PNG\r\n\x1a\n",
    b"IHDR",
    b"IDAT",
    b"IEND",
    b"PLTE",
    b"tRNS",
    b"acTL",
    b"fcTL",
    b"iCCP",
    b"eXIf",
    b"\xff\xd8\xff",
    b"\xff\xc0",
    b"\xff\xc2",
    b"\xff\xc4",
    b"\xff\xda",
    b"\xff\xdb",
    b"\xff\xdd\x00\x04\x00\x01",
    b"\xff\xe1",
    b"\xff\xd9",
    b"Exif\x00\x00II*\x00\x08\x00\x00\x00",
    b"RIFF",
    b"WEBP",
    b"VP8 ",
    b"VP8L",
    b"VP8X",
    b"ALPH",
    b"ANIM",
    b"ANMF",
    b"ICCP",
    b"GIF89a",
    b"\x2c\x00\x00\x00\x00",
    b"\x21\xf9\x04",
    b"\x00\x00",
    b"\xff\xff",
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x7f\xff",
];

/// Makes the checksums of a PNG file right again: who changes a file on purpose does so, too.
fn mend(file: &mut [u8]) {
    if !file.starts_with(b"\x89PNG\r\n\x1a\n") {
        return;
    }
    let mut at = 8;
    while let Some(size) = file.get(at..at + 4) {
        let size = u32::from_be_bytes([size[0], size[1], size[2], size[3]]) as usize;
        let Some(end) = at.checked_add(8).and_then(|end| end.checked_add(size)) else { return };
        let Some(chunk) = file.get(at + 4..end) else { return };
        let sum = checksum(chunk);
        let Some(old) = file.get_mut(end..end + 4) else { return };
        old.copy_from_slice(&sum.to_be_bytes());
        at = end + 4;
    }
}

/// That of PNG and of zip, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    let sum = bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 * (sum & 1)))
    });
    !sum
}

/// Whether it is a picture. One that is too large to be made of so few bytes for nothing is looked at by its header alone.
fn picture(file: &[u8], processor: &Processor) -> bool {
    /// Pixels that a test has time for.
    const PIXELS: u64 = 1 << 20;
    let said = |error: fornax_image::Error| {
        let message = error.to_string();
        assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
        false
    };
    let size = match Picture::size_of(file) {
        Ok(size) => size,
        Err(error) => return said(error),
    };
    let pixels = u64::from(size.width) * u64::from(size.height);
    assert!((1..=PIXELS_MAX).contains(&pixels), "{size}");
    let grid = processor.grid(size);
    if pixels > PIXELS {
        return false;
    }
    match Picture::decode(file) {
        Ok(picture) => {
            assert_eq!(picture.size(), size, "what the header says is what tokens are counted by");
            assert_eq!(picture.rgb().len() as u64, 3 * pixels);
            match (grid, processor.patches(&picture)) {
                (Ok(grid), Ok(patches)) => {
                    assert_eq!(patches.grid, grid);
                    assert!(patches.values.iter().all(|value| value.is_finite()));
                }
                (Err(error), Err(_)) => return said(error),
                (grid, patches) => panic!("{grid:?}, but {patches:?}"),
            }
            true
        }
        Err(error) => said(error),
    }
}

#[test]
fn changed_pictures_are_decoded_within_their_bounds_or_refused_in_a_line() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .expect("there are pictures")
        .map(|file| file.expect("files can be listed").path())
        .filter(|path| {
            path.extension().is_some_and(|kind| ["gif", "jpg", "png", "webp"].iter().any(|k| kind == *k))
        })
        .collect();
    paths.sort();
    let mut seeds: Vec<Vec<u8>> =
        paths.iter().map(|path| std::fs::read(path).expect("files can be read")).collect();
    // Small ones have more of their headers in them, and more of them are tried in a second.
    seeds.retain(|seed| seed.len() < 20_000);
    let fits = [
        Fit::Between { pixels_min: 56 * 56, pixels_max: 28 * 28 * 1280 },
        Fit::Square { side: 224 },
        Fit::Filling { tokens: 280 },
    ];
    let processors =
        fits.map(|fit| Processor::from_json(&json!({}), fit).expect("the family's own").within(64));
    assert!(seeds.iter().filter(|seed| picture(seed, &processors[0])).count() >= 10);
    mutate::cases("images", 2000, |mut random| {
        let mut file = mutate::changed(&mut random, &seeds, WORDS);
        if random.below(4) > 0 {
            mend(&mut file);
        }
        picture(&file, &processors[random.below(processors.len())])
    });
}
