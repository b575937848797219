// OpenAI's package for Node: chat, a stream, Responses, then two turns with a tool call.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather in a city.", parameters } }];
const hi = [{ role: "user", content: "hi" }];

let usage = null;
for await (const chunk of await client.chat.completions.create({
  model, messages: hi, max_tokens: 8, stream: true, stream_options: { include_usage: true },
})) usage = chunk.usage ?? usage;
assert.ok(usage.completion_tokens);
assert.ok((await client.responses.create({ model, input: "hi", max_output_tokens: 8, store: false })).id);

const talk = [{ role: "user", content: "What is the weather in Paris?" }];
const first = await client.chat.completions.create({
  model, messages: talk, tools, tool_choice: "required", max_tokens: 60, temperature: 0, parallel_tool_calls: false,
});
const said = first.choices[0].message;
talk.push(said, { role: "tool", tool_call_id: said.tool_calls[0].id, content: "sunny" });
const second = await client.chat.completions.create({ model, messages: talk, tools, max_tokens: 20 });
assert.ok(second.choices[0].finish_reason);
console.log((await import("openai/version.js")).VERSION);
