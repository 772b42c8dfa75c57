//! Matrices that a safetensors file keeps in several tensors: codes of a few bits or 8-bit floats, with scales and more.
//!
//! `config.json` says how a model was quantised. From then on such a matrix is one [`View`] under the name that it has
//! in an unquantised model, with the values' bytes as they lie in the file and its other tensors in [`Packing`]; those
//! are listed no more. What the bits mean is said here; nothing is computed here.
//!
//! | `config.json` says | which tensors |
//! |---|---|
//! | `fp8`, `fbgemm_fp8` | `weight` (F8_E4M3), `weight_scale` or `weight_scale_inv` |
//! | `compressed-tensors` | as above; `weight_packed` (words), `weight_scale`, perhaps `weight_zero_point`, `weight_g_idx`; `weight` (I8), `weight_scale`; `weight_packed` (bytes), `weight_scale`, perhaps `weight_global_scale` |
//! | `modelopt` | as `fp8`; `weight` (bytes), `weight_scale` (F8_E4M3), `weight_scale_2` |
//! | `gptq` | `qweight`, `qzeros`, `scales`, perhaps `g_idx` |
//! | `awq` | `qweight`, `qzeros`, `scales` |
//! | `bitsandbytes` | `weight` (bytes), `weight.absmax`, `weight.quant_map`, ...; `weight` (I8), `SCB` |
//! | `quantization` of MLX | `weight` (words), `scales`, perhaps `biases` |

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::{DType, Error, View, json};

/// What the values of a matrix need beside its own bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packing<'a> {
    /// [`DType::F8_E4M3`], row after row: value = float * scale.
    Float8 {
        /// F32, F16 or BF16: (row blocks, column blocks).
        scales: View<'a>,
        /// Rows and columns that share a scale.
        block: (usize, usize),
        /// Where the view's first row lies among all rows of the scales.
        first_row: usize,
    },
    /// Codes of a few bits, with a scale for each group of columns of each row.
    Integers(Box<Integers<'a>>),
    /// [`DType::F4`], row after row, the first of two values in the low half of a byte.
    Float4(Box<Float4<'a>>),
    /// [`DType::BNB_4`]: codes of values that a table has.
    Table(Box<Table<'a>>),
}

impl<'a> Packing<'a> {
    /// The same of the rows from this one on; `None` where rows do not lie one after the other.
    pub(crate) fn rows_from(&self, row: usize) -> Option<Packing<'a>> {
        let mut packing = self.clone();
        let first = match &mut packing {
            Packing::Float8 { first_row, .. } => first_row,
            Packing::Integers(integers) => match integers.order {
                CodeOrder::Along | CodeOrder::Bytes => &mut integers.first_row,
                CodeOrder::Down | CodeOrder::Awq => return None,
            },
            Packing::Float4(float4) => &mut float4.first_row,
            Packing::Table(_) => return None,
        };
        *first += row;
        Some(packing)
    }
}

/// value = scale * (code - zero point), or scale * code + bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Integers<'a> {
    /// Bits of a code, at most 8.
    pub bits: u32,
    /// How the codes lie.
    pub order: CodeOrder,
    /// F32, F16 or BF16.
    pub scales: Grid<'a>,
    /// What is taken off or added.
    pub zero: Zero<'a>,
    /// I32: the group of each column. Where it is missing, columns are grouped in order.
    pub groups: Option<View<'a>>,
    /// Groups of a row's columns.
    pub group_count: usize,
    /// Multiplies what comes of the rest, 1 for most.
    pub factor: Factor,
    /// Where the view's first row lies among all rows.
    pub first_row: usize,
}

/// How codes lie in words of 32 bits, or in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeOrder {
    /// Words (columns / codes of a word, rows): a row's codes follow each other down the words, without a gap, the first
    /// in the lowest bits.
    Down,
    /// Words (rows, columns / codes of a word): the same along the words.
    Along,
    /// Words (columns, rows / 8): eight codes of a column, of rows [`AWQ_ORDER`], the first in the lowest bits.
    Awq,
    /// Signed bytes, row after row; a code is the byte's value + 128.
    Bytes,
}

/// A value for each group of each row, or for all of a row, or for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid<'a> {
    /// The values.
    pub view: View<'a>,
    /// From one row's to the next.
    pub row_stride: usize,
    /// From one group's to the next.
    pub group_stride: usize,
}

/// What a code stands for where its value is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Zero<'a> {
    /// The same code everywhere.
    Fixed(u8),
    /// A code for each group of each row, in words as the codes.
    Codes {
        /// Words of 32 bits.
        view: View<'a>,
        /// How they lie.
        order: ZeroOrder,
        /// Added to a stored code, modulo what its bits hold: version 1 of GPTQ's format stores one less.
        add: u8,
    },
    /// A value for each group of each row, which is added.
    Biases(Grid<'a>),
}

/// How the words of zero points lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroOrder {
    /// (groups, words of all rows), along the words.
    GroupThenRows,
    /// The same with the rows of eight in [`AWQ_ORDER`].
    Awq,
    /// (rows, words of all groups), along the words.
    RowThenGroups,
    /// (words of all rows, groups), down the words.
    RowsDown,
}

/// A float that compares by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor(u32);

impl Factor {
    /// Multiplies by this.
    pub fn new(value: f32) -> Factor {
        Factor(value.to_bits())
    }

    /// The factor.
    pub fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// value = 4-bit float * scale of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Float4<'a> {
    /// One byte for each run of each row.
    pub scales: View<'a>,
    /// What such a byte means.
    pub scale: RunScale,
    /// Where the view's first row lies among all rows of the scales.
    pub first_row: usize,
}

/// The scale of a run of 4-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunScale {
    /// 32 values; two to the power of the byte less 127.
    Power,
    /// 16 values; an 8-bit float, times this.
    Times(Factor),
    /// 16 values; an 8-bit float, over this.
    Over(Factor),
}

impl RunScale {
    /// Values of a run.
    pub fn run(self) -> usize {
        if self == RunScale::Power { 32 } else { 16 }
    }
}

/// value = what the table has for its code * the largest of its block, as bitsandbytes' own float type has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table<'a> {
    /// F32: the value of each of 16 codes.
    pub values: View<'a>,
    /// One for each block: F32, or codes of a table that [`Table::nested`] has.
    pub largest: View<'a>,
    /// How `largest` is packed itself.
    pub nested: Option<Nested<'a>>,
    /// Values of a block; blocks do not end with rows.
    pub block: usize,
    /// The type that bitsandbytes makes of the values.
    pub dtype: DType,
}

