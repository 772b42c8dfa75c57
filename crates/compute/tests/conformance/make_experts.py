#!/usr/bin/env python3
"""Writes experts.json: a feed-forward of experts, computed by transformers in float64 on float32 inputs.

Needs numpy, torch and transformers; run it beside this file: `python make_experts.py`.
"""

import json
import pathlib

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
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


def case(block, chosen, shares, shared, **routing):
    block = block.double().eval()
    stored = {}
    for name, weight in [*block.named_parameters(), *block.named_buffers()]:
        # Corrections as large as scores differ.
        stored[name] = values(*weight.shape, size=0.2 if "bias" in name else 0.5)
        weight.data = torch.tensor(stored[name]).double()
    x = values(TOKENS, HIDDEN)
    with torch.no_grad():
        out = block(torch.tensor(x).double()[None])[0]
    fields = dict(
        chosen=chosen, shares=shares, hidden=HIDDEN, ffn=FFN, experts=EXPERTS, x=written(x), out=written(out.numpy()),
        router=written(stored["gate.weight"]),
        gate_up=written(stored["experts.up_proj" if "experts.up_proj" in stored else "experts.gate_up_proj"]),
        down=written(stored["experts.down_proj"]),
    )
    fields |= routing
    for name in stored:
        if "correction_bias" in name or "expert_bias" in name:
            fields["correction"] = written(stored[name])
    if shared == "as it is":
        fields["shared"] = dict(
            ffn=FFN,
            gate_up=written(
                np.concatenate(
                    [
                        stored[f"shared_experts.{name}_proj.weight"]
                        for name in ("gate", "up")
                        if f"shared_experts.{name}_proj.weight" in stored
                    ]
                )
            ),
            down=written(stored["shared_experts.down_proj.weight"]),
        )
    elif shared:
        fields["shared"] = dict(
            ffn=SHARED,
            gate=written(stored["shared_expert_gate.weight"]),
            gate_up=written(np.concatenate([stored[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")])),
            down=written(stored["shared_expert.down_proj.weight"]),
        )
    return fields


heads = dict(num_attention_heads=2, num_key_value_heads=2)
shape = dict(
    heads, hidden_size=HIDDEN, intermediate_size=FFN, moe_intermediate_size=FFN, experts_implementation="eager"
)
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
many = dict(shape, num_experts_per_tok=3)
groups = dict(n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5)
# Groups are ranked by their best expert here, and by their two best where there is a correction.
experts = EXPERTS
EXPERTS = 8
cases += [
    case(
        DeepseekV2Moe(DeepseekV2Config(**many, **groups, n_routed_experts=8, topk_method="group_limited_greedy")),
        3, "all", "as it is", groups=4, groups_chosen=2, by_two=False, scale=2.5,
    ),
    case(
        DeepseekV3MoE(DeepseekV3Config(**many, **groups, n_routed_experts=8, norm_topk_prob=True)),
        3, "chosen", "as it is", scores="sigmoid", groups=4, groups_chosen=2, by_two=True, scale=2.5, added=1e-20,
    ),
]
EXPERTS = experts
few = dict(shape, hidden_act="silu")
cases += [
    case(
        Ernie4_5_MoeSparseMoeBlock(
            Ernie4_5_MoeConfig(**few, moe_num_experts=EXPERTS, moe_k=2, moe_num_shared_experts=1, moe_norm_min=0.5)
        ),
        2, "chosen", "as it is", least=0.5,
    ),
    case(
        MiniMaxM2SparseMoeBlock(MiniMaxM2Config(**few, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        2, "chosen", False, scores="sigmoid",
    ),
    case(
        Lfm2MoeSparseMoeBlock(
            Lfm2MoeConfig(**few, num_experts=EXPERTS, num_experts_per_tok=2, routed_scaling_factor=1.5)
        ),
        2, "chosen", False, scores="sigmoid", added=1e-6, scale=1.5,
    ),
]
EXPERTS = 8
cases.append(
    case(
        NemotronHMoE(
            NemotronHConfig(
                hidden_size=HIDDEN, moe_intermediate_size=FFN, moe_shared_expert_intermediate_size=FFN,
                n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                experts_implementation="eager", head_dim=4, num_attention_heads=2, num_key_value_heads=2,
                layers_block_type=["moe"],
            )
        ),
        3, "chosen", "as it is", scores="sigmoid", groups=4, groups_chosen=2, by_two=True, scale=2.5, added=1e-20,
        plain=True,
    )
)
EXPERTS = experts
text = json.dumps(cases, separators=(",", ":")).replace(',"', ',\n"')
pathlib.Path(__file__).with_name("experts.json").write_text(text + "\n")
print(len(text), "bytes")
