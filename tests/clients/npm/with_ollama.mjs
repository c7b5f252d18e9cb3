// npm's ollama and ai-sdk-ollama against a server: node with_ollama.mjs URL PICTURE. Fails by an exception.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { Ollama } from "ollama";
import { generateText, jsonSchema, streamText, tool } from "ai";
import { createOllama } from "ai-sdk-ollama";

const [, , host, picture] = process.argv;
const data = readFileSync(picture);
const options = { num_predict: 40, temperature: 0 };
const schema = { type: "object", properties: { sort: { enum: ["animal", "number"] } }, required: ["sort"] };
const messages = [{ role: "user", content: "What is this?", images: [data.toString("base64")] }];
const client = new Ollama({ host });

assert.deepEqual((await client.list()).models.map((model) => model.name), ["mini:latest"]);
assert.deepEqual((await client.show({ model: "mini" })).capabilities, ["completion", "vision", "tools"]);
const whole = await client.chat({ model: "mini", messages, options });
assert.match(whole.message.content, /elephant/i);
let text = "";
for await (const piece of await client.chat({ model: "mini", messages, options, stream: true }))
  text += piece.message.content;
assert.equal(text, whole.message.content);
const generated = await client.generate({ model: "mini", prompt: "What is this?", images: [new Uint8Array(data)], options });
assert.equal(generated.response, whole.message.content);
const found = await client.chat({ model: "mini", messages, options, format: schema });
assert.deepEqual(Object.keys(JSON.parse(found.message.content)), ["sort"]);
const look = { type: "function", function: { name: "look", parameters: { type: "object", properties: { part: { type: "string" } } } } };
assert.ok((await client.chat({ model: "mini", messages, options, tools: [look] })).done);
const embedded = await client.embed({ model: "mini", input: ["a cat", "a dog"], dimensions: 8 });
assert.deepEqual(embedded.embeddings.map((vector) => vector.length), [8, 8]);
assert.ok((await client.embeddings({ model: "mini", prompt: "a cat" })).embedding.length);
for await (const progress of await client.pull({ model: "mini", stream: true })) text = progress.status;
assert.equal(text, "success");
await assert.rejects(client.chat({ model: "llama3", messages }), (error) => error.status_code === 404);
assert.ok((await client.version()).version);
console.log("ollama: fine");

const model = createOllama({ baseURL: host })("mini", { options });
const content = [{ type: "text", text: "What is this?" }, { type: "image", image: new Uint8Array(data), mediaType: "image/png" }];
const asked = { model, messages: [{ role: "user", content }], maxOutputTokens: 40, temperature: 0, maxRetries: 0 };
const answer = await generateText(asked);
assert.match(answer.text, /elephant/i);
let streamed = "";
for await (const piece of streamText(asked).textStream) streamed += piece;
assert.equal(streamed, answer.text);
const tools = { look: tool({ description: "Looks closer.", inputSchema: jsonSchema({ type: "object", properties: { part: { type: "string" } } }) }) };
assert.ok((await generateText({ ...asked, tools })).finishReason);
await assert.rejects(generateText({ ...asked, model: createOllama({ baseURL: host })("llama3") }));
console.log("ai-sdk-ollama: fine");
