//! The tests that every format passes, against fixtures that `tests/quant/make_blocks.py` wrote with the `gguf`
//! package. The scalar code is compared with them; the packed kernels are compared with the scalar code, bit by bit.

use super::{
    BLOCK, Format, GROUP, IntBlock, Kernels, PANEL_BLOCK_BYTES, Run, Simd, WIDTHS, format, quantize,
    store_block,
};
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
        fn integer_products_are_those_of_the_dequantised_values() {
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

/// Up to sixteen rows packed into a group.
pub(super) fn packed<'a>(kernels: &Kernels, columns: usize, rows: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    // Aligned for the words of the group, as a weight's memory is.
    let mut group = vec![0u64; (kernels.group_bytes)(columns) / 8];
    (kernels.pack)(&mut rows.into_iter(), columns, bytemuck::cast_slice_mut(&mut group));
    bytemuck::cast_slice(&group).to_vec()
}

/// Dequantised values equal those of gguf bit for bit; where gguf has NaN, so have we. Stored and packed.
pub(super) fn values(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let check = |simd: Simd, values: &mut dyn Iterator<Item = f32>| {
        for (index, (got, want)) in values.zip(&fixture.values).enumerate() {
            let (block, value) = (index / dtype.block_values(), index % dtype.block_values());
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{dtype} {}: value {value} of block {block} is {got}, gguf says {want}",
                simd.name()
            );
        }
    };
    let columns = fixture.values.len();
    for simd in Simd::present() {
        let format = format(dtype, simd).unwrap();
        let mut values = vec![f32::NAN; columns];
        (format.dequantize)(fixture.blocks, &mut values);
        check(simd, &mut values.into_iter());
        if let Some(runs) = format.runs {
            let mut read = vec![Run::default(); columns / 16];
            runs.read(fixture.blocks, &mut read);
            let value = |run: &Run, code: u8| run.scale * f32::from(runs.table[usize::from(code)]) - run.min;
            check(simd, &mut read.iter().flat_map(|run| run.codes.map(|code| value(run, code))));
            assert!(runs.mins || read.iter().all(|run| run.min == 0.0));
        }
        if let Some(kernels) = format.kernels {
            // Every row alike; the last few missing.
            let group = packed(kernels, columns, std::iter::repeat_n(fixture.blocks, 13));
            let mut values = vec![[f32::NAN; GROUP]; columns];
            kernels.dequantize(&group, columns, 0, &mut values);
            for row in [0, 1, 7, 8, 12] {
                check(simd, &mut values.iter().map(|column| column[row]));
            }
            assert!(values.iter().all(|column| column[15] == 0.0), "{dtype}: a missing row is zero");
            let middle = columns / 64 * BLOCK;
            let mut rest = vec![[f32::NAN; GROUP]; columns - middle];
            kernels.dequantize(&group, columns, middle, &mut rest);
            let bits = |column: &[f32; GROUP]| column.map(f32::to_bits);
            assert!(rest.iter().map(bits).eq(values[middle..].iter().map(bits)));
        }
    }
}

/// Scalar products lie within f32 rounding of the f64 sums that numpy made of gguf's values and its own integer
/// activations; packed products have the scalar bits at every place of a panel of every width.
pub(super) fn products(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    assert!(!fixture.products.is_empty());
    let activations = Activations::read();
    let rows: Vec<Vec<IntBlock>> = activations.rows.iter().map(|row| blocks(row)).collect();
    let row_bytes = dtype.bytes_for(ROW).unwrap();
    let weights = &fixture.blocks[fixture.units * dtype.block_bytes()..];
    let weights: Vec<&[u8]> =
        weights.chunks_exact(row_bytes).take(fixture.products.len() / ACTIVATION_ROWS).collect();
    let dot = format(dtype, Simd::Scalar).unwrap().dot.unwrap();
    for (index, (weights, wants)) in weights.iter().zip(fixture.products.chunks(ACTIVATION_ROWS)).enumerate()
    {
        for (row, (want, magnitude)) in wants.iter().enumerate() {
            let got = dot(weights, &rows[row]);
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= 1e-6 * magnitude,
                "{dtype}: product of weights {index} and activations {row} is {got}, not {want}"
            );
        }
    }
    for simd in Simd::present() {
        check_packed(&format(dtype, simd).unwrap(), &weights, &rows, simd);
    }
}

/// Packed products against the scalar ones.
fn check_packed(format: &Format, weights: &[&[u8]], rows: &[Vec<IntBlock>], simd: Simd) {
    let (Some(kernels), Some(dot)) = (format.kernels, format.dot) else { return };
    let columns = rows[0].len() * BLOCK;
    let weights: Vec<&[u8]> = weights.iter().copied().cycle().take(GROUP - 1).collect();
    let group = packed(kernels, columns, weights.iter().copied());
    for width in WIDTHS.into_iter().filter(|&width| width <= kernels.width_max) {
        let mut panel = vec![0u64; columns / BLOCK * width * PANEL_BLOCK_BYTES / 8];
        let panel: &mut [u8] = bytemuck::cast_slice_mut(&mut panel);
        for place in 0..width {
            for (index, block) in rows[place % rows.len()].iter().enumerate() {
                store_block(simd, panel, width, place, index, block);
            }
        }
        let mut tile = vec![[f32::NAN; GROUP]; width];
        kernels.multiply_integers(&group, columns, panel, &mut tile);
        for (place, tile) in tile.iter().enumerate() {
            for (lane, weights) in weights.iter().enumerate() {
                let want = dot(weights, &rows[place % rows.len()]);
                assert!(
                    tile[lane].to_bits() == want.to_bits() || tile[lane].is_nan() && want.is_nan(),
                    "{} {} width {width}: row {place}, weights {lane}: {} not {want}",
                    format.dtype,
                    simd.name(),
                    tile[lane]
                );
            }
        }
    }
}

