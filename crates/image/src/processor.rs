//! What a family's models are shown of a picture.

use serde_json::Value;

use crate::{Error, Picture, Size};

/// The processor of the Qwen family since Qwen2-VL: a picture keeps its shape and is brought to whole patches, between a
/// least and a most number of pixels. Patches that become one token follow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    /// Pixels on a side of a patch.
    pub patch: u32,
    /// Patches on a side of what becomes one token.
    pub merge: u32,
    /// Pixels that a picture has at least, once it is resized.
    pub pixels_min: u64,
    /// And at most.
    pub pixels_max: u64,
    /// Subtracted from red, green and blue of 0 to 1.
    pub mean: [f32; 3],
    /// What they are then divided by.
    pub std: [f32; 3],
}

/// Patches of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Across.
    pub width: u32,
    /// Down.
    pub height: u32,
    /// Patches on a side of what becomes one token.
    pub merge: u32,
}

impl Grid {
    /// How many there are.
    pub fn patches(&self) -> usize {
        self.width as usize * self.height as usize
    }

    /// Tokens that they become.
    pub fn tokens(&self) -> usize {
        self.patches() / (self.merge as usize * self.merge as usize)
    }

    /// Row and column of each patch, in the order in which patches are handed on: those of a token together, row by row.
    pub fn places(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let Grid { width, height, merge } = *self;
        let blocks =
            (0..height / merge).flat_map(move |down| (0..width / merge).map(move |across| (down, across)));
        blocks.flat_map(move |(down, across)| {
            (0..merge).flat_map(move |y| (0..merge).map(move |x| (down * merge + y, across * merge + x)))
        })
    }

    /// By section (time, height, width), where each of its tokens is, counted from the first.
    pub fn offsets(&self) -> Vec<Vec<u32>> {
        let (down, across) = (self.height / self.merge, self.width / self.merge);
        let each = || (0..down).flat_map(move |y| (0..across).map(move |x| (y, x)));
        vec![vec![0; self.tokens()], each().map(|(y, _)| y).collect(), each().map(|(_, x)| x).collect()]
    }
}

/// What a tower reads of a picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// How they lie.
    pub grid: Grid,
    /// (patches, 3 x patch x patch): of each patch red, then green, then blue, row by row.
    pub values: Vec<f32>,
}

/// The most that one side may be of the other.
const SLENDER_MAX: u32 = 200;

/// Bounds of what a processor's file may say, far above what any says.
const PATCH_MAX: u64 = 64;
const MERGE_MAX: u64 = 8;

impl Processor {
    /// Reads `preprocessor_config.json`. What it does not say is as the family's processor has it.
    pub fn from_json(config: &Value) -> Result<Processor, Error> {
        let wrong = |name: &str, value: &Value, wanted| Error::Processor {
            name: name.to_owned(),
            value: value.to_string(),
            wanted,
        };
        // Each of them a file may leave out, or say what is done here anyway.
        for (name, done) in [
            ("do_resize", Value::Bool(true)),
            ("do_rescale", Value::Bool(true)),
            ("do_normalize", Value::Bool(true)),
            ("do_convert_rgb", Value::Bool(true)),
            ("do_center_crop", Value::Bool(false)),
            ("do_pad", Value::Bool(false)),
            ("resample", Value::from(3)),
            ("temporal_patch_size", Value::from(2)),
        ] {
            let said = &config[name];
            if !said.is_null() && *said != done {
                return Err(wrong(name, said, "what this family's models were made with"));
            }
        }
        let factor = &config["rescale_factor"];
        if factor.as_f64().is_some_and(|factor| (factor * 255.0 - 1.0).abs() > 1e-9) {
            return Err(wrong("rescale_factor", factor, "1/255"));
        }
        let number = |name: &str, value: &Value, default: u64, most: u64| match value {
            Value::Null => Ok(default),
            value => match value.as_u64().filter(|number| (1..=most).contains(number)) {
                Some(number) => Ok(number),
                None => Err(wrong(name, value, "a whole number in its range")),
            },
        };
        let size = &config["size"];
        let edge = |name: &str, own: &str, default| {
            let inside = if size[name].is_null() { &config[own] } else { &size[name] };
            number(own, inside, default, crate::PIXELS_MAX)
        };
        let colours = |name: &str, default: [f32; 3]| match &config[name] {
            Value::Null => Ok(default),
            value => {
                let read = |at: usize| value[at].as_f64().map(|number| number as f32);
                match (value.as_array().map(Vec::len), read(0), read(1), read(2)) {
                    (Some(3), Some(red), Some(green), Some(blue)) => Ok([red, green, blue]),
                    _ => Err(wrong(name, value, "three numbers")),
                }
            }
        };
        let patch = number("patch_size", &config["patch_size"], 14, PATCH_MAX)?;
        let merge = number("merge_size", &config["merge_size"], 2, MERGE_MAX)?;
        let processor = Processor {
            patch: small(patch),
            merge: small(merge),
            pixels_min: edge("shortest_edge", "min_pixels", 56 * 56)?,
            pixels_max: edge("longest_edge", "max_pixels", 28 * 28 * 1280)?,
            mean: colours("image_mean", [0.481_454_66, 0.457_827_5, 0.408_210_73])?,
            std: colours("image_std", [0.268_629_54, 0.261_302_6, 0.275_777_1])?,
        };
        if processor.std.iter().any(|value| value.is_nan() || *value <= 0.0) {
            return Err(wrong("image_std", &config["image_std"], "three numbers above zero"));
        }
        if processor.pixels_min > processor.pixels_max {
            return Err(wrong("size", size, "a least that is at most the most"));
        }
        Ok(processor)
    }