/// The largest values of blocks, packed: table\[code\] * the largest of 256 or so + an offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nested<'a> {
    /// F32: the value of each of 256 codes.
    pub values: View<'a>,
    /// F32: one for each block of blocks.
    pub largest: View<'a>,
    /// Blocks of such a block.
    pub block: usize,
    /// Added to all.
    pub offset: Factor,
}

/// A list of the modules that are left out is the longest thing in it.
const OWN_FILE_BYTES_MAX: u64 = 4 << 20;

/// Which of eight rows each nibble of an AWQ word belongs to.
pub const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// How `config.json` says that a model was quantised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Quantization {
    Float8 {
        block: (usize, usize),
    },
    /// Whatever its tensors are called says which of its formats a matrix has.
    CompressedTensors,
    ModelOpt,
    Gptq {
        bits: u32,
        zeros_add: u8,
    },
    Awq,
    /// Rows along the words, in groups of so many columns.
    AwqByRows {
        group: usize,
    },
    BitsAndBytes,
    Mlx(Mlx),
}

/// What MLX says of its matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mlx {
    group: usize,
    mode: MlxMode,
    /// Groups of single matrices that differ, by the names of their modules.
    groups: BTreeMap<String, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MlxMode {
    Affine,
    Mxfp4,
    Nvfp4,
}

/// Tensors of one matrix, by name.
#[derive(Debug)]
pub(crate) struct Assembly {
    /// The name that an unquantised model has for it.
    pub(crate) name: Box<str>,
    /// The tensor with the values.
    pub(crate) main: Box<str>,
    kind: Kind,
    /// Those beside it that are read.
    others: Vec<(Role, Box<str>)>,
    /// Those that belong to it and are not read.
    unread: Vec<Box<str>>,
}

impl Assembly {
    /// All tensors that it is made of.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Box<str>> {
        [&self.main].into_iter().chain(self.others.iter().map(|(_, name)| name)).chain(&self.unread)
    }
}

/// What a matrix is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float8,
    Gptq,
    Awq,
    AwqByRows,
    /// `weight_packed` of words.
    Packed,
    /// `weight` of signed bytes.
    Bytes,
    Float4,
    BnbFour,
    BnbBytes,
    MlxAffine,
    MlxFloat4,
}

/// What a tensor beside the values is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Scales,
    Zeros,
    Groups,
    Shape,
    GlobalScale,
    Biases,
    QuantMap,
    NestedScales,
    NestedMap,
    QuantState,
}

impl Quantization {
    /// What `config.json` says; an error names a method or width that is not read.
    pub(crate) fn of(config: &Value) -> Result<Option<Quantization>, Error> {
        // Some models that see images say it only beside the numbers of the part that reads text.
        let places = [Some(config), config.get("text_config")].into_iter().flatten();
        let said = places.flat_map(|place| ["quantization_config", "quantization"].map(|key| place.get(key)));
        let Some(found) = said.flatten().find(|value| !value.is_null()) else {
            return Ok(None);
        };
        let text = |key: &str| found.get(key).and_then(Value::as_str).unwrap_or_default();
        let method = text("quant_method");
        let refuse = |what: String| Err(Error::Quantization { what });
        let bits = |wanted: &[u64]| match found.get("bits").and_then(Value::as_u64) {
            Some(bits) if wanted.contains(&bits) => Ok(bits as u32),
            bits => {
                let bits = bits.map_or("missing".to_owned(), |bits| bits.to_string());
                Err(Error::Quantization { what: format!("{method} with bits {bits}") })
            }
        };
        match method {
            "fp8" | "fbgemm_fp8" => {
                if let Some(format) =
                    found.get("fmt").and_then(Value::as_str).filter(|format| *format != "e4m3")
                {
                    return refuse(format!("fp8 with fmt {format:?}"));
                }
                Ok(Some(Quantization::Float8 { block: block_size(found)? }))
            }
            "compressed-tensors" => {
                const READ: [&str; 7] = [
                    "float-quantized",
                    "pack-quantized",
                    "int-quantized",
                    "naive-quantized",
                    "nvfp4-pack-quantized",
                    "mxfp4-pack-quantized",
                    "mixed-precision",
                ];
                match text("format") {
                    format if READ.contains(&format) => Ok(Some(Quantization::CompressedTensors)),
                    format => refuse(format!("compressed-tensors with format {format:?}")),
                }
            }
            "modelopt" => match text("quant_algo") {
                "FP8" | "NVFP4" | "" => Ok(Some(Quantization::ModelOpt)),
                algorithm => refuse(format!("modelopt with quant_algo {algorithm:?}")),
            },
            "gptq" => {
                let bits = bits(&[2, 3, 4, 8])?;
                let zeros_add = match text("checkpoint_format") {
                    "" | "gptq" => 1,
                    "gptq_v2" => 0,
                    other => return refuse(format!("gptq with checkpoint_format {other:?}")),
                };
                Ok(Some(Quantization::Gptq { bits, zeros_add }))
            }
            "awq" => {
                bits(&[4])?;
                match text("version").to_ascii_lowercase().as_str() {
                    "" | "gemm" => Ok(Some(Quantization::Awq)),
                    "gemv" => match found.get("group_size").and_then(Value::as_u64) {
                        Some(group @ (32 | 64 | 128)) => {
                            Ok(Some(Quantization::AwqByRows { group: group as usize }))
                        }
                        _ => refuse(format!("awq of version gemv with group_size {}", found["group_size"])),
                    },
                    other => refuse(format!("awq with version {other:?}")),
                }
            }
            "bitsandbytes" => Ok(Some(Quantization::BitsAndBytes)),
            // Its blocks and scales are tensors that a model of this kind reads by their own names.
            "mxfp4" => Ok(None),
            "" if found.get("group_size").is_some() => Mlx::of(found).map(|mlx| Some(Quantization::Mlx(mlx))),
            other => refuse(format!("method {other:?}")),
        }
    }

    /// What NVIDIA's tool says in a file of its own where `config.json` says nothing.
    pub(crate) fn beside(directory: &Path) -> Result<Option<Quantization>, Error> {
        let path = directory.join("hf_quant_config.json");
        let Some(found): Option<Value> = json::read_if_there(&path, OWN_FILE_BYTES_MAX)? else {
            return Ok(None);
        };
        match found["quantization"]["quant_algo"].as_str() {
            None => Ok(None),
            Some("FP8" | "NVFP4") => Ok(Some(Quantization::ModelOpt)),
            Some(other) => {
                let what = format!("hf_quant_config.json with quant_algo {other:?}");
                Err(Error::Quantization { what }.at(&path))
            }
        }
    }

