//! Experts: the choice, a product for each token and expert, the weighted sum.

use fornax_compute::{Error, ExpertRoom, Experts, Routing, Rows, Shares};

use super::fits;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::memory::{Buf, Weight, int};
use crate::program::Key;
use crate::step::Slot;

/// Experts that a token can have: as in experts.cu.
const EACH_MAX: usize = 64;
/// Warps of a block of expert_linear.cu, each with an output.
const WARPS: usize = 8;
/// Pairs of a token and an expert that one launch has: as many as a grid.
const PAIRS_MAX: usize = 65_535;

/// `ExpertRows` of expert_linear.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct ExpertRows {
    chosen: u64,
    x: u64,
    bias: u64,
    out: u64,
    each: i32,
    apart: i32,
    rows: i32,
    first: i32,
}

impl Cuda {
    pub(crate) fn op_add_gated(&self, slot: &Slot, gate: &Buf, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "add_gated";
        let columns = x.columns;
        fits(OPERATION, "gate", gate, (slot.tokens, 1))?;
        fits(OPERATION, "y", y, (slot.tokens, columns))?;
        fits(OPERATION, "x", x, (slot.tokens, columns))?;
        [gate, y, &*x].into_iter().try_for_each(|read| self.touch_read(slot, read))?;
        self.touch_written(slot, &[Some(x.pointer())])?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Pointer(gate.pointer()),
            Arg::Pointer(y.pointer()),
            Arg::Pointer(x.pointer()),
            Arg::Int(int(columns)),
        ];
        self.launch_values((OPERATION, "experts.cu"), slot, Rows::Tokens, columns, &args)
    }

    pub(crate) fn op_route(
        &self,
        slot: &Slot,
        routing: &Routing,
        logits: &Buf,
        chosen: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "route";
        // Nobody can take more experts than there are.
        let each = routing.chosen.min(routing.experts);
        fits(OPERATION, "logits", logits, (slot.tokens, routing.experts))?;
        fits(OPERATION, "chosen", chosen, (slot.tokens, 2 * each))?;
        if each > EACH_MAX {
            let what = format!("{each} experts for a token; at most {EACH_MAX} can be");
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        self.touch_read(slot, logits)?;
        self.touch_written(slot, &[Some(chosen.pointer())])?;
        let function = self.programs.function(&Key::plain("experts.cu"), OPERATION)?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Pointer(logits.pointer()),
            Arg::Int(int(routing.experts)),
            Arg::Int(int(each)),
            Arg::Int(i32::from(routing.shares == Shares::OfAll)),
            Arg::Pointer(chosen.pointer()),
        ];
        self.launch(OPERATION, function, [self.grid_rows(slot, Rows::Tokens), 1, 1], (32, 0), &args)
    }

    pub(crate) fn op_experts(
        &self,
        slot: &Slot,
        experts: &Experts<'_, Cuda>,
        chosen: &Buf,
        x: &Buf,
        room: &mut ExpertRoom<Buf>,
        residual: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "experts";
        let (tokens, each) = (slot.tokens, chosen.columns / 2);
        let (hidden, ffn) = (x.columns, room.gated.columns);
        fits(OPERATION, "chosen", chosen, (tokens, 2 * each))?;
        fits(OPERATION, "x", x, (tokens, hidden))?;
        fits(OPERATION, "residual", residual, (tokens, hidden))?;
        fits(OPERATION, "rows", &room.rows, (tokens * each, hidden))?;
        fits(OPERATION, "gate_up room", &room.gate_up, (tokens * each, 2 * ffn))?;
        fits(OPERATION, "gated room", &room.gated, (tokens * each, ffn))?;
        let stacks = |operand, weight: &Weight, bias: Option<&Buf>, rows: usize, columns: usize| {
            let (got, wanted) = ((weight.rows, weight.columns), (experts.count * rows, columns));
            if got != wanted {
                return Err(Error::OperandShape { operation: OPERATION, operand, got, wanted });
            }
            bias.map_or(Ok(()), |bias| fits(OPERATION, "bias", bias, (1, experts.count * rows)))
        };
        stacks("gate_up", experts.gate_up, experts.gate_up_bias, 2 * ffn, hidden)?;
        stacks("down", experts.down, experts.down_bias, hidden, ffn)?;
        [chosen, x, &*residual].into_iter().try_for_each(|read| self.touch_read(slot, read))?;
        let rooms = [&room.rows, &room.gate_up, &room.gated, &*residual];
        self.touch_written(slot, &rooms.map(|written| Some(written.pointer())))?;
        if each == 0 || tokens == 0 {
            return Ok(());
        }

        let products = |x: &Buf, apart: bool, bias: Option<&Buf>, out: &Buf, rows: usize| ExpertRows {
            chosen: chosen.pointer(),
            x: x.pointer(),
            bias: bias.map_or(0, Buf::pointer),
            out: out.pointer(),
            each: int(each),
            apart: i32::from(apart),
            rows: int(rows),
            first: 0,
        };
        let gate_up = products(x, false, experts.gate_up_bias, &room.gate_up, 2 * ffn);
        self.expert_linear(slot, experts.gate_up, gate_up)?;
        self.gate_rows(OPERATION, (slot, each), experts.glu, &room.gate_up, &room.gated)?;
        let down = products(&room.gated, true, experts.down_bias, &room.rows, hidden);
        self.expert_linear(slot, experts.down, down)?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Pointer(chosen.pointer()),
            Arg::Int(int(each)),
            Arg::Pointer(room.rows.pointer()),
            Arg::Pointer(residual.pointer()),
            Arg::Int(int(hidden)),
        ];
        self.launch_values(("combine", "experts.cu"), slot, Rows::Tokens, hidden, &args)
    }

    fn expert_linear(&self, slot: &Slot, weight: &Weight, rows: ExpertRows) -> Result<(), Error> {
        let pairs = self.grid_rows(slot, Rows::Tokens) * rows.each.cast_unsigned() as usize;
        if pairs > PAIRS_MAX {
            let what =
                format!("{pairs} pairs of a token and an expert in a step; at most {PAIRS_MAX} can be");
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        for part in &weight.parts {
            let key = Key::quant("expert_linear.cu", part.format);
            let function = self.programs.function(&key, "expert_linear")?;
            let (device_part, device_step) = (weight.device_part(part), self.device_step(slot));
            let rows = ExpertRows { first: int(part.first), ..rows };
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_part)),
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&rows)),
            ];
            let grid = [(rows.rows.cast_unsigned() as usize).div_ceil(WARPS), pairs, 1];
            self.launch("experts", function, grid, (WARPS as u32 * 32, 0), &args)?;
        }
        Ok(())
    }
}
