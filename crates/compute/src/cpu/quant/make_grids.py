"""Writes grids.bin: the points of the lattices that the IQ formats choose from, as the `gguf` package (MIT) has them.

Run with Python and gguf:  python crates/compute/src/cpu/quant/make_grids.py
One u16, little-endian, for each point: eight 2-bit indices into the format's magnitudes, or four 4-bit ones, the first
in the lowest bits. One lattice after the other, in the order below; IQ1_M uses IQ1_S's.
"""

from pathlib import Path

import numpy as np
from gguf import quants

LATTICES = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ1_S, quants.IQ3_XXS, quants.IQ3_S]

with open(Path(__file__).parent / "grids.bin", "wb") as file:
    for lattice in LATTICES:
        points = np.frombuffer(bytes.fromhex(lattice.grid_hex.decode()), "<u2")
        assert len(points) == lattice.grid_shape[0]
        file.write(points.tobytes())