    /// The names of a matrix's tensors, if this one holds its values; `has` says what the file has.
    pub(crate) fn assembly(
        &self,
        tensor: &str,
        dtype: DType,
        has: impl Fn(&str) -> bool,
    ) -> Result<Option<Assembly>, Error> {
        let stem = |end: &str| tensor.strip_suffix(end);
        let makes = |name: String, kind: Kind| Making {
            assembly: Assembly {
                name: name.into(),
                main: tensor.into(),
                kind,
                others: Vec::new(),
                unread: Vec::new(),
            },
            has: &has,
        };
        let making = match (self, dtype) {
            (
                Quantization::Float8 { .. } | Quantization::CompressedTensors | Quantization::ModelOpt,
                DType::F8_E4M3,
            ) if !tensor.ends_with("_scale") => makes(tensor.to_owned(), Kind::Float8)
                .needs(Role::Scales, &[&format!("{tensor}_scale_inv"), &format!("{tensor}_scale")])?,
            (Quantization::CompressedTensors, DType::I32) => {
                let Some(stem) = stem(".weight_packed") else { return Ok(None) };
                makes(format!("{stem}.weight"), Kind::Packed)
                    .needs(Role::Scales, &[&format!("{stem}.weight_scale")])?
                    .needs(Role::Shape, &[&format!("{stem}.weight_shape")])?
                    .may(Role::Zeros, &format!("{stem}.weight_zero_point"))
                    .may(Role::Groups, &format!("{stem}.weight_g_idx"))
            }
            (Quantization::CompressedTensors, DType::I8) => {
                let Some(stem) = stem(".weight") else { return Ok(None) };
                makes(tensor.to_owned(), Kind::Bytes)
                    .needs(Role::Scales, &[&format!("{stem}.weight_scale")])?
                    .may(Role::Zeros, &format!("{stem}.weight_zero_point"))
            }
            (Quantization::CompressedTensors, DType::U8) => {
                let Some(stem) = stem(".weight_packed") else { return Ok(None) };
                makes(format!("{stem}.weight"), Kind::Float4)
                    .needs(Role::Scales, &[&format!("{stem}.weight_scale")])?
                    .may(Role::GlobalScale, &format!("{stem}.weight_global_scale"))
                    .unread(&format!("{stem}.weight_shape"))
            }
            (Quantization::ModelOpt, DType::U8) => {
                let Some(stem) = stem(".weight") else { return Ok(None) };
                makes(tensor.to_owned(), Kind::Float4)
                    .needs(Role::Scales, &[&format!("{stem}.weight_scale")])?
                    .needs(Role::GlobalScale, &[&format!("{stem}.weight_scale_2")])?
            }
            (Quantization::Gptq { .. } | Quantization::Awq | Quantization::AwqByRows { .. }, _) => {
                let Some(stem) = stem(".qweight") else { return Ok(None) };
                let kind = match self {
                    Quantization::Gptq { .. } => Kind::Gptq,
                    Quantization::AwqByRows { .. } => Kind::AwqByRows,
                    _ => Kind::Awq,
                };
                makes(format!("{stem}.weight"), kind)
                    .needs(Role::Scales, &[&format!("{stem}.scales")])?
                    .needs(Role::Zeros, &[&format!("{stem}.qzeros")])?
                    .may(Role::Groups, &format!("{stem}.g_idx"))
            }
            (Quantization::BitsAndBytes, DType::U8) if has(&format!("{tensor}.absmax")) => {
                let states = ["nf4", "fp4"].map(|kind| format!("{tensor}.quant_state.bitsandbytes__{kind}"));
                makes(tensor.to_owned(), Kind::BnbFour)
                    .needs(Role::Scales, &[&format!("{tensor}.absmax")])?
                    .needs(Role::QuantMap, &[&format!("{tensor}.quant_map")])?
                    .needs(Role::QuantState, &[&states[0], &states[1]])?
                    .may(Role::NestedScales, &format!("{tensor}.nested_absmax"))
                    .may(Role::NestedMap, &format!("{tensor}.nested_quant_map"))
            }
            (Quantization::BitsAndBytes, DType::I8) => {
                let Some(stem) = stem(".weight") else { return Ok(None) };
                makes(tensor.to_owned(), Kind::BnbBytes)
                    .needs(Role::Scales, &[&format!("{stem}.SCB")])?
                    .unread(&format!("{stem}.weight_format"))
            }
            (Quantization::Mlx(mlx), DType::U32) => {
                let Some(stem) = stem(".weight") else { return Ok(None) };
                let (scales, biases) = (format!("{stem}.scales"), format!("{stem}.biases"));
                match mlx.mode {
                    MlxMode::Affine => makes(tensor.to_owned(), Kind::MlxAffine)
                        .needs(Role::Scales, &[&scales])?
                        .needs(Role::Biases, &[&biases])?,
                    _ => makes(tensor.to_owned(), Kind::MlxFloat4).needs(Role::Scales, &[&scales])?,
                }
            }
            _ => return Ok(None),
        };
        Ok(Some(making.assembly))
    }

    /// Whether a tensor belongs to the quantisation without being read: how activations were scaled when a model was
    /// quantised, which matters to none but kernels that round activations so.
    pub(crate) fn skips(&self, tensor: &str) -> bool {
        const ENDS: [&str; 6] = [
            ".input_scale",
            ".activation_scale",
            ".k_scale",
            ".v_scale",
            ".input_global_scale",
            ".input_zero_point",
        ];
        let scaled = matches!(
            self,
            Quantization::Float8 { .. } | Quantization::CompressedTensors | Quantization::ModelOpt
        );
        scaled && ENDS.iter().any(|end| tensor.ends_with(end))
    }

