#!/usr/bin/env python3
"""Writes ops.json: small inputs and outputs of the operations, computed by other people's code.

Needs numpy, torch, transformers and gguf; run it beside this file: `python make_ops.py`. Norm, rotation and masks are
transformers' own functions, attention is torch's, weights are dequantised by the gguf package. Arithmetic is float64
on float32 inputs, so that the outputs are truth and not one more rounding; only the rotary angles are float32, as
transformers makes them.
"""

import json
import pathlib

import gguf
import numpy as np
import torch
from transformers import DeepseekV3Config, Gemma4TextConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn as plain_conv
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

rng = np.random.default_rng(2)


def values(*shape, size=1.0):
    """Float32 values that a short decimal writes exactly enough to be read back as the same float32."""
    return np.round(rng.normal(0, size, shape), 3).astype(np.float32)


def written(array):
    """Float32 as its shortest decimal, float64 to nine digits."""
    array = np.asarray(array).ravel()
    return [float(str(x)) if array.dtype == np.float32 else float(f"{x:.9g}") for x in array]


def rms_norm():
    cases = []
    for columns, size, eps in [(48, 2.0, 1e-5), (31, 0.002, 1e-5), (64, 1.0, 1e-6)]:
        x, weight = values(4, columns, size=size), values(columns, size=3.0)
        norm = LlamaRMSNorm(columns, eps=eps)
        norm.weight.data = torch.tensor(weight).double()
        # The module itself computes in float32; its formula is used in float64.
        hidden = torch.tensor(x).double()
        wide = norm.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))
        assert torch.allclose(wide, norm(hidden).double(), atol=1e-4)
        cases.append(dict(columns=columns, eps=eps, x=written(x), weight=written(weight), out=written(wide.detach())))
    return cases


def rope():
    cases = []
    positions = [1, 2, 0, 31, 33, 700, 4095]
    for query, kv, dim, rotated in [(3, 1, 16, 16), (2, 2, 20, 8)]:
        config = LlamaConfig(
            hidden_size=query * rotated, num_attention_heads=query, head_dim=rotated, rope_theta=500000.0, max_position_embeddings=8192
        )
        module = LlamaRotaryEmbedding(config)
        cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.tensor([positions]))
        q, k, v = (values(len(positions), heads, dim) for heads in (query, kv, kv))
        heads = lambda x: torch.tensor(x).double().transpose(0, 1)[None]  # (1, heads, tokens, dim)
        # Partial rotary as in transformers' phi: the first part of a head turns, the rest passes.
        q_rot, k_rot = apply_rotary_pos_emb(heads(q)[..., :rotated], heads(k)[..., :rotated], cos.double(), sin.double())
        back = lambda turned, x: np.concatenate([turned[0].transpose(0, 1).numpy(), x[..., rotated:]], -1)
        q_out, k_out = back(q_rot, q), back(k_rot, k)
        fused = lambda q, k: np.concatenate([x.reshape(len(positions), -1) for x in (q, k, v)], -1)
        cases.append(
            dict(
                query=query, kv=kv, dim=dim, positions=positions, frequencies=written(module.inv_freq),
                qkv=written(fused(q, k)), out=written(fused(q_out, k_out)),
            )
        )
    return cases


def glu():
    gate, up = values(3, 33, size=4.0), values(3, 33)
    gate[0, :4] = [-90, 90, 0, -20]
    out = torch.nn.functional.silu(torch.tensor(gate).double()) * torch.tensor(up).double()
    return [dict(columns=33, x=written(np.concatenate([gate, up], -1)), out=written(out))]


