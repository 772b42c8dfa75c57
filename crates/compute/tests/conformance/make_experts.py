#!/usr/bin/env python3
"""Writes experts.json: a feed-forward of experts, computed by transformers in float64 on float32 inputs.

Needs numpy, torch and transformers; run it beside this file: `python make_experts.py`.
"""

import json
import pathlib

import numpy as np
import torch
from transformers import MixtralConfig, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

rng = np.random.default_rng(9)
HIDDEN, FFN, SHARED, EXPERTS, TOKENS = 12, 10, 14, 6, 7


def values(*shape, size=1.0):
    """Float32 values that a short decimal writes exactly enough to be read back as the same float32."""
    return np.round(rng.normal(0, size, shape), 3).astype(np.float32)


def written(array):
    """Float32 as its shortest decimal, float64 to nine digits."""
    array = np.asarray(array).ravel()
    return [float(str(x)) if array.dtype == np.float32 else float(f"{x:.9g}") for x in array]


def case(block, chosen, shares, shared):
    block = block.double().eval()
    stored = {}
    for name, weight in block.named_parameters():
        stored[name] = values(*weight.shape, size=0.5)
        weight.data = torch.tensor(stored[name]).double()
    x = values(TOKENS, HIDDEN)
    with torch.no_grad():
        out = block(torch.tensor(x).double()[None])[0]
    fields = dict(
        chosen=chosen, shares=shares, hidden=HIDDEN, ffn=FFN, experts=EXPERTS, x=written(x), out=written(out.numpy()),
        router=written(stored["gate.weight"]),
        gate_up=written(stored["experts.gate_up_proj"]),
        down=written(stored["experts.down_proj"]),
    )
    if shared:
        fields["shared"] = dict(
            ffn=SHARED,
            gate=written(stored["shared_expert_gate.weight"]),
            gate_up=written(np.concatenate([stored[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")])),
            down=written(stored["shared_expert.down_proj.weight"]),
        )
    return fields


shape = dict(hidden_size=HIDDEN, intermediate_size=FFN, moe_intermediate_size=FFN, experts_implementation="eager")
torch.set_default_dtype(torch.float64)
cases = [
    case(MixtralSparseMoeBlock(MixtralConfig(**shape, num_local_experts=EXPERTS, num_experts_per_tok=2)), 2, "chosen", False),
    case(
        Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(
                **shape, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=False,
                shared_expert_intermediate_size=SHARED,
            )
        ),
        3, "all", True,
    ),
]
text = json.dumps(cases, separators=(",", ":")).replace(',"', ',\n"')
pathlib.Path(__file__).with_name("experts.json").write_text(text + "\n")
print(len(text), "bytes")
