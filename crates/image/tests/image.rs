//! Pictures against what the processors of transformers make of the same files, and files that nobody should decode.

use std::collections::HashMap;
use std::path::Path;

use fornax_image::{Error, Fit, Grid, Kernel, PIXELS_MAX, Picture, Processor, Size};
use serde_json::Value;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
        .expect("a committed file")
}

fn number(value: &Value) -> u32 {
    let number = value.as_u64().expect("a count");
    u32::try_from(number).expect("a small count")
}

/// What each family does where its file says nothing.
const QWEN: Fit = Fit::Between { pixels_min: 56 * 56, pixels_max: 28 * 28 * 1280 };
const GEMMA3: Fit = Fit::Square { side: 224 };
const GEMMA4: Fit = Fit::Filling { tokens: 280 };

#[test]
fn pixels_are_those_of_the_reference_and_those_of_lossy_files_nearly() {
    let expected: Value = serde_json::from_slice(&fixture("expected.json")).unwrap();
    let pixels = fixture("expected.bin");
    let processors: HashMap<&str, Processor> = expected["processors"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, config)| {
            let fit = match name.as_str() {
                "gemma3" => GEMMA3,
                "gemma4" => GEMMA4,
                _ => QWEN,
            };
            (name.as_str(), Processor::from_json(config, fit).unwrap())
        })
        .collect();
    let cases = expected["expected"].as_array().unwrap();
    assert!(cases.len() >= 48);
    let mut far = Vec::new();
    for case in cases {
        let name = case["picture"].as_str().unwrap();
        let processor = &processors[case["processor"].as_str().unwrap()];
        let bytes = fixture(name);
        let picture = Picture::decode(&bytes).unwrap();
        assert_eq!(Picture::size_of(&bytes), Ok(picture.size()), "{name}");
        let patches = processor.patches(&picture).unwrap();
        let (width, height) = (number(&case["width"]), number(&case["height"]));
        assert_eq!(patches.grid, Grid { width, height, merge: processor.merge }, "{name}");
        let wanted = &pixels[number(&case["at"]) as usize..][..patches.values.len()];
        let plane = (processor.patch * processor.patch) as usize;
        let mut most = 0.0f32;
        let mut sum = 0.0f64;
        for (at, (value, wanted)) in patches.values.iter().zip(wanted).enumerate() {
            let colour = at / plane % 3;
            let byte = (value * processor.std[colour] + processor.mean[colour]) * 255.0;
            let apart = (byte - f32::from(*wanted)).abs();
            most = most.max(apart);
            sum += f64::from(apart);
        }
        println!("{name}: at most {most:.2} of 255 apart, {:.4} on average", sum / wanted.len() as f64);
        // Decoders of JPEG and lossy WebP may round otherwise; of everything else one step is allowed.
        let bound = if name.ends_with(".jpg") || name == "lossy.webp" { 3.01 } else { 1.01 };
        if most > bound || sum / wanted.len() as f64 > 0.4 {
            far.push((name, most));
        }
        let first = case["first"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap());
        for (value, wanted) in patches.values.iter().zip(first) {
            // So many steps of 255, as far apart as they become by the division.
            assert!(
                (f64::from(*value) - wanted).abs() < f64::from(bound) / 255.0 / 0.26,
                "{name}: {value} {wanted}"
            );
        }
    }
    assert!(far.is_empty(), "{far:?}");
}

#[test]
fn a_picture_takes_as_many_tokens_as_the_reference_says() {
    let sizes: Vec<[u64; 7]> = serde_json::from_slice(&fixture("sizes.json")).unwrap();
    assert!(sizes.len() >= 1000);
    for [width, height, factor, least, most, wanted_height, wanted_width] in sizes {
        let processor = Processor {
            patch: u32::try_from(factor / 2).unwrap(),
            merge: 2,
            fit: Fit::Between { pixels_min: least, pixels_max: most },
            kernel: Kernel::Bicubic,
            mean: [0.5; 3],
            std: [0.5; 3],
        };
        let size = Size { width: u32::try_from(width).unwrap(), height: u32::try_from(height).unwrap() };
        match processor.grid(size) {
            Ok(grid) => {
                let side = |patches: u32| u64::from(patches * processor.patch);
                assert_eq!([side(grid.height), side(grid.width)], [wanted_height, wanted_width], "{size}");
                assert!(grid.patches() <= processor.patches_max());
            }
            Err(error) => {
                assert_eq!(error, Error::Slender { size, most: 200 });
                assert_eq!(wanted_height, 0);
            }
        }
    }
}

