//! The ways computing can fail.

use std::ops::Range;

use fornax_format::DType;

use crate::{KvDType, Purpose};

/// Why a backend refused or failed. The values are those a person needs to act.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An allocation would exceed what the device has or what the limit allows.
    #[error("out of memory for {purpose}: {wanted} bytes wanted, {used} of {limit} bytes in use")]
    OutOfMemory {
        /// What the bytes were for.
        purpose: Purpose,
        /// Bytes of this allocation.
        wanted: u64,
        /// Bytes already counted.
        used: u64,
        /// The device's size or `--memory-limit`.
        limit: u64,
    },
    /// A stored type that this backend cannot multiply yet.
    #[error("tensor {tensor}: type {dtype} cannot be computed on {backend} yet")]
    DType {
        /// The tensor as its file names it.
        tensor: String,
        /// Its type.
        dtype: DType,
        /// The backend's name.
        backend: &'static str,
    },
    /// A tensor whose shape does not fit the place it is loaded into.
    #[error("tensor {tensor}: shape {got:?}, wanted {wanted:?}")]
    TensorShape {
        /// The tensor as its file names it.
        tensor: String,
        /// The shape in the file.
        got: Vec<usize>,
        /// The shape the operation needs; 0 stands for any.
        wanted: Vec<usize>,
    },
    /// Columns of a matrix that cannot be had by themselves: none, more than there are, or a block's in part.
    #[error("tensor {tensor}: columns {got:?} of {columns} in {dtype}; whole blocks of {} are wanted", .dtype.block_values())]
    Columns {
        /// The tensor as its file names it.
        tensor: String,
        /// What was asked for.
        got: Range<usize>,
        /// Columns that it has.
        columns: usize,
        /// The type that they are computed in.
        dtype: DType,
    },
    /// An option that this backend does not have.
    #[error("{what} is not available on {backend}")]
    Unsupported {
        /// The option, as the user names it.
        what: String,
        /// The backend's name.
        backend: &'static str,
    },
    /// Keys and values in a type that this backend does not keep them in.
    #[error("keys and values in {dtype} are not available on {backend}; use {}", names(.possible))]
    KvDType {
        /// The type that was asked for.
        dtype: KvDType,
        /// The backend's name.
        backend: &'static str,
        /// Those that it has.
        possible: &'static [KvDType],
    },
    /// A batch that names more than was allocated: tokens, rows, slots, pages.
    #[error("batch: {what} {got} beyond the limit {limit}")]
    BatchLimit {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: usize,
        /// The largest allowed.
        limit: usize,
    },
    /// A batch that contradicts itself.
    #[error("batch: {what}: {got}, wanted {wanted}")]
    BatchShape {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: usize,
        /// What the rest of the batch implies.
        wanted: usize,
    },
    /// An operand whose rows or columns do not fit the operation: a mistake in the model's own code.
    #[error("{operation}: {operand} is {got:?} (rows, columns), wanted {wanted:?} or more rows")]
    OperandShape {
        /// The operation.
        operation: &'static str,
        /// Which of its operands.
        operand: &'static str,
        /// Its rows and columns.
        got: (usize, usize),
        /// The rows that the step has, and the columns that the other operands imply.
        wanted: (usize, usize),
    },
    /// An operand of a ring product that has other values than its rows and columns.
    #[error("{operation}: {operand} has {got} values, wanted {wanted:?} (rows, columns)")]
    OperandLength {
        /// The operation.
        operation: &'static str,
        /// Which of its operands.
        operand: &'static str,
        /// How many values it has.
        got: usize,
        /// The rows and columns it must have.
        wanted: (usize, usize),
    },
    /// A page that was copied out of another kind of cache, or that was changed on the way.
    #[error("a page of another cache, or a damaged one: fingerprint {got:016x}, wanted {wanted:016x}")]
    PageCopy {
        /// The fingerprint that it came with.
        got: u64,
        /// What its bytes would have in this cache.
        wanted: u64,
    },
    /// A batch wants the token sampled into a slot into which nothing was sampled yet.
    #[error("batch: no token was sampled into slot {slot}")]
    NothingSampled {
        /// The sequence slot.
        slot: u32,
    },
    /// The threads of the backend could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// How many were wanted.
        threads: usize,
        /// What the operating system said.
        reason: std::io::Error,
    },
    /// A device that was asked for and cannot be used: no such card, no driver, a library that is missing or too old.
    #[error("device {device} is not available: {reason}")]
    DeviceUnavailable {
        /// The device, as the user names it.
        device: String,
        /// What is missing, and what to do about it.
        reason: String,
    },
    /// A call to the device's driver failed.
    #[error("{backend}: {operation} failed: {reason}")]
    Device {
        /// The backend's name.
        backend: &'static str,
        /// The operation or driver call.
        operation: &'static str,
        /// What the driver said.
        reason: String,
    },
    /// `begin` was called with every step slot in flight.
    #[error("all {slots} step slots are in flight; finish one first")]
    StepsInFlight {
        /// How many slots there are.
        slots: usize,
    },
    /// The device does not answer any more; nothing on it can be trusted.
    #[error("{backend} is lost: {reason}")]
    DeviceLost {
        /// The backend's name.
        backend: &'static str,
        /// What its driver said.
        reason: String,
    },
    /// Somebody who computes for us answered what cannot be right. Nothing of theirs can be trusted.
    #[error("{backend}: {reason}")]
    Integrity {
        /// The backend's name.
        backend: &'static str,
        /// Who answered what.
        reason: String,
    },
    /// A model that cannot be computed exactly by a backend that promises it.
    #[error("{reason}")]
    Inexact {
        /// Which weight, and why.
        reason: String,
    },
    /// NaN or infinity where a finite number must be.
    #[error("numeric fault: {place} holds {value}")]
    NumericFault {
        /// Where it was seen.
        place: String,
        /// The offending value.
        value: f32,
    },
    /// A sampling parameter outside what it can mean.
    #[error("{name} is {value}, must be {wanted}")]
    SampleParameter {
        /// The parameter, as the user names it.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        wanted: &'static str,
    },
}

/// `f32, f16 or fp8`.
fn names(dtypes: &[KvDType]) -> String {
    let names: Vec<String> = dtypes.iter().map(KvDType::to_string).collect();
    match &names[..] {
        [before @ .., last] if !before.is_empty() => format!("{} or {last}", before.join(", ")),
        _ => names.concat(),
    }
}
