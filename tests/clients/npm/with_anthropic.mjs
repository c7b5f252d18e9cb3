// npm's @anthropic-ai/sdk against a server: node with_anthropic.mjs URL PICTURE. Fails by an exception.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const works = (feature) => console.log(`@anthropic-ai/sdk: works: ${feature}`);
const [, , baseURL, picture] = process.argv;
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const data = readFileSync(picture).toString("base64");
const image = { type: "image", source: { type: "base64", media_type: "image/png", data } };
const question = { role: "user", content: [image, { type: "text", text: "What is this?" }] };
const asked = { model: "mini", max_tokens: 40, temperature: 0, messages: [question] };
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["mini"]);
works("list");
const whole = await client.messages.create(asked);
assert.match(text(whole), /elephant/i);
assert.equal(whole.stop_reason, "end_turn");
assert.ok(whole._request_id);
works("chat with a picture");
const stream = client.messages.stream(asked);
let streamed = "";
stream.on("text", (piece) => (streamed += piece));
const final = await stream.finalMessage();
assert.equal(streamed, text(whole));
assert.equal(text(final), streamed);
works("stream");
const counted = await client.messages.countTokens({ model: "mini", messages: [question] });
assert.equal(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

const schema = { type: "object", properties: { sort: { enum: ["animal", "number"] } }, required: ["sort"], additionalProperties: false };
const found = await client.messages.create({ ...asked, output_config: { format: { type: "json_schema", schema } } });
assert.deepEqual(Object.keys(JSON.parse(text(found))), ["sort"]);
works("schema");

const look = { name: "look_closer", input_schema: { type: "object", properties: { part: { enum: ["left", "right"] } }, required: ["part"], additionalProperties: false } };
const messages = [question];
for (let round = 0; round < 2; round++) {
  const answer = await client.messages.create({ ...asked, messages, tools: [look], tool_choice: { type: "any", disable_parallel_tool_use: true } });
  assert.equal(answer.stop_reason, "tool_use");
  const content = answer.content.filter((block) => block.type === "tool_use").map((call) => ({ type: "tool_result", tool_use_id: call.id, content: [image] }));
  messages.push({ role: "assistant", content: answer.content }, { role: "user", content });
}
assert.ok(text(await client.messages.create({ ...asked, messages, tools: [look], tool_choice: { type: "none" } })));
const chosen = await client.messages.create({ ...asked, tools: [look] });
assert.deepEqual(chosen.content.find((block) => block.type === "tool_use").input, { part: "left" });
works("tool call");
await assert.rejects(client.messages.create({ ...asked, model: "claude-sonnet-5" }), (error) => error instanceof Anthropic.NotFoundError && error.error.error.type === "not_found_error");
await assert.rejects(client.messages.create({ ...asked, messages: [] }), Anthropic.BadRequestError);
works("error");
console.log("anthropic: fine");
