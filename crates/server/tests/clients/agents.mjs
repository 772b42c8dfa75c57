// Clients of npm against a server whose model says what a script says: node agents.mjs NAME BASE_URL NODE_MODULES.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [name, base, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "none.js"));
const load = (module) => import(pathToFileURL(require.resolve(module)));
const question = "How is the weather in Paris?";
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = ({ city }) => `18 degrees in ${city}`;

function demand(holds, told) {
  if (!holds) throw new Error(JSON.stringify(told));
}

async function aiSdk(model, output) {
  const { generateText, Output, stepCountIs, streamText, tool } = await load("ai");
  const { z } = await load("zod");
  const ask = {
    model,
    prompt: question,
    stopWhen: stepCountIs(3),
    maxRetries: 0,
    tools: {
      weather_of: tool({ description: "The weather.", inputSchema: z.object({ city: z.string() }), execute: async (input) => weather(input) }),
      time_of: tool({ description: "The time.", inputSchema: z.object({}), execute: async () => "noon" }),
    },
  };
  if (!output) {
    const stream = streamText(ask);
    const [text, steps] = [await stream.text, await stream.steps];
    return demand(text.endsWith("It is mild.") && steps.length === 2, steps.map((step) => step.content));
  }
  // Tools and an output together.
  const result = await generateText({ ...ask, output: Output.object({ schema: z.object({ degrees: z.number().int() }) }) });
  const told = result.output ?? result.experimental_output;
  demand(told.degrees === 18 && result.steps.length === 2, result.steps.map((step) => step.content));
}

const clients = {
  async ai_sdk_js() {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const options = { name: "fornax", baseURL: `${base}/v1`, apiKey: "none", supportsStructuredOutputs: true };
    await aiSdk(createOpenAICompatible(options)("script"), true);
  },

  async ai_sdk_anthropic_js() {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    await aiSdk(createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })("script"), false);
  },

  async ai_sdk_openai_js() {
    // Its provider for OpenAI itself speaks the Responses API.
    const { createOpenAI } = await load("@ai-sdk/openai");
    await aiSdk(createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" })("script"), true);
  },

  async langchain_js() {
    const { ChatOpenAI } = await load("@langchain/openai");
    const { tool } = await load("@langchain/core/tools");
    const { HumanMessage } = await load("@langchain/core/messages");
    const { z } = await load("zod");
    const weatherOf = tool(weather, { name: "weather_of", description: "The weather.", schema: z.object({ city: z.string() }) });
    const model = new ChatOpenAI({ model: "script", apiKey: "none", maxRetries: 0, configuration: { baseURL: `${base}/v1` } });
    const agent = model.bindTools([weatherOf]);
    const messages = [new HumanMessage(question)];
    let called;
    for await (const part of await agent.stream(messages)) called = called ? called.concat(part) : part;
    messages.push(called, await weatherOf.invoke(called.tool_calls[0]));
    const answer = await agent.invoke(messages);
    demand(answer.content === "It is mild." && messages[2].content === "18 degrees in Paris", messages);
    const formed = model.withStructuredOutput(z.object({ degrees: z.number().int() }), { method: "jsonSchema" });
    const report = await formed.invoke("As JSON, please.");
    demand(report.degrees === 18, report);
  },

  async openai_js() {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
    const runner = client.chat.completions.runTools({
      model: "script",
      stream: true,
      messages: [{ role: "user", content: question }],
      tools: [{ type: "function", function: { name: "weather_of", parameters: schema, parse: JSON.parse, function: weather } }],
    });
    const answer = await runner.finalContent();
    demand(answer === "It is mild." && runner.messages.some((message) => message.role === "tool"), runner.messages);
    const formed = await client.responses.create({
      model: "script",
      input: "As JSON, please.",
      text: { format: { type: "json_schema", name: "report", strict: true, schema: {
        type: "object", properties: { degrees: { type: "integer" } }, required: ["degrees"], additionalProperties: false } } },
    });
    demand(JSON.parse(formed.output_text).degrees === 18, formed);
  },

  async anthropic_js() {
    const { default: Anthropic } = await load("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
    const ask = { model: "script", max_tokens: 512, tools: [{ name: "weather_of", input_schema: schema }] };
    const messages = [{ role: "user", content: question }];
    const called = await client.messages.stream({ ...ask, messages }).finalMessage();
    const call = called.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: weather(call.input) };
    messages.push({ role: "assistant", content: called.content }, { role: "user", content: [result] });
    const answer = await client.messages.create({ ...ask, messages });
    demand(answer.content.at(-1).text === "It is mild.", answer);
  },

  async ollama_js() {
    const { Ollama } = await load("ollama");
    const client = new Ollama({ host: base });
    const tools = [{ type: "function", function: { name: "weather_of", description: "The weather.", parameters: schema } }];
    const messages = [{ role: "user", content: question }];
    const { message } = await client.chat({ model: "script", messages, tools });
    const [call] = message.tool_calls;
    messages.push(message, { role: "tool", tool_name: call.function.name, content: weather(call.function.arguments) });
    let answer = "";
    for await (const part of await client.chat({ model: "script", messages, tools, stream: true })) answer += part.message.content;
    demand(answer === "It is mild.", answer);
    const format = { type: "object", properties: { degrees: { type: "integer" } }, required: ["degrees"] };
    const formed = await client.chat({ model: "script", messages: [{ role: "user", content: "As JSON, please." }], format });
    demand(JSON.parse(formed.message.content).degrees === 18, formed);
  },
};

await clients[name]();
