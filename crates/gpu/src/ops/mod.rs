//! Operations: check shapes, choose a kernel, size its grid, launch. A file here for a file in `kernels/`.

mod attention;
mod attention_f32;
mod experts;
mod fuse;
mod gemm;
mod gemm_few;
mod gemv;
mod latent;
mod low_rank;
mod products;
mod recurrence;
mod rows;
mod sample;

#[cfg(test)]
pub(crate) use attention::{HeadGroup, program as attention_program, storage, wgmma_program};
#[cfg(test)]
pub(crate) use experts::programs as expert_programs;
pub(crate) use fuse::Fuse;
#[cfg(test)]
pub(crate) use gemm::every_program as every_gemm;
#[cfg(test)]
pub(crate) use gemm_few::programs as few_programs;
pub(crate) use gemv::{Call, Scratch, slices, steps};
#[cfg(test)]
pub(crate) use gemv::{form_floats8_program, form_program, program_one, programs_several};
#[cfg(test)]
pub(crate) use latent::head_programs;
pub(crate) use latent::programs as latent_programs;
#[cfg(test)]
pub(crate) use products::RowCounts;

pub(crate) use recurrence::program as recurrence_program;
pub(crate) use sample::program as sample_program;

use crate::abi::{Constant, Layout};

/// What the files here share with theirs in `kernels/`.
pub(crate) const LAYOUTS: [&[Layout]; 10] = [
    attention::LAYOUTS,
    attention_f32::LAYOUTS,
    experts::LAYOUTS,
    gemm::LAYOUTS,
    gemm_few::LAYOUTS,
    gemv::LAYOUTS,
    latent::LAYOUTS,
    low_rank::LAYOUTS,
    recurrence::LAYOUTS,
    rows::LAYOUTS,
];
pub(crate) const CONSTANTS: [&[Constant]; 9] = [
    attention::CONSTANTS,
    attention_f32::CONSTANTS,
    experts::CONSTANTS,
    gemv::CONSTANTS,
    latent::CONSTANTS,
    low_rank::CONSTANTS,
    recurrence::CONSTANTS,
    rows::CONSTANTS,
    sample::CONSTANTS,
];

/// What tests of shapes have in common.
#[cfg(test)]
pub(crate) mod shapes {
    use crate::driver::Abilities;
    use crate::layout::{Format, PLANES};
    use crate::memory::WeightPart;

    /// An H200's.
    pub(crate) const HOPPER: Abilities = Abilities {
        warp: 32,
        multiprocessors: 132,
        shared_max: 219 << 10,
        wgmma: true,
        bulk_copies: true,
        clusters_max: 16,
        early_start: true,
    };

    pub(crate) fn part(format: Format, (rows, columns): (usize, usize)) -> WeightPart {
        WeightPart { format, first: 0, rows, columns, planes: [0; PLANES], slices: None }
    }
}
