//! Matrices that a safetensors file keeps in several tensors: 8-bit floats with scales, AWQ and GPTQ.
//!
//! `config.json` says how a model was quantised. From then on such a matrix is one [`View`] under the name that it has
//! in an unquantised model, with the values' bytes as they lie in the file and its other tensors in [`Packing`]; those
//! are listed no more. What the bits mean is said here; nothing is computed here.

use serde_json::Value;

use crate::{DType, Error, View};

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
    /// [`DType::GPTQ_4`]: value = scale * (code - zero point).
    ///
    /// Words of 32 bits, (columns / 8, rows): eight codes of a row, the first column in the lowest bits.
    Gptq {
        /// F16, BF16 or F32: (groups, rows).
        scales: View<'a>,
        /// Words: (groups, rows / 8), the first row in the lowest bits.
        zeros: View<'a>,
        /// Added to a stored zero point, modulo 16: version 1 of the format stores one less.
        zeros_add: u8,
        /// I32: the group of each column. Where it is missing, columns are grouped in order.
        groups: Option<View<'a>>,
    },
    /// [`DType::AWQ_4`]: value = scale * (code - zero point), columns grouped in order.
    ///
    /// Words of 32 bits, (columns, rows / 8): eight codes of a column, of rows [`AWQ_ORDER`], the first in the lowest
    /// bits.
    Awq {
        /// F16, BF16 or F32: (groups, rows).
        scales: View<'a>,
        /// Words: (groups, rows / 8), as the codes.
        zeros: View<'a>,
    },
}

/// Which of eight rows each nibble of an AWQ word belongs to.
pub const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// How `config.json` says that a model was quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quantization {
    Float8 { block: (usize, usize) },
    Gptq { zeros_add: u8 },
    Awq,
}

/// Tensors of one matrix, by name.
#[derive(Debug)]
pub(crate) struct Assembly {
    /// The name that an unquantised model has for it.
    pub(crate) name: Box<str>,
    /// The tensor with the values.
    pub(crate) main: Box<str>,
    pub(crate) scales: Box<str>,
    pub(crate) zeros: Option<Box<str>>,
    pub(crate) groups: Option<Box<str>>,
}

