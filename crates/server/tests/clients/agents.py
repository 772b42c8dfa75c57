"""Other people's clients against a server whose model says what a script says: python agents.py NAME BASE_URL FOLDER.

Most run a loop of a tool and an answer: what is tested is the protocol. `agents.json` beside it has what the model says, and in
FOLDER, which `cargo xtask prove clients` fills, is what they need of npm.
"""

import json
import os
import pathlib
import subprocess
import sys

name, base, folder = sys.argv[1:4]
KEY = "none"
QUESTION = "How is the weather in Paris?"
HERE = pathlib.Path(__file__).parent
# Python looks beside this file first, and one of the packages is called `agents`, too.
sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() != HERE.resolve()]


def weather_of(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return f"18 degrees in {city}"


def ran(*command, **environment):
    """Runs a program; what it said."""
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def openai():
    import openai
    from pydantic import BaseModel

    class weather_of(BaseModel):
        city: str

    class Report(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    ask = dict(model="script", tools=[openai.pydantic_function_tool(weather_of)])
    with client.chat.completions.stream(messages=messages, **ask) as stream:
        said = stream.get_final_completion().choices[0].message
    [call] = said.tool_calls
    assert call.function.parsed_arguments.city == "Paris", call
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = client.chat.completions.parse(messages=messages, response_format=Report, **ask)
    assert answer.choices[0].message.parsed.degrees == 18, answer


def openai_responses():
    import openai
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "name": "weather_of", "parameters": schema, "strict": False}]
    said = client.responses.create(model="script", input=QUESTION, tools=tools)
    [call] = [item for item in said.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": weather_of(**json.loads(call.arguments))}
    history = [{"role": "user", "content": QUESTION}, *said.output, result]
    with client.responses.stream(model="script", input=history, tools=tools) as stream:
        assert stream.get_final_response().output_text == "It is mild."
    parsed = client.responses.parse(model="script", input="As JSON, please.", text_format=Report)
    assert parsed.output_parsed.degrees == 18, parsed


def anthropic():
    import anthropic
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    client = anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": QUESTION}]
    runner = client.beta.messages.tool_runner(
        model="script", max_tokens=512, tools=[anthropic.beta_tool(weather_of)], messages=messages)
    said = [block for message in runner for block in message.content]
    kinds = [block.type for block in said if block.type != "thinking"]
    assert kinds == ["tool_use", "text"] and said[-1].text == "It is mild.", said
    parsed = client.messages.parse(
        model="script", max_tokens=512, output_format=Report, messages=[{"role": "user", "content": "As JSON, please."}])
    assert parsed.parsed_output.degrees == 18, parsed


def ollama():
    import ollama
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    client = ollama.Client(host=base)
    messages = [{"role": "user", "content": QUESTION}]
    said = client.chat("script", messages, tools=[weather_of]).message
    [call] = said.tool_calls
    result = weather_of(**call.function.arguments)
    messages += [said, {"role": "tool", "tool_name": call.function.name, "content": result}]
    parts = list(client.chat("script", messages, tools=[weather_of], stream=True))
    assert "".join(part.message.content or "" for part in parts) == "It is mild.", parts
    formed = client.chat("script", [{"role": "user", "content": "As JSON, please."}], format=Report.model_json_schema())
    assert Report.model_validate_json(formed.message.content).degrees == 18, formed


def langgraph(model):
    """A graph of one's own, not LangChain's agent."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = model.bind_tools([weather_of])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([weather_of]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    # Token by token, as its users' pages show it.
    parts = [part for part, _ in graph.compile().stream(asked, stream_mode="messages")]
    assert any(part.type == "tool" and "Paris" in part.content for part in parts), parts
    told = "".join(part.text for part in parts if part.type == "AIMessageChunk" and isinstance(part.text, str))
    assert told.endswith("It is mild."), parts


def langgraph_openai():
    from langchain_openai import ChatOpenAI

    langgraph(ChatOpenAI(model="script", base_url=f"{base}/v1", api_key=KEY, max_retries=0))


def langgraph_anthropic():
    from langchain_anthropic import ChatAnthropic

    langgraph(ChatAnthropic(model="script", base_url=base, api_key=KEY, max_retries=0, max_tokens=512))


def langgraph_ollama():
    from langchain_ollama import ChatOllama

    langgraph(ChatOllama(model="script", base_url=base))


def llama_index(llm):
    import asyncio

    from llama_index.core.agent.workflow import FunctionAgent

    async def loop():
        agent = FunctionAgent(tools=[weather_of], llm=llm)
        return await agent.run(QUESTION)

    answer = asyncio.run(loop())
    assert answer.tool_calls[0].tool_name == "weather_of", answer
    assert str(answer).endswith("It is mild."), answer


def llama_index_openai():
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    llama_index(OpenAILike(
        model="script", api_base=f"{base}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0))
    embedding = OpenAILikeEmbedding(model_name="script", api_base=f"{base}/v1", api_key=KEY, max_retries=0)
    assert len(embedding.get_text_embedding("a cat")) == 3


def llama_index_ollama():
    from llama_index.llms.ollama import Ollama

    llama_index(Ollama(model="script", base_url=base, request_timeout=60, context_window=8000))


def instructor():
    import instructor
    import openai
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    for mode, asked in [(instructor.Mode.TOOLS, QUESTION), (instructor.Mode.JSON_SCHEMA, f"{QUESTION} As JSON, please.")]:
        patched = instructor.from_openai(client, mode=mode)
        messages = [{"role": "user", "content": asked}]
        report = patched.chat.completions.create(
            model="script", response_model=Report, max_retries=0, messages=messages, max_tokens=64)
        assert report.degrees == 18, report


def dspy():
    import dspy

    model = dspy.LM("openai/script", api_base=f"{base}/v1", api_key=KEY, cache=False, num_retries=0)
    with dspy.context(lm=model):
        answer = dspy.ReAct("question -> answer", tools=[weather_of], max_iters=3)(question=QUESTION)
    assert answer.answer == "mild", answer
    assert "18 degrees in Paris" in str(answer.trajectory), answer


def outlines():
    import openai
    import outlines
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    told = outlines.from_openai(client, "script")(QUESTION, Report)
    assert Report.model_validate_json(told).degrees == 18, told
    vllm = outlines.from_vllm(client, "script")
    told = vllm(f"{QUESTION} As JSON, please.", Report)
    assert Report.model_validate_json(told).degrees == 18, told
    assert vllm(f"{QUESTION} Hot or mild, which of the two is it?", outlines.types.Choice(["hot", "mild"])) == "mild"


def semantic_kernel():
    import asyncio

    from openai import AsyncOpenAI
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai import FunctionChoiceBehavior
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory
    from semantic_kernel.functions import kernel_function

    class Weather:
        @kernel_function(name="of", description="The weather.")
        def of(self, city: str) -> str:
            return weather_of(city)

    async def loop():
        kernel = Kernel()
        service = OpenAIChatCompletion(
            ai_model_id="script", async_client=AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0))
        kernel.add_plugin(Weather(), plugin_name="weather")
        history = ChatHistory()
        history.add_user_message(QUESTION)
        settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
        return await service.get_chat_message_content(history, settings, kernel=kernel), history

    answer, history = asyncio.run(loop())
    assert str(answer) == "It is mild.", answer
    assert "18 degrees in Paris" in history.to_prompt(), history


def openai_conversations():
    """Conversations that the server keeps: the openai package's own calls, and openai-agents' session of them."""
    import asyncio

    import agents
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    begun = client.conversations.create(items=[{"role": "developer", "content": "Be brief."}], metadata={"topic": "weather"})
    said = client.responses.create(model="script", input=QUESTION, conversation=begun.id)
    assert said.conversation.id == begun.id and said.output_text == "It is mild.", said
    items = client.conversations.items.list(begun.id, order="asc")
    assert [item.role for item in items] == ["developer", "user", "assistant"], items
    assert client.conversations.update(begun.id, metadata={"topic": "none"}).metadata == {"topic": "none"}
    first = items.data[0].id
    assert client.conversations.items.retrieve(first, conversation_id=begun.id).id == first
    client.conversations.items.delete(first, conversation_id=begun.id)
    assert len(client.conversations.items.list(begun.id).data) == 2
    assert client.conversations.delete(begun.id).deleted

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    session = agents.OpenAIConversationsSession(openai_client=client)
    agent = agents.Agent("weather", model=agents.OpenAIResponsesModel("script", client))

    async def talk():
        for _ in range(2):
            assert (await agents.Runner.run(agent, QUESTION, session=session)).final_output == "It is mild."
        kept = await session.get_items()
        assert [item["role"] for item in kept] == ["user", "assistant"] * 2, kept
        assert (await session.pop_item())["role"] == "assistant"
        await session.clear_session()

    asyncio.run(talk())


def ollama_made():
    """Models that are made of others, as Ollama's users do."""
    import ollama

    client = ollama.Client(host=base)
    made = list(client.create("mario", from_="script", system="You are Mario.", parameters={"temperature": 0.5}, stream=True))
    assert made[-1].status == "success", made
    client.copy("mario", "luigi")
    client.delete("mario")
    assert sorted(model.model for model in client.list().models) == ["luigi", "script"]
    shown = client.show("luigi")
    assert "FROM script" in shown.modelfile and "You are Mario." in shown.modelfile, shown
    assert client.chat("luigi", [{"role": "user", "content": QUESTION}]).message.content == "It is mild."
    try:
        client.chat("mario", [{"role": "user", "content": QUESTION}])
    except ollama.ResponseError as error:
        assert error.status_code == 404, error
    else:
        raise AssertionError("it was deleted")


def agno():
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    agent = Agent(model=OpenAILike(id="script", base_url=f"{base}/v1", api_key=KEY), tools=[weather_of], telemetry=False)
    parts = [part for part in agent.run(QUESTION, stream=True, stream_events=True)]
    results = [part.tool.result for part in parts if getattr(part, "event", "") == "ToolCallCompleted"]
    assert results == ["18 degrees in Paris"], parts
    told = "".join(str(part.content) for part in parts if getattr(part, "event", "") == "RunContent")
    assert told.endswith("It is mild."), parts


def strands(model):
    from strands import Agent, tool

    agent = Agent(model=model, tools=[tool(weather_of)], callback_handler=None)
    answer = agent(QUESTION)
    assert str(answer).strip().endswith("It is mild."), answer
    results = [part["toolResult"] for message in agent.messages for part in message["content"] if "toolResult" in part]
    assert results[0]["content"] == [{"text": "18 degrees in Paris"}], results


def strands_openai():
    from strands.models.openai import OpenAIModel

    strands(OpenAIModel(client_args={"base_url": f"{base}/v1", "api_key": KEY, "max_retries": 0}, model_id="script"))


def strands_anthropic():
    from strands.models.anthropic import AnthropicModel

    strands(AnthropicModel(client_args={"base_url": base, "api_key": KEY, "max_retries": 0}, model_id="script", max_tokens=512))


def strands_ollama():
    from strands.models.ollama import OllamaModel

    strands(OllamaModel(base, model_id="script"))


def autogen():
    import asyncio

    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    skills = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="script", base_url=f"{base}/v1", api_key=KEY, model_info=skills, max_retries=0)
    agent = AssistantAgent("weather", model_client=client, tools=[weather_of], reflect_on_tool_use=True, model_client_stream=True)

    async def loop():
        return [part async for part in agent.run_stream(task=QUESTION)]

    last = asyncio.run(loop())[-1]
    assert last.messages[-1].content.endswith("It is mild."), last
    assert any("18 degrees in Paris" in str(message) for message in last.messages), last