    /// The matrix, of tensors that `find` knows by name; all shapes are checked against each other.
    pub(crate) fn view<'a>(
        &self,
        assembly: &'a Assembly,
        find: impl Fn(&str) -> Option<View<'a>>,
    ) -> Result<View<'a>, Error> {
        let of = |role: Role| {
            let named = assembly.others.iter().find(|(other, _)| *other == role);
            named.and_then(|(_, name)| find(name))
        };
        let name: &'a str = &assembly.name;
        let missing = |wanted: &str| Error::PackingMissing {
            tensor: assembly.main.to_string(),
            wanted: wanted.to_owned(),
        };
        let main = find(&assembly.main).ok_or_else(|| missing("it"))?;
        let scales = of(Role::Scales).ok_or_else(|| missing("scales"))?;
        let tensors = Tensors { name, main, scales };
        match (assembly.kind, self) {
            (Kind::Float8, Quantization::Float8 { block }) => tensors.float8(*block),
            (Kind::Float8, _) => tensors.float8((1, 1)),
            (Kind::Gptq, Quantization::Gptq { bits, zeros_add }) => {
                let zeros = of(Role::Zeros).ok_or_else(|| missing("zero points"))?;
                tensors.gptq(*bits, *zeros_add, zeros, of(Role::Groups))
            }
            (Kind::Awq, _) => tensors.awq(of(Role::Zeros).ok_or_else(|| missing("zero points"))?),
            (Kind::AwqByRows, Quantization::AwqByRows { group }) => {
                tensors.awq_by_rows(*group, of(Role::Zeros).ok_or_else(|| missing("zero points"))?)
            }
            (Kind::Packed, _) => {
                let shape = of(Role::Shape).ok_or_else(|| missing("its shape"))?;
                tensors.packed(&shape, of(Role::Zeros), of(Role::Groups))
            }
            (Kind::Bytes, _) => match of(Role::Zeros) {
                Some(zeros) if zeros.bytes.iter().any(|&byte| byte != 0) => {
                    Err(wrong(&zeros, "zeros alone".to_owned()))
                }
                _ => tensors.bytes(Factor::new(1.0)),
            },
            (Kind::BnbBytes, _) => tensors.bytes(Factor::new(BNB_BYTE)),
            (Kind::Float4, Quantization::ModelOpt) => {
                let global = of(Role::GlobalScale).ok_or_else(|| missing("weight_scale_2"))?;
                tensors.float4(RunScale::Times(single(&global)?))
            }
            (Kind::Float4, _) => match of(Role::GlobalScale) {
                Some(global) => tensors.float4(RunScale::Over(single(&global)?)),
                None => tensors.float4(RunScale::Power),
            },
            (Kind::MlxFloat4, Quantization::Mlx(Mlx { mode: MlxMode::Mxfp4, .. })) => {
                tensors.float4(RunScale::Power)
            }
            (Kind::MlxFloat4, _) => tensors.float4(RunScale::Times(Factor::new(1.0))),
            (Kind::MlxAffine, Quantization::Mlx(mlx)) => {
                let biases = of(Role::Biases).ok_or_else(|| missing("biases"))?;
                tensors.affine(mlx.group_of(name), biases)
            }
            (Kind::BnbFour, _) => {
                let map = of(Role::QuantMap).ok_or_else(|| missing("quant_map"))?;
                let state = of(Role::QuantState).ok_or_else(|| missing("quant_state"))?;
                tensors.table(map, &state, of(Role::NestedScales).zip(of(Role::NestedMap)))
            }
            (Kind::Gptq | Kind::MlxAffine | Kind::AwqByRows, other) => {
                unreachable!("{other:?} makes no such matrix")
            }
        }
    }
}

impl Mlx {
    fn of(found: &Value) -> Result<Mlx, Error> {
        let group = |value: &Value| {
            let size = value.get("group_size").and_then(Value::as_u64);
            size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0)
        };
        let refused = |what: String| Error::Quantization { what };
        let own = group(found);
        let own =
            own.ok_or_else(|| refused(format!("quantization with group_size {}", found["group_size"])))?;
        let mode = match found.get("mode").and_then(Value::as_str) {
            None | Some("affine") => MlxMode::Affine,
            Some("mxfp4") => MlxMode::Mxfp4,
            Some("nvfp4") => MlxMode::Nvfp4,
            Some(other) => return Err(refused(format!("quantization with mode {other:?}"))),
        };
        let mut groups = BTreeMap::new();
        for (name, value) in found.as_object().into_iter().flatten().filter(|(_, value)| value.is_object()) {
            if let Some(other) =
                value.get("mode").and_then(Value::as_str).filter(|_| value.get("mode") != found.get("mode"))
            {
                return Err(refused(format!(
                    "quantization of {name} with mode {other:?}, unlike the others"
                )));
            }
            groups.extend(group(value).map(|group| (name.clone(), group)));
        }
        Ok(Mlx { group: own, mode, groups })
    }

    /// Columns that share a scale in a matrix of this name.
    fn group_of(&self, name: &str) -> usize {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        self.groups.get(module).copied().unwrap_or(self.group)
    }
}

/// An assembly whose tensors are being looked for.
struct Making<'h, F> {
    assembly: Assembly,
    has: &'h F,
}

impl<F: Fn(&str) -> bool> Making<'_, F> {
    /// Takes the first of these that is there.
    fn needs(mut self, role: Role, names: &[&str]) -> Result<Self, Error> {
        let Some(name) = names.iter().find(|name| (self.has)(name)) else {
            let (tensor, wanted) = (self.assembly.main.to_string(), names.join(" or "));
            return Err(Error::PackingMissing { tensor, wanted });
        };
        self.assembly.others.push((role, (*name).into()));
        Ok(self)
    }

    /// Takes it if it is there.
    fn may(mut self, role: Role, name: &str) -> Self {
        if (self.has)(name) {
            self.assembly.others.push((role, name.into()));
        }
        self
    }

    /// Takes it without reading it, if it is there.
    fn unread(mut self, name: &str) -> Self {
        if (self.has)(name) {
            self.assembly.unread.push(name.into());
        }
        self
    }
}

/// What bitsandbytes multiplies a row's largest value and a byte by: 1 / 127 as it writes it.
const BNB_BYTE: f32 = 7.874_016e-3;

fn wrong(tensor: &View<'_>, wanted: String) -> Error {
    Error::PackingShape {
        tensor: tensor.name.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        wanted,
    }
}

/// The one value of a tensor of f32.
fn single(view: &View<'_>) -> Result<Factor, Error> {
    match (view.dtype, <[u8; 4]>::try_from(view.bytes)) {
        (DType::F32, Ok(bytes)) => {
            let value = f32::from_le_bytes(bytes);
            let good = value.is_finite() && value != 0.0;
            good.then(|| Factor::new(value))
                .ok_or_else(|| wrong(view, "a number that is not zero".to_owned()))
        }
        _ => Err(wrong(view, "one F32".to_owned())),
    }
}

/// The bits of a word's codes for a matrix of so many columns, whose rows take so many words.
fn bits_of(words: usize, columns: usize) -> Option<u32> {
    let bits = words.checked_mul(32)?.checked_div(columns)?;
    let whole = bits * columns == words * 32;
    u32::try_from(bits).ok().filter(|bits| whole && (1..=8).contains(bits))
}

/// The tensors that every matrix has.
struct Tensors<'a> {
    name: &'a str,
    main: View<'a>,
    scales: View<'a>,
}

