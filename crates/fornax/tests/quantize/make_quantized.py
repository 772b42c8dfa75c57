"""Writes what llama.cpp makes of tiny GGUF files: the SHA-256 of whole files, by mix.

    python crates/fornax/tests/quantize/make_quantized.py FOLDER
FOLDER holds libllama and the libraries that it needs, of a release (npm: @node-llama-cpp/linux-x64 3.22, in bins/linux-x64).

quantized.json: {fixture: {mix: sha256}}
"""

import ctypes
import hashlib
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FIXTURES = HERE / "../../../model/tests/fixtures"
# llama.cpp's numbers of mixes.
MIXES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8, "Q4_K_M": 15,
    "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "Q2_K": 10, "TQ2_0": 37,
    "TQ1_0": 36, "MXFP4_MOE": 38,
}
MODELS = ["llama", "qwen2", "gemma2", "phi3", "mixtral", "qwen3moe"]


class Params(ctypes.Structure):
    """The beginning of llama_model_quantize_params, and room for the rest."""

    _fields_ = [
        ("threads", ctypes.c_int32), ("ftype", ctypes.c_int32), ("output", ctypes.c_int32), ("embedding", ctypes.c_int32),
        ("allow_requantize", ctypes.c_bool), ("rest", ctypes.c_uint8 * 239),
    ]


def library(folder):
    for name in ["libggml-base.so", *sorted(path.name for path in folder.glob("libggml*.so*")), *sorted(path.name for path in folder.glob("libllama.*"))]:
        if "cpu" not in name:
            loaded = ctypes.CDLL(folder / name, mode=ctypes.RTLD_GLOBAL)
    loaded.llama_backend_init()
    loaded.llama_model_quantize_default_params.restype = Params
    loaded.llama_model_quantize.restype = ctypes.c_uint32
    loaded.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    return loaded


def quantize(llama, model, out, ftype, again=False):
    params = llama.llama_model_quantize_default_params()
    params.threads, params.ftype, params.allow_requantize = 2, ftype, again
    failed = llama.llama_model_quantize(str(model).encode(), str(out).encode(), ctypes.byref(params))
    return None if failed else hashlib.sha256(Path(out).read_bytes()).hexdigest()


def main():
    llama = library(Path(sys.argv[1]).resolve())
    if len(sys.argv) > 3:
        # One file: MODEL MIX OUT, whatever it is stored in.
        print(quantize(llama, sys.argv[2], sys.argv[4], MIXES[sys.argv[3]], True))
        return
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            out = Path(folder) / "out.gguf"
            made[model] = {mix: quantize(llama, FIXTURES / f"{model}.gguf", out, ftype) for mix, ftype in MIXES.items()}
    (HERE / "quantized.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