    /// The same, making at most this many tokens of a picture: larger ones are shrunk further, by the same rule.
    pub fn within(mut self, tokens_max: usize) -> Processor {
        let token = u64::from(self.patch * self.merge).pow(2);
        self.pixels_max = self.pixels_max.min(token.saturating_mul(tokens_max.max(1) as u64));
        self.pixels_min = self.pixels_min.min(self.pixels_max);
        self
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        3 * self.patch as usize * self.patch as usize
    }

    /// The most patches that a picture becomes.
    #[expect(clippy::cast_sign_loss, reason = "numbers of pixels are not negative")]
    pub fn patches_max(&self) -> usize {
        let side = f64::from(self.patch).powi(2);
        let factor = f64::from(self.patch * self.merge);
        // A picture that shrinks is at least one token on a side, and as long as one may be.
        let slender = f64::from(SLENDER_MAX) * factor * factor;
        // One that grows is rounded up on both sides.
        let (least, slenderest) = (self.pixels_min as f64, f64::from(SLENDER_MAX));
        let sides = (least * slenderest).sqrt() + (least / slenderest).sqrt();
        let grown = least + sides * factor + factor * factor;
        ((self.pixels_max as f64).max(slender).max(grown) / side) as usize
    }

    /// The patches of a picture of some size.
    #[expect(clippy::cast_sign_loss, reason = "sides are not negative")]
    pub fn grid(&self, size: Size) -> Result<Grid, Error> {
        let (long, short) = (size.width.max(size.height), size.width.min(size.height));
        if short == 0 {
            return Err(Error::NoPixels { size });
        }
        if u64::from(long) > u64::from(SLENDER_MAX) * u64::from(short) {
            return Err(Error::Slender { size, most: SLENDER_MAX });
        }
        let factor = f64::from(self.patch * self.merge);
        let [width, height] = [f64::from(size.width), f64::from(size.height)];
        let pixels = width * height;
        // As Python rounds: a half to the even number.
        let nearest = |side: f64| (side / factor).round_ties_even() * factor;
        let (mut w, mut h) = (nearest(width), nearest(height));
        let [least, most] = [self.pixels_min as f64, self.pixels_max as f64];
        if w * h > most {
            let beta = (pixels / most).sqrt();
            let shrunk = |side: f64| ((side / beta / factor).floor() * factor).max(factor);
            (w, h) = (shrunk(width), shrunk(height));
        } else if w * h < least {
            let beta = (least / pixels).sqrt();
            let grown = |side: f64| (side * beta / factor).ceil() * factor;
            (w, h) = (grown(width), grown(height));
        }
        let patches = |side: f64| side as u32 / self.patch;
        Ok(Grid { width: patches(w), height: patches(h), merge: self.merge })
    }

    /// What a tower reads of a picture.
    pub fn patches(&self, picture: &Picture) -> Result<Patches, Error> {
        let grid = self.grid(picture.size())?;
        let size = Size { width: grid.width * self.patch, height: grid.height * self.patch };
        let picture = picture.resized(size);
        let (patch, width) = (self.patch as usize, size.width as usize);
        // A byte has one number in each colour.
        let numbers: Vec<[f32; 256]> = (0..3)
            .map(|colour| {
                let number =
                    |byte: usize| (byte as f32 * (1.0 / 255.0) - self.mean[colour]) / self.std[colour];
                std::array::from_fn(number)
            })
            .collect();
        let mut values = Vec::with_capacity(grid.patches() * self.patch_values());
        for (down, across) in grid.places() {
            for (colour, numbers) in numbers.iter().enumerate() {
                for y in 0..patch {
                    let first = ((down as usize * patch + y) * width + across as usize * patch) * 3;
                    let row = picture.rgb()[first..][..patch * 3].chunks_exact(3);
                    values.extend(row.map(|pixel| numbers[usize::from(pixel[colour])]));
                }
            }
        }
        Ok(Patches { grid, values })
    }
}

fn small(value: u64) -> u32 {
    u32::try_from(value).expect("bounded when read")
}