def attention():
    tokens, query, kv, dim, scale = 45, 6, 2, 8, 0.3
    q, k, v = (values(tokens, heads, dim, size=1.5) for heads in (query, kv, kv))
    heads = lambda x: torch.tensor(x).double().transpose(0, 1)[None]
    keys, vals = repeat_kv(heads(k), query // kv), repeat_kv(heads(v), query // kv)
    cases = []
    for window in (None, 10, 33):
        function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        at = torch.arange(tokens)
        mask = function(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
        out = torch.nn.functional.scaled_dot_product_attention(heads(q), keys, vals, attn_mask=mask, scale=scale)
        cases.append(dict(window=window, out=written(out[0].transpose(0, 1).numpy())))
    qkv = np.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], -1)
    return dict(query=query, kv=kv, dim=dim, scale=scale, qkv=written(qkv), cases=cases)


def matmul():
    rows, columns, tokens = 3, 256, 2
    x = values(tokens, columns)
    cases = []
    # Where a block keeps its f16 scales; any other byte is valid.
    scales = dict(Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208])
    for name in ["F32", "F16", "BF16", *scales]:
        kind = gguf.GGMLQuantizationType[name]
        plain = values(rows, columns)
        if name == "F32":
            stored = plain.view(np.uint8)
        elif name == "F16":
            stored = plain.astype(np.float16).view(np.uint8)
        elif name == "BF16":
            stored = (plain.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            stored = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
            for at in scales[name]:
                scale = rng.uniform(0.001, 0.02, (len(stored), 1)) * rng.choice([-1, 1], (len(stored), 1))
                stored[:, at : at + 2] = scale.astype(np.float16).view(np.uint8)
            stored = stored.reshape(rows, -1)
        weight = gguf.dequantize(stored, kind).reshape(rows, columns).astype(np.float64)
        wide = x.astype(np.float64)
        # How large a product of such numbers usually is: what rounding errors are measured by.
        usual = np.sqrt(wide**2 @ (weight**2).T)
        cases.append(dict(dtype=name, bytes=stored.tobytes().hex(), out=written(wide @ weight.T), usual=written(usual)))
    return dict(rows=rows, columns=columns, x=written(x), cases=cases)


def short_conv():
    cases = []
    for gated, channels, taps in [(False, 21, 4), (True, 9, 3)]:
        tokens = 40
        weight, x = values(channels, taps), values(tokens, 3 * channels if gated else channels)
        wide, weights = torch.tensor(x).double(), torch.tensor(weight).double()
        if gated:
            b, c, x_in = wide.T[None].chunk(3, dim=-2)
            out = c * plain_conv(b * x_in, weights, None)
        else:
            out = causal_conv1d_fn(wide.T[None], weights, None, activation="silu")
        # Weights lie tap by tap here.
        cases.append(dict(gated=gated, channels=channels, taps=taps, weight=written(weight.T), x=written(x), out=written(out[0].T)))
    return cases


def delta_rule():
    key, value, dim_k, dim_v, tokens = 2, 4, 12, 20, 40
    q, k, v = values(tokens, key, dim_k), values(tokens, key, dim_k), values(tokens, value, dim_v)
    beta, decay, bias = values(tokens, value), values(tokens, value, size=2.0), values(value)
    rate = -np.abs(values(value, size=0.5)) - np.float32(0.1)
    wide = lambda x: torch.tensor(x).double()[None]
    g = wide(rate) * torch.nn.functional.softplus(wide(decay) + wide(bias))
    cases = []
    for turns in (False, True):
        # With as many key heads as value heads nothing is shared, so who reads which is said here.
        heads = [h % key if turns else h // (value // key) for h in range(value)]
        # The function computes in float32, whatever it is given.
        out, _ = torch_recurrent_gated_delta_rule(
            wide(q)[:, :, heads], wide(k)[:, :, heads], wide(v), g=g, beta=wide(beta).sigmoid(), use_qk_l2norm_in_kernel=True
        )
        cases.append(dict(turns=turns, out=written(out[0].double().numpy())))
    flat = lambda *parts: written(np.concatenate([part.reshape(tokens, -1) for part in parts], -1))
    return dict(
        key=key, value=value, dim_k=dim_k, dim_v=dim_v, rate=written(rate), bias=written(bias),
        qkv=flat(q, k, v), mixed=flat(beta, decay), cases=cases,
    )


def gated_norm():
    group, rows, eps = 14, 3, 1e-5
    x, gates, weight = values(rows, 2 * group), values(rows, 2 * group, size=3.0), values(group)
    norm = Qwen3_5RMSNormGated(group, eps=eps)
    norm.weight.data = torch.tensor(weight)
    split = lambda x: torch.tensor(x).reshape(-1, group)
    out = norm(split(x), split(gates)).reshape(rows, -1)
    return dict(group=group, eps=eps, x=written(x), gates=written(gates), weight=written(weight), out=written(out.double().numpy()))


def conv_with_bias():
    channels, taps, tokens = 19, 4, 40
    weight, bias, x = values(channels, taps), values(channels), values(tokens, channels)
    wide = lambda x: torch.tensor(x).double()
    out = causal_conv1d_fn(wide(x).T[None], wide(weight), wide(bias), activation="silu")
    return dict(
        gated=False, channels=channels, taps=taps, weight=written(weight.T), bias=written(bias), x=written(x), out=written(out[0].T)
    )


def selective_scan():
    heads, groups, dim, state, tokens = 4, 2, 20, 12, 40
    v, k, q = values(tokens, heads, dim), values(tokens, groups, state), values(tokens, groups, state)
    steps, bias, skip = values(tokens, heads, size=2.0), values(heads), values(heads)
    rate = -np.abs(values(heads, size=0.5)) - np.float32(0.1)
    wide = lambda x: torch.tensor(x)[None]
    # Chunks as long as all of it: the form that goes token by token is what is to be tested.
    out = mamba2_chunk_scan(
        wide(v), wide(steps), torch.tensor(rate), wide(k), wide(q), chunk_size=tokens, D=torch.tensor(skip),
        dt_bias=torch.tensor(bias), dt_softplus=True,
    )
    flat = lambda *parts: written(np.concatenate([part.reshape(tokens, -1) for part in parts], -1))
    return dict(
        heads=heads, groups=groups, dim=dim, state=state, rate=written(rate), bias=written(bias), skip=written(skip),
        x=flat(v, k, q), steps=written(steps), out=written(out[0].double().numpy()),
    )


def channel_scan():
    # A generator of its own, so that the other cases stay as they are.
    own = np.random.default_rng(11)
    drawn = lambda *shape, size=1.0: np.round(own.normal(0, size, shape), 3).astype(np.float32)
    channels, state, tokens = 21, 13, 40
    x, steps, bias, skip = drawn(tokens, channels), drawn(tokens, channels, size=2.0), drawn(channels), drawn(channels)
    keys, queries = drawn(tokens, state), drawn(tokens, state)
    rates = -np.abs(drawn(channels, state)) - np.float32(0.1)
    wide = lambda x: torch.tensor(x).T[None]
    out = mamba_selective_scan(
        wide(x), wide(steps), torch.tensor(rates), wide(keys), wide(queries), D=torch.tensor(skip), z=None,
        delta_bias=torch.tensor(bias), delta_softplus=True, return_last_state=False, use_mambapy=False,
        use_associative_scan=False,
    )
    return dict(
        channels=channels, state=state, rates=written(rates.T), bias=written(bias), skip=written(skip), x=written(x),
        keys=written(keys), queries=written(queries), steps=written(steps), out=written(out[0].T.double().numpy()),
    )


def grouped_norm():
    cases = []
    for gates_first in (False, True):
        columns, groups, rows, eps = 42, 3, 3, 1e-5
        x, gates, weight = values(rows, columns), values(rows, columns, size=3.0), values(columns)
        norm = FalconH1RMSNormGated(columns, eps=eps, n_groups=groups, norm_before_gate=not gates_first)
        norm.weight.data = torch.tensor(weight)
        out = norm(torch.tensor(x)[None], torch.tensor(gates)[None])
        cases.append(
            dict(
                gates_first=gates_first, groups=groups, eps=eps, x=written(x), gates=written(gates), weight=written(weight),
                out=written(out.double().numpy()),
            )
        )
    return cases
def glu_beside():
    gate, up, column = values(3, 17, size=4.0), values(3, 41), 19
    out = ACT2FN["gelu_pytorch_tanh"](torch.tensor(gate).double()) * torch.tensor(up).double()[:, column : column + 17]
    return dict(columns=17, column=column, gate=written(gate), up=written(up), out=written(out))


def scale_chosen():
    # Of the router itself, what it makes of the same logits with scales and without.
    experts, each, rows = 7, 3, 4
    config = Gemma4TextConfig(hidden_size=experts, num_experts=experts, top_k_experts=each, num_hidden_layers=1)
    router = Gemma4TextRouter(config).double()
    router.proj.weight.data = torch.eye(experts).double()
    x, scales = torch.tensor(values(rows, experts, size=3.0)).double(), values(experts)
    cases = []
    for one in [np.ones(experts, np.float32), scales]:
        router.per_expert_scale.data = torch.tensor(one).double()
        _, weights, numbers = router(x)
        order = numbers.argsort(-1)
        cases.append(torch.cat([numbers.gather(-1, order), weights.gather(-1, order)], -1).float().numpy())
    return dict(each=each, scales=written(scales), chosen=written(cases[0]), out=written(cases[1].astype(np.float64)))


def latent_attention():
    # Keys and values of every head are made by the module's own function, and torch attends over them.
    heads, latent, turned, kept, value, tokens, scale = 3, 20, 6, 10, 7, 45, 0.3
    config = DeepseekV3Config(
        hidden_size=8, num_attention_heads=heads, q_lora_rank=None, kv_lora_rank=latent, qk_nope_head_dim=kept,
        qk_rope_head_dim=turned, v_head_dim=value,
    )
    module = DeepseekV3Attention(config, 0).double()
    made = values(heads, kept + value, latent, size=0.4)
    module.kv_b_proj.weight.data = torch.tensor(made.reshape(-1, latent)).double()
    rows, spun = values(tokens, latent), values(tokens, turned)
    q_turned, q_kept = values(tokens, heads, turned), values(tokens, heads, kept)
    wide = lambda x: torch.tensor(x).double()[None]
    keys, vals = module.expand_kv(wide(rows)[:, None], wide(spun)[:, None])
    queries = torch.cat([wide(q_kept), wide(q_turned)], -1).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, vals, is_causal=True, scale=scale)
    return dict(
        heads=heads, latent=latent, turned=turned, kept=kept, value=value, scale=scale,
        keys=written(made[:, :kept].transpose(0, 2, 1)), values=written(made[:, kept:]), rows=written(rows), spun=written(spun),
        queries=written(np.concatenate([q_turned, q_kept], -1)), out=written(out[0].transpose(0, 1).numpy()),
    )


def temperature():
    positions, columns, beta, length = [0, 31, 32, 63, 64, 1000, 8192], 5, 0.1, 32
    x = values(len(positions), columns + 3)
    scales = get_llama_4_attn_scale(torch.tensor([positions]), beta, length).reshape(-1, 1).double().numpy()
    out = np.concatenate([x[:, :columns] * scales, x[:, columns:].astype(np.float64)], -1)
    return dict(positions=positions, columns=columns, beta=beta, length=length, x=written(x), out=written(out))


with torch.no_grad():
    out = dict(rms_norm=rms_norm(), rope=rope(), glu=glu(), attention=attention(), matmul=matmul())
    out.update(short_conv=short_conv(), delta_rule=delta_rule(), gated_norm=gated_norm())
    out["short_conv"].append(conv_with_bias())
    out.update(selective_scan=selective_scan(), grouped_norm=grouped_norm())
    out.update(glu_beside=glu_beside(), scale_chosen=scale_chosen(), channel_scan=channel_scan())
    out.update(latent_attention=latent_attention(), temperature=temperature())
text = json.dumps(out, separators=(",", ":")).replace(',"', ',\n"')
pathlib.Path(__file__).with_name("ops.json").write_text(text + "\n")
print(len(text), "bytes")
