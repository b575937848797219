// Every route of the endpoint through OpenAI's own package; prints a word a route, throws at the first that is wrong.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = "smollm2";
const messages = [{ role: "user", content: "hi" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const tool_choice = { type: "function", function: { name: "get_weather" } };
const question = [{ role: "user", content: "What is the weather in Paris?" }];

assert.deepEqual((await client.models.list()).data.map((m) => m.id), [model]);
console.log("models");

const chat = await client.chat.completions.create({ model, messages, max_tokens: 20, temperature: 0 });
assert.ok(chat.choices[0].message.content);
console.log("chat");

let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  model, messages, max_tokens: 20, temperature: 0, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, chat.choices[0].message.content);
assert.equal(usage.completion_tokens, chat.usage.completion_tokens);
console.log("stream");

assert.equal((await client.chat.completions.create({ model, messages, max_tokens: 3, n: 2 })).choices.length, 2);
console.log("n");

const probs = await client.chat.completions.create({ model, messages, max_tokens: 2, logprobs: true, top_logprobs: 2 });
assert.equal(probs.choices[0].logprobs.content[0].top_logprobs.length, 2);
console.log("logprobs");

const structured = await client.chat.completions.create({
  model, messages: question, max_tokens: 60, temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } },
});
assert.equal(typeof JSON.parse(structured.choices[0].message.content).city, "string");
console.log("schema");

const called = await client.chat.completions.create({
  model, messages: question, max_tokens: 60, temperature: 0, tools, tool_choice, parallel_tool_calls: false,
});
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(typeof JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "string");
console.log("tool");

const streamed = client.chat.completions.stream({
  model, messages: question, max_tokens: 60, temperature: 0, tools, tool_choice, parallel_tool_calls: false,
});
const final = await streamed.finalChatCompletion();
assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
console.log("tool-stream");

assert.ok((await client.completions.create({ model, prompt: "Once upon a", max_tokens: 4 })).choices[0].text);
console.log("completion");

const embedded = await client.embeddings.create({ model, input: ["a cat", "a dog"] });
assert.equal(embedded.data.length, 2);
assert.ok(Math.abs(Math.hypot(...embedded.data[0].embedding) - 1) < 1e-3);
console.log("embedding");

const response = await client.responses.create({ model, input: "hi", max_output_tokens: 40, temperature: 0 });
assert.ok(response.output_text);
console.log("response");

let said = "";
for await (const event of await client.responses.create({
  model, input: "hi", max_output_tokens: 40, temperature: 0, stream: true,
})) {
  if (event.type === "response.output_text.delta") said += event.delta;
}
assert.equal(said, response.output_text);
console.log("response-stream");

await assert.rejects(
  client.chat.completions.create({ model: "nobody", messages }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
console.log("errors");
