//! The instruction sets that kernels are written for.

/// A level of vector instructions. Levels can be forced, so that conformance runs each one that the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Simd {
    /// Plain Rust: the specification.
    Scalar,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with BW, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same, with tiles of bytes (AMX) where many tokens are computed.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON, which every 64-bit ARM processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with products of four bytes (dotprod).
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// NEON with products of matrices of bytes (i8mm), and dotprod.
    #[cfg(target_arch = "aarch64")]
    I8mm,
}

impl Simd {
    const ALL: &[Simd] = &[
        Simd::Scalar,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512,
        #[cfg(target_arch = "x86_64")]
        Simd::Amx,
        #[cfg(target_arch = "aarch64")]
        Simd::Neon,
        #[cfg(target_arch = "aarch64")]
        Simd::Dotprod,
        #[cfg(target_arch = "aarch64")]
        Simd::I8mm,
    ];

    /// The best level of this machine.
    pub fn detect() -> Simd {
        Simd::present().last().unwrap_or(Simd::Scalar)
    }

    /// Every level that this machine can run, slowest first.
    pub fn present() -> impl Iterator<Item = Simd> {
        Simd::ALL.iter().copied().filter(|simd| simd.is_present())
    }

    /// The name that people read and type.
    pub fn name(self) -> &'static str {
        match self {
            Simd::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Simd::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Simd::Dotprod => "dotprod",
            #[cfg(target_arch = "aarch64")]
            Simd::I8mm => "i8mm",
        }
    }

    /// Panics if the machine lacks this level: what makes it sound to hand out functions compiled for it.
    pub(crate) fn assert_present(self) {
        assert!(self.is_present(), "this machine has no {}", self.name());
    }

    fn is_present(self) -> bool {
        match self {
            Simd::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => {
                Simd::Avx2.is_present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Simd::Amx => Simd::Avx512.is_present() && super::tiles::present(),
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Simd::Dotprod => Simd::Neon.is_present() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Simd::I8mm => Simd::Dotprod.is_present() && std::arch::is_aarch64_feature_detected!("i8mm"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_level_is_the_last_that_is_there() {
        let present: Vec<_> = Simd::present().collect();
        assert_eq!(present[0], Simd::Scalar);
        assert_eq!(present.last(), Some(&Simd::detect()));
        present.iter().for_each(|simd| simd.assert_present());
        println!("best level: {}", Simd::detect().name());
    }
}
