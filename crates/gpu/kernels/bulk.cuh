// Copies by Hopper's copy engine into rings of shared memory: who copies and who reads tell each other by barriers there.
#pragma once
#include "prelude.cuh"

#if __CUDA_ARCH__ >= 900
DEVICE u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(barrier)), "r"(count) : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}"
                 ::"r"(shared_at(barrier)), "r"(parity) : "memory");
}
DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(barrier)) : "memory");
}
// Arrives, and expects so many bytes to be copied.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(u32 to, const u8* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(shared_at(barrier)) : "memory");
}
// The same for what is read once: it leaves the cache before other things do.
DEVICE void copy_bulk_once(u32 to, const u8* from, u32 bytes, u64* barrier) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(shared_at(barrier)), "l"(policy) : "memory");
}
// All BLOCKS of a cluster get it, at the same place, and each one's barrier is told.
template <int BLOCKS> DEVICE void copy_bulk_to_all(u32 to, const u8* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(shared_at(barrier)), "h"((u16)((1 << BLOCKS) - 1)) : "memory");
}
// The same place in another block's shared memory; and that this thread has read what was there, and has nothing to show: with
// `release.cluster` every arrival would wait for all that the thread has written.
DEVICE u32 shared_of(const void* p, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_at(p)), "r"(rank));
    return there;
}
DEVICE void barrier_arrive_at(u32 barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// Another block's of the cluster.
DEVICE float4 load_from_block(const float4* at, int rank) {
    float4 v;
    asm volatile("{.reg .u32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(shared_at(at)), "r"(rank) : "memory");
    return v;
}
// One step of 16 rows; ONCE says whether nobody else reads it.
template <class Bytes, bool ONCE = false> DEVICE void copy_step(const Part& part, long step, u32 to, u64* barrier) {
    auto copy_bulk = [](u32 to, const u8* from, u32 bytes, u64* barrier) {
        if (ONCE) copy_bulk_once(to, from, bytes, barrier);
        else ::copy_bulk(to, from, bytes, barrier);
    };
    const int codes = Bytes::HIGH, high = Bytes::SCALES - Bytes::HIGH, scales = Bytes::MINS - Bytes::SCALES;
    const int mins = Bytes::BYTES - Bytes::MINS;
    copy_bulk(to, part.codes + step * codes, codes, barrier);
    if (high) copy_bulk(to + Bytes::HIGH, part.high + step * high, high, barrier);
    if (scales) copy_bulk(to + Bytes::SCALES, part.scales + step * scales, scales, barrier);
    if (mins) copy_bulk(to + Bytes::MINS, part.mins + step * mins, mins, barrier);
}

// The barriers of a ring: of each stage, that it is full, and that all who read it are done with it.
template <int STAGES> struct Barriers {
    u64 full[STAGES], empty[STAGES];
    DEVICE_METHOD void init(int readers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, readers);
        }
    }
};
// Before others use them, and before the copy engine does.
DEVICE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A place in a ring: which stage, and whether it has come round an odd number of times.
template <int STAGES> struct Turn {
    u32 stage = 0, parity = 0;
    DEVICE_METHOD void move() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
#endif
