"""Writes the fixtures of 8-bit floats: what the `ml_dtypes` package makes of their bits, and of numbers.

Run with Python, numpy and ml_dtypes:  python crates/compute/tests/quant/make_float8.py
The output is deterministic. All little-endian:

float8.json       "values": what each of the 256 codes stands for, as the bits of an f32 (all ones, NaN in ml_dtypes, is
                  null); "powers": the same of the 256 exponents; "rounded": pairs of the bits of an f32 and its nearest
                  code, what lies beyond 448 taken as 448.
mxfp8.bin         laid out as make_blocks.py says, without units and products: random blocks, then every code beside exponents
                  at the ends of their range.
fp8_128.bin       the same of runs of 128 codes behind an f32 scale.
mxfp8_rows.bin    the f32 rows of ../packed/quantize.bin as blocks: the smallest power of two whose 448-fold no value exceeds,
                  then the nearest codes.
"""

import json
from pathlib import Path

import numpy as np
from ml_dtypes import float8_e4m3fn, float8_e8m0fnu

HERE = Path(__file__).parent


def values_of(codes):
    """All ones are 480: the number that follows 448."""
    values = codes.view(float8_e4m3fn).astype(np.float32)
    ones = codes & 127 == 127
    return np.where(ones, np.where(codes > 127, np.float32(-480), np.float32(480)), values)


def codes_of(values):
    return np.clip(values, -448, 448).astype(float8_e4m3fn).view(np.uint8)


def numbers(rng):
    """Every value, what lies half-way between two neighbours and the f32 beside that, and random ones of every size."""
    values = np.arange(127, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    random = np.exp2(rng.uniform(-12, 12, 200)).astype(np.float32)
    some = np.concatenate([values, middles, *beside, random, np.float32([0, 1e-30, 449, 464, 1e30])])
    return np.concatenate([some, -some])


def blocks_of(exponents, codes):
    return np.concatenate([exponents.reshape(-1, 1), codes], axis=1)


def quantized(rows):
    most = np.abs(rows).max(axis=1)
    fraction, exponent = np.frexp(most)  # most = fraction * 2^exponent, fraction in [1/2, 1)
    power = np.where(most > 0, np.maximum(exponent - 9 + (fraction > 0.875), -126), -126)
    codes = codes_of((rows / np.exp2(power.astype(np.float64))[:, None]).astype(np.float32))
    return blocks_of((power + 127).astype(np.uint8), codes)


def main():
    rng = np.random.default_rng(20261116)
    every = np.arange(256, dtype=np.uint8)
    values = every.view(float8_e4m3fn).astype(np.float32)
    powers = every.view(float8_e8m0fnu).astype(np.float32)
    some = numbers(rng)
    listed = lambda floats: [None if np.isnan(x) else int(x.view(np.uint32)) for x in floats]
    rounded = [[int(bits), int(code)] for bits, code in zip(some.view(np.uint32), codes_of(some))]
    text = json.dumps({"values": listed(values), "powers": listed(powers), "rounded": rounded})
    (HERE / "float8.json").write_text(text + "\n")

    ordinary = rng.integers(100, 140, 64, dtype=np.uint8)
    blocks = [blocks_of(ordinary, rng.integers(0, 256, (64, 32), dtype=np.uint8))]
    for exponent in (0, 1, 2, 117, 127, 246, 247, 254, 255):
        blocks.append(blocks_of(np.full(8, exponent, np.uint8), every.reshape(8, 32)))
    blocks = np.concatenate(blocks)
    with np.errstate(over="ignore"):
        expanded = blocks[:, :1].view(float8_e8m0fnu).astype(np.float32) * values_of(blocks[:, 1:])
    with open(HERE / "mxfp8.bin", "wb") as file:
        file.write(np.array([0, 0, len(blocks)], "<u4").tobytes() + blocks.tobytes())
        file.write(expanded.astype("<f4").tobytes())

    # Random blocks, every code beside scales of several sizes, and what no file has.
    rng = np.random.default_rng(128)
    scales = np.concatenate([rng.uniform(-1e-2, 1e-2, 20), [1.0, 2.0**-126, 2.0**-140, 3e38, 0.0, np.inf, np.nan]]).astype("<f4")
    codes = np.concatenate([rng.integers(0, 256, (20, 128), dtype=np.uint8), every.reshape(2, 128).repeat(4, 0)[: len(scales) - 20]])
    with np.errstate(over="ignore", invalid="ignore"):
        expanded = scales[:, None] * values_of(codes)
    blocks = np.concatenate([scales.view(np.uint8).reshape(-1, 4), codes], axis=1)
    with open(HERE / "fp8_128.bin", "wb") as file:
        file.write(np.array([0, 0, len(blocks)], "<u4").tobytes() + blocks.tobytes())
        file.write(expanded.astype("<f4").tobytes())

    rows = np.frombuffer((HERE / "../packed/quantize.bin").read_bytes()[: 16 * 1024 * 4], "<f4")
    (HERE / "mxfp8_rows.bin").write_bytes(quantized(rows.reshape(-1, 32)).tobytes())


if __name__ == "__main__":
    main()
