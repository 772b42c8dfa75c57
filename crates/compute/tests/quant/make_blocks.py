"""Writes the fixtures of the weight formats: blocks, and what the `gguf` package makes of them.

Run with Python, numpy and gguf:  python crates/compute/tests/quant/make_blocks.py
The output is deterministic. Layouts, all little-endian:

<dtype>.bin      u32 units, u32 rows, u32 blocks; the blocks; their values as gguf dequantises them (f32);
                 for each weight row and, within it, each activation row: product, sum of |terms| (f64).
                 First come `units` blocks whose scales make values whole, then `rows` rows of 1024 values (random blocks,
                 then extreme ones), then blocks with scales that are not finite.
activations.bin  3 rows of 1024 f32; the rows in blocks of 32: f32 scale, int16 values.

The products are made of gguf's values, in f64, and of activations quantised here: nothing of the project's own reading
of the bits goes into them.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = Path(__file__).parent
ROW = 1024
# For each format: byte offsets of its f16 scales, and the byte range of its packed sub-block scales.
# (IQ1_M scatters its scale, MXFP4 and NVFP4 have no f16: see `put_scales`.)
BLOCKS = {
    T.Q4_0: ([0], (0, 0)),
    T.Q4_1: ([0, 2], (0, 0)),
    T.Q5_0: ([0], (0, 0)),
    T.Q5_1: ([0, 2], (0, 0)),
    T.Q8_0: ([0], (0, 0)),
    T.Q4_K: ([0, 2], (4, 16)),
    T.Q5_K: ([0, 2], (4, 16)),
    T.Q6_K: ([208], (192, 208)),
    T.Q2_K: ([80, 82], (0, 16)),
    T.Q3_K: ([108], (96, 108)),
    T.IQ1_S: ([0], (0, 0)),
    T.IQ1_M: ([], (0, 0)),
    T.IQ2_XXS: ([0], (0, 0)),
    T.IQ2_XS: ([0], (66, 74)),
    T.IQ2_S: ([0], (74, 82)),
    T.IQ3_XXS: ([0], (0, 0)),
    T.IQ3_S: ([0], (106, 110)),
    T.IQ4_NL: ([0], (0, 0)),
    T.IQ4_XS: ([0], (2, 8)),
    T.TQ1_0: ([52], (0, 0)),
    T.TQ2_0: ([64], (0, 0)),
    T.MXFP4: ([], (0, 0)),
    T.NVFP4: ([], (0, 0)),
}
# Their values are eighths of the scale: with this one, whole numbers.
EIGHTHS = (T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S)
MAX, MIN_NORMAL, MAX_SUBNORMAL, MIN_SUBNORMAL = 65504.0, 2.0**-14, 1023 * 2.0**-24, 2.0**-24
EXTREME_SCALES = [0.0, -0.0, 1.0, -1.0, MAX, -MAX, MIN_NORMAL, MAX_SUBNORMAL, MIN_SUBNORMAL, -MIN_SUBNORMAL]


def put_scales(dtype, data, scales):
    """Writes a block's own scales, of which there are at most two."""
    for offset, scale in zip(BLOCKS[dtype][0], scales):
        data[offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    magnitude = min(abs(float(scales[0])), 1e20)
    if dtype == T.IQ1_M:
        bits = int(np.float16(scales[0]).view(np.uint16))
        for word in range(4):
            data[49 + 2 * word] = (data[49 + 2 * word] & 0x0F) | (bits >> (4 * word) & 15) << 4
    elif dtype == T.MXFP4:
        # Infinity as the largest exponents, which overflow; NaN as one that does not; zero as the smallest.
        finite = 128 + int(np.log2(magnitude)) if magnitude > 0 else int(np.signbit(scales[0]))
        data[0] = finite if np.isfinite(scales[0]) else 254 if np.isinf(scales[0]) else 128
    elif dtype == T.NVFP4:
        finite = np.isfinite(scales[0])
        data[:4] = gguf.quants.NVFP4.fp32_to_ue4m3(np.float32([2 * magnitude] * 4)) if finite else [127, 255, 128, 7]


def block(rng, dtype, scales, sub=None, codes=None):
    """One block with the given f16 scales; sub-scale and code bytes are one repeated byte, or random."""
    _, size = gguf.GGML_QUANT_SIZES[dtype]
    _, (start, end) = BLOCKS[dtype]
    data = rng.integers(0, 256, size, dtype=np.uint8)
    sub_bytes = data[start:end].copy()
    if codes is not None:
        data[:] = codes
    data[start:end] = sub_bytes if sub is None else sub
    put_scales(dtype, data, scales)
    return data


def blocks_of(rng, dtype):
    values, _ = gguf.GGML_QUANT_SIZES[dtype]
    per_row = ROW // values
    # (sub-scale byte, code byte); None is random
    unit_patterns = [(0xFF, 0xFF), (0xFF, 0x00), (0x00, 0xFF), (0x7F, 0x7F), (0x80, 0x80), (1, None), (None, None)]
    unit = 8.0 if dtype in EIGHTHS else 1.0
    units = [block(rng, dtype, (unit, unit), sub, codes) for sub, codes in unit_patterns]
    normal = [block(rng, dtype, rng.normal(0.0, 0.02, 2)) for _ in range(per_row)]
    extreme = [np.zeros_like(units[0])]
    patterns = [(0xFF, 0xFF), (0xFF, 0x00), (None, None), (0xC0, 0x0F), (0x3F, 0xF0), (0x80, 0x55), (0x7F, 0x80)]
    for index in range(max(per_row, 12) - 1):
        sub, codes = patterns[index % len(patterns)]
        scale = EXTREME_SCALES[index % len(EXTREME_SCALES)]
        other = EXTREME_SCALES[(index * 3 + 1) % len(EXTREME_SCALES)]
        extreme.append(block(rng, dtype, (scale, other), sub, codes))
    infinite_scales = [(np.inf, 1.0), (-np.inf, np.inf), (np.nan, 1.0), (1.0, np.nan)]
    infinite = [block(rng, dtype, scales, 0xFF) for scales in infinite_scales]
    infinite.append(block(rng, dtype, (np.inf, 0.0), 0x00, 0x88))  # infinity times zero
    rows = (len(normal) + len(extreme)) // per_row
    return len(units), rows, np.concatenate(units + normal + extreme + infinite)


def plain(rng, dtype):
    """Random bits, with the special values of the type among them."""
    width = {T.F32: np.uint32, T.F16: np.uint16, T.BF16: np.uint16}[dtype]
    bits = rng.integers(0, np.iinfo(width).max, 1000, dtype=width, endpoint=True)
    exponent = {T.F32: 0x7F800000, T.F16: 0x7C00, T.BF16: 0x7F80}[dtype]
    sign = 1 << (np.iinfo(width).bits - 1)
    special = [0, 1, exponent - 1, exponent, exponent + 1, exponent >> 1]
    bits[: len(special) * 2] = special + [value | sign for value in special]
    return bits.view(np.uint8)


def quantize(activations):
    """Blocks of 32: f32 scale = magnitude / 32767, int16 = x * (32767 / magnitude), to nearest, ties to even."""
    blocks = activations.reshape(-1, 32)
    magnitude = np.abs(blocks).max(axis=1, keepdims=True)
    live = magnitude >= np.float32(2.0**-100)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factor = np.float32(32767) / magnitude
        values = np.where(live, blocks * factor, np.float32(0))
    scale = np.where(live, magnitude / np.float32(32767), np.float32(0))
    assert scale.dtype == values.dtype == np.float32
    return scale, np.rint(values).astype(np.int16)


def activation_rows(rng):
    rows = rng.normal(0.0, 1.0, (3, ROW)).astype(np.float32)
    rows[1, rng.integers(0, ROW, 20)] *= 300  # outliers
    rows[1, 256:544] = 0  # a whole block of 256, and one of 32 more
    rows[2, :256] *= np.float32(1e-40)  # subnormal
    rows[2, 256:512] *= np.float32(1e-3)
    rows[2, 512:768] = np.arange(-127, 129, dtype=np.float32) / 2  # ties: the magnitude is made 32767
    rows[2, 512:768:32] = 32767
    rows[2, 768:] = np.where(rng.integers(0, 2, 256) == 1, np.float32(-3.5), np.float32(3.5))
    return rows


def main():
    rng = np.random.default_rng(20261115)
    rows = activation_rows(rng)
    quantized = [quantize(row) for row in rows]
    with open(HERE / "activations.bin", "wb") as file:
        file.write(rows.tobytes())
        for scales, values in quantized:
            for scale, block in zip(scales, values):
                file.write(scale.tobytes() + block.tobytes())

    for dtype in BLOCKS:
        rng = np.random.default_rng([20261115, dtype])  # a new format leaves the others' fixtures as they are
        units, weight_rows, data = blocks_of(rng, dtype)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data.reshape(-1, block_bytes), dtype).reshape(-1)
        products = []
        for weight_row in range(weight_rows):
            first = units * block_values + weight_row * ROW
            weights = values[first : first + ROW].astype(np.float64)
            assert np.isfinite(weights).all()
            for scales, integers in quantized:
                terms = weights.reshape(integers.shape) * integers.astype(np.float64) * scales.astype(np.float64)
                products += [terms.sum(), np.abs(terms).sum()]
        write(dtype, units, weight_rows, data, values, products)

    for dtype in (T.F32, T.F16, T.BF16):
        rng = np.random.default_rng([20261115, dtype])
        data = plain(rng, dtype)
        write(dtype, 0, 0, data, gguf.quants.dequantize(data, dtype).reshape(-1), [])


def write(dtype, units, rows, data, values, products):
    assert values.dtype == np.float32
    blocks = len(data) // gguf.GGML_QUANT_SIZES[dtype][1]
    with open(HERE / f"{dtype.name.lower()}.bin", "wb") as file:
        file.write(np.array([units, rows, blocks], "<u4").tobytes() + data.tobytes())
        file.write(values.tobytes() + np.array(products, "<f8").tobytes())


if __name__ == "__main__":
    main()
