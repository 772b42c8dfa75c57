"""Tools, thoughts and other people's APIs, with their own clients, against a running `fornax serve`.

Run as: python tools_suite.py BASE_URL KEY MODEL. Needs the packages `openai`, `anthropic` and `ollama`, and a server whose
chat template is `tools.jinja`. What a small model chooses to say proves nothing: calls are forced, thoughts are bounded.
"""

import json
import sys

import anthropic
import ollama
import openai

base, key, model = sys.argv[1:4]
gpt = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=120)
claude = anthropic.Anthropic(base_url=base, api_key=key, max_retries=0, timeout=120)
llama = ollama.Client(host=base, headers={"Authorization": f"Bearer {key}"}, timeout=120)

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": TIME}},
]
CLAUDE_TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA},
                {"name": "get_time", "description": "The time.", "input_schema": TIME}]
# This client has no word for it any more.
GREEDY = {"temperature": 0}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def valid(name, arguments):
    if name == "get_time":
        assert arguments["zone"] in ("CET", "UTC"), arguments
        return
    assert name == "get_weather", name
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit"), arguments


def openai_forces():
    for choice in (NAMED, "required"):
        whole = gpt.chat.completions.create(model=model, messages=ASK, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=96)
        [call] = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content is None
        valid(call.function.name, json.loads(call.function.arguments))
        parts = list(gpt.chat.completions.create(
            model=model, messages=ASK, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=96, stream=True))
        deltas = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
        assert deltas[0].function.name == call.function.name and deltas[0].id
        assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
        assert parts[-1].choices[0].finish_reason == "tool_calls"


def openai_goes_on():
    call = {"id": "call_abc", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_abc", "content": "18 degrees, sunny"}]
    whole = gpt.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0, max_tokens=24)
    assert whole.choices[0].message.content or whole.choices[0].message.tool_calls


def openai_formats_beside_tools():
    format = {"type": "json_schema", "json_schema": {"name": "time", "schema": TIME, "strict": True}}
    ask = dict(model=model, messages=ASK, tools=TOOLS, response_format=format, stop=["Observation:"], temperature=0, max_tokens=96)
    message = gpt.chat.completions.create(**ask).choices[0].message
    # A small model may call or answer; whichever it does is held to what it must look like.
    if message.tool_calls:
        assert message.content is None
    else:
        valid("get_time", json.loads(message.content))
    parts = list(gpt.chat.completions.create(**ask, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == (message.content or "")
    called = gpt.chat.completions.create(**ask, tool_choice="required").choices[0].message.tool_calls[0]
    valid(called.function.name, json.loads(called.function.arguments))


def openai_thinks():
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8}
    whole = gpt.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=48, extra_body=extra)
    message = whole.choices[0].message
    assert message.reasoning_content and message.content, message
    assert whole.usage.completion_tokens_details.reasoning_tokens == 8
    parts = list(gpt.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=48, stream=True, extra_body=extra))
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content


def openai_responds():
    whole = gpt.responses.create(model=model, input="Name three colours.", temperature=0, max_output_tokens=16)
    assert whole.output_text and whole.status in ("completed", "incomplete") and whole.usage.input_tokens > 0
    text = ""
    for event in gpt.responses.create(model=model, input="Name three colours.", temperature=0, max_output_tokens=16, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert event.type in ("response.completed", "response.incomplete") and event.response.output_text == text == whole.output_text
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    called = gpt.responses.create(model=model, input="Weather in Paris?", tools=tools, tool_choice="required", max_output_tokens=96)
    [call] = [item for item in called.output if item.type == "function_call"]
    valid(call.name, json.loads(call.arguments))
    try:
        gpt.responses.create(model=model, input="And now?", previous_response_id=whole.id)
    except openai.BadRequestError as error:
        assert error.body["param"] == "previous_response_id", error
    else:
        raise AssertionError("nothing is remembered here")


def anthropic_answers():
    whole = claude.messages.create(model=model, max_tokens=24, messages=ASK, system="Be brief.", extra_body=GREEDY)
    assert whole.type == "message" and whole.content[0].type == "text" and whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(model=model, max_tokens=24, messages=ASK, system="Be brief.", extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason
    count = claude.messages.count_tokens(model=model, messages=ASK, system="Be brief.")
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def anthropic_calls():
    for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any"}):
        ask = dict(model=model, max_tokens=96, messages=ASK, tools=CLAUDE_TOOLS, tool_choice=choice, extra_body=GREEDY)
        whole = claude.messages.create(**ask)
        [block] = whole.content
        assert block.type == "tool_use" and whole.stop_reason == "tool_use"
        valid(block.name, block.input)
        with claude.messages.stream(**ask) as stream:
            [streamed] = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}
    messages = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model=model, max_tokens=8, messages=messages, tools=CLAUDE_TOOLS).content


