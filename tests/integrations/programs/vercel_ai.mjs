// A text, a stream, a typed answer, and a tool whose result is answered.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const server = createOpenAICompatible({
  name: "inflight",
  baseURL: `${process.env.URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = server.chatModel("demo");

assert.equal((await generateText({ model, prompt: "Say hello." })).text, "Hello, world!");

const parts = [];
for await (const part of streamText({ model, prompt: "Say hello." }).textStream) parts.push(part);
assert.ok(parts.length > 1);
assert.equal(parts.join(""), "Hello, world!");

const shape = z.object({ kind: z.enum(["circle", "square"]), is_filled: z.boolean() });
const typed = await generateText({ model, prompt: "Which shape?", output: Output.object({ schema: shape }) });
assert.deepEqual(typed.output, { kind: "circle", is_filled: true });

const turn = tool({
  description: "Turn the pen.",
  inputSchema: z.object({ to: z.enum(["left", "right"]) }),
  execute: async ({ to }) => `turned ${to}`,
});
const answer = await generateText({
  model,
  prompt: "Turn the pen, please.",
  tools: { turn },
  stopWhen: stepCountIs(3),
});
assert.equal(answer.text, "I turned left.");
assert.equal(answer.steps.length, 2);
