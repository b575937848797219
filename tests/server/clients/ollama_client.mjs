// Every route of Ollama's API through its own package; prints a word a route, throws at the first that is wrong.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const model = "smollm2";
const messages = [{ role: "user", content: "hi" }];
const options = { num_predict: 20, temperature: 0 };
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};

assert.deepEqual((await client.list()).models.map((m) => m.model), ["smollm2:latest"]);
console.log("list");

assert.ok((await client.show({ model })).capabilities.includes("completion"));
console.log("show");

const whole = await client.chat({ model, messages, options });
assert.ok(whole.message.content);
console.log("chat");

let text = "";
let last = null;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert.equal(last.done, true);
assert.equal(last.eval_count, whole.eval_count);
console.log("stream");

const structured = await client.chat({ model, messages, format: parameters, options: { ...options, num_predict: 60 } });
assert.deepEqual(Object.keys(JSON.parse(structured.message.content)), ["city"]);
console.log("format");

const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters } }];
const turns = [
  { role: "user", content: "What is the weather in Paris?" },
  { role: "assistant", content: "", tool_calls: [{ function: { name: "get_weather", arguments: { city: "Paris" } } }] },
  { role: "tool", tool_name: "get_weather", content: "sunny" },
];
assert.ok((await client.chat({ model, messages: turns, tools, options })).done);
console.log("tool");

assert.ok((await client.generate({ model, prompt: "Once upon a", raw: true, options })).response);
console.log("generate");

const embedded = await client.embed({ model, input: ["a cat", "a dog"] });
assert.equal(embedded.embeddings.length, 2);
console.log("embed");

assert.equal((await client.ps()).models[0].name, "smollm2:latest");
console.log("ps");

await assert.rejects(client.chat({ model: "nobody", messages }), (error) => error.status_code === 404 && /not found/.test(error.message));
await assert.rejects(client.pull({ model: "nobody" }), (error) => error.status_code === 403);
console.log("errors");
