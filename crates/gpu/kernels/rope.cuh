// Rotation of heads.
#pragma once
#include "prelude.cuh"

struct Rotation {
    const float* frequencies;
    int pairs;
    float magnitude;
};

// Sine and cosine. The angle is a product in f32, as the reference implementations have it.
DEVICE float2 turn_by(const Rotation& rope, float position, float frequency) {
    float sine, cosine;
    sincosf(__fmul_rn(position, frequency), &sine, &cosine);
    return make_float2(__fmul_rn(sine, rope.magnitude), __fmul_rn(cosine, rope.magnitude));
}
// For pair i.
DEVICE float2 turn_of(const Rotation& rope, float position, int i) { return turn_by(rope, position, rope.frequencies[i]); }
// Pair i is the values i and i + pairs of a head. Written out, so that every caller rounds alike.
DEVICE float2 turned(float2 turn, float a, float b) {
    return make_float2(__fmaf_rn(a, turn.y, -__fmul_rn(b, turn.x)), __fmaf_rn(b, turn.y, __fmul_rn(a, turn.x)));
}
