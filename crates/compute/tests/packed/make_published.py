"""Writes rows, and what llama.cpp's own library makes of them in every type that `fornax quantize` writes.

    python crates/compute/tests/packed/make_published.py LIBRARY
LIBRARY is libggml-base of a llama.cpp that was built without instructions beyond x86-64 (fused sums would round otherwise), as
releases are. The output is deterministic.

published.bin: 24 rows of 512 f32; one row of importance; then for Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL,
IQ4_XS, TQ1_0, TQ2_0 and MXFP4 the rows without and with it.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROWS, COLUMNS = 24, 512
# ggml's number of each type, values and bytes of a block.
TYPES = [(8, 32, 34), (2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (12, 256, 144), (13, 256, 176), (14, 256, 210)]
TYPES += [(10, 256, 84), (11, 256, 110), (20, 32, 18), (23, 256, 136), (34, 256, 54), (35, 256, 66), (39, 32, 17)]


def rows(rng):
    rows = rng.normal(0, 0.03, (ROWS, COLUMNS))
    rows[8] = rng.uniform(-1, 1, COLUMNS)
    rows[9] = rng.laplace(0, 0.05, COLUMNS)
    rows[10] = rng.standard_t(3, COLUMNS)
    rows[11] = np.abs(rows[11])
    rows[12] = -np.abs(rows[12])
    rows[13, ::97] *= 50
    rows[14] *= rng.integers(0, 2, COLUMNS)
    rows[15] *= 1e-4
    rows[16] *= 1e5
    rows[17] += 0.5
    rows[18, :256] = 0
    rows[19] = np.round(rows[19] * 200) / 200
    rows[20] = 0
    rows[21] = 0.25
    rows[22, 32:64] = -0.125
    rows[23] *= 1e-18
    return rows.astype(np.float32)


def main():
    rng = np.random.default_rng(7)
    values = np.ascontiguousarray(rows(rng))
    importance = rng.lognormal(0, 2, COLUMNS).astype(np.float32)
    library = ctypes.CDLL(sys.argv[1])
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    made = [values.tobytes(), importance.tobytes()]
    for number, block, size in TYPES:
        for weights in [None, importance]:
            out = np.zeros(values.size // block * size, np.uint8)
            pointer = None if weights is None else weights.ctypes.data
            done = quantize(number, values.ctypes.data, out.ctypes.data, 0, ROWS, COLUMNS, pointer)
            assert done == out.size
            made.append(out.tobytes())
    (HERE / "published.bin").write_bytes(b"".join(made))


if __name__ == "__main__":
    main()
