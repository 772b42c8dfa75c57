"""Writes what matrices of tiny models are multiplied by, as transformers computes it: sums of squares by column, and how many rows.

    python crates/fornax/tests/quantize/make_imatrix.py

imatrix.json: {fixture: {text, chunk, tensors: {name: {counts, sums}}}}. The last tokens, which fill no chunk, are left out.
"""

import json
from pathlib import Path

import sentencepiece
import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
FIXTURES = HERE / "../../../model/tests/fixtures"
TEXT = "the sky is blue because light scatters in air more than red does over far sky blue light air red because in " * 3
CHUNK = 16
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def count(into, name, expert, experts, rows):
    entry = into.setdefault(name, dict(counts=[0] * experts, sums=[[0.0] * rows.shape[-1] for _ in range(experts)]))
    entry["counts"][expert] += rows.shape[0]
    squares = (rows.double() ** 2).sum(0)
    entry["sums"][expert] = (torch.tensor(entry["sums"][expert]).double() + squares).tolist()


def measure(case, tokens, bos):
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / case, dtype=torch.float32).eval()
    seen = {}
    for layer, block in enumerate(model.model.layers):
        for path, name in NAMES.items():
            module = dict(block.named_modules()).get(path)
            if module is not None:
                full = f"blk.{layer}.{name}.weight"
                hook = lambda _, args, full=full: count(seen, full, 0, 1, args[0].reshape(-1, args[0].shape[-1]))
                module.register_forward_pre_hook(hook)
        experts = getattr(block.mlp, "experts", None)
        if experts is not None:
            block.mlp.register_forward_pre_hook(
                lambda module, args, layer=layer: of_experts(seen, layer, module, args[0].reshape(-1, args[0].shape[-1]))
            )
    with torch.no_grad():
        for first in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
            chunk = tokens[first : first + CHUNK]
            model(torch.tensor([[*bos, *chunk[len(bos) :]]]))
    return seen


def of_experts(seen, layer, module, x):
    """Of Qwen3: who is chosen by the router, and what the matrices of each expert read."""
    gate_up, down = module.experts.gate_up_proj, module.experts.down_proj
    logits = torch.nn.functional.linear(x, module.gate.weight)
    ranked = logits.sort(-1, descending=True).values
    margin = (ranked[:, module.gate.top_k - 1] - ranked[:, module.gate.top_k]).min().item()
    assert margin > 1e-3, f"experts are chosen by a margin of {margin}"
    count(seen, f"blk.{layer}.ffn_gate_inp.weight", 0, 1, x)
    chosen = logits.topk(module.gate.top_k, dim=-1).indices
    for expert in range(gate_up.shape[0]):
        own = x[(chosen == expert).any(-1)]
        gate, up = torch.nn.functional.linear(own, gate_up[expert]).chunk(2, dim=-1)
        for name in ["ffn_gate_exps", "ffn_up_exps"]:
            count(seen, f"blk.{layer}.{name}.weight", expert, gate_up.shape[0], own)
        count(seen, f"blk.{layer}.ffn_down_exps.weight", expert, gate_up.shape[0], torch.nn.functional.silu(gate) * up)


def main():
    pieces = sentencepiece.SentencePieceProcessor(str(HERE / "../convert/tokenizer.model"))
    words = tokenizers.Tokenizer.from_file(str(HERE / "../convert/tokenizer.json"))
    made = {}
    # One of these tokenizers puts a BOS before a text.
    for case, tokens, bos in [("qwen3", [1, *pieces.encode(TEXT)], [1]), ("qwen3moe", words.encode(TEXT).ids, [])]:
        seen = {name: dict(counts=entry["counts"], sums=[[float(f"{value:.7g}") for value in row] for row in entry["sums"]])
                for name, entry in measure(case, tokens, bos).items()}
        made[case] = dict(text=TEXT, chunk=CHUNK, tensors=seen)
        print(case, len(tokens), len(seen))
    (HERE / "imatrix.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
