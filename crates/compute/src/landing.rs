//! Weights that are computed in another type than they are stored in: what they land in, and how.
//!
//! Some matrices of safetensors files have no type that a backend multiplies: codes of a few bits and 8-bit floats, with
//! scales beside them. They land in the smallest type that holds their values exactly (what no type of blocks holds is
//! rounded once, to f32, where it is computed):
//!
//! | stored | lands in |
//! |---|---|
//! | codes whose distance from their zero point is from -8 to 7 (4 bits around the middle; 2 and 3 bits of any kind) | Q4_0 |
//! | those from -16 to 15 (4 bits with zero points) | Q5_0 |
//! | those from -128 to 127 (8 bits around the middle) | Q8_0 |
//! | up to 4 bits with biases; 5 bits | Q4_1; Q5_1 |
//! | all these where 32 columns do not share a scale, or the scale is no f16; 8 bits with zero points; 6 and 8 with biases | F32 |
//! | 4-bit floats with powers of two | MXFP4 |
//! | 4-bit floats with 8-bit floats, where a factor of the whole matrix leaves them 8-bit floats | NVFP4 |
//! | those with other factors | F32 |
//! | bitsandbytes' 4 bits | the float type that it makes of them itself |
//! | 8-bit floats of which whole runs of 128 columns share a scale of ordinary size | FP8_128, with their bits |
//! | others whose scales are powers of two | BF16 |
//! | others | F32 |
//!
//! And a float matrix may be asked to land in a smaller type ([`View::lands`]), which rounds as [`quantize_q8_0`],
//! [`quantize_q4_k`], [`quantize_mxfp8`] and [`quantize_fp8_row`] say. 8-bit floats that are asked to land in FP8_A8
//! keep their bits, whatever their scales. Sizes are known without reading a matrix, so that a plan is made at once.
//!
//! A part that takes some of its matrix's columns ([`Part::columns`]) is cut here, after it has landed.

mod float4;
mod integers;
mod published;
mod quantize;
mod table;

use std::ops::Range;

use fornax_format::{DType, Packing, View};
use half::{bf16, f16};

use crate::cpu::dequantize;
use crate::{Error, Part, float8};

use float4::Float4;
use integers::Integers;
pub use published::{WRITTEN, quantize_row};
pub use quantize::{quantize_fp8_row, quantize_mxfp8, quantize_q4_k, quantize_q8_0};
use table::Table;

/// Whether landed parts hold values, or only as much room: a plan asks for sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Values.
    Values,
    /// Zeros that nobody reads, and that take no memory.
    Room,
}

/// The type that a tensor is computed in.
pub fn landing(view: &View<'_>) -> DType {
    match (view.lands, view.packing.as_deref()) {
        (Some(dtype), _) => dtype,
        (None, None) => view.dtype,
        (None, Some(Packing::Float8 { scales, block, .. })) => {
            let columns = view.shape.last().copied().unwrap_or(0);
            let runs = block.1.is_multiple_of(RUN) || block.1 >= columns;
            if columns > 0 && columns.is_multiple_of(RUN) && runs && are_ordinary(scales) {
                DType::FP8_128
            } else if floats(scales).all(is_power_of_two) {
                DType::BF16
            } else {
                DType::F32
            }
        }
        (None, Some(Packing::Integers(packed))) => Integers::new(view, packed).landing(),
        (None, Some(Packing::Float4(packed))) => Float4::new(view, packed).landing(),
        (None, Some(Packing::Table(packed))) => Table::new(view, packed).landing(),
    }
}

