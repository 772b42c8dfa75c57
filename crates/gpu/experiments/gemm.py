"""Tensor-core products before they are designed: do tile widths and instructions give the same bits, and how do tiles that fill
the card compare with cuBLAS? `python3 gemm.py` on a machine with nvcc, PyTorch and a Hopper card. The kernel is the plain form of
a warp-specialised one: one warpgroup asks the copy engine for tiles, two multiply them (wgmma), S stages deep."""

import ctypes
import statistics
import subprocess
import tempfile

import torch

WIDTHS = [8, 16, 32, 64, 128, 144, 192, 224, 256]
# (rows of activations, rows of weights, stages) of a tile: for bits, then for speed.
NARROW = [(128, n, 4) for n in (8, 16, 32, 64)]
TILES = [(128, 128, 5), (128, 192, 5), (128, 224, 4), (128, 256, 4), (256, 144, 4)]


def wgmma(n):
    count = n // 2
    regs = ",".join(f"%{i}" for i in range(count))
    outs = ",".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
template <> struct Wgmma<{n}> {{
    static __device__ __forceinline__ void go(float (&d)[{count}], uint64_t a, uint64_t b, int adds) {{
        asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{regs}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;}}"
            : {outs} : "l"(a), "l"(b), "r"(adds));
    }}
}};"""


SOURCE = r"""
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>

template <int N> struct Wgmma;
@WGMMA@

__device__ __forceinline__ uint32_t at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// Rows of 128 bytes, swizzled, eight of them 1024 bytes apart from the next eight.
__device__ __forceinline__ uint64_t tile(uint32_t start) {
    return (uint64_t)((start & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
    asm volatile("{.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone: }"
                 ::"r"(at(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(at(barrier)), "r"(x), "r"(y) : "memory");
}

template <int BM, int BN, int S> __global__ __launch_bounds__(384, 1)
void gemm(const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, void* out, int M, int N, int K, int f32) {
    extern __shared__ uint8_t room[];
    __shared__ uint64_t full[S], empty[S];
    constexpr int A = BM * 128, STAGE = (BM + BN) * 128, MT = BM / 128;
    const uint32_t base = (at(room) + 1023) & ~1023u;
    const int group = threadIdx.x / 128, tm = (M + BM - 1) / BM, tiles = tm * ((N + BN - 1) / BN), steps = K / 64;
    if (threadIdx.x == 0) {
        for (int s = 0; s < S; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(full + s)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(at(empty + s)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int s = 0, parity = 0;
    auto next = [&] { if (++s == S) { s = 0; parity ^= 1; } };
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
                for (int k = 0; k < steps; k++) {
                    wait(empty + s, parity ^ 1);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(full + s)), "r"(STAGE) : "memory");
                    load(base + s * STAGE, &ma, full + s, k * 64, t % tm * BM);
                    load(base + s * STAGE + A, &mb, full + s, k * 64, t / tm * BN);
                    next();
                }
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const bool elected = thread == 0;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        float d[MT][BN / 2];
        int last = -1;
        for (int k = 0; k < steps; k++) {
            wait(full + s, parity);
            const uint32_t a = base + s * STAGE + (group - 1) * MT * 64 * 128, b = base + s * STAGE + A;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int kk = 0; kk < 4; kk++)
#pragma unroll
                for (int mt = 0; mt < MT; mt++) Wgmma<BN>::go(d[mt], tile(a + mt * 8192 + kk * 32), tile(b + kk * 32), k + kk > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (last >= 0 && elected) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(empty + last)) : "memory");
            last = s;
            next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (elected) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(empty + last)) : "memory");
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int i = 0; i < BN / 2; i += 2) {
                const long row = t % tm * BM + ((group - 1) * MT + mt) * 64 + warp * 16 + lane / 4 + (i % 4 ? 8 : 0);
                const int column = t / tm * BN + i / 4 * 8 + lane % 4 * 2;
                if (row >= M || column >= N) continue;
                if (f32) *(float2*)((float*)out + row * N + column) = make_float2(d[mt][i], d[mt][i + 1]);
                else *(__nv_bfloat162*)((__nv_bfloat16*)out + row * N + column) = __floats2bfloat162_rn(d[mt][i], d[mt][i + 1]);
            }
        }
    }
}

// The same sums by the older instruction: a warp for 16 x 8, k in the same order.
__global__ void warps(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out, int N, int K) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const uint32_t* x = (const uint32_t*)(a + (long)(blockIdx.y * 16 + g) * K) + t;
    const uint32_t* w = (const uint32_t*)(b + (long)(blockIdx.x * 8 + g) * K) + t;
    float d[4] = {0, 0, 0, 0};
    for (int k = 0; k < K / 2; k += 8)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(x[k]), "r"(x[k + 4 * K]), "r"(x[k + 4]), "r"(x[k + 4 * K + 4]), "r"(w[k]), "r"(w[k + 4]));
    float* to = out + (long)(blockIdx.y * 16 + g) * N + blockIdx.x * 8 + t * 2;
    to[0] = d[0]; to[1] = d[1]; to[8L * N] = d[2]; to[8L * N + 1] = d[3];
}