impl Quantization {
    /// What `config.json` says; an error names a method or width that is not read.
    pub(crate) fn of(config: &Value) -> Result<Option<Quantization>, Error> {
        let Some(found) = config.get("quantization_config").filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let text = |key: &str| found.get(key).and_then(Value::as_str).unwrap_or_default();
        let method = text("quant_method");
        let refused = |what: String| Error::Quantization { what };
        let refuse = |what: String| Err(refused(what));
        let four_bits = || match found.get("bits").and_then(Value::as_u64) {
            Some(4) => Ok(()),
            bits => {
                let bits = bits.map_or("missing".to_owned(), |bits| bits.to_string());
                Err(refused(format!("{method} with bits {bits}")))
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
            "compressed-tensors" if text("format") == "float-quantized" => {
                Ok(Some(Quantization::Float8 { block: (1, 1) }))
            }
            "compressed-tensors" => refuse(format!("compressed-tensors with format {:?}", text("format"))),
            "gptq" => {
                four_bits()?;
                let zeros_add = match text("checkpoint_format") {
                    "" | "gptq" => 1,
                    "gptq_v2" => 0,
                    other => return refuse(format!("gptq with checkpoint_format {other:?}")),
                };
                Ok(Some(Quantization::Gptq { zeros_add }))
            }
            "awq" => {
                four_bits()?;
                match text("version").to_ascii_lowercase().as_str() {
                    "" | "gemm" => Ok(Some(Quantization::Awq)),
                    other => refuse(format!("awq with version {other:?}")),
                }
            }
            // Its blocks and scales are tensors that a model of this kind reads by their own names.
            "mxfp4" => Ok(None),
            other => refuse(format!("method {other:?}")),
        }
    }

    /// The names of a matrix's tensors, if this one holds its values; `has` says what the file has.
    pub(crate) fn assembly(
        self,
        tensor: &str,
        dtype: DType,
        has: impl Fn(&str) -> bool,
    ) -> Result<Option<Assembly>, Error> {
        let found = |name: String| has(&name).then(|| name.into_boxed_str());
        let missing = |wanted: String| Error::PackingMissing { tensor: tensor.to_owned(), wanted };
        match self {
            Quantization::Float8 { .. } => {
                if dtype != DType::F8_E4M3 {
                    return Ok(None);
                }
                let scales = found(format!("{tensor}_scale_inv"))
                    .or_else(|| found(format!("{tensor}_scale")))
                    .ok_or_else(|| missing(format!("{tensor}_scale or {tensor}_scale_inv")))?;
                let name = tensor.into();
                Ok(Some(Assembly { name, main: tensor.into(), scales, zeros: None, groups: None }))
            }
            Quantization::Gptq { .. } | Quantization::Awq => {
                let Some(stem) = tensor.strip_suffix(".qweight") else { return Ok(None) };
                let needed = |end: &str| {
                    let name = format!("{stem}.{end}");
                    found(name.clone()).ok_or_else(|| missing(name))
                };
                Ok(Some(Assembly {
                    name: format!("{stem}.weight").into(),
                    main: tensor.into(),
                    scales: needed("scales")?,
                    zeros: Some(needed("qzeros")?),
                    groups: found(format!("{stem}.g_idx")),
                }))
            }
        }
    }

    /// Whether a tensor belongs to the quantisation without being read: how activations were scaled when a model was
    /// quantised, which matters to none but kernels that round activations so.
    pub(crate) fn skips(self, tensor: &str) -> bool {
        const ENDS: [&str; 4] = [".input_scale", ".activation_scale", ".k_scale", ".v_scale"];
        matches!(self, Quantization::Float8 { .. }) && ENDS.iter().any(|end| tensor.ends_with(end))
    }

    /// The matrix; all shapes are checked against each other.
    pub(crate) fn view<'a>(
        self,
        name: &'a str,
        main: View<'a>,
        scales: View<'a>,
        zeros: Option<View<'a>>,
        groups: Option<View<'a>>,
    ) -> Result<View<'a>, Error> {
        let wrong = |tensor: &View<'_>, wanted: String| Error::PackingShape {
            tensor: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            wanted,
        };
        let is_float = |view: &View<'_>| matches!(view.dtype, DType::F32 | DType::F16 | DType::BF16);
        let [first, second] = main.shape[..] else {
            return Err(wrong(&main, "a matrix".to_owned()));
        };
        if !is_float(&scales) {
            return Err(wrong(&scales, "F32, F16 or BF16".to_owned()));
        }
        if let Quantization::Float8 { block } = self {
            let (rows, columns) = (first, second);
            // One for all, one for each row, or one for each block.
            let block = match scales.shape[..] {
                [] | [1] | [1, 1] => (rows.max(1), columns.max(1)),
                [some] if some == rows => (1, columns.max(1)),
                [some, 1] if some == rows => (1, columns.max(1)),
                [some, others] if (some, others) == (rows.div_ceil(block.0), columns.div_ceil(block.1)) => {
                    block
                }
                _ => return Err(wrong(&scales, format!("one for {rows} rows, or for blocks of {block:?}"))),
            };
            return Ok(main.packed(
                name,
                DType::F8_E4M3,
                vec![rows, columns],
                Packing::Float8 { scales, block, first_row: 0 },
            ));
        }
        if main.dtype != DType::I32 {
            return Err(wrong(&main, "I32".to_owned()));
        }
        let zeros = zeros.ok_or_else(|| wrong(&main, "zero points".to_owned()))?;
        let (rows, columns) = match self {
            Quantization::Gptq { .. } => (second, first.saturating_mul(8)),
            _ => (second.saturating_mul(8), first),
        };
        let [scale_groups, scale_rows] = scales.shape[..] else {
            return Err(wrong(&scales, "a matrix".to_owned()));
        };
        if scale_rows != rows || scale_groups == 0 || !columns.is_multiple_of(scale_groups) {
            return Err(wrong(&scales, format!("(groups of {columns} columns, {rows})")));
        }
        if zeros.dtype != DType::I32 || zeros.shape != [scale_groups, rows / 8] || !rows.is_multiple_of(8) {
            return Err(wrong(&zeros, format!("I32 [{scale_groups}, {}]", rows / 8)));
        }
        let (dtype, packing) = match self {
            Quantization::Gptq { zeros_add } => {
                if let Some(groups) = &groups {
                    let known = |bytes: &[u8; 4]| (u32::from_le_bytes(*bytes) as usize) < scale_groups;
                    let all = groups.bytes.as_chunks().0.iter().all(known);
                    if groups.dtype != DType::I32 || groups.shape != [columns] || !all {
                        return Err(wrong(groups, format!("I32 [{columns}], each below {scale_groups}")));
                    }
                }
                (DType::GPTQ_4, Packing::Gptq { scales, zeros, zeros_add, groups })
            }
            _ => (DType::AWQ_4, Packing::Awq { scales, zeros }),
        };
        Ok(main.packed(name, dtype, vec![rows, columns], packing))
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
            (json!({"quant_method": "bitsandbytes"}), "method \"bitsandbytes\""),
            (json!({}), "method \"\""),
            (json!({"quant_method": "gptq", "bits": 3}), "gptq with bits 3"),
            (json!({"quant_method": "gptq"}), "gptq with bits missing"),
            (
                json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
                "checkpoint_format \"marlin\"",
            ),
            (json!({"quant_method": "awq", "bits": 8}), "awq with bits 8"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "awq with version \"gemv\""),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fp8 with fmt \"e5m2\""),
            (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size [128]"),
            (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "weight_block_size [0,128]"),
            (json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}), "\"pack-quantized\""),
        ] {
            let error = Quantization::of(&json!({"quantization_config": config})).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        for config in [json!({}), json!({"quantization_config": null})] {
            assert_eq!(Quantization::of(&config).unwrap(), None);
        }
    }

    #[test]
    fn shapes_that_contradict_each_other_are_refused_with_the_tensor() {
        let bytes = vec![0u8; 1 << 16];
        let view = |name, dtype: DType, shape: &[usize]| {
            let len = dtype.bytes_for(shape.iter().product()).unwrap();
            View::new(name, dtype, shape.to_vec(), &bytes[..len]).unwrap()
        };
        let gptq = Quantization::Gptq { zeros_add: 1 };
        let check = |kind: Quantization, main, scales, zeros, groups, wanted: &str| {
            let error = kind.view("w", main, scales, zeros, groups).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        let main = || view("q", DType::I32, &[16, 24]);
        let (scales, zeros) = (|| view("s", DType::F16, &[4, 24]), || Some(view("z", DType::I32, &[4, 3])));
        assert_eq!(gptq.view("w", main(), scales(), zeros(), None).unwrap().shape, [24, 128]);
        check(gptq, view("q", DType::I32, &[16]), scales(), zeros(), None, "tensor q");
        check(gptq, view("q", DType::I16, &[16, 24]), scales(), zeros(), None, "tensor q");
        check(gptq, main(), view("s", DType::I32, &[4, 24]), zeros(), None, "tensor s");
        check(gptq, main(), view("s", DType::F16, &[5, 24]), zeros(), None, "tensor s");
        check(gptq, main(), view("s", DType::F16, &[0, 24]), zeros(), None, "tensor s");
        check(gptq, main(), scales(), Some(view("z", DType::I32, &[4, 4])), None, "tensor z");
        check(gptq, main(), scales(), zeros(), Some(view("g", DType::I32, &[127])), "tensor g");
        let negative = [0xff; 512];
        let groups = View::new("g", DType::I32, vec![128], &negative).unwrap();
        check(gptq, main(), scales(), zeros(), Some(groups), "tensor g");
        let float8 = Quantization::Float8 { block: (128, 128) };
        let main = || view("f", DType::F8_E4M3, &[130, 256]);
        for (shape, block) in
            [(&[][..], (130, 256)), (&[1], (130, 256)), (&[130, 1], (1, 256)), (&[2, 2], (128, 128))]
        {
            let view = float8.view("w", main(), view("s", DType::F32, shape), None, None).unwrap();
            assert!(
                matches!(view.packing.as_deref(), Some(Packing::Float8 { block: got, .. }) if *got == block)
            );
        }
        check(float8, main(), view("s", DType::F32, &[2, 3]), None, None, "tensor s");
        check(float8, main(), view("s", DType::F32, &[129]), None, None, "tensor s");
    }
}
