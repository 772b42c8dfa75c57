"""Everything that OpenAI's own client does with a server, against a running `fornax serve`.

Run as: python openai_suite.py BASE_URL KEY MODEL. Needs the package `openai`. Each scenario is a function; the first
assertion that fails ends the run.
"""

import json
import pathlib
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

base, key, model = sys.argv[1:4]
client = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name three colours."}]


def health():
    request = urllib.request.Request(f"{base}/health", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def post(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{base}{path}", data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def until(condition):
    """Asks again and again; a server that never gets there fails by time."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never was"


def chat(**more):
    return client.chat.completions.create(**{"model": model, "messages": ASK, "max_tokens": 24, "temperature": 0, **more})


def text(completion, index=0):
    return completion.choices[index].message.content


def refused(kind, status, code, **more):
    try:
        chat(**more)
    except kind as error:
        assert error.status_code == status, error
        assert error.code == code, error
        return error
    raise AssertionError(f"{more} was not refused")


def answers():
    whole = chat()
    assert whole.object == "chat.completion" and whole.model == model
    assert whole.choices[0].message.role == "assistant" and text(whole)
    assert whole.choices[0].finish_reason in ("stop", "length")
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24


def streams():
    parts = list(chat(stream=True, stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    whole = chat()
    assert joined == text(whole), (joined, text(whole))
    ends = [part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def several():
    three = chat(n=3, temperature=1, seed=5)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len({text(three, index) for index in range(3)}) > 1
    parts = list(chat(n=3, temperature=1, seed=5, stream=True))
    for index in range(3):
        joined = "".join(p.choices[0].delta.content or "" for p in parts if p.choices[0].index == index)
        assert joined == text(three, index)


def seeds():
    one, same = chat(temperature=1, seed=7), chat(temperature=1, seed=7)
    assert text(one) == text(same)
    assert any(text(chat(temperature=1, seed=seed)) != text(one) for seed in range(8, 12))


def logprobs():
    choice = chat(logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == choice.message.content
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        # Greedy takes the most likely.
        assert token.logprob == token.top_logprobs[0].logprob
    older = client.completions.create(model=model, prompt="The sky is", max_tokens=4, logprobs=2, temperature=0).choices[0]
    assert "".join(older.logprobs.tokens) == older.text
    assert all(len(top) == 2 for top in older.logprobs.top_logprobs)


def structured():
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green", "blue"]}, "share": {"type": "integer", "minimum": 0, "maximum": 100}},
        "required": ["name", "share"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": schema}}
    for seed in range(3):
        choice = chat(response_format=format, temperature=1.5, seed=seed, max_tokens=64).choices[0]
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert value["name"] in ("red", "green", "blue") and 0 <= value["share"] <= 100
    cut = chat(response_format=format, max_tokens=3).choices[0]
    assert cut.finish_reason == "length"
    one = chat(extra_body={"guided_choice": ["yes", "no"]}, temperature=1, seed=1)
    assert text(one) in ("yes", "no")


def stops():
    whole = text(chat())
    middle = whole[len(whole) // 2 :][:3]
    stopped = chat(stop=middle)
    assert stopped.choices[0].finish_reason == "stop"
    assert text(stopped) == whole[: whole.index(middle)]
    joined = "".join(part.choices[0].delta.content or "" for part in chat(stop=[middle], stream=True))
    assert joined == text(stopped)


def cached():
    long = [{"role": "user", "content": "Count the words of this. " * 20}]
    chat(messages=long)
    again = chat(messages=long)
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens // 2


def models():
    assert [one.id for one in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def errors():
    refused(openai.NotFoundError, 404, "MODEL_NOT_FOUND", model="other")
    error = refused(openai.BadRequestError, 400, "INVALID_INPUT", temperature=3)
    assert error.param == "temperature" and error.type == "invalid_request_error"
    refused(openai.BadRequestError, 400, "INVALID_INPUT", n=0)
    refused(openai.BadRequestError, 400, "INVALID_INPUT", messages=[])
    refused(openai.BadRequestError, 400, "MODEL_UNSUPPORTED", tools=[{"type": "function", "function": {"name": "f"}}])
    refused(openai.BadRequestError, 400, "context_length_exceeded", messages=[{"role": "user", "content": "long " * 5000}])
    refused(openai.BadRequestError, 400, "context_length_exceeded", max_tokens=1_000_000)
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    refused(openai.BadRequestError, 400, "SCHEMA_UNSUPPORTED", response_format=format)
    refused(openai.APIStatusError, 413, "BODY_TOO_LARGE", messages=[{"role": "user", "content": "x" * (1 << 21)}])
    stranger = openai.OpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0)
    try:
        stranger.models.list()
        raise AssertionError("a wrong key was let in")
    except openai.AuthenticationError as error:
        assert error.code == "UNAUTHORIZED"
    for wrong in ({"input": []}, {"input": ""}, {"input": "text", "dimensions": 100000}):
        try:
            client.embeddings.create(model=model, **wrong)
            raise AssertionError(f"{wrong} was embedded")
        except openai.BadRequestError as error:
            assert error.code == "INVALID_INPUT", error


def embeddings():
    """Equal to what transformers makes of the same texts, but for the rounding of integer activations."""
    golden = json.loads((pathlib.Path(__file__).parents[4] / "tests/golden/smollm2-embeddings.json").read_text())
    dot = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))
    ways = [
        {"input": [case["text"] for case in golden]},
        {"input": [case["tokens"] for case in golden], "encoding_format": "float"},
    ]
    for way in ways:
        answer = client.embeddings.create(model=model, **way)
        assert [item.index for item in answer.data] == list(range(len(golden)))
        assert answer.usage.prompt_tokens == sum(len(case["tokens"]) for case in golden)
        for item, case in zip(answer.data, golden, strict=True):
            likeness = dot(item.embedding, case["embedding"])
            assert likeness > 0.9995, (case["text"], likeness)
            assert abs(dot(item.embedding, item.embedding) - 1) < 1e-5
    # More than the engine is handed at once, shortest last.
    texts = ["word " * (70 - count) for count in range(70)]
    many = client.embeddings.create(model=model, input=texts)
    one = client.embeddings.create(model=model, input=texts[41]).data[0].embedding
    assert len(many.data) == 70 and many.data[41].embedding == one, "the same bits alone and among others"


def cancels():
    stream = chat(stream=True, max_tokens=None, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: health()["running"] == 1)
    stream.close()
    until(lambda: health()["running"] == 0 and health()["kv"]["pages_used"] == 0)
    impatient = client.with_options(timeout=0.5)
    try:
        impatient.chat.completions.create(model=model, messages=ASK, extra_body={"ignore_eos": True})
        raise AssertionError("a whole context within half a second")
    except openai.APITimeoutError:
        pass
    until(lambda: health()["running"] == 0 and health()["kv"]["pages_used"] == 0)


def full():
    streams = [chat(stream=True, max_tokens=None, extra_body={"ignore_eos": True}) for _ in range(8)]
    error = refused(openai.RateLimitError, 429, "QUEUE_FULL")
    assert int(error.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    until(lambda: health()["running"] == 0 and health()["waiting"] == 0 and health()["kv"]["pages_used"] == 0)
    # A client that is told to come again does, by itself.
    assert text(client.with_options(max_retries=5).chat.completions.create(model=model, messages=ASK, max_tokens=4))


def together():
    def ask(number):
        return text(chat(messages=[{"role": "user", "content": f"Tell me about the number {number}."}], max_tokens=16))

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def steered():
    first = chat(logprobs=True, top_logprobs=0, max_tokens=1).choices[0].logprobs.content[0].token
    ids = post("/tokenize", {"content": first})["tokens"]
    assert text(chat(max_tokens=1, logit_bias={str(ids[0]): -100})) != first
    assert text(chat(max_tokens=1, logit_bias={str(ids[0]): 100}, temperature=2, seed=3)) == first
    whole = text(chat(max_tokens=48, messages=[{"role": "user", "content": "Say la la la la la la."}]))
    other = text(chat(max_tokens=48, messages=[{"role": "user", "content": "Say la la la la la la."}], frequency_penalty=2))
    assert whole != other
    loose = chat(response_format={"type": "json_object"}, max_tokens=200, temperature=1, seed=2).choices[0]
    if loose.finish_reason == "stop":
        assert isinstance(json.loads(loose.message.content), dict)


def scored_stream():
    parts = list(chat(stream=True, logprobs=True, top_logprobs=1))
    tokens = [token for part in parts for token in (part.choices[0].logprobs.content if part.choices[0].logprobs else [])]
    whole = chat(logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [token.token for token in tokens] == [token.token for token in whole]
    assert [token.logprob for token in tokens] == [token.logprob for token in whole]


def tokens():
    said = "Hello world, how are you? <|im_start|> \u00e9\u4e2d\U0001f600"
    ids = post("/tokenize", {"content": said})["tokens"]
    assert post("/detokenize", {"tokens": ids})["content"] == said
    pieces = post("/tokenize", {"content": said, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    # Control tokens written by a user are text, unless they are asked to be more.
    assert len(post("/tokenize", {"content": "<|im_start|>", "parse_special": True})["tokens"]) == 1
    assert len(post("/tokenize", {"content": "<|im_start|>"})["tokens"]) > 1


def completes():
    prompts = client.completions.create(model=model, prompt=["The sky is", "Water is"], max_tokens=4, temperature=0)
    assert [choice.index for choice in prompts.choices] == [0, 1]
    one = client.completions.create(model=model, prompt="Water is", max_tokens=4, temperature=0)
    # The same alone as among others.
    assert one.choices[0].text == prompts.choices[1].text


def echoes():
    ids = post("/tokenize", {"prompt": "The sky is blue", "model": model})["tokens"]
    told = client.completions.create(model=model, prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True)
    logprobs = told.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1 and logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert told.choices[0].text.startswith("The sky is blue") and logprobs.text_offset[0] == 0
    for offset, token in zip(logprobs.text_offset, logprobs.tokens):
        assert told.choices[0].text[offset:].startswith(token), (offset, token)
    # The same figures under vLLM's name.
    scored = post("/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1})
    for token, logprob, known in list(zip(ids, logprobs.token_logprobs, scored["choices"][0]["prompt_logprobs"]))[1:]:
        assert known[str(token)]["logprob"] == logprob
    parts = client.completions.create(model=model, prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True, stream=True)
    lists = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    assert [token for part in lists for token in part.tokens] == logprobs.tokens
    assert [value for part in lists for value in part.token_logprobs] == logprobs.token_logprobs
    none = client.completions.create(model=model, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=0)
    assert (none.choices[0].text, none.usage.completion_tokens) == ("The sky is blue", 0)


def batches():
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions",
              "body": {"model": model, "messages": ASK, "max_tokens": 8, "temperature": 0}} for n in range(3)]
    lines[1]["body"]["temperature"] = 9
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content and client.files.retrieve(file.id).bytes == len(content)
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"})
    ended = []

    def over():
        ended[:] = [client.batches.retrieve(batch.id)]
        return ended[0].status == "completed"

    until(over)
    counts = ended[0].request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1) and ended[0].metadata == {"a": "b"}
    answers = [json.loads(line) for line in client.files.content(ended[0].output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["r0", "r2"]
    said = answers[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert said == text(chat(max_tokens=8)) == answers[1]["response"]["body"]["choices"][0]["message"]["content"]
    wrong = [json.loads(line) for line in client.files.content(ended[0].error_file_id).text.splitlines()]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in wrong] == [("r1", 400)]
    assert batch.id in [listed.id for listed in client.batches.list(limit=5)]
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    second = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=second.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled", "completed")


def remembers():
    few = {"model": model, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="My name is Ada.", metadata={"a": "b"}, **few)
    assert first.store and first.metadata == {"a": "b"}
    assert client.responses.retrieve(first.id) == first
    asked = list(client.responses.input_items.list(first.id))
    assert [item.content[0].text for item in asked] == ["My name is Ada."]
    then = client.responses.create(input="What is my name?", previous_response_id=first.id, **few)
    so_far = [{"role": "user", "content": "My name is Ada."}, *(item.model_dump(exclude_none=True) for item in first.output)]
    question = {"role": "user", "content": "What is my name?"}
    whole = client.responses.create(input=[*so_far, question], store=False, **few)
    assert (then.output_text, then.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    counted = client.responses.input_tokens.count(model=model, input="What is my name?", previous_response_id=first.id)
    assert counted.input_tokens == then.usage.input_tokens
    named = [so_far[0], *({"type": "item_reference", "id": item.id} for item in first.output), question]
    assert client.responses.create(input=named, **few).output_text == then.output_text
    events = list(client.responses.create(input="What is my name?", previous_response_id=first.id, stream=True, **few))
    streamed = events[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text == then.output_text
    late = client.responses.create(input="What is my name?", previous_response_id=first.id, background=True, **few)
    assert late.status == "queued"
    until(lambda: client.responses.retrieve(late.id).status not in ("queued", "in_progress"))
    late = client.responses.retrieve(late.id)
    assert (late.status, late.output_text) == ("incomplete" if then.status == "incomplete" else "completed", then.output_text)
    endless = client.responses.create(model=model, input="Count to a thousand.", background=True)
    assert client.responses.cancel(endless.id).status in ("cancelled", "completed")
    client.responses.delete(first.id)
    for gone in (lambda: client.responses.retrieve(first.id), lambda: client.responses.retrieve("resp_none")):
        try:
            gone()
            raise AssertionError("it is still there")
        except openai.NotFoundError as error:
            assert error.code == "RESPONSE_NOT_FOUND", error
    try:
        client.responses.create(input="And?", previous_response_id=then.id, **few)
        raise AssertionError("its beginning is gone")
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id", error


def decides():
    questions = {
        "animal": {"type": "noul", "instructions": "Is a cat an animal?"},
        "colour": {"type": "choice", "instructions": "Which colour is the sky?", "criteria": {"blue": None, "green": "as grass"}},
        "heat": {"type": "score", "instructions": "How hot is it?", "criteria": ["cold", "warm", "hot"]},
    }
    body = {"model": model, "state": "It is a day in August, without a cloud.", "questions": questions}
    told = post("/v1/systemone", body)
    for name, answer in told["answers"].items():
        assert abs(sum(answer["probabilities"].values()) - 1) < 1e-9, answer
        assert 0 <= answer["confidence"] <= told["diagnostics"][name]["label_mass"] <= 1.00001
        # The same to the bit, alone and among others.
        alone = post("/v1/systemone", {**body, "questions": {name: questions[name]}})
        assert alone["answers"][name] == answer and alone["diagnostics"][name] == told["diagnostics"][name]
    assert told["answers"]["animal"]["noul"] == told["answers"]["animal"]["probabilities"]["yes"]
    levels = told["answers"]["heat"]["probabilities"]
    assert abs(told["answers"]["heat"]["score"] - sum(int(level) * share for level, share in levels.items())) < 1e-9


for scenario in (answers, streams, several, seeds, logprobs, structured, stops, cached, models, errors, cancels, full, together, steered, scored_stream, tokens, completes, echoes, batches, remembers, decides, embeddings):
    scenario()
    print(f"ok {scenario.__name__}", flush=True)
