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
    /// NEON, which every 64-bit ARM processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Simd {
    const ALL: &[Simd] = &[
        Simd::Scalar,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx512,
        #[cfg(target_arch = "aarch64")]
        Simd::Neon,
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
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => "neon",
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
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => std::arch::is_aarch64_feature_detected!("neon"),
        }
    }
}
