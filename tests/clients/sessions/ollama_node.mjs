// Ollama's package for JavaScript: what is here, a stream, then two turns with a tool call.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { Ollama } from "ollama";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather in a city.", parameters } }];
const options = { num_predict: 60, temperature: 0 };

assert.ok((await client.list()).models.some((one) => one.model.includes(model)));
let said = "";
for await (const part of await client.generate({ model, prompt: "hi", stream: true, options: { num_predict: 8 } })) {
  said += part.response;
}
assert.ok(said);
const talk = [{ role: "user", content: "What is the weather in Paris?" }];
const first = await client.chat({ model, messages: talk, tools, options });
// a small model calls no tool unasked: what follows is the shape of one that was
const called = [{ function: { name: "get_weather", arguments: { city: "Paris" } } }];
talk.push(
  { role: "assistant", content: first.message.content ?? "", tool_calls: first.message.tool_calls ?? called },
  { role: "tool", tool_name: "get_weather", content: "sunny" },
);
assert.ok((await client.chat({ model, messages: talk, tools, options })).done);
console.log(JSON.parse(readFileSync(new URL(import.meta.resolve("ollama/package.json"))).toString()).version);
