"""Other people's agents against a server whose model says what a script says: python agents.py NAME BASE_URL.

Each runs a loop of a tool and an answer: what is tested is the protocol. `agents.rs` beside it has the scripts.
"""

import json
import sys

name, base = sys.argv[1:3]
KEY = "none"


def weather_of(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return f"18 degrees in {city}"


def smolagents():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("script", api_base=f"{base}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(weather_of)], model=model, max_steps=3, verbosity_level=0)
    assert agent.run("How is the weather in Paris?") == "mild"


def langchain():
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Report(BaseModel):
        degrees: int

    model = ChatOpenAI(model="script", base_url=f"{base}/v1", api_key=KEY, max_retries=0)
    agent = create_agent(model, [weather_of], response_format=ProviderStrategy(Report))
    state = agent.invoke({"messages": [{"role": "user", "content": "How is the weather in Paris?"}]})
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
    result = agents.Runner.run_sync(agent, "How is the weather in Paris?")
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
    assert agent.run_sync("How is the weather in Paris?").output.degrees == 18


def litellm():
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
        except litellm.APIConnectionError as error:
            # It tells no errors of this API apart, but for what it says.
            assert model.startswith("ollama") and "maximum context length" in str(error), error
        else:
            raise AssertionError(f"{model}: that was too long")


globals()[name]()
print(json.dumps({"ok": name}))
