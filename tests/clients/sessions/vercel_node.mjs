// Vercel's AI SDK over Anthropic's API: a text, a stream, a tool call.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const model = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(name);
const asked = { model, prompt: "What is the weather in Paris?", maxRetries: 0, temperature: 0 };
const inputSchema = jsonSchema({
  type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"],
});
const tools = { get_weather: tool({ description: "The weather in a city.", inputSchema }) };

const whole = await generateText({ ...asked, maxOutputTokens: 8 });
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens);
let streamed = "";
for await (const piece of streamText({ ...asked, maxOutputTokens: 8 }).textStream) streamed += piece;
assert.equal(streamed, whole.text);
const called = await generateText({ ...asked, maxOutputTokens: 60, tools, toolChoice: "required" });
assert.equal(called.toolCalls[0].toolName, "get_weather");
console.log(JSON.parse(readFileSync(new URL("./node_modules/ai/package.json", import.meta.url))).version);
