"""Writes eights.bin: rows of activations, and what they are as 8-bit floats.

Run with Python and torch (2.x):  python crates/compute/tests/quant/make_eights.py
The output is deterministic, little-endian: rows of 256 f32, each followed by the 256 f32 that are left of it when it is
multiplied by the power of two that brings its largest magnitude to [2^7, 2^8), made a float8_e4m3fn, and multiplied by
the inverse.
"""

import math
from pathlib import Path

import torch

HERE = Path(__file__).parent


def rows():
    """Of every size, with and without a value that is far above the others."""
    torch.manual_seed(88)
    for power in (-120, -60, -20, -8, -1, 0, 3, 10, 40, 100):
        for outlier in (1, 40, 20_000):
            row = torch.randn(256, dtype=torch.float64)
            row[int(torch.randint(256, ()))] *= outlier
            yield (row * 2.0**power).float()
    yield torch.ones(256)
    yield torch.linspace(-255.9, 255.9, 256)


def main():
    with open(HERE / "eights.bin", "wb") as file:
        for row in rows():
            _, exponent = math.frexp(row.abs().max())  # the largest is in [2^(exponent - 1), 2^exponent)
            scale = 2.0 ** min(8 - exponent, 126)
            eights = (row.double() * scale).float().to(torch.float8_e4m3fn)
            file.write(row.numpy().tobytes() + (eights.double() / scale).float().numpy().tobytes())


if __name__ == "__main__":
    main()
