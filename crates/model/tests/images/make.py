#!/usr/bin/env python3
"""Makes tiny models that read images, and what transformers computes with them. Nothing of it is needed to run the tests.

    python make.py path/to/llama.cpp      # the sources, for their converter

Versions: transformers 5.22.2, torch 2.15, gguf, numpy, pillow 13.0.0. Each case is a Hugging Face directory `<case>/`, the
language model as `<case>.gguf` and its tower as `mmproj-<case>.gguf`, both by llama.cpp's converter, and

- `<case>/golden.json`: grids of pictures whose patches are numbers by a formula (`patch_values`), a prompt with all of
  them, and a conversation with pictures of crates/image/tests/fixtures, as the template and the processor write it;
- `<case>/golden.bin`, float32: by grid the tower's rows (rows, hidden x (1 + levels)), then the logits of the prompt
  (tokens, vocab), then the log-probabilities of what follows the conversation, one row for each token that is then
  chosen greedily.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
PICTURES = HERE.parent.parent.parent / "image/tests/fixtures"

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
FIRST_SPECIAL = 256
IDS = {name: FIRST_SPECIAL + at for at, name in enumerate(SPECIAL)}
VOCAB = 272

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

PROCESSOR = dict(
    patch_size=4, merge_size=2, temporal_patch_size=2, size=dict(shortest_edge=8 * 8 * 4, longest_edge=8 * 8 * 40),
    image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5],
)

TEXT = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    # Large, or noise of small states decides.
    rms_norm_eps=0.02, tie_word_embeddings=True,
)
VISION = dict(
    depth=3, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=48, patch_size=4, spatial_merge_size=2,
    num_position_embeddings=25,
)
TOKENS = dict(
    image_token_id=IDS["<|image_pad|>"], video_token_id=IDS["<|video_pad|>"],
    vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
)


def rope(**more):
    return dict(rope_theta=5000.0, rope_type="default", mrope_interleaved=True, **more)


CASES = {
    "qwen3-vl": (
        transformers.Qwen3VLConfig(
            text_config=dict(TEXT, rope_parameters=rope(mrope_section=[3, 3, 2])),
            vision_config=dict(VISION, deepstack_visual_indexes=[0, 2]), tie_word_embeddings=True, **TOKENS,
        ),
        transformers.Qwen3VLForConditionalGeneration,
    ),
    "qwen35": (
        transformers.Qwen3_5Config(
            text_config=dict(
                TEXT, rope_parameters=rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
                linear_conv_kernel_dim=4, linear_key_head_dim=12, linear_value_head_dim=12, linear_num_key_heads=2,
                linear_num_value_heads=4, layer_types=["linear_attention", "full_attention", "linear_attention"],
            ),
            vision_config=VISION, tie_word_embeddings=True, **TOKENS,
        ),
        transformers.Qwen3_5ForConditionalGeneration,
    ),
}

# Grids in patches, down and across: odd numbers of tokens, and a picture of one.
GRIDS = [(6, 10), (2, 2), (14, 4)]
CONVERSATION = [
    ("user", ["What are these? ", "odd.png", "photo.jpg", " Compare. "]),
    ("assistant", ["Slopes."]),
    ("user", ["turned-6.jpg", "And this, <|image_pad|>?"]),
]
FOLLOWING = 6


def spread(model):
    """Weights of useful size that F16 and BF16 hold exactly."""
    for name, weight in list(model.named_parameters()):
        if "norm" in name and name.endswith("weight"):
            value = 0.5 + torch.rand_like(weight)
        elif name.endswith("bias"):
            value = 0.4 * torch.randn_like(weight)
        elif "embed" in name and "patch" not in name:
            value = 0.3 * torch.randn_like(weight)
        elif name.endswith("A_log"):
            value = (0.3 + 2.0 * torch.rand_like(weight)).log()
        elif name.endswith("dt_bias") or "conv1d" in name:
            value = 0.7 * torch.randn_like(weight)
        else:
            scale = 2.0 if any(part in name for part in ["q_proj", "k_proj", "qkv"]) else 1.0
            value = scale * torch.randn_like(weight) / weight[0].numel() ** 0.5
        value = value.bfloat16().float()
        value[value.abs() < 2**-13] = 0
        weight.data = value


def tokenizer(directory):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # One merge, which no text here has: GGUF files cannot say that there is none.
    letters = [*alphabet, *SPECIAL, "QQ"]
    vocab = {letter: at for at, letter in enumerate(letters)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Q", "Q")]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    assert all(bpe.token_to_id(name) == at for name, at in IDS.items())
    bpe.save(str(directory / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def patch_values(patches):
    """By patch: each number of the formula, for both frames."""
    at = np.arange(patches * 48, dtype=np.int64)
    values = ((at * 7919 + at // 48 * 31) % 1001) / np.float32(500) - np.float32(1)
    return values.astype("float32").reshape(patches, 3, 16)


def both_frames(values):
    return torch.tensor(np.repeat(values[:, :, None], 2, 2).reshape(len(values), -1))


def tower_rows(model, pixels, grids):
    made = model.model.visual(pixels, grid_thw=torch.tensor([[1, *grid] for grid in grids]))
    levels = getattr(made, "deepstack_features", None) or []
    return torch.cat([made.pooler_output, *levels], -1)


def logits(model, ids, pixels, grids):
    ids = torch.tensor([ids])
    return model(
        input_ids=ids, pixel_values=pixels, image_grid_thw=torch.tensor([[1, *grid] for grid in grids]),
        mm_token_type_ids=(ids == TOKENS["image_token_id"]).int(), use_cache=False,
    ).logits[0]


def conversation(model, words):
    """The prompt as the template and the processor write it, and its pictures."""
    messages, images = [], []
    for role, parts in CONVERSATION:
        content = []
        for part in parts:
            if part.endswith((".png", ".jpg")):
                images.append(part)
                content.append(dict(type="image"))
            else:
                content.append(dict(type="text", text=part))
        messages.append(dict(role=role, content=content))
    processor = Qwen2VLImageProcessorPil(**PROCESSOR)
    opened = [ImageOps.exif_transpose(Image.open(PICTURES / name)).convert("RGB") for name in images]
    made = processor(images=opened, return_tensors="pt")
    grids = made["image_grid_thw"][:, 1:].tolist()
    # What a message says is no token of its own: written with other letters, and put back as bytes.
    said = json.loads(json.dumps(messages).replace("<|image_pad|>", "\\u0001"))
    text = words.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids, at = [], 0
    for token in words(text)["input_ids"]:
        if token == IDS["<|image_pad|>"]:
            height, width = grids[at]
            ids += [token] * (height * width // 4)
            at += 1
        elif token == words.convert_tokens_to_ids(words.tokenize("\u0001"))[0]:
            ids += [words.convert_tokens_to_ids(piece) for letter in "<|image_pad|>" for piece in words.tokenize(letter)]
        else:
            ids.append(token)
    assert at == len(images)
    return dict(messages=messages, images=images, prompt=ids), made["pixel_values"], grids


def make(name, config, kind, llama_cpp):
    torch.manual_seed(sum(name.encode()))
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    model = kind(config).eval()
    spread(model)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((directory / "config.json").read_text())
    written["text_config"]["full_attention_interval"] = 2
    (directory / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    preprocessor = dict(PROCESSOR, image_processor_type="Qwen2VLImageProcessor", resample=3, rescale_factor=1 / 255)
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=1) + "\n")
    words = tokenizer(directory)
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").float().eval()

    pixels = [patch_values(height * width) for height, width in GRIDS]
    pixels = torch.cat([both_frames(values) for values in pixels])
    prompt = [IDS["<|im_start|>"], 70, 80]
    for at, (height, width) in enumerate(GRIDS):
        pads = [IDS["<|image_pad|>"]] * (height * width // 4)
        prompt += [IDS["<|vision_start|>"], *pads, IDS["<|vision_end|>"], *range(90 + 7 * at, 90 + 7 * at + 5)]
    chat, chat_pixels, chat_grids = conversation(model, words)
    with torch.no_grad():
        rows = tower_rows(model, pixels, GRIDS)
        of_prompt = logits(model, prompt, pixels, GRIDS)
        following, scores = list(chat["prompt"]), []
        for _ in range(FOLLOWING):
            last = logits(model, following, chat_pixels, chat_grids)[-1].log_softmax(-1)
            scores.append(last)
            following.append(int(last[: len(IDS) + FIRST_SPECIAL].argmax()))
    chat["following"] = following[len(chat["prompt"]) :]
    golden = dict(grids=GRIDS, prompt=prompt, **{f"chat_{key}": value for key, value in chat.items()})
    (directory / "golden.json").write_text(json.dumps(golden) + "\n")
    numbers = [rows, of_prompt, torch.stack(scores)]
    with open(directory / "golden.bin", "wb") as file:
        file.write(b"".join(one.float().numpy().astype("<f4").tobytes() for one in numbers))

    convert = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rsplit("/", 1)[0])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(directory, scratch, ignore=shutil.ignore_patterns("golden*"), dirs_exist_ok=True)
        # None of them has layers that guess ahead.
        ahead = ["--no-mtp"] if name == "qwen35" else []
        for path, more in [(f"{name}.gguf", ahead), (f"mmproj-{name}.gguf", ["--mmproj"])]:
            if "--mmproj" in more:
                # The converter takes the language model's epsilon for the tower's, which is this in published models.
                said = json.loads((Path(scratch) / "config.json").read_text())
                said["text_config"]["rms_norm_eps"] = 1e-6
                (Path(scratch) / "config.json").write_text(json.dumps(said))
            subprocess.run(
                [sys.executable, "-c", convert, f"{llama_cpp}/convert_hf_to_gguf.py", scratch]
                + ["--outfile", HERE / path, "--outtype", "f16", "--model-name", name, *more],
                check=True,
            )
    print(f"{name}: {len(prompt)} and {len(chat['prompt'])} tokens; rows deviate by {rows.std():.2f}, logits by {of_prompt.std():.2f}")


for name, (config, kind) in CASES.items():
    make(name, config, kind, Path(sys.argv[1]))