#[test]
fn a_picture_fills_as_many_tokens_as_the_reference_says() {
    let sizes: Vec<[u32; 5]> = serde_json::from_slice(&fixture("filling.json")).unwrap();
    assert!(sizes.len() >= 900 && sizes.iter().any(|size| size[3] == 48 && size[4] > 480));
    for [width, height, tokens, wanted_height, wanted_width] in sizes {
        let config =
            serde_json::json!({"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": tokens});
        let processor = Processor::from_json(&config, GEMMA4).unwrap();
        let size = Size { width, height };
        let grid = processor.grid(size).unwrap();
        assert_eq!([16 * grid.height, 16 * grid.width], [wanted_height, wanted_width], "{size}");
        assert!(grid.patches() <= processor.patches_max());
        let one = processor.within(1).grid(size).unwrap();
        assert_eq!((one.tokens(), one.patches()), (1, 9), "{size}");
    }
}

#[test]
fn a_bound_of_tokens_shrinks_a_picture_by_the_same_rule() {
    let config =
        serde_json::json!({"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}});
    let whole = Processor::from_json(&config, QWEN).unwrap();
    let size = Size { width: 4000, height: 3000 };
    assert_eq!(whole.grid(size).unwrap().tokens(), 125 * 94);
    for most in [1, 7, 256, 1024] {
        let tokens = whole.clone().within(most).grid(size).unwrap().tokens();
        assert!(tokens <= most && tokens * 2 >= most.min(2), "{tokens} of {most}");
    }
}

#[test]
fn patches_of_a_token_follow_each_other() {
    let grid = Grid { width: 4, height: 2, merge: 2 };
    let places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)];
    assert_eq!(grid.places().collect::<Vec<_>>(), places);
    assert_eq!(grid.offsets(), [[0, 0], [0, 0], [0, 1]]);
}

#[test]
fn files_of_other_kinds_are_refused_by_their_name() {
    let check = |bytes: &[u8], wanted: &str| {
        for refused in [Picture::size_of(bytes).map(drop), Picture::decode(bytes).map(drop)] {
            assert_eq!(refused.unwrap_err().to_string(), wanted);
        }
    };
    let wanted = "wanted JPEG, PNG, WebP or GIF";
    check(b"", "the image is empty");
    check(b"<svg xmlns='http://www.w3.org/2000/svg'/>", &format!("the image is an SVG drawing; {wanted}"));
    check(b"\xef\xbb\xbf <?xml version='1.0'?>\n<svg/>", &format!("the image is an SVG drawing; {wanted}"));
    check(b"<!doctype html><p>404", &format!("the image is a page of HTML or XML; {wanted}"));
    check(b"%PDF-1.7\n%...", &format!("the image is a PDF document; {wanted}"));
    check(b"\0\0\0\x18ftypheic\0\0\0\0", &format!("the image is HEIC; {wanted}"));
    check(b"\0\0\0\x18ftypavif\0\0\0\0", &format!("the image is AVIF; {wanted}"));
    check(b"\0\0\0\x18ftypisom\0\0\0\0", &format!("the image is a film; {wanted}"));
    check(b"BM\x36\0\0\0\0\0\0\0", &format!("the image is BMP; {wanted}"));
    let unknown = "the image is of no known kind (its bytes begin with 01020304);";
    check(&[1, 2, 3, 4], &format!("{unknown} {wanted}"));
}

