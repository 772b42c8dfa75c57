//! What a family's models are shown of a picture.

use serde_json::Value;

use crate::{Error, Kernel, Picture, Size};

/// What is made of a picture: it is resized, its colours become numbers, and it is cut into patches. Patches that
/// become one token follow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    /// Pixels on a side of a patch.
    pub patch: u32,
    /// Patches on a side of what becomes one token.
    pub merge: u32,
    /// Which size a picture is brought to.
    pub fit: Fit,
    /// How its pixels become those of that size.
    pub kernel: Kernel,
    /// Subtracted from red, green and blue of 0 to 1.
    pub mean: [f32; 3],
    /// What they are then divided by.
    pub std: [f32; 3],
}

/// Which size a picture is brought to; all are of whole tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Its own, and where that has too few or too many pixels another one of nearly the same shape: the Qwen family
    /// since Qwen2-VL.
    Between {
        /// Pixels that a picture has at least, once it is resized.
        pixels_min: u64,
        /// And at most.
        pixels_max: u64,
    },
    /// A square, whatever its shape was: Gemma 3.
    Square {
        /// Pixels on a side.
        side: u32,
    },
    /// As many tokens as there may be, in nearly the same shape: Gemma 4.
    Filling {
        /// The most tokens.
        tokens: u64,
    },
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
const TOKENS_MAX: u64 = 1 << 16;

/// What stands in a processor's file.
struct Said<'a>(&'a Value);

impl Said<'_> {
    fn wrong(name: &str, value: &Value, wanted: &'static str) -> Error {
        Error::Processor { name: name.to_owned(), value: value.to_string(), wanted }
    }

    /// Refuses what is not done here. Each of them a file may leave out, or say what is done anyway.
    fn check(&self, done: &[(&str, Value)]) -> Result<(), Error> {
        let differs = |(name, done): &&(&str, Value)| !self.0[*name].is_null() && self.0[*name] != *done;
        match done.iter().find(differs) {
            Some((name, _)) => {
                Err(Said::wrong(name, &self.0[*name], "what this family's models were made with"))
            }
            None => Ok(()),
        }
    }

    /// The number under the first of these names that has one.
    fn number(&self, names: &[&str], default: u64, most: u64) -> Result<u64, Error> {
        let Some(name) = names.iter().find(|name| !self.0[**name].is_null()) else { return Ok(default) };
        Said::whole(name, &self.0[*name], most)
    }

    fn whole(name: &str, value: &Value, most: u64) -> Result<u64, Error> {
        match value.as_u64().filter(|number| (1..=most).contains(number)) {
            Some(number) => Ok(number),
            None => Err(Said::wrong(name, value, "a whole number in its range")),
        }
    }

    /// Of red, green and blue.
    fn colours(&self, name: &str, default: [f32; 3]) -> Result<[f32; 3], Error> {
        let value = &self.0[name];
        if value.is_null() {
            return Ok(default);
        }
        let read = |at: usize| value[at].as_f64().map(|number| number as f32);
        match (value.as_array().map(Vec::len), read(0), read(1), read(2)) {
            (Some(3), Some(red), Some(green), Some(blue)) => Ok([red, green, blue]),
            _ => Err(Said::wrong(name, value, "three numbers")),
        }
    }
}

