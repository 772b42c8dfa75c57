//! Small files whose headers ask for much memory. Alone in its process, whose peak it looks at.
#![cfg(target_os = "linux")]

use std::path::Path;

use fornax_image::{Picture, Size};

/// Kilobytes of addresses that the process has had at most.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("what Linux says of a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).expect("its peak");
    line.trim().trim_end_matches(" kB").parse().expect("kilobytes")
}

/// Bits from the lowest up, as deflate writes them.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    count: usize,
}

impl Bits {
    fn put(&mut self, bits: &str) {
        for bit in bits.bytes() {
            if self.count.is_multiple_of(8) {
                self.bytes.push(0);
            }
            *self.bytes.last_mut().expect("a byte that is not full") |= (bit - b'0') << (self.count % 8);
            self.count += 1;
        }
    }
}

/// A zlib stream of one zero and so many times 258 more.
fn zeros(times: u32) -> Vec<u8> {
    let mut bits = Bits { bytes: vec![0x78, 0x9c], count: 16 };
    // The last block, with the codes that the format itself fixes; a zero.
    bits.put("1");
    bits.put("10");
    bits.put("00110000");
    for _ in 0..times {
        // 258 bytes, from one byte before.
        bits.put("1100010100000");
    }
    bits.put("0000000");
    let mut bytes = bits.bytes;
    // Adler-32 of zeros: their number and one.
    let count = (1 + u64::from(times) * 258) % 65521;
    bytes.extend([u16::try_from(count).expect("a remainder").to_be_bytes(), [0, 1]].concat());
    bytes
}

fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let named = [&name[..], data].concat();
    let crc = !named.iter().fold(u32::MAX, |crc, byte| {
        let mut crc = crc ^ u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
        crc
    });
    [&u32::try_from(data.len()).expect("a few megabytes").to_be_bytes()[..], &named, &crc.to_be_bytes()]
        .concat()
}

/// A white pixel with a profile of one zero and so many times 258.
fn png(times: u32) -> Vec<u8> {
    let ihdr = [&1u32.to_be_bytes()[..], &1u32.to_be_bytes(), &[8, 0, 0, 0, 0]].concat();
    let profile = [b"a\0\0", &zeros(times)[..]].concat();
    // A stored block: no filter, and white.
    let pixel = [0x78, 0x01, 1, 2, 0, 0xfd, 0xff, 0, 255, 0x01, 0x01, 0x01, 0x00];
    let chunks =
        [chunk(b"IHDR", &ihdr), chunk(b"iCCP", &profile), chunk(b"IDAT", &pixel), chunk(b"IEND", &[])];
    [&b"\x89PNG\r\n\x1a\n"[..], &chunks.concat()].concat()
}

#[test]
fn what_stands_beside_the_pixels_is_bounded() {
    // What the process needs for its threads and files is there now.
    let small = png(4);
    let size = Size { width: 1, height: 1 };
    assert_eq!(Picture::decode(&small).unwrap().size(), size);

    // A gigabyte of profile: it is left out, and the picture is read.
    let bomb = png(4_000_000);
    assert!(bomb.len() < 7 << 20, "{}", bomb.len());
    let before = peak();
    assert_eq!(Picture::size_of(&bomb), Ok(size));
    assert_eq!(Picture::decode(&bomb).unwrap().rgb(), [255; 3]);
    let grown = peak() - before;
    assert!(grown < 200 << 10, "{grown} kB for a profile");

    // EXIF data that claim four gigabytes.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lossless.webp");
    let simple = std::fs::read(path).unwrap();
    let Size { width, height } = Picture::size_of(&simple).unwrap();
    let side = |side: u32| (side - 1).to_le_bytes()[..3].to_vec();
    let vp8x = [&[0x08, 0, 0, 0][..], &side(width), &side(height)].concat();
    let webp = |claim: u32| {
        let exif = [&b"EXIF"[..], &claim.to_le_bytes(), b"II*\0"].concat();
        let chunks = [b"WEBPVP8X", &10u32.to_le_bytes()[..], &vp8x, &simple[12..], &exif].concat();
        [b"RIFF", &u32::try_from(chunks.len()).unwrap().to_le_bytes()[..], &chunks].concat()
    };
    assert_eq!(Picture::size_of(&webp(4)), Ok(Size { width, height }));
    let before = peak();
    let claims = webp(u32::MAX - 1);
    assert_eq!(Picture::size_of(&claims), Ok(Size { width, height }));
    assert_eq!(Picture::decode(&claims), Picture::decode(&simple));
    let grown = peak() - before;
    assert!(grown < 200 << 10, "{grown} kB for what is claimed");
}