#[test]
fn a_header_that_promises_too_much_is_refused_before_a_pixel_is_decoded() {
    let too_many = |bytes: &[u8], size: Size| {
        assert_eq!(Picture::decode(bytes), Err(Error::TooManyPixels { size }));
        assert_eq!(Picture::size_of(bytes), Err(Error::TooManyPixels { size }));
    };
    too_many(&fixture("bomb.png"), Size { width: 40_000, height: 40_000 });
    // The frame of a JPEG file says its size.
    let mut jpeg = fixture("gray.jpg");
    let frame = jpeg.windows(2).position(|two| two == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 9].copy_from_slice(&[0x7f, 0xff, 0x7f, 0xff]);
    too_many(&jpeg, Size { width: 32_767, height: 32_767 });
    let mut gif = fixture("film.gif");
    gif[6..10].copy_from_slice(&[0xff, 0xff, 0xff, 0xff]);
    too_many(&gif, Size { width: 65_535, height: 65_535 });
    assert!(u64::from(32_767u32).pow(2) > PIXELS_MAX);
    let long = vec![0; fornax_image::BYTES_MAX + 1];
    assert_eq!(Picture::decode(&long), Err(Error::TooManyBytes { bytes: long.len() }));
}

#[test]
fn damaged_files_are_errors_and_never_panics() {
    for name in ["odd.png", "photo.jpg", "film.gif", "lossy.webp", "lossless.webp", "alpha.png"] {
        let bytes = fixture(name);
        // Cut at many places: an error, or of some kinds a picture whose rest is missing.
        for cut in (0..bytes.len()).step_by(bytes.len() / 40) {
            if let Ok(picture) = Picture::decode(&bytes[..cut]) {
                assert!(
                    name.ends_with(".jpg") || name.ends_with(".gif"),
                    "{name} cut at {cut} is {picture:?}"
                );
            }
        }
        // And with bytes changed.
        for at in (4..bytes.len()).step_by(bytes.len() / 60) {
            let mut changed = bytes.clone();
            changed[at] ^= 0xff;
            drop(Picture::decode(&changed));
        }
    }
}

#[test]
fn a_processor_that_does_something_else_is_refused_by_its_field() {
    let refused = |config: Value, fit: Fit, wanted: &str| {
        assert_eq!(Processor::from_json(&config, fit).unwrap_err().to_string(), wanted);
    };
    let check = |config, wanted: &str| refused(config, QWEN, wanted);
    let made = "what this family's models were made with";
    let says = |field: &str, value: &str| format!("the image processor's {field} is {value}; wanted {made}");
    check(serde_json::json!({"resample": 2}), &says("resample", "2"));
    check(serde_json::json!({"do_center_crop": true}), &says("do_center_crop", "true"));
    let range = "the image processor's patch_size is 0; wanted a whole number in its range";
    check(serde_json::json!({"patch_size": 0}), range);
    let std = "the image processor's image_std is [0.5,0.5,0]; wanted three numbers above zero";
    check(serde_json::json!({"image_std": [0.5, 0.5, 0]}), std);
    refused(serde_json::json!({"do_pan_and_scan": true}), GEMMA3, &says("do_pan_and_scan", "true"));
    refused(serde_json::json!({"resample": 3}), GEMMA3, &says("resample", "3"));
    let square = "the image processor's size is {\"height\":56,\"width\":28}; wanted a square";
    refused(serde_json::json!({"size": {"height": 56, "width": 28}}), GEMMA3, square);
    let tokens = "the image processor's size is 30; wanted whole tokens on a side";
    refused(serde_json::json!({"size": {"height": 30, "width": 30}}), GEMMA3, tokens);
    refused(serde_json::json!({"do_normalize": true}), GEMMA4, &says("do_normalize", "true"));
    let qwen2 = serde_json::json!({"rescale_factor": 0.00392156862745098});
    let qwen2 = Processor::from_json(&qwen2, QWEN).unwrap();
    assert_eq!((qwen2.patch, qwen2.fit), (14, QWEN));
}