impl Processor {
    /// Reads `preprocessor_config.json`. What it does not say is as the family's own processor has it; which family
    /// that is, and what it does where the file says nothing, is told by `fit`.
    pub fn from_json(config: &Value, fit: Fit) -> Result<Processor, Error> {
        let said = Said(config);
        said.check(&[
            ("do_resize", Value::Bool(true)),
            ("do_rescale", Value::Bool(true)),
            ("do_convert_rgb", Value::Bool(true)),
            ("do_center_crop", Value::Bool(false)),
            ("do_pad", Value::Bool(false)),
            ("do_pan_and_scan", Value::Bool(false)),
            ("temporal_patch_size", Value::from(2)),
        ])?;
        let factor = &config["rescale_factor"];
        if factor.as_f64().is_some_and(|factor| (factor * 255.0 - 1.0).abs() > 1e-9) {
            return Err(Said::wrong("rescale_factor", factor, "1/255"));
        }
        let half = [0.5; 3];
        let (kernel, mean, std) = match fit {
            Fit::Between { .. } => (
                Kernel::Bicubic,
                said.colours("image_mean", [0.481_454_66, 0.457_827_5, 0.408_210_73])?,
                said.colours("image_std", [0.268_629_54, 0.261_302_6, 0.275_777_1])?,
            ),
            Fit::Square { .. } => {
                (Kernel::Bilinear, said.colours("image_mean", half)?, said.colours("image_std", half)?)
            }
            // Its processor leaves colours alone, and the model itself begins with this.
            Fit::Filling { .. } => (Kernel::Bicubic, half, half),
        };
        let normalizes = !matches!(fit, Fit::Filling { .. });
        let resample = if kernel == Kernel::Bilinear { 2 } else { 3 };
        said.check(&[("do_normalize", Value::Bool(normalizes)), ("resample", Value::from(resample))])?;
        if std.iter().any(|value| value.is_nan() || *value <= 0.0) {
            return Err(Said::wrong("image_std", &config["image_std"], "three numbers above zero"));
        }
        let size = &config["size"];
        let edge = |name: &str, own: &str, default| match &size[name] {
            Value::Null => said.number(&[own], default, crate::PIXELS_MAX),
            value => Said::whole(name, value, crate::PIXELS_MAX),
        };
        let fit = match fit {
            Fit::Between { pixels_min, pixels_max } => Fit::Between {
                pixels_min: edge("shortest_edge", "min_pixels", pixels_min)?,
                pixels_max: edge("longest_edge", "max_pixels", pixels_max)?,
            },
            Fit::Square { side } => {
                let side = |name: &str| match &size[name] {
                    Value::Null => Ok(side),
                    value => Said::whole(name, value, u64::from(crate::SIDE_MAX)).map(small),
                };
                let (height, width) = (side("height")?, side("width")?);
                if height != width {
                    return Err(Said::wrong("size", size, "a square"));
                }
                Fit::Square { side: height }
            }
            Fit::Filling { tokens } => {
                Fit::Filling { tokens: said.number(&["max_soft_tokens"], tokens, TOKENS_MAX)? }
            }
        };
        let processor = Processor {
            patch: small(said.number(&["patch_size"], 14, PATCH_MAX)?),
            merge: small(said.number(&["merge_size", "pooling_kernel_size"], 2, MERGE_MAX)?),
            fit,
            kernel,
            mean,
            std,
        };
        let token = processor.patch * processor.merge;
        match processor.fit {
            Fit::Between { pixels_min, pixels_max } if pixels_min > pixels_max => {
                Err(Said::wrong("size", size, "a least that is at most the most"))
            }
            Fit::Square { side } if side % token != 0 => {
                Err(Said::wrong("size", &Value::from(side), "whole tokens on a side"))
            }
            _ => Ok(processor),
        }
    }

