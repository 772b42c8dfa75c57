"""lm-evaluation-harness against a running `fornax serve`, and transformers on the same weights.

Two acts, because the two want environments of their own:
  python lm_eval_suite.py ask BASE_URL KEY MODEL FOLDER      lm-eval asks the server; what it was told is kept in FOLDER
  python lm_eval_suite.py compare GGUF FOLDER                transformers says the same of the dequantised file
FOLDER/tokenizer is what `python lm_eval_suite.py tokenizer GGUF FOLDER` makes, with transformers.
"""

import json
import math
import os
import pathlib
import sys

# A question, choices, and which is right: enough that a small model gets some right and some wrong.
QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "Rome", "Madrid"], 0),
    ("The chemical symbol of gold is", ["Ag", "Au", "Fe", "Pb"], 1),
    ("Water freezes at a temperature of", ["100 degrees Celsius", "50 degrees Celsius", "0 degrees Celsius", "-40 degrees Celsius"], 2),
    ("The largest planet of the solar system is", ["Mars", "Venus", "Earth", "Jupiter"], 3),
    ("Two and three make", ["five", "six", "four", "nine"], 0),
    ("The author of Hamlet is", ["Charles Dickens", "William Shakespeare", "Jane Austen", "Mark Twain"], 1),
    ("Plants take up carbon dioxide and give off", ["nitrogen", "helium", "oxygen", "methane"], 2),
    ("A triangle has", ["two sides", "four sides", "five sides", "three sides"], 3),
    ("The opposite of hot is", ["cold", "warm", "dry", "bright"], 0),
    ("A week has", ["five days", "seven days", "eight days", "ten days"], 1),
    ("The first month of the year is", ["March", "December", "January", "June"], 2),
    ("Bees make", ["milk", "silk", "wool", "honey"], 3),
    ("The heart pumps", ["blood", "air", "bile", "water"], 0),
    ("The currency of Japan is the", ["won", "yen", "yuan", "rupee"], 1),
    ("The speed of light is about", ["300 metres per second", "3,000 kilometres per hour", "300,000 kilometres per second", "30 kilometres per second"], 2),
    ("The Great Wall is in", ["India", "Japan", "Egypt", "China"], 3),
    ("Ice is frozen", ["water", "oil", "air", "sand"], 0),
    ("The square root of 81 is", ["8", "9", "18", "27"], 1),
    ("Photographs are taken with a", ["telescope", "hammer", "camera", "kettle"], 2),
    ("The Amazon is a", ["mountain", "lake", "desert", "river"], 3),
    ("Größe heißt auf Englisch", ["size", "house", "dog", "colour"], 0),
    ("In Python, the length of a list is told by", ["size()", "len()", "count()", "length()"], 1),
]
# What differs by more is a fault: keys and values in f32 and float activations on both sides.
BOUND = 0.01


def tokenizer(gguf, folder):
    from transformers import AutoTokenizer

    path = pathlib.Path(gguf)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(pathlib.Path(folder) / "tokenizer")


def ask(base, key, model, folder):
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.environ["OPENAI_API_KEY"] = key
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    folder = pathlib.Path(folder)
    rows = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "questions", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"base_url": f"{base}/v1/completions", "model": model, "tokenizer": str(folder / "tokenizer"),
                    "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1},
        tasks=[task], task_manager=TaskManager(), log_samples=True, bootstrap_iters=0)
    samples = [
        {"arguments": [list(pair) for pair in sample["arguments"]], "told": [list(told) for told in sample["filtered_resps"]],
         "target": sample["target"]}
        for sample in result["samples"]["questions"]
    ]
    scores = {name: value for name, value in result["results"]["questions"].items() if isinstance(value, float)}
    (folder / "told.json").write_text(json.dumps({"samples": samples, "scores": scores}))


def compare(gguf, folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, folder = pathlib.Path(gguf), pathlib.Path(folder)
    tokens = AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    told = json.loads((folder / "told.json").read_text())
    worst, choices, right = 0.0, 0, 0
    assert len(told["samples"]) == len(QUESTIONS), len(told["samples"])
    for sample in told["samples"]:
        ours = [float(logprob) for logprob, _ in sample["told"]]
        # As lm-eval parts them: the whole, without what the context alone makes.
        wholes = [tokens(context + choice, add_special_tokens=False).input_ids for context, choice in sample["arguments"]]
        count = len(tokens(sample["arguments"][0][0], add_special_tokens=False).input_ids)
        # What stands behind a text changes nothing before it.
        longest = max(len(whole) for whole in wholes)
        batch = torch.tensor([whole + [0] * (longest - len(whole)) for whole in wholes])
        with torch.no_grad():
            logits = model(batch).logits[:, count - 1 :].double().log_softmax(-1)
        theirs = [
            sum(row[at - count, whole[at]].item() for at in range(count, len(whole))) for row, whole in zip(logits, wholes)]
        worst = max([worst, *(abs(a - b) for a, b in zip(ours, theirs))])
        choices += 1
        assert ours.index(max(ours)) == theirs.index(max(theirs)), (sample, theirs)
        right += theirs.index(max(theirs)) == int(sample["target"])
    assert worst <= BOUND and not math.isnan(worst), worst
    assert abs(told["scores"]["acc,none"] - right / choices) < 1e-9, (told["scores"], right)
    print(json.dumps({"questions": choices, "right": right, "worst": round(worst, 5)}))


{"tokenizer": tokenizer, "ask": ask, "compare": compare}[sys.argv[1]](*sys.argv[2:])
