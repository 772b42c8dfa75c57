// Copies by Hopper's copy engine into rings of shared memory: who copies and who reads tell each other by barriers there.
#pragma once
#include "prelude.cuh"

DEVICE void mbarrier_init(u64* barrier, int count) { mbarrier_init(shared_address(barrier), count); }
DEVICE void mbarrier_wait(u64* barrier, u32 parity) { mbarrier_wait(shared_address(barrier), parity); }
DEVICE void mbarrier_arrive(u64* barrier) { mbarrier_arrive(shared_address(barrier)); }
DEVICE void mbarrier_expect(u64* barrier, u32 bytes) { mbarrier_expect(shared_address(barrier), bytes); }

// One step of 16 rows; ONCE says whether nobody else reads it.
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

// The barriers of a ring: of each stage, that it is full, and that all who read it are done with it.
template <int STAGES> struct Barriers {
    u64 full[STAGES], empty[STAGES];
    DEVICE_METHOD void init(int readers) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, readers);
        }
    }
};

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
