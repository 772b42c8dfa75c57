//! The tests that every format passes, against fixtures that `tests/quant/make_blocks.py` wrote with the `gguf` package.

use super::{Activation, Dot, Format, Q8Block, Simd, format, quantize_q8};
use bytemuck::Zeroable;
use fornax_format::DType;

/// Tests of one quantised format: its type and its fixture.
macro_rules! format_tests {
    ($dtype:ident, $file:literal) => {
        const FIXTURE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/quant/", $file));

        #[test]
        fn every_value_has_the_bits_that_gguf_gives() {
            $crate::cpu::quant::check::values(fornax_format::DType::$dtype, FIXTURE);
        }

        #[test]
        fn int8_products_are_those_of_the_dequantised_values() {
            $crate::cpu::quant::check::products(fornax_format::DType::$dtype, FIXTURE);
        }

        #[test]
        fn integers_are_exact_inside_a_block() {
            $crate::cpu::quant::check::integers(fornax_format::DType::$dtype, FIXTURE);
        }

        #[test]
        fn a_bad_activation_or_scale_makes_the_product_nan() {
            $crate::cpu::quant::check::faults(fornax_format::DType::$dtype, FIXTURE);
        }
    };
}
pub(super) use format_tests;

/// Dequantised values equal those of gguf bit for bit; where gguf has NaN, so have we.
pub(super) fn values(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    for simd in Simd::present() {
        let mut values = vec![f32::NAN; fixture.values.len()];
        (format(dtype, simd).unwrap().dequantize)(fixture.blocks, &mut values);
        for (index, (got, want)) in values.iter().zip(&fixture.values).enumerate() {
            let (block, value) = (index / dtype.block_values(), index % dtype.block_values());
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{dtype} {}: value {value} of block {block} is {got}, gguf says {want}",
                simd.name()
            );
        }
    }
}

/// Int8 products lie within f32 rounding of the f64 sums that numpy made of gguf's values and its own int8
/// activations; a row's product has the same bits alone and among others.
pub(super) fn products(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let activations = Activations::read();
    for simd in Simd::present() {
        match &format(dtype, simd).unwrap().activation {
            Activation::Float => panic!("{dtype} has no int8 product"),
            Activation::Q8(dot) => {
                let mut blocks = vec![Q8Block::zeroed(); activations.rows.len() * ROW / 32];
                quantize_q8(simd, &activations.rows.concat(), &mut blocks);
                check_products(dot, &blocks, &fixture, simd);
            }
        }
    }
}

fn check_products<A: Copy>(dot: &Dot<u8, A>, activations: &[A], fixture: &Fixture<'_>, simd: Simd) {
    assert!(!fixture.products.is_empty());
    let row_bytes = fixture.dtype.bytes_for(ROW).unwrap();
    let row_blocks = activations.len() / ACTIVATION_ROWS;
    for (index, wants) in fixture.products.chunks(ACTIVATION_ROWS).enumerate() {
        let weights =
            &fixture.blocks[fixture.units * fixture.dtype.block_bytes()..][index * row_bytes..][..row_bytes];
        // Each row several times, so that it meets every place among four and in the remainder.
        let places = 7;
        let many: Vec<A> = activations.repeat(places);
        let mut got = vec![f32::NAN; ACTIVATION_ROWS * places];
        dot.rows(weights, &many, &mut got);
        for (place, got) in got.iter().enumerate() {
            let (row, (want, magnitude)) = (place % ACTIVATION_ROWS, wants[place % ACTIVATION_ROWS]);
            let alone = dot.one(weights, &activations[row * row_blocks..][..row_blocks]);
            assert_eq!(
                got.to_bits(),
                alone.to_bits(),
                "{} {}: alone and among others",
                fixture.dtype,
                simd.name()
            );
            let error = (f64::from(*got) - want).abs();
            assert!(
                error <= 1e-6 * magnitude,
                "{} {}: product of weights {index} and activations {row} is {got}, not {want}",
                fixture.dtype,
                simd.name()
            );
        }
    }
}