def haystack():
    from typing import Annotated

    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def weather(city: Annotated[str, "Where."]) -> str:
        """The weather."""
        return weather_of(city)

    generator = OpenAIChatGenerator(
        model="script", api_base_url=f"{base}/v1", api_key=Secret.from_token(KEY), max_retries=0)
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(weather, name="weather_of")])
    told = agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"]
    assert told[-1].text == "It is mild.", told
    assert any(message.tool_call_result and message.tool_call_result.result == "18 degrees in Paris" for message in told), told


def shell_gpt():
    program = pathlib.Path(sys.executable).parent / "sgpt"
    said = ran(program, "--model", "script", "--no-cache", "--no-md", "--no-functions", QUESTION, API_BASE_URL=f"{base}/v1",
               OPENAI_API_KEY=KEY, DEFAULT_MODEL="script", USE_LITELLM="false", OPENAI_USE_FUNCTIONS="false")
    assert said.strip() == "It is mild.", said


def gptme():
    program = pathlib.Path(sys.executable).parent / "gptme"
    said = ran(program, "--non-interactive", "--no-confirm", "--model", "local/script", "--tools", "shell", "--tool-format", "markdown",
               "Run it.", OPENAI_BASE_URL=f"{base}/v1", OPENAI_API_KEY=KEY)
    assert pathlib.Path("by-gptme").read_text() == "it-ran\n", said