impl<'a> Tensors<'a> {
    /// Two dimensions of the values.
    fn matrix(&self) -> Result<[usize; 2], Error> {
        <[usize; 2]>::try_from(&self.main.shape[..]).map_err(|_| wrong(&self.main, "a matrix".to_owned()))
    }

    fn check(&self, dtypes: &[DType]) -> Result<(), Error> {
        if !dtypes.contains(&self.main.dtype) {
            let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
            return Err(wrong(&self.main, names.join(" or ")));
        }
        Ok(())
    }

    /// Refuses scales that are no floats.
    fn check_scales(&self) -> Result<(), Error> {
        match is_float(&self.scales) {
            true => Ok(()),
            false => Err(wrong(&self.scales, "F32, F16 or BF16".to_owned())),
        }
    }

    fn float8(self, block: (usize, usize)) -> Result<View<'a>, Error> {
        let [rows, columns] = self.matrix()?;
        self.check_scales()?;
        // One for all, one for each row, or one for each block.
        let block = match self.scales.shape[..] {
            [] | [1] | [1, 1] => (rows.max(1), columns.max(1)),
            [some] if some == rows => (1, columns.max(1)),
            [some, 1] if some == rows => (1, columns.max(1)),
            [some, others] if (some, others) == (rows.div_ceil(block.0), columns.div_ceil(block.1)) => block,
            _ => return Err(wrong(&self.scales, format!("one for {rows} rows, or for blocks of {block:?}"))),
        };
        let Tensors { name, main, scales } = self;
        let packing = Packing::Float8 { scales, block, first_row: 0 };
        Ok(main.packed(name, DType::F8_E4M3, vec![rows, columns], packing))
    }

    fn gptq(self, bits: u32, add: u8, zeros: View<'a>, groups: Option<View<'a>>) -> Result<View<'a>, Error> {
        let [words, rows] = self.matrix()?;
        self.check(&[DType::I32])?;
        self.check_scales()?;
        // Single matrices may have other widths than the model says; their columns tell.
        let bits = match &groups {
            Some(groups) => bits_of(words, groups.values())
                .filter(|bits| [2, 3, 4, 8].contains(bits))
                .ok_or_else(|| wrong(groups, "one for each column".to_owned()))?,
            None => bits,
        };
        let columns = words.saturating_mul(32) / bits as usize;
        if columns.saturating_mul(bits as usize) != words.saturating_mul(32) {
            return Err(wrong(&self.main, format!("whole codes of {bits} bits")));
        }
        let group_count = self.groups_by_rows(rows, columns)?;
        let zero_bits = rows.saturating_mul(bits as usize);
        let zero_words = zero_bits / 32;
        if zeros.dtype != DType::I32
            || zeros.shape != [group_count, zero_words]
            || !zero_bits.is_multiple_of(32)
        {
            return Err(wrong(&zeros, format!("I32 [{group_count}, {zero_words}]")));
        }
        check_groups(groups.as_ref(), columns, group_count)?;
        let dtype = match bits {
            2 => DType::GPTQ_2,
            3 => DType::GPTQ_3,
            8 => DType::GPTQ_8,
            _ => DType::GPTQ_4,
        };
        let scales = Grid { view: self.scales.clone(), row_stride: 1, group_stride: rows };
        let zero = Zero::Codes { view: zeros, order: ZeroOrder::GroupThenRows, add };
        self.integers(
            dtype,
            [rows, columns],
            Coded { bits, order: CodeOrder::Down, scales, zero, groups, group_count },
        )
    }

    fn awq(self, zeros: View<'a>) -> Result<View<'a>, Error> {
        let [columns, words] = self.matrix()?;
        self.check(&[DType::I32])?;
        self.check_scales()?;
        let rows = words.saturating_mul(8);
        let group_count = self.groups_by_rows(rows, columns)?;
        if zeros.dtype != DType::I32 || zeros.shape != [group_count, words] {
            return Err(wrong(&zeros, format!("I32 [{group_count}, {words}]")));
        }
        let scales = Grid { view: self.scales.clone(), row_stride: 1, group_stride: rows };
        let zero = Zero::Codes { view: zeros, order: ZeroOrder::Awq, add: 0 };
        let coded = Coded { bits: 4, order: CodeOrder::Awq, scales, zero, groups: None, group_count };
        self.integers(DType::AWQ_4, [rows, columns], coded)
    }

    /// As kernels for one row at a time read it: rows lie along the words. There are places for more groups than a row has.
    fn awq_by_rows(self, group: usize, zeros: View<'a>) -> Result<View<'a>, Error> {
        let [rows, words] = self.matrix()?;
        self.check(&[DType::I32])?;
        self.check_scales()?;
        let columns = words.saturating_mul(8);
        let group_count = columns / group;
        let width = match self.scales.shape[..] {
            [some, width]
                if some == rows
                    && width.is_multiple_of(8)
                    && (1..=width).contains(&group_count)
                    && columns.is_multiple_of(group) =>
            {
                width
            }
            _ => return Err(wrong(&self.scales, format!("[{rows}, {group_count} groups, in eights]"))),
        };
        if zeros.dtype != DType::I32 || zeros.shape != [rows, width / 8] {
            return Err(wrong(&zeros, format!("I32 [{rows}, {}]", width / 8)));
        }
        let scales = Grid { view: self.scales.clone(), row_stride: width, group_stride: 1 };
        let zero = Zero::Codes { view: zeros, order: ZeroOrder::RowThenGroups, add: 0 };
        let coded = Coded { bits: 4, order: CodeOrder::Along, scales, zero, groups: None, group_count };
        self.integers(DType::AWQ_4, [rows, columns], coded)
    }

    fn packed(
        self,
        shape: &View<'a>,
        zeros: Option<View<'a>>,
        groups: Option<View<'a>>,
    ) -> Result<View<'a>, Error> {
        let [rows, words] = self.matrix()?;
        self.check_scales()?;
        let said: Vec<u64> = match shape.dtype {
            DType::I64 => shape.bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
            _ => {
                shape.bytes.as_chunks().0.iter().map(|bytes| u64::from(u32::from_le_bytes(*bytes))).collect()
            }
        };
        let columns = match said[..] {
            [some, columns] if some == rows as u64 => usize::try_from(columns).ok(),
            _ => None,
        };
        let columns = columns.ok_or_else(|| wrong(shape, format!("I64 or I32: {rows} rows and columns")))?;
        let bits = bits_of(words, columns)
            .ok_or_else(|| wrong(&self.main, format!("whole words of codes for {columns} columns")))?;
        let (scales, group_count) = self.along(rows, columns)?;
        let zero = match zeros {
            None => Zero::Fixed(1 << (bits - 1)),
            Some(zeros) => {
                let lines = rows.saturating_mul(bits as usize).div_ceil(32);
                if zeros.dtype != DType::I32 || zeros.shape != [lines, group_count] {
                    return Err(wrong(&zeros, format!("I32 [{lines}, {group_count}]")));
                }
                Zero::Codes { view: zeros, order: ZeroOrder::RowsDown, add: 0 }
            }
        };
        check_groups(groups.as_ref(), columns, group_count)?;
        let coded = Coded { bits, order: CodeOrder::Along, scales, zero, groups, group_count };
        self.integers(packed_dtype(bits), [rows, columns], coded)
    }

    fn bytes(self, factor: Factor) -> Result<View<'a>, Error> {
        let [rows, columns] = self.matrix()?;
        self.check_scales()?;
        let (scales, group_count) = self.along(rows, columns)?;
        let packing = Packing::Integers(Box::new(Integers {
            bits: 8,
            order: CodeOrder::Bytes,
            scales,
            zero: Zero::Fixed(128),
            groups: None,
            group_count,
            factor,
            first_row: 0,
        }));
        Ok(self.main.packed(self.name, DType::I8, vec![rows, columns], packing))
    }

    fn affine(self, group: usize, biases: View<'a>) -> Result<View<'a>, Error> {
        let [rows, words] = self.matrix()?;
        self.check_scales()?;
        let [scale_rows, group_count] = self.scales.shape[..] else {
            return Err(wrong(&self.scales, "a matrix".to_owned()));
        };
        let columns = group_count.saturating_mul(group);
        let bits = bits_of(words, columns).filter(|bits| [2, 3, 4, 5, 6, 8].contains(bits));
        let bits = bits.ok_or_else(|| {
            wrong(&self.main, format!("codes of 2 to 8 bits for {group_count} groups of {group} columns"))
        })?;
        if scale_rows != rows {
            return Err(wrong(&self.scales, format!("[{rows}, {group_count}]")));
        }
        if !is_float(&biases) || biases.shape != self.scales.shape {
            return Err(wrong(&biases, format!("floats [{rows}, {group_count}]")));
        }
        let grid = |view| Grid { view, row_stride: group_count, group_stride: 1 };
        let (scales, zero) = (grid(self.scales.clone()), Zero::Biases(grid(biases)));
        let coded = Coded { bits, order: CodeOrder::Along, scales, zero, groups: None, group_count };
        self.integers(packed_dtype(bits), [rows, columns], coded)
    }

    fn float4(self, scale: RunScale) -> Result<View<'a>, Error> {
        let [rows, width] = self.matrix()?;
        self.check(&[DType::U8, DType::U32])?;
        let columns = width.saturating_mul(if self.main.dtype == DType::U8 { 2 } else { 8 });
        let run = scale.run();
        let bytes = [DType::U8, DType::F8_E4M3, DType::F8_E8M0].contains(&self.scales.dtype);
        if !bytes || self.scales.shape != [rows, columns / run] || !columns.is_multiple_of(run) {
            return Err(wrong(&self.scales, format!("bytes [{rows}, {}]", columns / run)));
        }
        let packing = Packing::Float4(Box::new(Float4 { scales: self.scales, scale, first_row: 0 }));
        Ok(self.main.packed(self.name, DType::F4, vec![rows, columns], packing))
    }

    fn table(
        self,
        values: View<'a>,
        state: &View<'a>,
        nested: Option<(View<'a>, View<'a>)>,
    ) -> Result<View<'a>, Error> {
        let said: Value = serde_json::from_slice(state.bytes)
            .map_err(|_| wrong(state, "bytes of JSON that says how it was quantised".to_owned()))?;
        let size = |key: &str| said[key].as_u64().and_then(|size| usize::try_from(size).ok());
        let missing = |key: &str| wrong(state, format!("{key}, and not {}", said[key]));
        let block = size("blocksize").filter(|block| *block > 0).ok_or_else(|| missing("blocksize"))?;
        let shape: Option<Vec<usize>> = said["shape"]
            .as_array()
            .map(|shape| shape.iter().filter_map(|size| usize::try_from(size.as_u64()?).ok()).collect());
        let [rows, columns] = shape.as_deref().unwrap_or_default() else { return Err(missing("shape")) };
        let (rows, columns) = (*rows, *columns);
        let dtype = match said["dtype"].as_str() {
            Some("bfloat16") => DType::BF16,
            Some("float16") => DType::F16,
            Some("float32") => DType::F32,
            _ => return Err(missing("dtype")),
        };
        let count = rows
            .checked_mul(columns)
            .filter(|count| count.is_multiple_of(2) && count / 2 == self.main.bytes.len());
        let count = count.ok_or_else(|| wrong(&self.main, format!("half of {rows} x {columns} bytes")))?;
        let blocks = count.div_ceil(block);
        let floats = |view: &View<'a>, count: usize| match view.dtype == DType::F32 && view.values() == count
        {
            true => Ok(()),
            false => Err(wrong(view, format!("F32 [{count}]"))),
        };
        floats(&values, 16)?;
        let nested = match nested {
            None => {
                floats(&self.scales, blocks)?;
                None
            }
            Some((largest, values)) => {
                let block = size("nested_blocksize").filter(|block| *block > 0);
                let block = block.ok_or_else(|| missing("nested_blocksize"))?;
                if self.scales.dtype != DType::U8 || self.scales.bytes.len() != blocks {
                    return Err(wrong(&self.scales, format!("U8 [{blocks}]")));
                }
                floats(&values, 256)?;
                floats(&largest, blocks.div_ceil(block))?;
                let offset = said["nested_offset"].as_f64().ok_or_else(|| missing("nested_offset"))?;
                Some(Nested { values, largest, block, offset: Factor::new(offset as f32) })
            }
        };
        let packing = Packing::Table(Box::new(Table { values, largest: self.scales, nested, block, dtype }));
        Ok(self.main.packed(self.name, DType::BNB_4, vec![rows, columns], packing))
    }

    fn integers(
        self,
        dtype: DType,
        [rows, columns]: [usize; 2],
        coded: Coded<'a>,
    ) -> Result<View<'a>, Error> {
        if dtype.bytes_for(rows.saturating_mul(columns)) != Some(self.main.bytes.len()) {
            return Err(wrong(&self.main, format!("{dtype} of {rows} x {columns}")));
        }
        let Coded { bits, order, scales, zero, groups, group_count } = coded;
        let factor = Factor::new(1.0);
        let integers = Integers { bits, order, scales, zero, groups, group_count, factor, first_row: 0 };
        Ok(self.main.packed(self.name, dtype, vec![rows, columns], Packing::Integers(Box::new(integers))))
    }

    /// The groups of scales that lie (groups, rows).
    fn groups_by_rows(&self, rows: usize, columns: usize) -> Result<usize, Error> {
        match self.scales.shape[..] {
            [groups, some] if some == rows && groups > 0 && columns.is_multiple_of(groups) => Ok(groups),
            _ => Err(wrong(&self.scales, format!("(groups of {columns} columns, {rows})"))),
        }
    }

    /// Scales that lie (rows, groups), one for each row, or one for all.
    fn along(&self, rows: usize, columns: usize) -> Result<(Grid<'a>, usize), Error> {
        let (row_stride, groups) = match self.scales.shape[..] {
            [] | [1] | [1, 1] if rows != 1 => (0, 1),
            [some] if some == rows => (1, 1),
            [some, groups] if some == rows && groups > 0 && columns.is_multiple_of(groups) => {
                (groups, groups)
            }
            _ => return Err(wrong(&self.scales, format!("({rows}, groups of {columns} columns)"))),
        };
        Ok((Grid { view: self.scales.clone(), row_stride, group_stride: 1 }, groups))
    }
}

