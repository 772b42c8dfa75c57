// RoPE.
#pragma once
#include "prelude.cuh"

struct Rotation {
    const float* frequencies;
    int pairs;
    float magnitude;
};

// Sine and cosine. The angle is a product in f32, as in the reference implementations.
DEVICE float2 rotation_by(const Rotation& rope, float position, float frequency) {
    float sine, cosine;
    sincosf(__fmul_rn(position, frequency), &sine, &cosine);
    return make_float2(__fmul_rn(sine, rope.magnitude), __fmul_rn(cosine, rope.magnitude));
}
// For pair i.
DEVICE float2 rotation_of(const Rotation& rope, float position, int i) { return rotation_by(rope, position, rope.frequencies[i]); }
// Pair i is the values i and i + pairs of a head. Rounded once, so that every caller gets the same bits.
DEVICE float2 rotated(float2 angle, float a, float b) {
    return make_float2(__fmaf_rn(a, angle.y, -__fmul_rn(b, angle.x)), __fmaf_rn(b, angle.y, __fmul_rn(a, angle.x)));
}
