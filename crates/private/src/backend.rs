//! The client's backend: everything on its own CPU but products with weights, which are exact products of whole numbers
//! computed wherever [`Products`] says.

use std::cell::RefCell;

use fornax_compute::cpu::{self, Cpu, CpuSizes};
use fornax_compute::{
    Attention, Backend, Batch, ChannelInputs, ChannelScan, DeltaRule, Error as ComputeError, ExpertRoom,
    Experts, GatedNorm, Glu, Heads, KvLayer, KvSpec, Memory, Need, Norm, Output, Part, Pointwise, Pooling,
    Purpose, QkNorm, Rope, Routing, Rows, SampleRow, SelectiveScan, ShortConv, Sizes, Temperature, Usage,
    operands,
};

use crate::Error;
use crate::error::{NAME, supports};
use crate::quantize::{Matrix, quantize_row};

/// Who multiplies. Matrices are numbered from 0 in the order in which they are added.
pub trait Products {
    /// The next matrix.
    fn add(&mut self, matrix: Matrix) -> Result<(), Error>;
    /// A step begins, with so many tokens, of which so many want logits.
    fn begin(&mut self, tokens: usize, wanted: usize) -> Result<(), Error>;
    /// `out` = the product of a matrix with each row of `x`: exact, and inside half of the ring by the matrix's bound.
    /// `kind` says which of the step's rows they are.
    fn multiply(&mut self, matrix: usize, kind: Rows, x: &[i32], out: &mut [i32]) -> Result<(), Error>;
}

/// A CPU backend whose products are done by `P`.
pub struct Integer<P> {
    cpu: Cpu,
    state: RefCell<State<P>>,
}

struct State<P> {
    products: P,
    matrices: usize,
    /// Activations as whole numbers, and what one is worth in each row.
    x: Vec<i32>,
    scales: Vec<f32>,
    y: Vec<i32>,
}

/// A weight as the client sees it.
pub struct Weight {
    /// Rows to look up, in the types of the file.
    table: Option<cpu::Weight>,
    product: Option<Product>,
}

/// What the client keeps of a matrix that is multiplied by elsewhere.
struct Product {
    number: usize,
    rows: usize,
    columns: usize,
    bound: i32,
    /// One for each output row.
    scales: cpu::Buf,
}

impl Weight {
    fn looked_up(&self) -> Result<&cpu::Weight, ComputeError> {
        let refused =
            || ComputeError::Unsupported { what: "looking up rows of a product".to_owned(), backend: NAME };
        self.table.as_ref().ok_or_else(refused)
    }
}

impl<P: Products> Integer<P> {
    /// A backend on this CPU.
    pub fn new(cpu: Cpu, products: P) -> Integer<P> {
        let state = State { products, matrices: 0, x: Vec::new(), scales: Vec::new(), y: Vec::new() };
        Integer { cpu, state: RefCell::new(state) }
    }

    /// Asks whoever multiplies.
    pub fn with_products<T>(&self, ask: impl FnOnce(&mut P) -> T) -> T {
        ask(&mut self.state.borrow_mut().products)
    }

    fn product(&self, parts: &[Part<'_>]) -> Result<Product, ComputeError> {
        let state = &mut *self.state.borrow_mut();
        let number = state.matrices;
        let matrix = Matrix::new(number, parts)?;
        let mut scales = self.cpu.alloc(Purpose::Weights, 1, matrix.rows)?;
        scales.values_mut().copy_from_slice(&matrix.scales);
        let product =
            Product { number, rows: matrix.rows, columns: matrix.columns, bound: matrix.bound, scales };
        state.products.add(matrix)?;
        state.matrices += 1;
        Ok(product)
    }
}

impl<P: Products> Memory for Integer<P> {
    type Weight = Weight;
    type Buf = cpu::Buf;
    type Kv = cpu::Kv;

