//! Plain code compiled for several widths of vectors, the widest of which is chosen when it runs.

/// What is done. It has to be inlined whole, so that it is compiled anew for each width.
pub(crate) trait Work {
    /// What comes of it.
    type Result;

    /// Does it: `#[inline(always)]`, and so all that it calls.
    fn run(self) -> Self::Result;
}

/// Does `work` with the widest vectors that the machine has.
pub(crate) fn widest<W: Work>(work: W) -> W::Result {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the machine has what the function asks for.
            return unsafe { avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has what the function asks for.
            return unsafe { avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn avx512<W: Work>(work: W) -> W::Result {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<W: Work>(work: W) -> W::Result {
    work.run()
}