/// With unit scales a block's product is an integer: exact wherever f32 can hold it and its parts, even with the largest codes and
/// activations, which would show an overflow on the way.
pub(super) fn integers(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let mut random = Random(11);
    let mut exact = 0;
    for unit in 0..fixture.units {
        let weights = &fixture.blocks[unit * dtype.block_bytes()..][..dtype.block_bytes()];
        let values = &fixture.values[unit * dtype.block_values()..][..dtype.block_values()];
        for pattern in 0..8 {
            let mut activations = [0i8; 256];
            for (index, activation) in activations.iter_mut().enumerate() {
                *activation = match pattern {
                    0 => 127,
                    1 => -127,
                    2 if values[index % values.len()] < 0.0 => -127,
                    2 => 127,
                    3 => 1,
                    _ => ((random.next() % 255) as u8).wrapping_sub(127).cast_signed(),
                };
            }
            let terms = || values.iter().zip(&activations).map(|(&w, &a)| f64::from(w) * f64::from(a));
            let (want, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            for simd in Simd::present() {
                let got = f64::from(unit_product(format(dtype, simd).unwrap(), weights, &activations));
                if magnitude < 4e6 {
                    assert_eq!(got, want, "{dtype} {}: block {unit}, activations {pattern}", simd.name());
                    exact += 1;
                }
                assert!(
                    (got - want).abs() <= 1e-6 * magnitude.max(1.0),
                    "{dtype} {}: {got} not {want}",
                    simd.name()
                );
            }
        }
    }
    assert!(exact > 0, "no product was small enough to be exact");
}

/// Neither a NaN or infinite activation nor a NaN scale is lost, whatever it is multiplied with.
pub(super) fn faults(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let zeros = vec![0; dtype.block_bytes()];
    let blocks: Vec<&[u8]> = fixture.blocks.chunks(dtype.block_bytes()).chain([&zeros[..]]).collect();
    for simd in Simd::present() {
        let format = format(dtype, simd).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut activations = vec![1.0; dtype.block_values()];
            activations[9] = bad;
            for (index, weights) in blocks.iter().enumerate() {
                let product = product(format, simd, weights, &activations);
                assert!(product.is_nan(), "{dtype} {}: block {index} by {bad} is {product}", simd.name());
            }
        }
        let activations = vec![1.0; dtype.block_values()];
        for (index, weights) in blocks.iter().enumerate() {
            let values = fixture.values.chunks(dtype.block_values()).nth(index);
            let nan = values.is_some_and(|values| values.iter().all(|value| value.is_nan()));
            let product = product(format, simd, weights, &activations);
            assert!(product.is_nan() || !nan, "{dtype} {}: block {index} is {product}", simd.name());
        }
    }
}

/// The int8 product of one block with activations.
fn product(format: &Format, simd: Simd, weights: &[u8], activations: &[f32]) -> f32 {
    match &format.activation {
        Activation::Float => panic!("{} has no int8 product", format.dtype),
        Activation::Q8(dot) => {
            let mut blocks = vec![Q8Block::zeroed(); activations.len() / 32];
            quantize_q8(simd, activations, &mut blocks);
            dot.one(weights, &blocks)
        }
    }
}

/// The product of one block with activations of scale 1.
fn unit_product(format: &Format, weights: &[u8], activations: &[i8; 256]) -> f32 {
    match &format.activation {
        Activation::Float => panic!("{} has no int8 product", format.dtype),
        Activation::Q8(dot) => {
            let block = |values: &[i8; 32]| {
                let sum = values.iter().map(|&value| f32::from(value)).sum();
                Q8Block { scales: [1.0; 8], sum, values: *values }
            };
            let blocks: Vec<_> = activations.as_chunks().0.iter().map(block).collect();
            dot.one(weights, &blocks[..format.dtype.block_values() / 32])
        }
    }
}

/// Values in a weight or activation row of the fixtures.
const ROW: usize = 1024;
/// Rows in the activation fixture.
const ACTIVATION_ROWS: usize = 3;

/// What make_blocks.py wrote for one type.
struct Fixture<'a> {
    dtype: DType,
    /// Leading blocks whose f16 scales are 1.
    units: usize,
    /// The unit blocks; then the blocks of the weight rows; then blocks with scales that are not finite.
    blocks: &'a [u8],
    /// All blocks dequantised by gguf.
    values: Vec<f32>,
    /// (product, sum of the magnitudes of its terms) for each weight row and, within it, each activation row.
    products: Vec<(f64, f64)>,
}

impl<'a> Fixture<'a> {
    fn read(dtype: DType, bytes: &'a [u8]) -> Fixture<'a> {
        let mut bytes = Bytes(bytes);
        let [units, rows, blocks] = [(); 3].map(|()| bytes.usize());
        let fixture = Fixture {
            dtype,
            units,
            blocks: bytes.take(blocks * dtype.block_bytes()),
            values: (0..blocks * dtype.block_values()).map(|_| bytes.f32()).collect(),
            products: (0..rows * ACTIVATION_ROWS).map(|_| (bytes.f64(), bytes.f64())).collect(),
        };
        assert!(bytes.0.is_empty() && blocks > 0);
        fixture
    }
}

/// Activation rows, and how numpy quantised them.
pub(super) struct Activations {
    pub(super) rows: Vec<Vec<f32>>,
    /// By row and what shares a scale: scale, values.
    pub(super) q8: Vec<Vec<(f32, [i8; 4])>>,
}

impl Activations {
    pub(super) fn read() -> Activations {
        let mut bytes =
            Bytes(include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/quant/activations.bin")));
        let rows = (0..ACTIVATION_ROWS).map(|_| (0..ROW).map(|_| bytes.f32()).collect()).collect();
        let activations = Activations { rows, q8: bytes.quantized() };
        assert!(bytes.0.is_empty());
        activations
    }
}

/// Little-endian numbers, one after the other.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        self.0.split_off(..len).unwrap()
    }

    fn usize(&mut self) -> usize {
        u32::from_le_bytes(self.take(4).try_into().unwrap()).try_into().unwrap()
    }

    fn f32(&mut self) -> f32 {
        f32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn f64(&mut self) -> f64 {
        f64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn quantized<const N: usize>(&mut self) -> Vec<Vec<(f32, [i8; N])>> {
        let mut block = || (self.f32(), *bytemuck::cast_slice::<_, i8>(self.take(N)).as_array().unwrap());
        (0..ACTIVATION_ROWS).map(|_| (0..ROW / N).map(|_| block()).collect()).collect()
    }
}

/// A small generator (splitmix64), so that a failure repeats.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// Evenly in -1..1.
    pub(super) fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}
