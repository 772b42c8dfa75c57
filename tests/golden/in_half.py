"""How far transformers' own results in f32, f16 and bf16 are from the golden logits of the tiny checkpoints, which it
computed in f32: what a device that rounds activations is compared with.

python tests/golden/in_half.py [DEVICE], from the root of the repository, with torch and transformers installed. For each
checkpoint and type: the largest difference in a log-probability, and in brackets that of the second worst position.
"""

import json
import pathlib
import sys

import numpy
import torch
import transformers

FIXTURES = pathlib.Path("crates/model/tests/fixtures")


def differences(folder, tokens, wanted, dtype, device):
    unpacked = {}
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        unpacked = dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager", **unpacked).eval().to(device).to(dtype)
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=device)).logits[0].double().cpu()
    logits = logits[:, : wanted.shape[1]]
    by_value = (torch.log_softmax(logits, -1) - torch.log_softmax(wanted, -1)).abs()
    return by_value.max(-1).values.sort(descending=True).values


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    for golden in sorted(FIXTURES.glob("*/golden.json")):
        tokens = json.loads(golden.read_text()).get("tokens")
        if tokens is None:
            continue
        wanted = numpy.fromfile(golden.with_name("golden.bin"), dtype="<f4").reshape(len(tokens), -1)
        wanted = torch.tensor(wanted).double()
        shown = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            worst = differences(golden.parent, tokens, wanted, dtype, device)
            shown.append(f"{worst[0]:.1e} ({worst[1]:.1e})")
        print(f"{golden.parent.name:<16}", *shown, flush=True)


if __name__ == "__main__":
    main()
