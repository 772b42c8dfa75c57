"""llama.cpp's own tests of its server, against Fornax: python llama_server_suite.py TESTS BINARY MODELS [--write] [FILE...].

TESTS is `tools/server/tests` of llama.cpp's sources, BINARY is `fornax`, MODELS the folder of its catalog's files.
`llama_server.json` beside this file says which tests fail and why. The run fails where another one does, or where one of the list
no longer does; `--write` adds the former to the list, without a reason, and removes the latter. The interpreter needs gguf,
pytest, pytest-timeout and what the tests import.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
LIST = HERE / "llama_server.json"
# The others test what is no server of a model: a browser's proxy, built-in tools, a router of processes, what is asked by Google's
# platform; or what their own flags do: draft models, sleep, adapters by a scale, images by a hub's model. `tokenize` and
# `tool_call` are not in the list yet.
FILES = ["basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift", "embedding",
         "ignore_eos", "infill", "metrics", "rerank", "security", "slot_save", "stream", "template"]
# Whose tokenizer each stand-in has.
STAND_INS = {"tiny.gguf": "smollm2-135m-instruct-q4_1.gguf", "infill.gguf": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"}


class Outcomes:
    def __init__(self):
        self.told = {}
        self.why = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.removeprefix("unit/")
        if report.failed:
            self.told[name] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.why[name] = (crash.message if crash else str(report.longrepr)).splitlines()[0][:200]
        elif report.when == "call" or report.skipped:
            self.told.setdefault(name, report.outcome)


tests, binary, models, *more = sys.argv[1:]
stand_ins = tempfile.TemporaryDirectory()
for name, tokenizer in STAND_INS.items():
    arguments = [pathlib.Path(models) / tokenizer, pathlib.Path(stand_ins.name) / name]
    subprocess.run([sys.executable, HERE / "llama_server_model.py", *map(str, arguments)], check=True)
os.environ["FORNAX_STAND_INS"] = stand_ins.name
os.environ["FORNAX_BINARY"] = str(pathlib.Path(binary).resolve())
os.environ["LLAMA_SERVER_BIN_PATH"] = str(HERE / "llama_server.py")
os.environ.setdefault("PORT", "18093")
os.chdir(tests)
wanted = [name for name in more if not name.startswith("-")] or FILES
outcomes = Outcomes()
pytest.main(
    ["-q", "--no-header", "--tb=no", "--timeout=90", "-p", "no:cacheprovider", "-m", "not slow", *[f"unit/test_{name}.py" for name in wanted]],
    plugins=[outcomes])
if not outcomes.told:
    sys.exit("no test ran")
listed = json.loads(LIST.read_text()) if LIST.exists() else {"reasons": {}, "failing": {}}
failed = {name for name, told in outcomes.told.items() if told == "failed"}
known = {name for name in listed["failing"] if name in outcomes.told}
new, gone = sorted(failed - known), sorted(known - failed)
if "--write" in more:
    listed["failing"].update({name: f"? {outcomes.why[name]}" for name in new})
    for name in gone:
        del listed["failing"][name]
    listed["failing"] = dict(sorted(listed["failing"].items()))
    LIST.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    new = gone = []
by_reason = {}
for name in failed & known:
    by_reason[listed["failing"][name]] = by_reason.get(listed["failing"][name], 0) + 1


def count(told):
    return sum(1 for other in outcomes.told.values() if other == told)


print(json.dumps({"passed": count("passed"), "failed": count("failed"), "skipped": count("skipped"), "by_reason": by_reason}))
for name in new:
    print(f"fails, and is not listed: {name}: {outcomes.why[name]}", file=sys.stderr)
for name in gone:
    print(f"is listed, and passes: {name}", file=sys.stderr)
unreasoned = sorted(name for name, reason in listed["failing"].items() if reason not in listed["reasons"])
if unreasoned and "--write" not in more:
    print("without a known reason:", *unreasoned, file=sys.stderr)
sys.exit(1 if new or gone or (unreasoned and "--write" not in more) else 0)
