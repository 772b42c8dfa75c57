// Activation functions, value by value.
#pragma once
#include "prelude.cuh"

// By the fast units: a product with many rows ends by it, and nothing else of it is as long. Relative errors are below
// 2^-20 where |x| < 16; the same bits wherever it is used.
DEVICE float silu(float x) {
    const float power = exp2_approx(__fmul_rn(x, -1.44269504f));
    return __fmul_rn(x, reciprocal_approx(__fadd_rn(1.0f, power)));
}
// x times the probability that a standard normal number is less.
DEVICE float gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }
// Its approximation: x / 2 * (1 + tanh(u)) is x / (1 + e^(-2u)).
DEVICE float gelu_tanh(float x) { return __fdiv_rn(x, 1.0f + expf(-1.5957691f * (x + 0.044715f * x * x * x))); }
DEVICE float relu_squared(float x) { return x < 0.0f ? 0.0f : __fmul_rn(x, x); }
DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE float soft_cap(float x, float cap) { return __fmul_rn(cap, tanhf(__fdiv_rn(x, cap))); }

// Above zero p.x x^2 + p.z x; else p.y (e^min(x, p.w) - 1 - x) + p.z x. A NaN stays one.
DEVICE float xielu(float x, float4 p) {
    if (x > 0.0f) return __fadd_rn(__fmul_rn(__fmul_rn(p.x, x), x), __fmul_rn(p.z, x));
    const float least = x > p.w ? p.w : x;
    return __fadd_rn(__fmul_rn(__fadd_rn(expm1f(least), -x), p.y), __fmul_rn(p.z, x));
}

enum Function { SCALE, SOFT_CAP, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU };
// A function with one parameter has it first.
DEVICE float of_value(int function, float4 parameters, float value) {
    switch (function) {
        case SCALE: return __fmul_rn(value, parameters.x);
        case SOFT_CAP: return soft_cap(value, parameters.x);
        case GELU: return gelu(value);
        case GELU_TANH: return gelu_tanh(value);
        case RELU: return value < 0.0f ? 0.0f : value;
        case RELU_SQUARED: return relu_squared(value);
        case XIELU: return xielu(value, parameters);
    }
    return value;
}