def anthropic_thinks():
    thinking = {"type": "enabled", "budget_tokens": 8}
    whole = claude.messages.create(model=model, max_tokens=64, messages=ASK, extra_body=GREEDY, thinking=thinking)
    assert [block.type for block in whole.content] == ["thinking", "text"] and whole.content[0].thinking


def anthropic_formats_and_goes_on():
    format = {"output_config": {"format": {"type": "json_schema", "schema": TIME}, "effort": "low"}, **GREEDY}
    [block] = claude.messages.create(model=model, max_tokens=48, messages=ASK, extra_body=format).content
    valid("get_time", json.loads(block.text))
    begun = [*ASK, {"role": "assistant", "content": "The weather in Paris is"}]
    [block] = claude.messages.create(model=model, max_tokens=8, messages=begun, extra_body=GREEDY).content
    assert block.text and not block.text.startswith("The weather in Paris is"), block


def anthropic_errs():
    try:
        claude.messages.create(model="another", max_tokens=8, messages=ASK)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("there is no such model")
    wrong = anthropic.Anthropic(base_url=base, api_key="a-wrong-key-of-some-length", max_retries=0)
    try:
        wrong.messages.create(model=model, max_tokens=8, messages=ASK)
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error", error.body
    else:
        raise AssertionError("that key is wrong")
    try:
        claude.messages.create(model=model, max_tokens=8, messages=[{"role": "user", "content": "word " * 4000}])
    except anthropic.BadRequestError as error:
        assert error.body["error"]["message"].startswith("prompt is too long: "), error.body
    else:
        raise AssertionError("that is too long")


def ollama_answers():
    options = {"temperature": 0, "num_predict": 16}
    whole = llama.chat(model=model, messages=ASK, options=options)
    assert whole.message.content and whole.done and whole.eval_count <= 16 and whole.total_duration > 0
    parts = list(llama.chat(model=model, messages=ASK, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count
    generated = llama.generate(model=model, prompt="The sky is", raw=True, options=options)
    assert generated.response and generated.prompt_eval_count > 0
    formed = llama.chat(model=model, messages=ASK, format=TIME, options={**options, "num_predict": 64})
    assert json.loads(formed.message.content)["zone"] in ("CET", "UTC")


def ollama_knows_models():
    assert [entry.model for entry in llama.list().models] == [model]
    shown = llama.show(model)
    assert "tools" in shown.capabilities and shown.details.family
    assert llama.ps().models[0].model == model
    vectors = llama.embed(model=model, input=["a cat", "a dog"]).embeddings
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 100
    entry = llama.list().models[0]
    assert entry.details.format == "gguf" and entry.details.parameter_size.endswith("M") and len(entry.digest) == 64, entry
    assert llama.embed(model=model, input="word " * 4000, truncate=True).prompt_eval_count == 2048
    assert len(llama.embeddings(model=model, prompt="a cat").embedding) == len(vectors[0])
    scored = llama.chat(model=model, messages=ASK, logprobs=True, top_logprobs=2, keep_alive="5m", options={"num_predict": 2, "num_ctx": 100000})
    assert len(scored.logprobs) == 2 and len(scored.logprobs[0].top_logprobs) == 2, scored
    assert llama.pull(model).status == "success"
    assert [part.status for part in llama.pull(model, stream=True)] == ["pulling manifest", "success"]
    refused = {
        "no such model": [lambda: llama.chat(model="another", messages=ASK), lambda: llama.pull("another")],
        # What this key may not do.
        "may not make or delete models": [
            lambda: llama.copy(model, "another"),
            lambda: llama.delete(model),
            lambda: llama.create(model="another", from_=model),
        ],
        "no tokens to ask for": [lambda: llama.generate(model=model, prompt="def f(", suffix="return a")],
    }
    for reason, asks in refused.items():
        for ask in asks:
            try:
                ask()
            except ollama.ResponseError as error:
                assert reason in error.error, error
            else:
                raise AssertionError(f"it was not refused: {reason}")


for scenario in (openai_forces, openai_goes_on, openai_formats_beside_tools, openai_thinks, openai_responds, anthropic_answers, anthropic_calls, anthropic_thinks, anthropic_formats_and_goes_on, anthropic_errs, ollama_answers, ollama_knows_models):
    scenario()
    print(f"ok {scenario.__name__}", flush=True)