def qwen_code():
    said = ran(f"{folder}/npm/node_modules/.bin/qwen", "--yolo", "-p", "Run it.", "--auth-type", "openai", "--model", "script",
               "--openai-base-url", f"{base}/v1", "--openai-api-key", KEY)
    assert "The command has run." in said, said
    assert pathlib.Path("by-qwen").read_text() == "it-ran\n"


def llm():
    home = pathlib.Path("llm")
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: script\n  model_name: script\n  api_base: {base}/v1\n  supports_tools: true\n  supports_schema: true\n")
    functions = "def weather_of(city: str) -> str:\n    'The weather.'\n    return f'18 degrees in {city}'\n"
    program = pathlib.Path(sys.executable).parent / "llm"
    environment = {"LLM_USER_PATH": str(home.resolve()), "OPENAI_API_KEY": KEY}
    said = ran(program, "-m", "script", "--functions", functions, QUESTION, **environment)
    assert said.strip() == "It is mild.", said
    said = ran(program, "-m", "script", "--schema", "degrees int", "As JSON, please.", **environment)
    assert json.loads(said) == {"degrees": 18}, said


def aider():
    pathlib.Path("hello.py").write_text("print(1)\n")
    program = pathlib.Path(sys.executable).parent / "aider"
    ran(program, "--model", "openai/script", "--openai-api-base", f"{base}/v1", "--openai-api-key", KEY, "--no-git",
        "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--edit-format", "diff",
        "--map-tokens", "0", "--message", "Print two.", "hello.py")
    assert pathlib.Path("hello.py").read_text() == "print(2)\n"