static CUtensorMap map(const void* from, int rows, int K, int box) {
    typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
        const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode = (Encode)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled");
    CUtensorMap map;
    cuuint64_t size[2] = {(cuuint64_t)K, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)K * 2};
    cuuint32_t boxes[2] = {64, (cuuint32_t)box}, ones[2] = {1, 1};
    CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void*)from, size, stride, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) fprintf(stderr, "no map: %d\n", r);
    return map;
}
template <int BM, int BN, int S> static int go(const void* a, const void* b, void* out, int M, int N, int K, int f32) {
    const int bytes = S * (BM + BN) * 128 + 1024;
    cudaFuncSetAttribute(gemm<BM, BN, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    gemm<BM, BN, S><<<132, 384, bytes>>>(map(a, M, K, BM), map(b, N, K, BN), out, M, N, K, f32);
    return cudaGetLastError();
}
extern "C" int run(int bm, int bn, const void* a, const void* b, void* out, int M, int N, int K, int f32) {
@CASES@
    if (bm == 16) { warps<<<dim3(N / 8, M / 16), 32>>>((const __nv_bfloat16*)a, (const __nv_bfloat16*)b, (float*)out, N, K); return cudaGetLastError(); }
    return -1;
}
"""


def build():
    cases = "\n".join(
        f"    if (bm == {m} && bn == {n}) return go<{m}, {n}, {s}>(a, b, out, M, N, K, f32);" for m, n, s in NARROW + TILES
    )
    text = SOURCE.replace("@WGMMA@", "".join(map(wgmma, WIDTHS))).replace("@CASES@", cases)
    folder = tempfile.mkdtemp()
    open(f"{folder}/gemm.cu", "w").write(text)
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
    done = subprocess.run(["nvcc", *flags, f"{folder}/gemm.cu", "-o", f"{folder}/gemm.so"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    spilled = [line.strip() for line in done.stderr.splitlines() if "spill" in line and " 0 bytes spill stores" not in line]
    print("spilled:", spilled or "nothing")
    return ctypes.CDLL(f"{folder}/gemm.so")


def main():
    lib = build()
    pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())

    def run(tile, a, b, out, f32):
        code = lib.run(tile[0], tile[1], pointer(a), pointer(b), pointer(out), a.shape[0], b.shape[0], a.shape[1], f32)
        assert code == 0, (tile, code)

    draw = lambda rows, columns: torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    # Bits: every width and both instructions.
    m, n, k = 256, 4608, 3584
    a, b = draw(m, k), draw(n, k)
    wanted = a.double() @ b.double().T
    results = {}
    for tile in [(16, 8), *NARROW, *TILES]:
        out = torch.full((m, n), float("nan"), device="cuda")
        run(tile, a, b, out, 1)
        torch.cuda.synchronize()
        error = ((out.double() - wanted).norm() / wanted.norm()).item()
        results[tile[:2]] = out
        print(f"tile {tile[0]:>3} x {tile[1]:<3} error {error:.1e}")
    first = results[(128, 256)]
    for tile, out in results.items():
        name = "mma.sync" if tile[0] == 16 else f"wgmma {tile[0]} x {tile[1]}"
        same = (out.view(torch.int32) == first.view(torch.int32)).float().mean().item()
        print(f"{name:<16} equal bits with wgmma 128 x 256: {100 * same:.3f} %")
    # One row of activations among others: the same tile, other neighbours.
    alone = torch.full((128, n), float("nan"), device="cuda")
    few = torch.zeros(128, k, device="cuda", dtype=torch.bfloat16)
    few[77] = a[3]
    run((128, 256), few, b, alone, 1)
    torch.cuda.synchronize()
    print("a row alone has the same bits:", torch.equal(alone[77].view(torch.int32), first[3].view(torch.int32)))

    # Speed: single shots in turn over three sets of weights, so that no cache holds them.
    print(f"\n{'2048 x':<18}" + "".join(f"{f'{t[0]}x{t[1]}':>10}" for t in TILES) + f"{'cuBLAS':>10}   TFLOP/s, medians of 15")
    total = {}
    for name, n, k in [("qkv", 4608, 3584), ("output", 3584, 3584), ("gate+up", 37888, 3584), ("down", 3584, 18944)]:
        a, bs = draw(2048, k), [draw(n, k) for _ in range(3)]
        out = torch.empty(2048, n, device="cuda", dtype=torch.bfloat16)
        row = []
        ways = [(t, lambda b, t=t: run(t, a, b, out, 0)) for t in TILES]
        ways.append(("cuBLAS", lambda b: torch.matmul(a, b.T, out=out)))
        for way, body in ways:
            times = []
            for i in range(18):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(200_000)
                start.record()
                body(bs[i % 3])
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            ms = statistics.median(times[3:])
            total.setdefault(str(way), []).append(ms)
            row.append(2 * 2048 * n * k / ms / 1e9)
        print(f"{name:<18}" + "".join(f"{rate:>10.0f}" for rate in row))
    best = sum(min(total[str(t)][i] for t in TILES) for i in range(4))
    print(f"a layer: best tiles {best:.3f} ms, cuBLAS {sum(total['cuBLAS']):.3f} ms")


if __name__ == "__main__":
    main()