/// The parts of [`Integers`] that differ between the words of different tools.
struct Coded<'a> {
    bits: u32,
    order: CodeOrder,
    scales: Grid<'a>,
    zero: Zero<'a>,
    groups: Option<View<'a>>,
    group_count: usize,
}

fn is_float(view: &View<'_>) -> bool {
    matches!(view.dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Codes along words.
fn packed_dtype(bits: u32) -> DType {
    match bits {
        1 => DType::PACKED_1,
        2 => DType::PACKED_2,
        3 => DType::PACKED_3,
        4 => DType::PACKED_4,
        5 => DType::PACKED_5,
        6 => DType::PACKED_6,
        7 => DType::PACKED_7,
        _ => DType::PACKED_8,
    }
}

/// Refuses columns of groups that are not there.
fn check_groups(groups: Option<&View<'_>>, columns: usize, count: usize) -> Result<(), Error> {
    let Some(groups) = groups else { return Ok(()) };
    let known = |bytes: &[u8; 4]| (u32::from_le_bytes(*bytes) as usize) < count;
    match groups.dtype == DType::I32
        && groups.shape == [columns]
        && groups.bytes.as_chunks().0.iter().all(known)
    {
        true => Ok(()),
        false => Err(wrong(groups, format!("I32 [{columns}], each below {count}"))),
    }
}

/// `weight_block_size`, by default 128 x 128.
fn block_size(found: &Value) -> Result<(usize, usize), Error> {
    let Some(size) = found.get("weight_block_size").filter(|size| !size.is_null()) else {
        return Ok((128, 128));
    };
    let dimension =
        |at: usize| size.get(at).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
    match (dimension(0), dimension(1), size.get(2)) {
        (Some(rows @ 1..), Some(columns @ 1..), None) => Ok((rows, columns)),
        _ => Err(Error::Quantization { what: format!("weight_block_size {size}") }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_read_is_refused_by_its_name() {
        for (config, wanted) in [
            (json!({"quant_method": "quark"}), "method \"quark\""),
            (json!({}), "method \"\""),
            (json!({"group_size": 64, "bits": 4, "mode": "mxfp8"}), "quantization with mode \"mxfp8\""),
            (json!({"group_size": 0, "bits": 4}), "quantization with group_size 0"),
            (json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}), "quant_algo \"W4A8_AWQ\""),
            (json!({"quant_method": "gptq", "bits": 5}), "gptq with bits 5"),
            (json!({"quant_method": "gptq"}), "gptq with bits missing"),
            (
                json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
                "checkpoint_format \"marlin\"",
            ),
            (json!({"quant_method": "awq", "bits": 8}), "awq with bits 8"),
            (
                json!({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}),
                "awq with version \"gemv_fast\"",
            ),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "gemv with group_size null"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fp8 with fmt \"e5m2\""),
            (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size [128]"),
            (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "weight_block_size [0,128]"),
            (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "\"marlin-24\""),
        ] {
            let error = Quantization::of(&json!({"quantization_config": config})).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        for config in [json!({}), json!({"quantization_config": null})] {
            assert_eq!(Quantization::of(&config).unwrap(), None);
        }
    }

    #[test]
    fn the_part_that_reads_text_may_say_it() {
        let (four, eight) = (json!({"quant_method": "gptq", "bits": 4}), json!({"quant_method": "fp8"}));
        let alone = Quantization::of(&json!({"quantization_config": four})).unwrap();
        assert!(alone.is_some());
        let within = json!({"text_config": {"quantization_config": four}});
        assert_eq!(Quantization::of(&within).unwrap(), alone);
        let null = json!({"quantization_config": null, "text_config": {"quantization_config": four}});
        assert_eq!(Quantization::of(&null).unwrap(), alone);
        // The whole's own comes first.
        let both = json!({"quantization_config": four, "text_config": {"quantization_config": eight}});
        assert_eq!(Quantization::of(&both).unwrap(), alone);
    }

    /// The matrix of a list of tensors, of which the first holds its values.
    fn made<'a>(kind: &Quantization, tensors: &[View<'a>]) -> Result<Vec<usize>, String> {
        let find = |name: &str| tensors.iter().find(|view| view.name == name).cloned();
        let main = &tensors[0];
        let assembly = kind.assembly(main.name, main.dtype, |name| find(name).is_some());
        let assembly =
            assembly.map_err(|error| error.to_string())?.ok_or("it is no matrix of several tensors")?;
        let view = kind.view(&assembly, |name| {
            tensors.iter().find(|view| view.name == name).map(|view| {
                // As long as the assembly, which the view of a file borrows from as well.
                View::new(view.name, view.dtype, view.shape.clone(), view.bytes).unwrap()
            })
        });
        view.map(|view| view.shape).map_err(|error| error.to_string())
    }

    #[test]
    fn shapes_that_contradict_each_other_are_refused_with_the_tensor() {
        let bytes = vec![0u8; 1 << 16];
        let view = |name, dtype: DType, shape: &[usize]| {
            let len = dtype.bytes_for(shape.iter().product()).unwrap();
            View::new(name, dtype, shape.to_vec(), &bytes[..len]).unwrap()
        };
        let check = |kind: &Quantization, tensors: &[View<'_>], wanted: &str| {
            let error = made(kind, tensors).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        };
        let gptq = Quantization::Gptq { bits: 4, zeros_add: 1 };
        let main = || view("q.qweight", DType::I32, &[16, 24]);
        let scales = || view("q.scales", DType::F16, &[4, 24]);
        let zeros = || view("q.qzeros", DType::I32, &[4, 3]);
        assert_eq!(made(&gptq, &[main(), scales(), zeros()]), Ok(vec![24, 128]));
        // The columns say how many bits a matrix has, whatever the model says: 16 words are 64 codes of eight.
        let groups = view("q.g_idx", DType::I32, &[64]);
        let eight = view("q.qzeros", DType::I32, &[4, 6]);
        assert_eq!(made(&gptq, &[main(), scales(), eight, groups]), Ok(vec![24, 64]));
        check(&gptq, &[view("q.qweight", DType::I32, &[16]), scales(), zeros()], "tensor q.qweight");
        check(&gptq, &[view("q.qweight", DType::I16, &[16, 24]), scales(), zeros()], "tensor q.qweight");
        check(&gptq, &[main(), view("q.scales", DType::I32, &[4, 24]), zeros()], "tensor q.scales");
        check(&gptq, &[main(), view("q.scales", DType::F16, &[5, 24]), zeros()], "tensor q.scales");
        check(&gptq, &[main(), view("q.scales", DType::F16, &[0, 24]), zeros()], "tensor q.scales");
        check(&gptq, &[main(), scales(), view("q.qzeros", DType::I32, &[4, 4])], "tensor q.qzeros");
        check(&gptq, &[main(), scales()], "q.qzeros is missing");
        check(&gptq, &[main(), scales(), zeros(), view("q.g_idx", DType::I32, &[127])], "tensor q.g_idx");
        let negative = [0xff; 512];
        let groups = View::new("q.g_idx", DType::I32, vec![128], &negative).unwrap();
        check(&gptq, &[main(), scales(), zeros(), groups], "tensor q.g_idx");
        let float8 = Quantization::Float8 { block: (128, 128) };
        let main = || view("f", DType::F8_E4M3, &[130, 256]);
        for shape in [&[][..], &[1], &[130, 1], &[2, 2]] {
            assert_eq!(made(&float8, &[main(), view("f_scale", DType::F32, shape)]), Ok(vec![130, 256]));
        }
        for shape in [&[130, 2][..], &[2, 3], &[256], &[2, 2, 1]] {
            check(&float8, &[main(), view("f_scale", DType::F32, shape)], "tensor f_scale");
        }
        let tensors = Quantization::CompressedTensors;
        let main = || view("p.weight_packed", DType::I32, &[24, 16]);
        let size: Vec<u8> = [24u64, 128].iter().flat_map(|size| size.to_le_bytes()).collect();
        let size = || View::new("p.weight_shape", DType::I64, vec![2], &size).unwrap();
        let scales = |shape: &[usize]| view("p.weight_scale", DType::BF16, shape);
        assert_eq!(made(&tensors, &[main(), scales(&[24, 1]), size()]), Ok(vec![24, 128]));
        check(&tensors, &[main(), scales(&[24, 3]), size()], "tensor p.weight_scale");
        check(
            &tensors,
            &[view("p.weight_packed", DType::I32, &[24, 15]), scales(&[24, 1]), size()],
            "whole words",
        );
        check(&tensors, &[main(), scales(&[24, 1])], "p.weight_shape is missing");
        let zeros = view("p.weight_zero_point", DType::I8, &[24, 1]);
        check(&tensors, &[main(), scales(&[24, 1]), size(), zeros], "tensor p.weight_zero_point");
        let optimised = Quantization::ModelOpt;
        let main = || view("n.weight", DType::U8, &[8, 16]);
        let global = || View::new("n.weight_scale_2", DType::F32, vec![], &[0, 0, 128, 63]).unwrap();
        let runs = |shape: &[usize]| view("n.weight_scale", DType::F8_E4M3, shape);
        assert_eq!(made(&optimised, &[main(), runs(&[8, 2]), global()]), Ok(vec![8, 32]));
        check(&optimised, &[main(), runs(&[8, 1]), global()], "tensor n.weight_scale");
        check(&optimised, &[main(), runs(&[8, 2]), view("n.weight_scale_2", DType::F32, &[])], "not zero");
        let bits = Quantization::BitsAndBytes;
        let main = || view("b.weight", DType::U8, &[64, 1]);
        let largest = || view("b.weight.absmax", DType::F32, &[2]);
        let map = || view("b.weight.quant_map", DType::F32, &[16]);
        let says = br#"{"blocksize": 64, "dtype": "bfloat16", "shape": [4, 32]}"#.to_vec();
        let state = |says: &'static [u8]| {
            View::new("b.weight.quant_state.bitsandbytes__nf4", DType::U8, vec![says.len()], says).unwrap()
        };
        let said: &'static [u8] = Vec::leak(says);
        assert_eq!(made(&bits, &[main(), largest(), map(), state(said)]), Ok(vec![4, 32]));
        check(&bits, &[main(), largest(), map(), state(b"{}")], "blocksize");
        check(&bits, &[main(), largest(), map(), state(b"\xff")], "bytes of JSON");
        check(
            &bits,
            &[
                main(),
                largest(),
                map(),
                state(br#"{"blocksize": 64, "dtype": "bfloat16", "shape": [4, 33]}"#),
            ],
            "tensor b.weight:",
        );
        check(
            &bits,
            &[main(), view("b.weight.absmax", DType::F32, &[3]), map(), state(said)],
            "b.weight.absmax",
        );
        let mlx = json!({"quantization": {"group_size": 64, "bits": 4, "m": {"group_size": 32, "bits": 8}}});
        let mlx = Quantization::of(&mlx).unwrap().unwrap();
        let pair = |name: [&'static str; 2], shape: &[usize]| name.map(|name| view(name, DType::F16, shape));
        let [scales, biases] = pair(["x.scales", "x.biases"], &[8, 2]);
        assert_eq!(made(&mlx, &[view("x.weight", DType::U32, &[8, 16]), scales, biases]), Ok(vec![8, 128]));
        let [scales, biases] = pair(["m.scales", "m.biases"], &[8, 2]);
        assert_eq!(made(&mlx, &[view("m.weight", DType::U32, &[8, 16]), scales, biases]), Ok(vec![8, 64]));
        let [scales, biases] = pair(["x.scales", "x.biases"], &[8, 3]);
        check(&mlx, &[view("x.weight", DType::U32, &[8, 16]), scales, biases], "tensor x.weight");
    }
}