    /// The same, making at most this many tokens of a picture, where the family has pictures of several sizes: larger
    /// ones are shrunk further, by the same rule.
    pub fn within(mut self, tokens_max: usize) -> Processor {
        let most = tokens_max.max(1) as u64;
        let token = u64::from(self.patch * self.merge).pow(2);
        match &mut self.fit {
            Fit::Between { pixels_min, pixels_max } => {
                *pixels_max = (*pixels_max).min(token.saturating_mul(most));
                *pixels_min = (*pixels_min).min(*pixels_max);
            }
            Fit::Square { .. } => {}
            Fit::Filling { tokens } => *tokens = (*tokens).min(most),
        }
        self
    }

    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        3 * self.patch as usize * self.patch as usize
    }

    /// The most patches that a picture becomes.
    #[expect(clippy::cast_sign_loss, reason = "numbers of pixels are not negative")]
    pub fn patches_max(&self) -> usize {
        match self.fit {
            Fit::Between { pixels_min, pixels_max } => {
                let side = f64::from(self.patch).powi(2);
                let factor = f64::from(self.patch * self.merge);
                // A picture that shrinks is at least one token on a side, and as long as one may be.
                let slender = f64::from(SLENDER_MAX) * factor * factor;
                // One that grows is rounded up on both sides.
                let (least, slenderest) = (pixels_min as f64, f64::from(SLENDER_MAX));
                let sides = (least * slenderest).sqrt() + (least / slenderest).sqrt();
                let grown = least + sides * factor + factor * factor;
                ((pixels_max as f64).max(slender).max(grown) / side) as usize
            }
            Fit::Square { side } => (side / self.patch) as usize * (side / self.patch) as usize,
            Fit::Filling { tokens } => tokens as usize * self.merge as usize * self.merge as usize,
        }
    }

    /// The patches of a picture of some size.
    pub fn grid(&self, size: Size) -> Result<Grid, Error> {
        if size.width == 0 || size.height == 0 {
            return Err(Error::NoPixels { size });
        }
        let to = match self.fit {
            Fit::Between { pixels_min, pixels_max } => self.between(size, pixels_min, pixels_max)?,
            Fit::Square { side } => Size { width: side, height: side },
            Fit::Filling { tokens } => self.filling(size, tokens),
        };
        Ok(Grid { width: to.width / self.patch, height: to.height / self.patch, merge: self.merge })
    }

    #[expect(clippy::cast_sign_loss, reason = "sides are not negative")]
    fn between(&self, size: Size, pixels_min: u64, pixels_max: u64) -> Result<Size, Error> {
        let (long, short) = (size.width.max(size.height), size.width.min(size.height));
        if u64::from(long) > u64::from(SLENDER_MAX) * u64::from(short) {
            return Err(Error::Slender { size, most: SLENDER_MAX });
        }
        let factor = f64::from(self.patch * self.merge);
        let [width, height] = [f64::from(size.width), f64::from(size.height)];
        let pixels = width * height;
        // As Python rounds: a half to the even number.
        let nearest = |side: f64| (side / factor).round_ties_even() * factor;
        let (mut w, mut h) = (nearest(width), nearest(height));
        let [least, most] = [pixels_min as f64, pixels_max as f64];
        if w * h > most {
            let beta = (pixels / most).sqrt();
            let shrunk = |side: f64| ((side / beta / factor).floor() * factor).max(factor);
            (w, h) = (shrunk(width), shrunk(height));
        } else if w * h < least {
            let beta = (least / pixels).sqrt();
            let grown = |side: f64| (side * beta / factor).ceil() * factor;
            (w, h) = (grown(width), grown(height));
        }
        Ok(Size { width: w as u32, height: h as u32 })
    }

    /// Rounded down to whole tokens on both sides; of a side that would be none, one is left.
    #[expect(clippy::cast_sign_loss, reason = "sides are not negative")]
    fn filling(&self, size: Size, tokens: u64) -> Size {
        let token = self.patch * self.merge;
        let [width, height] = [f64::from(size.width), f64::from(size.height)];
        let factor = (tokens as f64 * f64::from(token).powi(2) / (width * height)).sqrt();
        let whole = |side: f64| (factor * side / f64::from(token)).floor() as u64;
        let along = |long: u32, short: u32| u64::from(long / short).min(tokens);
        let (across, down) = match (whole(width), whole(height)) {
            // Of a square as large as one token, if its root is rounded.
            (0, 0) => (1, 1),
            (_, 0) => (along(size.width, size.height), 1),
            (0, _) => (1, along(size.height, size.width)),
            both => both,
        };
        let side = |tokens: u64| u32::try_from(tokens).expect("bounded when read") * token;
        Size { width: side(across), height: side(down) }
    }

    /// What a tower reads of a picture.
    pub fn patches(&self, picture: &Picture) -> Result<Patches, Error> {
        let grid = self.grid(picture.size())?;
        let size = Size { width: grid.width * self.patch, height: grid.height * self.patch };
        let picture = picture.resized(size, self.kernel);
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
