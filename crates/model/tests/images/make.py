#!/usr/bin/env python3
"""Makes tiny models that read images, and what transformers computes with them. Nothing of it is needed to run the tests.

    python make.py path/to/llama.cpp [CASE...]      # the sources, for their converter

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
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
PICTURES = HERE.parent.parent.parent / "image/tests/fixtures"

FIRST_SPECIAL = 256
VOCAB = 272


def ids(names):
    return {name: FIRST_SPECIAL + at for at, name in enumerate(names)}


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDS = ids(SPECIAL)
GEMMA3_IDS = ids(["<pad>", "<end_of_turn>", "<start_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<unused>"])
GEMMA4_IDS = ids(["<pad>", "<turn|>", "<|turn>", "<|image>", "<image|>", "<|image|>", "<|audio|>", "<|video|>"])

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



def gemma_template(begin, end, image):
    """The shape of the published ones."""
    text = TEMPLATE.replace("<|im_start|>", begin).replace("<|im_end|>", end)
    return text.replace("<|vision_start|><|image_pad|><|vision_end|>", image)


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


HALF = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
GEMMA_VISION = dict(
    # Heads of twenty values, which fill no block of sixteen.
    hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
)
GEMMA3 = transformers.Gemma3Config(
    text_config=dict(
        # Files in GGUF cannot say which layers have windows: all but each sixth.
        dict(TEXT, num_hidden_layers=6), sliding_window=12, query_pre_attn_scalar=16,
        layer_types=5 * ["sliding_attention"] + ["full_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_theta=5000.0, rope_type="default"),
            sliding_attention=dict(rope_theta=300.0, rope_type="default"),
        ),
    ),
    vision_config=dict(GEMMA_VISION, image_size=32, vision_use_head=False), mm_tokens_per_image=16,
    image_token_index=GEMMA3_IDS["<image_soft_token>"], boi_token_index=GEMMA3_IDS["<start_of_image>"],
    eoi_token_index=GEMMA3_IDS["<end_of_image>"],
)


def gemma4(text, vision):
    """Heads by layer; one weight for keys and values in layers without a window."""
    return transformers.Gemma4Config(
        text_config=dict(
            TEXT, sliding_window=12, global_head_dim=24, num_global_key_value_heads=1, final_logit_softcapping=9.0,
            rope_parameters=dict(
                full_attention=dict(rope_theta=5000.0, rope_type="proportional", partial_rotary_factor=0.5),
                sliding_attention=dict(rope_theta=300.0, rope_type="default"),
            ),
            vocab_size_per_layer_input=VOCAB, **text,
        ),
        vision_config=dict(
            GEMMA_VISION, num_key_value_heads=2, head_dim=20, position_embedding_size=128, pooling_kernel_size=3, **vision,
        ),
        audio_config=None, image_token_id=GEMMA4_IDS["<|image|>"], boi_token_id=GEMMA4_IDS["<|image>"],
        eoi_token_id=GEMMA4_IDS["<image|>"], audio_token_id=GEMMA4_IDS["<|audio|>"], video_token_id=GEMMA4_IDS["<|video|>"],
    )


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
    "gemma3": (GEMMA3, transformers.Gemma3ForConditionalGeneration),
    # Pictures are read in both directions by layers with windows.
    "gemma4": (
        gemma4(
            dict(
                layer_types=["sliding_attention", "full_attention", "full_attention"], attention_k_eq_v=True,
                hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
            ),
            dict(standardize=True),
        ),
        transformers.Gemma4ForConditionalGeneration,
    ),
    # Embeddings for each layer, and bounds of what the tower's layers read and make.
    "gemma4-e": (
        gemma4(
            dict(
                layer_types=["sliding_attention", "full_attention", "full_attention"], attention_k_eq_v=False,
                hidden_size_per_layer_input=24, num_kv_shared_layers=1,
            ),
            dict(use_clipped_linears=True),
        ),
        transformers.Gemma4ForConditionalGeneration,
    ),
}


class Qwen:
    """How models of the Qwen family are shown pictures."""

    ids = IDS
    template = TEMPLATE
    merges = [("Q", "Q")]
    merge = 2
    image = "<|image_pad|>"
    written = image
    # Grids in patches, down and across: odd numbers of tokens, and a picture of one.
    grids = [(6, 10), (2, 2), (14, 4)]
    file = dict(PROCESSOR, image_processor_type="Qwen2VLImageProcessor", resample=3, rescale_factor=1 / 255)

    def shown(self, count):
        return self.image * count

    def around(self, count):
        return [IDS["<|vision_start|>"]], [IDS[self.image]] * count, [IDS["<|vision_end|>"]]

    def of_patches(self, patches, grids):
        return dict(pixel_values=torch.cat([both_frames(values) for values in patches])), grids

    def of_pictures(self, pictures):
        made = Qwen2VLImageProcessorPil(**PROCESSOR)(images=pictures, return_tensors="pt")
        return dict(pixel_values=made["pixel_values"]), made["image_grid_thw"][:, 1:].tolist()

    def rows(self, model, inputs, grids):
        return tower_rows(model, inputs["pixel_values"], grids)

    def inputs(self, ids, inputs, grids):
        return dict(
            inputs, image_grid_thw=torch.tensor([[1, *grid] for grid in grids]),
            mm_token_type_ids=(ids == TOKENS["image_token_id"]).int(),
        )


def by_rows(values, grid, merge):
    """Patches, those of a token together, row after row."""
    height, width = grid
    values = values.reshape(height // merge, width // merge, merge, merge, *values.shape[1:])
    return values.swapaxes(1, 2).reshape(height * width, *values.shape[4:])


class Gemma3:
    """Squares, which are read in both directions."""

    ids = GEMMA3_IDS
    template = gemma_template("<start_of_turn>", "<end_of_turn>", "<start_of_image>")
    # Ends of lines become one token, as in the real tokenizer.
    merges = [("Q", "Q"), ("\u010a", "\u010a"), ("\u010a\u010a", "\u010a")]
    merge = 2
    image = "<image_soft_token>"
    written = "<start_of_image>"
    grids = [(8, 8)] * 3
    file = dict(
        image_processor_type="Gemma3ImageProcessor", size=dict(height=32, width=32), resample=2,
        do_pan_and_scan=None, image_seq_length=16, **HALF,
    )

    def shown(self, count):
        return f"\n\n<start_of_image>{self.image * count}<end_of_image>\n\n"

    def around(self, count):
        names = self.ids
        return [70, names["<start_of_image>"]], [names[self.image]] * count, [names["<end_of_image>"]]

    def of_patches(self, patches, grids):
        pictures = []
        for values, grid in zip(patches, grids):
            rows = by_rows(values.reshape(-1, 3, 4, 4), grid, self.merge).reshape(8, 8, 3, 4, 4)
            pictures.append(rows.transpose(2, 0, 3, 1, 4).reshape(3, 32, 32))
        return dict(pixel_values=torch.tensor(np.stack(pictures))), grids

    def of_pictures(self, pictures):
        made = Gemma3ImageProcessorPil(size=dict(height=32, width=32))(images=pictures, return_tensors="pt")
        return dict(pixel_values=made["pixel_values"]), [(8, 8)] * len(pictures)

    def rows(self, model, inputs, grids):
        return model.model.get_image_features(**inputs).pooler_output.flatten(0, 1)

    def inputs(self, ids, inputs, grids):
        return dict(inputs, token_type_ids=(ids == self.ids[self.image]).int())


class Gemma4:
    """As many tokens as there may be, of any shape."""

    ids = GEMMA4_IDS
    template = gemma_template("<|turn>", "<turn|>", "<|image|>")
    merges = [("Q", "Q")]
    merge = 3
    image = "<|image|>"
    written = image
    grids = [(6, 9), (3, 3), (12, 3)]
    file = dict(
        image_processor_type="Gemma4ImageProcessor", patch_size=4, pooling_kernel_size=3, max_soft_tokens=70,
        image_mean=[0.0] * 3, image_std=[1.0] * 3,
    )

    def shown(self, count):
        return f"<|image>{self.image * count}<image|>"

    def around(self, count):
        names = self.ids
        return [names["<|image>"]], [names[self.image]] * count, [names["<image|>"]]

    def of_patches(self, patches, grids):
        most = max(len(values) for values in patches)
        pixels, places = np.zeros((len(grids), most, 48), "float32"), -np.ones((len(grids), most, 2), "int64")
        for at, (values, (height, width)) in enumerate(zip(patches, grids)):
            rows = by_rows(values.reshape(-1, 3, 16), (height, width), self.merge)
            # Of each pixel its colours, between 0 and 1.
            pixels[at, : len(rows)] = rows.swapaxes(1, 2).reshape(-1, 48) / 2 + 0.5
            places[at, : len(rows)] = [(x, y) for y in range(height) for x in range(width)]
        return dict(pixel_values=torch.tensor(pixels), image_position_ids=torch.tensor(places)), grids

    def of_pictures(self, pictures):
        said = {key: value for key, value in self.file.items() if key != "image_processor_type"}
        made = Gemma4ImageProcessorPil(**said)(images=pictures, return_tensors="pt")
        places = made["image_position_ids"]
        grids = [[int(side) + 1 for side in of.max(0).values.flip(0)] for of in places]
        return dict(pixel_values=made["pixel_values"].float(), image_position_ids=places), grids

    def rows(self, model, inputs, grids):
        return torch.cat(model.model.get_image_features(**inputs).pooler_output)

    def inputs(self, ids, inputs, grids):
        return dict(inputs, mm_token_type_ids=(ids == self.ids[self.image]).int())


def family(name):
    return dict(gemma3=Gemma3, gemma4=Gemma4).get(name.split("-")[0], Qwen)()


def as_published(config):
    """config.json of Gemma 4 in the words of its published files."""
    text = config["text_config"]
    heads = list(text.pop("per_layer_config").values())[0]
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads.get("num_key_value_heads")

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
        if name.endswith("position_embedding_table"):
            value = 0.3 * torch.randn_like(weight)
        value = value.bfloat16().float()
        value[value.abs() < 2**-13] = 0
        weight.data = value
    for name, buffer in model.named_buffers():
        # Means are some times the root of their width, and their bounds are such that they cut.
        ends = dict(std_bias=3.0, input_min=-1.2, input_max=1.4, output_min=-1.6, output_max=1.7)
        end = ends.get(name.split(".")[-1])
        if name.endswith("std_bias"):
            buffer.data = (end * torch.randn_like(buffer)).bfloat16().float()
        elif name.endswith("std_scale"):
            buffer.data = (0.1 + 0.2 * torch.rand_like(buffer)).bfloat16().float()
        elif end is not None:
            # Of all layers that read the same, the same; what they make has bounds of its own.
            own = 1.0 if "input" in name else 1.0 + sum(name.encode()) % 7 / 8
            buffer.data = torch.tensor(own * end).bfloat16().float()


def tokenizer(directory, family):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # At least one merge, which no text here has: GGUF files cannot say that there is none.
    letters = [*alphabet, *family.ids, *(first + second for first, second in family.merges)]
    vocab = {letter: at for at, letter in enumerate(letters)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, family.merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in family.ids])
    assert all(bpe.token_to_id(name) == at for name, at in family.ids.items())
    bpe.save(str(directory / "tokenizer.json"))
    pad, first, second = list(family.ids)[:3]
    end = second if family.ids is IDS else first
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=end, pad_token=pad)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "chat_template.jinja").write_text(family.template)
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


def logits(model, family, ids, inputs, grids):
    ids = torch.tensor([ids])
    return model(input_ids=ids, use_cache=False, **family.inputs(ids, inputs, grids)).logits[0]


def conversation(family, words):
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
    opened = [ImageOps.exif_transpose(Image.open(PICTURES / name)).convert("RGB") for name in images]
    inputs, grids = family.of_pictures(opened)
    # What a message says is no token of its own: written with other letters, and put back as bytes.
    for message in messages:
        for part in message["content"]:
            if "text" in part:
                part["text"] = part["text"].replace("<|image_pad|>", family.written)
    said = json.loads(json.dumps(messages).replace(family.written, "\\u0001"))
    text = words.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    first, *pieces = text.split(family.written)
    assert len(pieces) == len(images)
    counts = [height * width // family.merge**2 for height, width in grids]
    text = first + "".join(family.shown(count) + piece for count, piece in zip(counts, pieces))
    ids, spelt = [], words.convert_tokens_to_ids(words.tokenize("\u0001"))[0]
    for token in words(text)["input_ids"]:
        if token == spelt:
            ids += [words.convert_tokens_to_ids(piece) for letter in family.written for piece in words.tokenize(letter)]
        else:
            ids.append(token)
    return dict(messages=messages, images=images, prompt=ids), inputs, grids


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
    shows = family(name)
    if "per_layer_config" in written["text_config"]:
        as_published(written)
    if shows.ids is IDS:
        written["text_config"]["full_attention_interval"] = 2
    (directory / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    if name == "gemma3":
        # The published files call them so, and the converter knows no other names.
        weights = load_file(directory / "model.safetensors")
        weights = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in weights.items()}
        save_file(weights, directory / "model.safetensors", metadata=dict(format="pt"))
    # Newer files say it beside what else the processor does.
    (directory / "preprocessor_config.json").unlink(missing_ok=True)
    file, said = ("preprocessor_config.json", shows.file) if name != "gemma4" else ("processor_config.json", dict(image_processor=shows.file))
    (directory / file).write_text(json.dumps(said, indent=1) + "\n")
    words = tokenizer(directory, shows)
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").float().eval()

    patches = [patch_values(height * width) for height, width in shows.grids]
    inputs, grids = shows.of_patches(patches, shows.grids)
    prompt = [list(shows.ids.values())[1], 70, 80]
    for at, (height, width) in enumerate(grids):
        before, pads, behind = shows.around(height * width // shows.merge**2)
        prompt += [*before, *pads, *behind, *range(90 + 7 * at, 90 + 7 * at + 5)]
    chat, chat_inputs, chat_grids = conversation(shows, words)
    with torch.no_grad():
        rows = shows.rows(model, inputs, grids)
        of_prompt = logits(model, shows, prompt, inputs, grids)
        following, scores = list(chat["prompt"]), []
        for _ in range(FOLLOWING):
            last = logits(model, shows, following, chat_inputs, chat_grids)[-1].log_softmax(-1)
            scores.append(last)
            following.append(int(last[: len(shows.ids) + FIRST_SPECIAL].argmax()))
    chat["following"] = following[len(chat["prompt"]) :]
    golden = dict(grids=grids, prompt=prompt, **{f"chat_{key}": value for key, value in chat.items()})
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
from conversion.gemma import Gemma4Model
Gemma4Model.set_vocab = lambda self: self._set_vocab_gpt2()
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
    if name in sys.argv[2:] or len(sys.argv) == 2:
        make(name, config, kind, Path(sys.argv[1]))
