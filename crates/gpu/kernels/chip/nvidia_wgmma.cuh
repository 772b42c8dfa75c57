// Hopper's wgmma: 64 rows x N columns x 16 (of 8-bit floats 32), asynchronous, by a warpgroup (four warps). Rows come from registers, each
// warp's 16 as in `mma_f16`, columns from shared memory, each column's values contiguous. It gives the same bits as
// `mma_f16` over the same order of values. Kernels that include this are compiled where HAS_WGMMA is.
#pragma once
#include "prelude.cuh"

#if HAS_WGMMA
// The descriptor of columns of 64 values (128 bytes) in the 128-byte swizzle: piece c (16 bytes) of column n lies at
// piece c ^ n % 8. Eight columns are 1024 bytes. `start` advances by 32 bytes for the next 16 values.
DEVICE u64 wgmma_descriptor(u32 start) { return (u64)((start & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// The same in two steps: the lower half, to which an advance in units of 16 bytes is added; then the whole. For a
// transposed operand (rows of memory are k) `start` advances by 2048 bytes for the next 16 values, and columns after
// the first 64 lie `apart` bytes behind.
DEVICE u32 wgmma_descriptor_low(u32 start) { return (start & 0x3ffff) >> 4 | 1 << 16; }
DEVICE u64 wgmma_descriptor_of(u32 low) { return low | 64ull << 32 | 1ull << 62; }
DEVICE u64 wgmma_descriptor_strided(u32 low, u32 apart) { return wgmma_descriptor_of((low & 0xffff) | apart >> 4 << 16); }
// Before the first wgmma that reads or adds to registers written by other instructions.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are in flight.
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

#define OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_16(d, i) OUT_4(d, i), OUT_4(d, i + 4), OUT_4(d, i + 8), OUT_4(d, i + 12)
#define OUT_32(d, i) OUT_16(d, i), OUT_16(d, i + 16)
#define OUT_64(d, i) OUT_32(d, i), OUT_32(d, i + 32)
#define REGISTERS_4 "%0,%1,%2,%3"
#define REGISTERS_8 REGISTERS_4 ",%4,%5,%6,%7"
#define REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_32 REGISTERS_16 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_40 REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define REGISTERS_48 REGISTERS_32 "," "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGISTERS_64 REGISTERS_48 "," "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_80 REGISTERS_64 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define REGISTERS_96 REGISTERS_80 "," "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_112 REGISTERS_96 "," "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_128 REGISTERS_112 "," "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a * columns, with `adds` d += a * columns: in f16; and in 8-bit floats (e4m3), whose sums within an instruction, and
// with what is there, are rounded towards zero at about 2^-13 of the largest term.
template <int N> struct Wgmma;
template <int N> struct WgmmaFloats8;
#define WGMMA(OF, TYPES, TRANSPOSED, N, REGISTERS, A0, A1, A2, A3, COLUMNS, ADDS, ...)                                       \
    template <> struct OF<N> {                                                                                               \
        DEVICE_METHOD static void multiply(float (&d)[N / 2], const u32 a[4], u64 columns, int adds) {                       \
            asm volatile("{.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" REGISTERS "}, {" A0 "," A1 "," A2 "," A3          \
                         "}, " COLUMNS ", adds, 1, 1" TRANSPOSED ";}"                                                        \
                         : __VA_ARGS__                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(adds));                             \
        }                                                                                                                    \
    };
#define WGMMAS(...)                                                                                                          \
    WGMMA(__VA_ARGS__, 8, REGISTERS_4, "%4", "%5", "%6", "%7", "%8", "%9", OUT_4(d, 0))                                      \
    WGMMA(__VA_ARGS__, 16, REGISTERS_8, "%8", "%9", "%10", "%11", "%12", "%13", OUT_4(d, 0), OUT_4(d, 4))                    \
    WGMMA(__VA_ARGS__, 32, REGISTERS_16, "%16", "%17", "%18", "%19", "%20", "%21", OUT_16(d, 0))                             \
    WGMMA(__VA_ARGS__, 64, REGISTERS_32, "%32", "%33", "%34", "%35", "%36", "%37", OUT_32(d, 0))                             \
    WGMMA(__VA_ARGS__, 80, REGISTERS_40, "%40", "%41", "%42", "%43", "%44", "%45", OUT_32(d, 0), OUT_4(d, 32), OUT_4(d, 36))  \
    WGMMA(__VA_ARGS__, 96, REGISTERS_48, "%48", "%49", "%50", "%51", "%52", "%53", OUT_32(d, 0), OUT_16(d, 32))              \
    WGMMA(__VA_ARGS__, 128, REGISTERS_64, "%64", "%65", "%66", "%67", "%68", "%69", OUT_64(d, 0))                            \
    WGMMA(__VA_ARGS__, 160, REGISTERS_80, "%80", "%81", "%82", "%83", "%84", "%85", OUT_64(d, 0), OUT_16(d, 64))             \
    WGMMA(__VA_ARGS__, 192, REGISTERS_96, "%96", "%97", "%98", "%99", "%100", "%101", OUT_64(d, 0), OUT_32(d, 64))           \
    WGMMA(__VA_ARGS__, 224, REGISTERS_112, "%112", "%113", "%114", "%115", "%116", "%117", OUT_64(d, 0), OUT_32(d, 64), OUT_16(d, 96)) \
    WGMMA(__VA_ARGS__, 256, REGISTERS_128, "%128", "%129", "%130", "%131", "%132", "%133", OUT_64(d, 0), OUT_64(d, 64))
WGMMAS(Wgmma, "k16.f32.f16.f16", ", 0")
WGMMAS(WgmmaFloats8, "k32.f32.e4m3.e4m3", "")

// Keeps the compiler from reading accumulators before `wgmma_wait`.
template <int N> DEVICE void wgmma_fence_operands(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// d += a * b, 64 rows and 128 columns, both from shared memory.
DEVICE void wgmma_m64n128_shared(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" REGISTERS_64 "}, %64, %65, 1, 1, 1, 0, 0;\n"
                 : OUT_64(d, 0)
                 : "l"(a), "l"(b));
}

// For f16 and bf16: 64 rows from shared memory, laid out as columns are; and transposed columns, optionally with eight
// more behind the last (wgmma_descriptor_strided).
template <int N, bool BF16> struct WgmmaOf;
#define WGMMA_OF(N, MORE, BF16, TYPE)                                                                                        \
    template <> struct WgmmaOf<N, BF16> {                                                                                    \
        DEVICE_METHOD static void multiply_shared(float (&d)[N / 2], u64 rows, u64 columns, int adds) {                      \
            asm volatile("{.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS_32                   \
                         "}, %32, %33, adds, 1, 1, 0, 0;}"                                                                   \
                         : OUT_32(d, 0)                                                                                      \
                         : "l"(rows), "l"(columns), "r"(adds));                                                              \
        }                                                                                                                    \
        DEVICE_METHOD static void multiply_transposed(float (&d)[N / 2], const u32 a[4], u64 columns, int adds) {                \
            asm volatile("{.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS_32                   \
                         "}, {%32,%33,%34,%35}, %36, adds, 1, 1, 1;}"                                                        \
                         : OUT_32(d, 0)                                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(adds));                             \
        }                                                                                                                    \
        DEVICE_METHOD static void multiply_transposed_more(float (&d)[N / 2], float (&more)[4], const u32 a[4], u64 columns, int adds) { \
            asm volatile("{.reg .pred adds;\nsetp.ne.b32 adds, %41, 0;\n"                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #MORE "k16.f32." TYPE "." TYPE " {" REGISTERS_32                \
                         ",%32,%33,%34,%35}, {%36,%37,%38,%39}, %40, adds, 1, 1, 1;}"                                        \
                         : OUT_32(d, 0), OUT_4(more, 0)                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(adds));                             \
        }                                                                                                                    \
    };
WGMMA_OF(64, 72, false, "f16")
WGMMA_OF(64, 72, true, "bf16")
#endif
