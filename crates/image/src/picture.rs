//! A decoded picture.

use std::fmt;
use std::io::Cursor;

use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageResult, Limits};

use crate::Error;

/// Bytes of a file: more than a phone's largest photograph.
pub const BYTES_MAX: usize = 32 << 20;

/// Pixels that are decoded: a photograph of 48 megapixels, and a little more. They take three bytes each, and while they
/// are decoded up to as much again.
pub const PIXELS_MAX: u64 = 50_000_000;

/// Pixels on a side.
pub const SIDE_MAX: u32 = 32_768;

/// Bytes that may be made of what stands in a file beside its pixels: a colour profile may be written so that a megabyte
/// becomes a gigabyte.
const ASIDE_MAX: u64 = BYTES_MAX as u64;

/// What is decoded.
pub(crate) const KINDS: &str = "JPEG, PNG, WebP or GIF";

/// Pixels across and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Across.
    pub width: u32,
    /// Down.
    pub height: u32,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.width, self.height)
    }
}

/// Rows of red, green and blue, the right way up. What is transparent stands before white, as in transformers.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    pub(crate) size: Size,
    /// (height, width, 3)
    pub(crate) rgb: Vec<u8>,
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a picture of {}", self.size)
    }
}

/// A file whose header was read.
struct Opened<'b> {
    decoder: Box<dyn ImageDecoder + 'b>,
    orientation: Orientation,
    /// The right way up.
    size: Size,
}

impl Picture {
    /// A picture of pixels that are already there, (height, width, 3); `None` unless there are as many as the size says.
    pub fn new(size: Size, rgb: Vec<u8>) -> Option<Picture> {
        let values = u64::from(size.width) * u64::from(size.height) * 3;
        (values > 0 && values == rgb.len() as u64).then_some(Picture { size, rgb })
    }

    /// The size that a file's header says, the right way up. No pixel is decoded.
    pub fn size_of(bytes: &[u8]) -> Result<Size, Error> {
        Ok(open(bytes)?.size)
    }

    /// Decodes a file, of an animation its first frame.
    pub fn decode(bytes: &[u8]) -> Result<Picture, Error> {
        let Opened { decoder, orientation, size } = open(bytes)?;
        let mut image = DynamicImage::from_decoder(decoder).map_err(damaged)?;
        image.apply_orientation(orientation);
        let rgb = match image.color().has_alpha() {
            false => image.into_rgb8().into_raw(),
            true => image.into_rgba8().pixels().flat_map(|pixel| before_white(pixel.0)).collect(),
        };
        Picture::new(size, rgb)
            .ok_or_else(|| Error::Damaged { reason: "another size than its header says".to_owned() })
    }

    /// How large it is.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Red, green and blue of each pixel, row after row.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// A pixel with white behind it.
fn before_white([red, green, blue, alpha]: [u8; 4]) -> [u8; 3] {
    let alpha = u32::from(alpha);
    let over = |colour: u8| {
        let sum = u32::from(colour) * alpha + 255 * (255 - alpha);
        u8::try_from((sum + 127) / 255).expect("between the colour and white")
    };
    [over(red), over(green), over(blue)]
}

/// Reads the header, and refuses what would be too much.
fn open(bytes: &[u8]) -> Result<Opened<'_>, Error> {
    if bytes.len() > BYTES_MAX {
        return Err(Error::TooManyBytes { bytes: bytes.len() });
    }
    let kind = kind(bytes)?;
    let reader = || Cursor::new(bytes);
    let decoder: ImageResult<Box<dyn ImageDecoder + '_>> = match kind {
        ImageFormat::Jpeg => JpegDecoder::new(reader()).map(|decoder| Box::new(decoder) as _),
        ImageFormat::Png => PngDecoder::with_limits(reader(), aside()).map(|decoder| Box::new(decoder) as _),
        ImageFormat::WebP => WebPDecoder::new(reader()).map(|decoder| Box::new(decoder) as _),
        _ => GifDecoder::new(reader()).map(|decoder| Box::new(decoder) as _),
    };
    let mut decoder = decoder.map_err(damaged)?;
    let (width, height) = decoder.dimensions();
    let size = Size { width, height };
    if width == 0 || height == 0 {
        return Err(Error::NoPixels { size });
    }
    if u64::from(width) * u64::from(height) > PIXELS_MAX || width.max(height) > SIDE_MAX {
        return Err(Error::TooManyPixels { size });
    }
    decoder.set_limits(limits()).map_err(damaged)?;
    // What stands in the file beside the pixels may be damaged without harm to them.
    let orientation = match kind {
        ImageFormat::WebP if !chunks_are_whole(bytes) => Orientation::NoTransforms,
        _ => decoder.orientation().unwrap_or(Orientation::NoTransforms),
    };
    let turned = matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    );
    let size = if turned { Size { width: height, height: width } } else { size };
    Ok(Opened { decoder, orientation, size })
}

/// What a decoder may allocate while it reads the header; how large the picture may be is judged with its size.
fn aside() -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(ASIDE_MAX);
    limits
}

/// Whether no chunk of a WebP file claims to reach behind its end. For one that does, the decoder would ask for as much
/// memory as it claims: up to 4 GiB.
fn chunks_are_whole(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(12..).unwrap_or_default();
    while let Some((header, behind)) = rest.split_at_checked(8) {
        let size = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if size > behind.len() {
            return false;
        }
        // A byte is filled in behind an odd number of them.
        rest = behind.get(size + size % 2..).unwrap_or_default();
    }
    true
}

/// What a decoder may allocate: pixels of sixteen bits in four channels, twice.
fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(SIDE_MAX);
    limits.max_image_height = Some(SIDE_MAX);
    limits.max_alloc = Some(PIXELS_MAX * 16);
    limits
}

/// What a file is, by its first bytes.
fn kind(bytes: &[u8]) -> Result<ImageFormat, Error> {
    if bytes.is_empty() {
        return Err(Error::Empty);
    }
    let known = image::guess_format(bytes).ok();
    if let Some(kind @ (ImageFormat::Jpeg | ImageFormat::Png | ImageFormat::WebP | ImageFormat::Gif)) = known
    {
        return Ok(kind);
    }
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]).to_lowercase();
    let begins = text.trim_start_matches(['\u{feff}', ' ', '\t', '\r', '\n']);
    let brand = bytes.get(4..12).unwrap_or_default();
    let found = if begins.starts_with("<svg") || (begins.starts_with('<') && begins.contains("<svg")) {
        "an SVG drawing"
    } else if begins.starts_with("%pdf") {
        "a PDF document"
    } else if begins.starts_with('<') {
        "a page of HTML or XML"
    } else if [&b"ftypavif"[..], b"ftypavis"].contains(&brand) {
        "AVIF"
    } else if [&b"ftypheic"[..], b"ftypheix", b"ftypmif1", b"ftypmsf1", b"ftyphevc"].contains(&brand) {
        "HEIC"
    } else if brand.starts_with(b"ftyp") {
        "a film"
    } else {
        match known {
            Some(ImageFormat::Bmp) => "BMP",
            Some(ImageFormat::Tiff) => "TIFF",
            Some(ImageFormat::Ico) => "an icon",
            _ => {
                let begins = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
                return Err(Error::UnknownKind { begins });
            }
        }
    };
    Err(Error::Kind { found })
}

/// What the decoder says, in a line: it may end lines, and repeat what stands in the file.
fn damaged(error: ImageError) -> Error {
    let said = error.to_string();
    let line: String = said.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Error::Damaged { reason: line }
}
