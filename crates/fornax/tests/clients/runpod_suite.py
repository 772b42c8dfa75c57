"""The real `runpod` client against a server: python runpod_suite.py BASE_URL KEY. Prints `ok NAME` for each scenario."""

import os
import sys

base, key = sys.argv[1:3]
os.environ["RUNPOD_ENDPOINT_BASE_URL"] = f"{base}/v2"
import runpod  # noqa: E402  (it reads the address when it is imported)

runpod.api_key = key
endpoint = runpod.Endpoint("default")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fruit", "metal"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def submits_and_polls():
    job = endpoint.run({"input": {"prompt": "An apple is a", "schema": SCHEMA, "temperature": 0}})
    assert job.status() in ("IN_QUEUE", "IN_PROGRESS", "COMPLETED")
    output = job.output(timeout=60)
    assert job.status() == "COMPLETED", job.status()
    assert output["success"] and output["output"]["kind"] in ("fruit", "metal"), output
    confidence = output["metadata"]["confidence"]["/kind"]
    assert 0 < confidence <= 1, confidence


def waits_in_one_call():
    output = endpoint.run_sync({"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 8}, timeout=60)
    assert output["metadata"]["usage"]["completion"] >= 1, output


def streams_a_batch():
    items = [{"id": f"d{n}", "text": f"Thing {n}: iron."} for n in range(5)]
    prefix = "You sort things into fruit and metal. " * 20
    job = endpoint.run({"input": {"shared_prefix": prefix, "items": items, "schema": SCHEMA, "temperature": 0}})
    seen = [part["id"] for part in job.stream()]
    assert seen == [item["id"] for item in items], seen
    usage = job.output()["metadata"]["usage"]
    assert usage["cached"] > usage["prompt"] / 2, usage


def cancels():
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    job = endpoint.run({"input": body})
    # Each look is a request of its own.
    while job.status() == "IN_QUEUE":
        pass
    assert job.cancel()["status"] == "CANCELLED"
    assert job.status() == "CANCELLED"


def sees_failures():
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 50}}, "required": ["text"]}
    job = endpoint.run({"input": {"prompt": "A story:", "schema": text, "max_tokens": 10}})
    output = job.output(timeout=60)
    assert job.status() == "FAILED" and output["code"] == "OUTPUT_TRUNCATED", output


def health_and_purge():
    health = endpoint.health()
    assert health["jobs"]["completed"] >= 3 and health["workers"]["running"] >= 0, health
    assert endpoint.purge_queue()["status"] == "completed"


for scenario in (submits_and_polls, waits_in_one_call, streams_a_batch, cancels, sees_failures, health_and_purge):
    scenario()
    print("ok", scenario.__name__)