/// Hands `then` the parts in the types that they land in.
pub fn land<R>(
    parts: &[Part<'_>],
    content: Content,
    then: impl FnOnce(&[Part<'_>]) -> Result<R, Error>,
) -> Result<R, Error> {
    let moves =
        |part: &Part<'_>| part.view.packing.is_some() || part.view.lands.is_some() || part.columns.is_some();
    if !parts.iter().any(moves) {
        return then(parts);
    }
    let mut rooms = Vec::with_capacity(parts.len());
    for part in parts {
        rooms.push(if moves(part) { Some(landed_part(part, content)?) } else { None });
    }
    let mut landed = Vec::with_capacity(parts.len());
    for (part, room) in parts.iter().zip(&rooms) {
        landed.push(match room {
            None => part.clone(),
            Some(Landed { dtype, shape, bytes }) => {
                let view = View::new(part.view.name, *dtype, shape.clone(), bytes);
                let view = view.map_err(|_| wrong_shape(&part.view))?;
                Part { view, rows: part.rows.clone(), columns: None, whole: part.whole, place: part.place }
            }
        });
    }
    then(&landed)
}

/// A matrix in the type and the shape that it is computed in.
struct Landed {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn landed_part(part: &Part<'_>, content: Content) -> Result<Landed, Error> {
    let view = &part.view;
    let moved = match view.packing.is_some() || view.lands.is_some() {
        true => Some(landed(view, content)?),
        false => None,
    };
    let dtype = moved.as_ref().map_or(view.dtype, |(dtype, _)| *dtype);
    match (&part.columns, moved) {
        (None, Some((_, bytes))) => Ok(Landed { dtype, shape: view.shape.clone(), bytes }),
        (None, None) => unreachable!("only what moves is landed"),
        (Some(columns), moved) => {
            let bytes = moved.as_ref().map_or(view.bytes, |(_, bytes)| bytes);
            let cut = cut(view, (dtype, bytes), columns, content)?;
            view.release();
            Ok(cut)
        }
    }
}

/// Some columns of a matrix that has landed.
fn cut(
    view: &View<'_>,
    (dtype, bytes): (DType, &[u8]),
    columns: &Range<usize>,
    content: Content,
) -> Result<Landed, Error> {
    let &[rows, all] = &view.shape[..] else { return Err(wrong_shape(view)) };
    let refused =
        || Error::Columns { tensor: view.name.to_owned(), got: columns.clone(), columns: all, dtype };
    // Where a row's bytes lie: both ends are ends of blocks.
    let at = |column: usize| dtype.bytes_for(column).filter(|_| column <= all).ok_or_else(refused);
    let (begin, end, row_bytes) = (at(columns.start)?, at(columns.end)?, at(all)?);
    if columns.is_empty() {
        return Err(refused());
    }
    let shape = vec![rows, columns.len()];
    let each = end - begin;
    if content == Content::Room {
        return Ok(Landed { dtype, shape, bytes: vec![0; rows * each] });
    }
    let mut kept = Vec::with_capacity(rows * each);
    bytes.chunks_exact(row_bytes).for_each(|row| kept.extend_from_slice(&row[begin..end]));
    Ok(Landed { dtype, shape, bytes: kept })
}

fn landed(view: &View<'_>, content: Content) -> Result<(DType, Vec<u8>), Error> {
    let dtype = landing(view);
    let &[rows, columns] = &view.shape[..] else { return Err(wrong_shape(view)) };
    let row_bytes = dtype.bytes_for(columns).filter(|&bytes| bytes > 0).ok_or_else(|| wrong_shape(view))?;
    let mut bytes = vec![0; rows.checked_mul(row_bytes).ok_or_else(|| wrong_shape(view))?];
    if content == Content::Room || bytes.is_empty() {
        return Ok((dtype, bytes));
    }
    let packed = Packed::of(view);
    let write = |first: usize, out: &mut [u8]| match &packed {
        Packed::Integers(integers) => integers.write(dtype, first, out),
        Packed::Float4(float4) => float4.write(dtype, first, out),
        Packed::Table(table) => table.write(dtype, first, out),
        Packed::Floats => write_floats(view, dtype, first, out),
    };
    // Eight rows at a time: those that share words of AWQ.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.div_ceil(threads).next_multiple_of(8);
    std::thread::scope(|scope| {
        for (index, out) in bytes.chunks_mut(each * row_bytes).enumerate() {
            let write = &write;
            scope.spawn(move || {
                for (eight, out) in out.chunks_mut(8 * row_bytes).enumerate() {
                    write(index * each + eight * 8, out);
                }
            });
        }
    });
    view.release();
    Ok((dtype, bytes))
}

/// What is read of a matrix before its rows are written.
enum Packed<'v> {
    Integers(Integers<'v>),
    Float4(Float4<'v>),
    Table(Table<'v>),
    Floats,
}

impl<'v> Packed<'v> {
    fn of(view: &'v View<'v>) -> Packed<'v> {
        match view.packing.as_deref() {
            Some(Packing::Integers(packed)) => Packed::Integers(Integers::new(view, packed)),
            Some(Packing::Float4(packed)) => Packed::Float4(Float4::new(view, packed)),
            Some(Packing::Table(packed)) => Packed::Table(Table::new(view, packed)),
            Some(Packing::Float8 { .. }) | None => Packed::Floats,
        }
    }
}

/// Rows of floats from `first` on, as many as `out` has room for, in another type.
fn write_floats(view: &View<'_>, dtype: DType, first: usize, out: &mut [u8]) {
    let columns = view.shape[1];
    let stored_bytes = view.dtype.bytes_for(columns).expect("rows of whole blocks");
    let row_bytes = dtype.bytes_for(columns).expect("checked by `landed`");
    let mut values = vec![0.0; columns];
    for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
        let stored = &view.bytes[row * stored_bytes..][..stored_bytes];
        if let (DType::FP8_128 | DType::FP8_A8, Some(Packing::Float8 { scales, block, first_row })) =
            (dtype, view.packing.as_deref())
        {
            let all = (first_row + row) / block.0 * columns.div_ceil(block.1);
            for (run, (out, codes)) in out.chunks_exact_mut(4 + RUN).zip(stored.chunks_exact(RUN)).enumerate()
            {
                let scale = float(scales, all + run * RUN / block.1);
                // NaN in the file; here the code is a number.
                let scale = if codes.iter().any(|code| code & 127 == 127) { f32::NAN } else { scale };
                out[..4].copy_from_slice(&scale.to_le_bytes());
                out[4..].copy_from_slice(codes);
            }
            continue;
        }
        match view.packing.as_deref() {
            Some(Packing::Float8 { scales, block, first_row }) => {
                let across = columns.div_ceil(block.1);
                let all = (first_row + row) / block.0 * across;
                for (index, value) in values.iter_mut().enumerate() {
                    *value = float8(stored[index]) * float(scales, all + index / block.1);
                }
            }
            _ => dequantize(view.dtype, stored, &mut values).expect("a float type"),
        }
        match dtype {
            DType::Q8_0 => quantize_q8_0(&values, out),
            DType::Q4_K => quantize_q4_k(&values, out),
            DType::MXFP8 => quantize_mxfp8(&values, out),
            DType::FP8_A8 => quantize_fp8_row(&values, out),
            DType::BF16 => {
                for (out, &value) in out.as_chunks_mut().0.iter_mut().zip(&values) {
                    *out = bf16::from_f32(value).to_le_bytes();
                }
            }
            _ => {
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(&values) {
                    *out = value.to_le_bytes();
                }
            }
        }
    }
}

/// An 8-bit float of a file, where all ones is NaN.
fn float8(byte: u8) -> f32 {
    if byte & 127 == 127 { f32::NAN } else { float8::value(byte) }
}

/// One value of a tensor of floats.
fn float(view: &View<'_>, index: usize) -> f32 {
    let at = |bytes: usize| &view.bytes[index * bytes..][..bytes];
    match view.dtype {
        DType::F32 => f32::from_le_bytes(at(4).try_into().expect("four bytes")),
        DType::F16 => f16::from_le_bytes(at(2).try_into().expect("two bytes")).to_f32_const(),
        DType::BF16 => bf16::from_le_bytes(at(2).try_into().expect("two bytes")).to_f32_const(),
        other => unreachable!("{other} was refused when the file was opened"),
    }
}

fn floats<'a>(view: &'a View<'_>) -> impl Iterator<Item = f32> + 'a {
    (0..view.values()).map(|index| float(view, index))
}

/// Columns that share a scale in [`DType::FP8_128`].
const RUN: usize = 128;

/// Scales whose largest an f16 times 256 holds, with room for the largest 8-bit float and for what is small beside it:
/// a device multiplies so. What is much smaller than the largest has fewer bits there.
fn are_ordinary(scales: &View<'_>) -> bool {
    let most = floats(scales).fold(0.0f32, |most, scale| most.max(scale.abs()));
    floats(scales).all(f32::is_finite) && (2.0f32.powi(-18)..=2.0f32.powi(6)).contains(&most)
}

/// Whose product with an 8-bit float a bf16 holds: powers of two far from the ends of the exponents.
fn is_power_of_two(scale: f32) -> bool {
    scale.to_bits() & 0x007f_ffff == 0 && (-100.0..=100.0).contains(&scale.abs().log2())
}

fn wrong_shape(view: &View<'_>) -> Error {
    Error::TensorShape { tensor: view.name.to_owned(), got: view.shape.clone(), wanted: vec![0, 0] }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use fornax_format::HuggingFace;

    use super::*;

    /// Matrices of a directory that make_packed.py wrote, beside what torch makes of them.
    fn check(folder: &str, wanted: &[(&str, DType)]) {
        check_as(|_| {}, folder, wanted);
    }

    /// The same of a model that was told something.
    fn check_as(tell: impl FnOnce(&mut HuggingFace), folder: &str, wanted: &[(&str, DType)]) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed").join(folder);
        let mut model = HuggingFace::open(&path).unwrap();
        tell(&mut model);
        let names: Vec<&str> = model.weights().tensors().map(|view| view.name).collect();
        for &(name, dtype) in wanted {
            assert!(names.contains(&name), "{name} of {names:?}");
            let view = model.weights().tensor(name).unwrap();
            assert_eq!(landing(&view), dtype, "{folder} {name}");
            let values = std::fs::read(path.join(format!("{name}.f32"))).unwrap();
            let values: Vec<f32> =
                values.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
            let columns = view.shape[1];
            let parts = [Part::from(view)];
            let mut got = Vec::new();
            crate::cpu::expand_rows(&parts[0], |_, row| {
                got.extend_from_slice(row);
                Ok(())
            })
            .unwrap();
            assert_eq!(got.len(), values.len(), "{folder} {name}");
            for (index, (got, want)) in got.iter().zip(&values).enumerate() {
                let place = (index / columns, index % columns);
                assert_eq!(got, want, "{folder} {name} at {place:?}");
            }
            // A plan sees the same size.
            let bytes = |content| land(&parts, content, |parts| Ok(parts[0].view.bytes.len())).unwrap();
            assert_eq!(bytes(Content::Room), bytes(Content::Values));
        }
        // What belongs to a matrix is listed no more.
        let others = names.iter().filter(|name| !wanted.iter().any(|(wanted, _)| wanted == *name));
        assert_eq!(others.copied().collect::<Vec<_>>(), ["norm.weight"]);
    }

    /// The rows of a part as f32.
    fn rows(part: &Part<'_>) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        crate::cpu::expand_rows(part, |_, row| {
            rows.push(row.to_vec());
            Ok(())
        })
        .unwrap();
        rows
    }

    #[test]
    fn shards_of_columns_are_the_columns_of_the_whole_however_it_is_stored() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed");
        for (folder, name, block) in
            [("fp8", "powers.weight", 1), ("gptq", "symmetric.weight", 32), ("gptq", "asymmetric.weight", 32)]
        {
            let model = HuggingFace::open(&path.join(folder)).unwrap();
            let whole = Part::from(model.weights().tensor(name).unwrap());
            let (columns, values) = (whole.view.shape[1], rows(&whole));
            let middle = (columns / 2).next_multiple_of(block);
            for range in [0..middle, middle..columns, block..middle] {
                let mut shard = Part { columns: Some(range.clone()), ..whole.clone() };
                // Rows are chosen and ordered as of the whole.
                shard.rows = Some(vec![3, 0]);
                let wanted = [3, 0].map(|row: usize| values[row][range.clone()].to_vec());
                assert_eq!(rows(&shard), wanted, "{folder} {name} {range:?}");
                let bytes = |content| {
                    land(std::slice::from_ref(&shard), content, |parts| Ok(parts[0].view.bytes.len()))
                        .unwrap()
                };
                assert_eq!(bytes(Content::Room), bytes(Content::Values));
            }
            // Beyond the end, nothing at all, within a block.
            for range in [0..columns + block, middle..middle, 0..block + 1] {
                if block == 1 && range.end == 2 {
                    continue;
                }
                let shard = Part { columns: Some(range.clone()), ..whole.clone() };
                let refused = land(&[shard], Content::Room, |_| Ok(())).unwrap_err();
                assert!(matches!(refused, Error::Columns { .. }), "{range:?}: {refused}");
            }
        }
    }

    #[test]
    fn eight_bit_floats_have_the_values_that_torch_gives() {
        check(
            "fp8",
            &[
                ("block.weight", DType::F32),
                ("channel.weight", DType::F32),
                ("powers.weight", DType::BF16),
                ("tensor.weight", DType::F32),
            ],
        );
    }

    #[test]
    fn eight_bit_floats_whose_runs_share_a_scale_keep_their_bits() {
        let fp8 = DType::FP8_128;
        check(
            "fp8_128",
            &[
                ("block.weight", fp8),
                ("channel.weight", fp8),
                ("tensor.weight", fp8),
                ("tiny.weight", DType::F32),
            ],
        );
    }

    #[test]
    fn eight_bit_floats_keep_their_bits_for_activations_of_8_bits_whatever_their_scales() {
        let names = ["block.weight", "channel.weight", "tensor.weight", "tiny.weight"];
        let tell = |model: &mut HuggingFace| assert!(model.multiply_floats8());
        check_as(tell, "fp8_128", &names.map(|name| (name, DType::FP8_A8)));
        // Rows that are no multiple of 128 values land as they do otherwise.
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed/fp8");
        assert!(!HuggingFace::open(&path).unwrap().multiply_floats8());
    }

    #[test]
    fn gptq_has_the_published_values_and_is_exact_in_a_small_type() {
        check(
            "gptq",
            &[
                ("act_order.weight", DType::F32),
                ("asymmetric.weight", DType::Q5_0),
                ("narrow.weight", DType::F32),
                ("symmetric.weight", DType::Q4_0),
            ],
        );
        check("gptq_v2", &[("symmetric.weight", DType::Q4_0)]);
    }

    #[test]
    fn gptq_of_two_three_and_eight_bits_is_exact_in_a_small_type() {
        check(
            "gptq_bits",
            &[
                ("eight.weight", DType::Q8_0),
                // A code less a zero point has nine bits.
                ("eight_asymmetric.weight", DType::F32),
                ("three.weight", DType::Q4_0),
                ("two.weight", DType::Q4_0),
            ],
        );
    }

    #[test]
    fn awq_has_the_published_values_and_is_exact_in_a_small_type() {
        check("awq", &[("asymmetric.weight", DType::Q5_0), ("brain.weight", DType::F32)]);
        check("awq_gemv", &[("wide.weight", DType::Q5_0)]);
        check("awq_gemv_64", &[("narrow.weight", DType::Q5_0)]);
    }

    #[test]
    fn compressed_tensors_have_the_values_of_their_own_package() {
        check(
            "compressed",
            &[
                ("bytes.weight", DType::Q8_0),
                ("eight.weight", DType::Q8_0),
                ("eight_asymmetric.weight", DType::F32),
                ("four.weight", DType::Q4_0),
                ("four_asymmetric.weight", DType::Q5_0),
                ("four_channel.weight", DType::Q4_0),
                // Columns of a block have different scales.
                ("four_ordered.weight", DType::F32),
                ("three.weight", DType::Q4_0),
            ],
        );
    }

    #[test]
    fn four_bit_floats_keep_their_bits_where_no_factor_of_the_matrix_prevents_it() {
        check("mxfp4", &[("plain.weight", DType::MXFP4)]);
        check("nvfp4", &[("odd.weight", DType::F32), ("power.weight", DType::NVFP4)]);
        check("modelopt", &[("eight.weight", DType::FP8_128), ("linear.weight", DType::F32)]);
    }

    #[test]
    fn four_bits_of_bitsandbytes_land_in_the_type_that_it_makes_of_them_itself() {
        check(
            "bnb",
            &[
                ("bytes.weight", DType::F32),
                ("fp4.weight", DType::F32),
                ("nf4.weight", DType::F16),
                ("nf4_nested.weight", DType::BF16),
            ],
        );
    }

    #[test]
    fn groups_with_biases_are_exact_in_a_small_type() {
        check(
            "mlx",
            &[
                ("eight.weight", DType::F32),
                ("five.weight", DType::Q5_1),
                ("four.weight", DType::Q4_1),
                ("four_brain.weight", DType::Q4_1),
                ("four_wide.weight", DType::Q4_1),
                ("six.weight", DType::F32),
                ("three.weight", DType::Q4_1),
                ("two.weight", DType::Q4_1),
            ],
        );
    }
}