def claude_code():
    said = json.loads(ran(
        f"{folder}/npm/node_modules/@anthropic-ai/claude-code-linux-x64/claude", "-p", "Run it.", "--allowedTools", "Bash",
        "--output-format", "json", ANTHROPIC_BASE_URL=base, ANTHROPIC_API_KEY="fk-none", ANTHROPIC_MODEL="script",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1"))
    assert said["result"] == "The command has run." and said["num_turns"] == 2, said
    assert pathlib.Path("by-claude").read_text() == "it-ran\n"


def codex():
    home = pathlib.Path("codex").resolve()
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "script"\nmodel_provider = "fornax"\n[model_providers.fornax]\nname = "Fornax"\n'
        f'base_url = "{base}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n')
    said = ran(
        f"{folder}/npm/node_modules/.bin/codex", "exec", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", "Run it.", CODEX_HOME=str(home))
    assert "The command has run." in said, said
    assert pathlib.Path("by-codex").read_text() == "it-ran\n"


def opencode():
    model = {"name": "script", "tool_call": True, "limit": {"context": 200_000, "output": 4096}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Fornax", "models": {"script": model},
                "options": {"baseURL": f"{base}/v1", "apiKey": KEY}}
    config = {"provider": {"fornax": provider}, "model": "fornax/script", "small_model": "fornax/script",
              "enabled_providers": ["fornax"], "permission": "allow", "autoupdate": False, "share": "disabled",
              # It asks for a title beside the first question, in no order that a script could follow.
              "agent": {"title": {"disable": True}}}
    pathlib.Path("opencode.json").write_text(json.dumps(config))
    ran(f"{folder}/npm/node_modules/.bin/opencode", "run", "--title", "it", "Run it.",
        OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1")
    assert pathlib.Path("by-opencode").read_text() == "it-ran\n"


def node():
    """The clients of npm are in a file of their own."""
    print(ran("node", HERE / "agents.mjs", name, base, f"{folder}/npm/node_modules"))


def smolagents():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("script", api_base=f"{base}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(weather_of)], model=model, max_steps=3, verbosity_level=0)
    assert agent.run(QUESTION) == "mild"


def langchain():
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    model = ChatOpenAI(model="script", base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    agent = create_agent(model, [weather_of], response_format=ProviderStrategy(Report))
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert state["structured_response"].degrees == 18, state
    assert any(message.type == "tool" and "Paris" in message.content for message in state["messages"]), state


def openai_agents():
    import agents
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    model = agents.OpenAIChatCompletionsModel("script", client)
    agent = agents.Agent("weather", model=model, tools=[agents.function_tool(weather_of)], output_type=Report)
    result = agents.Runner.run_sync(agent, QUESTION)
    assert result.final_output.degrees == 18, result


def pydantic_ai():
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Report(BaseModel):
        degrees: int

    model = OpenAIChatModel("script", provider=OpenAIProvider(base_url=f"{base}/v1", api_key=KEY))
    agent = Agent(model, output_type=NativeOutput(Report), tools=[weather_of])
    assert agent.run_sync(QUESTION).output.degrees == 18


def litellm():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    long = [{"role": "user", "content": "word " * 60_000}]
    models = [("openai/script", f"{base}/v1"), ("anthropic/script", base), ("ollama_chat/script", base)]
    for model, address in models:
        ask = dict(model=model, api_base=address, api_key=KEY, max_tokens=8, num_retries=0)
        answer = litellm.completion(messages=[{"role": "user", "content": "Hi"}], **ask)
        assert answer.choices[0].message.content, answer
        try:
            litellm.completion(messages=long, **ask)
        except litellm.ContextWindowExceededError:
            print(f"{model}: ContextWindowExceededError")
        except (litellm.BadRequestError, litellm.APIConnectionError) as error:
            # It tells no errors of this API apart, but by their status.
            assert model.startswith("ollama") and "maximum context length" in str(error), error
        else:
            raise AssertionError(f"{model}: that was too long")


(node if name.endswith("_js") else globals()[name])()
print("the client is content")
