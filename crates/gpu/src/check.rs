//! Rows of new weights that are read back from the device and compared with the file, bit by bit, while the next
//! weights are on their way.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

use fornax_compute::cpu::dequantize;
use fornax_compute::{Error, Part, Purpose};
use fornax_format::DType;

use crate::cuda::Cuda;
use crate::driver::{Arg, Device, Event, Pinned};
use crate::gather::Stored;
use crate::grid::Grid;
use crate::layout::Format;
use crate::memory::{COLUMNS_MAX, Weight, WeightPart, int};
use crate::program::Key;

const OPERATION: &str = "check upload";
/// Rows of each part of a weight that are compared.
const CHECKED_ROWS: usize = 3;
/// Pinned memory for rows that are read back: for the longest rows, and for those of many ordinary weights.
const ROOM_BYTES: usize = CHECKED_ROWS * COLUMNS_MAX * 4;

/// Rows that are on their way back, the oldest first.
pub(crate) struct Checks {
    room: Pinned,
    /// Where the next rows go.
    next: usize,
    arriving: VecDeque<Arriving>,
    /// Events that can be used again.
    spare: Vec<Event>,
}

/// Rows of a part on their way back, and what they must be.
struct Arriving {
    /// Where they arrive.
    at: Range<usize>,
    /// (row, as it is stored) in their order.
    stored: Vec<(usize, Vec<u8>)>,
    dtype: DType,
    columns: usize,
    names: String,
    /// Whether the smallest values of the part are rounded on the device.
    rounds: bool,
    event: Event,
}

impl Checks {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Checks, Error> {
        Ok(Checks {
            room: Pinned::new(device, ROOM_BYTES)?,
            next: 0,
            arriving: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    /// Waits for everything that is on its way, and compares it.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        while !self.arriving.is_empty() {
            self.settle_oldest()?;
        }
        Ok(())
    }

    /// Compares what has arrived.
    pub(crate) fn settle_arrived(&mut self) -> Result<(), Error> {
        while let Some(oldest) = self.arriving.front()
            && oldest.event.passed()?
        {
            self.settle_oldest()?;
        }
        Ok(())
    }

    /// Room for some rows after those before. What lies there is compared first.
    fn room(&mut self, bytes: usize) -> Result<Range<usize>, Error> {
        let start = if self.next + bytes > ROOM_BYTES { 0 } else { self.next };
        let at = start..start + bytes;
        let lies = |arriving: &Arriving| arriving.at.start < at.end && at.start < arriving.at.end;
        while self.arriving.iter().any(lies) {
            self.settle_oldest()?;
        }
        self.next = at.end;
        Ok(at)
    }

    fn settle_oldest(&mut self) -> Result<(), Error> {
        let Some(Arriving { at, stored, dtype, columns, names, rounds, event }) = self.arriving.pop_front()
        else {
            return Ok(());
        };
        event.wait(OPERATION)?;
        let device = event.device().name();
        self.spare.push(event);
        let values: &[f32] = bytemuck::cast_slice(&self.room.bytes()[at]);
        let mut wanted = vec![0.0; stored.len() * columns];
        for ((_, stored), wanted) in stored.iter().zip(wanted.chunks_exact_mut(columns)) {
            let tensor = || names.clone();
            dequantize(dtype, stored, wanted).ok_or_else(|| Error::DType {
                tensor: tensor(),
                dtype,
                backend: device,
            })?;
        }
        let largest = wanted.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
        let small = if rounds { largest * 2f32.powi(-30) } else { 0.0 };
        let rows = values.chunks_exact(columns).zip(wanted.chunks_exact(columns));
        for ((row, _), (arrived, wanted)) in stored.iter().zip(rows) {
            let differs = |(got, wanted): (&f32, &f32)| {
                let same = got.to_bits() == wanted.to_bits() || wanted.is_nan();
                !same && wanted.abs().max(got.abs()) >= small
            };
            if let Some(column) = arrived.iter().zip(wanted).position(differs) {
                let reason = format!(
                    "{names}: row {row} column {column} is {:e} on the device and {:e} in the file",
                    arrived[column], wanted[column]
                );
                return Err(Error::Device { backend: device, operation: OPERATION, reason });
            }
        }
        Ok(())
    }
}

impl Cuda {
    /// Begins to read back some rows of a new weight.
    pub(crate) fn begin_check(
        &self,
        checks: &mut Checks,
        weight: &Weight,
        parts: &[Part<'_>],
    ) -> Result<(), Error> {
        weight.parts.iter().try_for_each(|part| self.begin_check_part(checks, weight, part, parts))
    }

    fn begin_check_part(
        &self,
        checks: &mut Checks,
        weight: &Weight,
        part: &WeightPart,
        parts: &[Part<'_>],
    ) -> Result<(), Error> {
        let stride = (part.rows / CHECKED_ROWS).max(1);
        let rows = CHECKED_ROWS.min(part.rows);
        let bytes = rows * part.columns * 4;
        let at = checks.room(bytes)?;
        let room = self.cut(Purpose::Workspace, bytes as u64)?;
        let device_part = weight.device_part(part);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Int(0),
            Arg::Int(int(stride)),
            Arg::Pointer(room.pointer()),
            Arg::Int(int(part.columns)),
        ];
        let function = self.programs.function(&Key::quant("embed.cu", part.format), "rows_of")?;
        self.launching(|| self.launch(OPERATION, function, Grid::new([rows, 1, 1], 256), &args))?;
        let event = match checks.spare.pop() {
            Some(event) => event,
            None => Event::new(&self.device)?,
        };
        self.device.read_pinned(OPERATION, room.pointer(), checks.room.room().part(at.start, bytes))?;
        event.record()?;
        let of_format = |part_of: &&Part<'_>| Format::of(part_of.view.dtype) == Some(part.format);
        let dtype = parts.iter().find(of_format).unwrap_or(&parts[0]).view.dtype;
        let all = Stored::new(parts, part);
        let unreadable = |reason| Error::Device { backend: self.device.name(), operation: OPERATION, reason };
        let stored = (0..rows).map(|at| at * stride).map(|row| Ok((row, all.row(row)?)));
        let stored = stored.collect::<Result<_, _>>().map_err(unreadable)?;
        let names: Vec<&str> = parts.iter().map(|part| part.view.name).collect();
        checks.arriving.push_back(Arriving {
            at,
            stored,
            dtype,
            columns: part.columns,
            names: names.join(" + "),
            rounds: part.format == Format::BF16,
            event,
        });
        Ok(())
    }
}
