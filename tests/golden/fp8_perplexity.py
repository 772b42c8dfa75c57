"""What 8-bit floats cost, matrix by matrix and with activations: perplexity of a GGUF model in torch, in f32.

Run with torch, transformers and gguf:  python tests/golden/fp8_perplexity.py FILE.gguf TEXT [TOKENS]

Weights are rounded as `--quant fp8` rounds them (32 values to a power of two), or with a scale for each row as
`--quant fp8 --activations fp8` does; activations of the layers' products with a power of two for each token. Nothing of
Fornax is used. The first TOKENS of the text (512) are one context.
"""

import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FLOAT8 = torch.float8_e4m3fn


def shared_powers(weight):
    runs = weight.reshape(-1, 32)
    most = runs.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    power = 2.0 ** (torch.floor(torch.log2(most)) - 8)
    power = torch.where(most / power > 448, power * 2, power)
    return ((runs / power).to(FLOAT8).float() * power).reshape(weight.shape)


def scaled_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).clamp(-448, 448).to(FLOAT8).float() * scale


def rounded_tokens(_, inputs):
    most = inputs[0].abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    power = 2.0 ** (torch.floor(torch.log2(most)) - 7)
    return ((inputs[0] / power).to(FLOAT8).float() * power,)


def main():
    path, tokens = Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 512
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer(Path(sys.argv[2]).read_text(), return_tensors="pt").input_ids[:, :tokens]
    stored = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    layers = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "lm_head" not in name}
    embedding = model.get_input_embeddings().weight
    base = None

    @torch.no_grad()
    def measure(what, layer=None, table=None, activations=False, only=""):
        nonlocal base
        for name, weight in model.named_parameters():
            weight.copy_(stored[name])
        for name, part in layers.items():
            if layer and only in name:
                part.weight.copy_(layer(part.weight))
        if table:
            embedding.copy_(table(embedding))
        hooks = [part.register_forward_pre_hook(rounded_tokens) for part in layers.values() if activations]
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        perplexity = math.exp(-logits.gather(1, ids[0, 1:, None]).mean())
        base = base or perplexity
        print(f"{what:44} {perplexity:9.4f} {100 * (perplexity / base - 1):+6.2f} %", flush=True)

    measure("as stored")
    measure("powers of two: all", shared_powers, shared_powers)
    measure("powers of two: embedding (and head, where tied)", None, shared_powers)
    measure("powers of two: layers", shared_powers)
    measure("activations alone", activations=True)
    measure("scaled rows: layers", scaled_rows)
    measure("scaled rows: layers, and activations", scaled_rows, activations=True)
    for only in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        measure(f"powers of two: {only}", shared_powers, only=only)


if __name__ == "__main__":
    main()