    fn upload(&self, parts: &[Part<'_>]) -> Result<Weight, ComputeError> {
        Ok(Weight { table: None, product: Some(self.product(parts)?) })
    }

    fn upload_table(&self, parts: &[Part<'_>], tied: bool) -> Result<Weight, ComputeError> {
        let product = if tied { Some(self.product(parts)?) } else { None };
        Ok(Weight { table: Some(self.cpu.upload(parts)?), product })
    }

    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<cpu::Buf, ComputeError> {
        self.cpu.upload_vector(parts)
    }

    fn upload_values(&self, values: &[f32]) -> Result<cpu::Buf, ComputeError> {
        self.cpu.upload_values(values)
    }

    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<cpu::Buf, ComputeError> {
        self.cpu.alloc(purpose, rows, columns)
    }

    fn alloc_kv(&self, spec: &KvSpec) -> Result<cpu::Kv, ComputeError> {
        self.cpu.alloc_kv(spec)
    }

    fn usage(&self) -> Usage {
        self.cpu.usage()
    }

    fn supports(&self, need: Need) -> Result<(), ComputeError> {
        supports(need)
    }
}

/// Operations that are the CPU's own.
macro_rules! done_by_the_cpu {
    ($($operation:ident($($operand:ident: $type:ty),*);)*) => {
        $(fn $operation(&self, step: &cpu::Step, $($operand: $type),*) -> Result<(), ComputeError> {
            self.cpu.$operation(step, $($operand),*)
        })*
    };
}

impl<P: Products> Backend for Integer<P> {
    type Step = cpu::Step;

    fn name(&self) -> &'static str {
        NAME
    }

    fn begin(&self, batch: &Batch) -> Result<cpu::Step, ComputeError> {
        let step = self.cpu.begin(batch)?;
        let (tokens, wanted) = (step.count(Rows::Tokens), step.count(Rows::Wanted));
        self.state.borrow_mut().products.begin(tokens, wanted)?;
        Ok(step)
    }

    fn record(
        &self,
        step: &cpu::Step,
        body: &mut dyn FnMut() -> Result<(), ComputeError>,
    ) -> Result<(), ComputeError> {
        self.cpu.record(step, body)
    }

    fn finish(&self, step: cpu::Step) -> Result<Output, ComputeError> {
        self.cpu.finish(step)
    }

    fn write(&self, buf: &mut cpu::Buf, row: usize, values: &[f32]) -> Result<(), ComputeError> {
        self.cpu.write(buf, row, values)
    }

    fn read(&self, buf: &cpu::Buf, row: usize, rows: usize) -> Result<Vec<f32>, ComputeError> {
        self.cpu.read(buf, row, rows)
    }

    fn embed(&self, step: &cpu::Step, table: &Weight, out: &mut cpu::Buf) -> Result<(), ComputeError> {
        self.cpu.embed(step, table.looked_up()?, out)
    }

    fn matmul(
        &self,
        step: &cpu::Step,
        rows: Rows,
        weight: &Weight,
        x: &cpu::Buf,
        out: &mut cpu::Buf,
    ) -> Result<(), ComputeError> {
        let refused =
            || ComputeError::Unsupported { what: "a product with a table".to_owned(), backend: NAME };
        let product = weight.product.as_ref().ok_or_else(refused)?;
        let count = step.count(rows);
        operands::fits("matmul", "x", x, (count, product.columns))?;
        operands::fits("matmul", "out", out, (count, product.rows))?;
        if count == 0 {
            return Ok(());
        }
        let State { products, x: whole, scales, y, .. } = &mut *self.state.borrow_mut();
        whole.resize(count * product.columns, 0);
        y.resize(count * product.rows, 0);
        scales.clear();
        let values = x.values().chunks_exact(product.columns);
        for (row, (values, whole)) in values.zip(whole.chunks_exact_mut(product.columns)).enumerate() {
            let fault = || ComputeError::NumericFault {
                place: format!("row {row} of the input of matrix {}", product.number),
                value: values.iter().copied().find(|value| !value.is_finite()).unwrap_or(f32::NAN),
            };
            scales.push(quantize_row(values, product.bound, whole).ok_or_else(fault)?);
        }
        products.multiply(product.number, rows, whole, y)?;
        let outs = out.values_mut().chunks_exact_mut(product.rows);
        for ((out, y), &scale) in outs.zip(y.chunks_exact(product.rows)).zip(scales.iter()) {
            for ((out, &y), &weight) in out.iter_mut().zip(y).zip(product.scales.values()) {
                #[expect(clippy::cast_precision_loss, reason = "a sum of 31 bits becomes the nearest float")]
                let y = y as f32;
                *out = y * (scale * weight);
            }
        }
        Ok(())
    }

    fn add_positions(&self, step: &cpu::Step, table: &Weight, x: &mut cpu::Buf) -> Result<(), ComputeError> {
        self.cpu.add_positions(step, table.looked_up()?, x)
    }

    done_by_the_cpu! {
        add_vector(rows: Rows, vector: &cpu::Buf, x: &mut cpu::Buf);
        add(rows: Rows, y: &cpu::Buf, x: &mut cpu::Buf);
        clamp(bounds: &cpu::Buf, x: &mut cpu::Buf);
        scale_columns(factors: &cpu::Buf, x: &mut cpu::Buf);
        pointwise(rows: Rows, function: Pointwise, x: &mut cpu::Buf);
        norm(rows: Rows, norm: &Norm<cpu::Buf>, x: &cpu::Buf, out: &mut cpu::Buf);
        qk_norm(heads: Heads, norm: &QkNorm<cpu::Buf>, qkv: &mut cpu::Buf);
        rope(heads: Heads, rope: &Rope<cpu::Buf>, qkv: &mut cpu::Buf);
        kv_write(heads: Heads, layer: KvLayer, qkv: &cpu::Buf, kv: &mut cpu::Kv);
        attention(attention: &Attention<cpu::Buf>, qkv: &cpu::Buf, kv: &cpu::Kv, out: &mut cpu::Buf);
        glu(kind: Glu, gate_up: &cpu::Buf, out: &mut cpu::Buf);
        add_gated(gate: &cpu::Buf, y: &cpu::Buf, x: &mut cpu::Buf);
        route(routing: &Routing, logits: &cpu::Buf, correction: Option<&cpu::Buf>, chosen: &mut cpu::Buf);
        short_conv(conv: &ShortConv<cpu::Buf>, x: &cpu::Buf, kv: &mut cpu::Kv, out: &mut cpu::Buf);
        delta_rule(rule: &DeltaRule<cpu::Buf>, qkv: &mut cpu::Buf, mixed: &mut cpu::Buf, kv: &mut cpu::Kv, out: &mut cpu::Buf);
        selective_scan(scan: &SelectiveScan<cpu::Buf>, x: &cpu::Buf, mixed: &mut cpu::Buf, kv: &mut cpu::Kv, out: &mut cpu::Buf);
        channel_scan(scan: &ChannelScan<cpu::Buf>, inputs: &ChannelInputs<'_, cpu::Buf>, steps: &mut cpu::Buf, kv: &mut cpu::Kv, out: &mut cpu::Buf);
        gated_norm(norm: &GatedNorm<cpu::Buf>, gates: &cpu::Buf, x: &mut cpu::Buf);
        sigmoid_gate(gates: &cpu::Buf, x: &mut cpu::Buf);
        glu_beside(kind: Glu, up: &cpu::Buf, column: usize, gate: &mut cpu::Buf);
        add_given(column: usize, x: &mut cpu::Buf);
        scale_chosen(scales: &cpu::Buf, chosen: &mut cpu::Buf);
        scale_by_position(temperature: Temperature, columns: usize, x: &mut cpu::Buf);
        gather_wanted(x: &cpu::Buf, out: &mut cpu::Buf);
        pool(pooling: Pooling, x: &cpu::Buf, out: &mut cpu::Buf);
    }

    fn experts(
        &self,
        _step: &cpu::Step,
        _experts: &Experts<'_, Integer<P>>,
        _chosen: &cpu::Buf,
        _x: &cpu::Buf,
        _room: &mut ExpertRoom<cpu::Buf>,
        _residual: &mut cpu::Buf,
    ) -> Result<(), ComputeError> {
        supports(Need::Experts)
    }

    fn sample(
        &self,
        step: &mut cpu::Step,
        logits: &cpu::Buf,
        rows: &[SampleRow<'_>],
    ) -> Result<(), ComputeError> {
        self.cpu.sample(step, logits, rows)
    }
}

/// The client's memory: tables as the CPU keeps them, and a scale for each row of everything else. The vectors that
/// answers are checked with are few beside them, and counted with the process.
pub struct IntegerSizes(pub CpuSizes);

impl IntegerSizes {
    fn scales(&self, parts: &[Part<'_>]) -> u64 {
        let rows = |part: &Part<'_>| {
            part.rows.as_ref().map_or(part.view.shape.first().copied().unwrap_or(0), Vec::len)
        };
        self.0.buf_bytes(Purpose::Weights, 1, parts.iter().map(rows).sum())
    }
}

impl Sizes for IntegerSizes {
    fn weight_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        // What the CPU cannot read is refused by the same name.
        self.0.weight_bytes(parts)?;
        Ok(self.scales(parts))
    }

    fn table_bytes(&self, parts: &[Part<'_>], tied: bool) -> Result<u64, ComputeError> {
        Ok(self.0.weight_bytes(parts)? + if tied { self.scales(parts) } else { 0 })
    }

    fn vector_bytes(&self, parts: &[Part<'_>]) -> Result<u64, ComputeError> {
        self.0.vector_bytes(parts)
    }

    fn buf_bytes(&self, purpose: Purpose, rows: usize, columns: usize) -> u64 {
        self.0.buf_bytes(purpose, rows, columns)
    }

    fn keeps(&self, spec: &KvSpec) -> Result<(), ComputeError> {
        self.0.keeps(spec)
    }

    fn workspace_bytes(&self) -> u64 {
        self.0.workspace_bytes()
    }

    fn supports(&self, need: Need) -> Result<(), ComputeError> {
        supports(need)
    }
}