/// A row quantised.
fn blocks(row: &[f32]) -> Vec<IntBlock> {
    let mut blocks = Vec::new();
    quantize(Simd::Scalar, row, |_, block| blocks.push(*block));
    blocks
}

/// With unit scales a block's product is an integer: exact wherever f32 can hold it and its parts, even with the
/// largest codes and activations, which would show an overflow on the way.
pub(super) fn integers(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let mut random = Random(11);
    let mut exact = 0;
    let dot = format(dtype, Simd::Scalar).unwrap().dot.unwrap();
    for unit in 0..fixture.units {
        let weights = &fixture.blocks[unit * dtype.block_bytes()..][..dtype.block_bytes()];
        let values = &fixture.values[unit * dtype.block_values()..][..dtype.block_values()];
        let mut rows = Vec::new();
        for pattern in 0..10 {
            let mut activations = vec![0i16; dtype.block_values()];
            for (activation, value) in activations.iter_mut().zip(values) {
                *activation = match pattern {
                    0 => 32767,
                    1 => -32767,
                    2 if *value < 0.0 => -32767,
                    2 => 32767,
                    3 => 1,
                    4 => -1,
                    5..8 => (random.next() % 255) as i16 - 127,
                    _ => ((random.next() % 65535) as u16).wrapping_sub(32767).cast_signed(),
                };
            }
            let row: Vec<_> = activations
                .as_chunks()
                .0
                .iter()
                .map(|values: &[i16; BLOCK]| {
                    let sum = values.iter().map(|&value| i32::from(value)).sum::<i32>() as f32;
                    IntBlock { values: *values, scale: 1.0, sum }
                })
                .collect();
            let terms = || values.iter().zip(&activations).map(|(&w, &a)| f64::from(w) * f64::from(a));
            let (want, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let got = f64::from(dot(weights, &row));
            if magnitude < 4e6 {
                assert_eq!(got, want, "{dtype}: block {unit}, activations {pattern}");
                exact += 1;
            }
            assert!((got - want).abs() <= 1e-6 * magnitude.max(1.0), "{dtype}: {got} not {want}");
            rows.push(row);
        }
        for simd in Simd::present() {
            check_packed(&format(dtype, simd).unwrap(), &[weights], &rows, simd);
        }
    }
    assert!(exact > 0, "no product was small enough to be exact");
}

/// Neither a NaN or infinite activation nor a NaN scale is lost, whatever it is multiplied with.
pub(super) fn faults(dtype: DType, fixture: &[u8]) {
    let fixture = Fixture::read(dtype, fixture);
    let zeros = vec![0; dtype.block_bytes()];
    let weights: Vec<&[u8]> = fixture.blocks.chunks(dtype.block_bytes()).chain([&zeros[..]]).collect();
    let dot = format(dtype, Simd::Scalar).unwrap().dot.unwrap();
    let mut rows = vec![blocks(&vec![1.0; dtype.block_values()])];
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut activations = vec![1.0; dtype.block_values()];
        activations[9] = bad;
        rows.push(blocks(&activations));
    }
    for (index, weights) in weights.iter().enumerate() {
        for row in &rows[1..] {
            assert!(dot(weights, row).is_nan(), "{dtype}: block {index}");
        }
        let values = fixture.values.chunks(dtype.block_values()).nth(index);
        let nan = values.is_some_and(|values| values.iter().all(|value| value.is_nan()));
        let product = dot(weights, &rows[0]);
        assert!(product.is_nan() || !nan, "{dtype}: block {index} is {product}");
    }
    for simd in Simd::present() {
        for weights in weights.chunks(GROUP - 1) {
            check_packed(&format(dtype, simd).unwrap(), weights, &rows, simd);
        }
    }
}

/// Values in a weight or activation row of the fixtures.
const ROW: usize = 1024;
/// Rows in the activation fixture.
const ACTIVATION_ROWS: usize = 3;

/// What make_blocks.py wrote for one type.
struct Fixture<'a> {
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
    /// By row and block: scale, values.
    pub(super) blocks: Vec<Vec<(f32, [i16; BLOCK])>>,
}

impl Activations {
    pub(super) fn read() -> Activations {
        let mut bytes =
            Bytes(include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/quant/activations.bin")));
        let rows = (0..ACTIVATION_ROWS).map(|_| (0..ROW).map(|_| bytes.f32()).collect()).collect();
        let activations = Activations { rows, blocks: bytes.quantized() };
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

    fn quantized(&mut self) -> Vec<Vec<(f32, [i16; BLOCK])>> {
        let mut block = || {
            let scale = self.f32();
            let values = self.take(BLOCK * 2).as_chunks().0.iter().map(|&bytes| i16::from_le_bytes(bytes));
            (scale, values.collect::<Vec<_>>().try_into().unwrap())
        };
        (0..ACTIVATION_ROWS).map(|_| (0..ROW / BLOCK).map(|_| block()).collect()).collect()
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
