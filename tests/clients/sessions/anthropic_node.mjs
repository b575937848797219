// Anthropic's package for Node: a stream, then two turns with a tool call.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const input_schema = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "The weather in a city.", input_schema }];
const talk = [{ role: "user", content: "What is the weather in Paris?" }];

const streamed = await client.messages.stream({ model, max_tokens: 8, messages: talk }).finalMessage();
assert.ok(streamed.usage.output_tokens);
const said = await client.messages.create({
  model, max_tokens: 60, messages: talk, tools, tool_choice: { type: "any" }, temperature: 0,
});
const call = said.content.find((block) => block.type === "tool_use");
talk.push(
  { role: "assistant", content: said.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] },
);
await client.messages.create({ model, max_tokens: 20, messages: talk, tools });
console.log((await import("@anthropic-ai/sdk/version.js")).VERSION);
