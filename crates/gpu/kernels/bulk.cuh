// Rings in shared memory that the copy engine (TMA) fills: producers and consumers synchronise through mbarriers, one
// pair for each stage. Hopper and later.
#pragma once
#include "prelude.cuh"

DEVICE void mbarrier_init(u64* barrier, int count) { mbarrier_init(shared_address(barrier), count); }
DEVICE void mbarrier_wait(u64* barrier, u32 parity) { mbarrier_wait(shared_address(barrier), parity); }
DEVICE void mbarrier_arrive(u64* barrier) { mbarrier_arrive(shared_address(barrier)); }
DEVICE void mbarrier_expect(u64* barrier, u32 bytes) { mbarrier_expect(shared_address(barrier), bytes); }

// Copies one step of 16 rows of a weight; ONCE: no other block reads it.
template <class Bytes, bool ONCE = false> DEVICE void copy_step(const Part& part, long step, u32 to, u64* barrier) {
    auto copy_bulk = [](u32 to, const u8* from, u32 bytes, u64* barrier) {
        if (ONCE) copy_bulk_streaming(to, from, bytes, shared_address(barrier));
        else ::copy_bulk(to, from, bytes, shared_address(barrier));
    };
    const int codes = Bytes::HIGH, high = Bytes::SCALES - Bytes::HIGH, scales = Bytes::MINS - Bytes::SCALES;
    const int mins = Bytes::BYTES - Bytes::MINS;
    copy_bulk(to, part.codes + step * codes, codes, barrier);
    if (high) copy_bulk(to + Bytes::HIGH, part.high + step * high, high, barrier);
    if (scales) copy_bulk(to + Bytes::SCALES, part.scales + step * scales, scales, barrier);
    if (mins) copy_bulk(to + Bytes::MINS, part.mins + step * mins, mins, barrier);
}

// For each stage of a ring: that it is full, and that all consumers have released it.
template <int STAGES> struct Barriers {
    u64 full[STAGES], empty[STAGES];
    DEVICE_METHOD void init(int readers) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, readers);
        }
    }
};

// The next stage of a ring to fill or to read, and the parity of the phase to wait for.
template <int STAGES> struct RingPosition {
    u32 stage = 0, parity = 0;
    DEVICE_METHOD void move() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
