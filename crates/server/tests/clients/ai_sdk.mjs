// Tools and an output together, with the AI SDK: node ai_sdk.mjs BASE_URL NODE_MODULES.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [base, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "none.js"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, Output, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const provider = createOpenAICompatible({
  name: "fornax", baseURL: `${base}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const result = await generateText({
  model: provider("script"),
  prompt: "How is the weather in Paris?",
  stopWhen: stepCountIs(3),
  maxRetries: 0,
  tools: {
    weather_of: tool({
      description: "The weather.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `18 degrees in ${city}`,
    }),
    time_of: tool({ description: "The time.", inputSchema: z.object({}), execute: async () => "noon" }),
  },
  output: Output.object({ schema: z.object({ degrees: z.number().int() }) }),
});
const output = result.output ?? result.experimental_output;
if (output.degrees !== 18 || result.steps.length !== 2) {
  throw new Error(JSON.stringify(result.steps.map((step) => step.content)));
}
console.log(JSON.stringify({ ok: "ai_sdk" }));
