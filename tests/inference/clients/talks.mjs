// What talks.py does, for clients of node: node talks.mjs CLIENT URL KEY STOP PACKAGES
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [client, url, key, stop, packages] = process.argv.slice(2);
const { resolve } = createRequire(`${packages}/package.json`);
const load = (name) => import(pathToFileURL(resolve(name)));
globalThis.AI_SDK_LOG_WARNINGS = false; // which go to standard output
const model = "tiny";
const question = "What is it?";
const next = ["And now?", "Why?"];
const png =
  "iVBORw0KGgoAAAANSUhEUgAAABAAAAAMCAIAAADkharWAAAAFklEQVR4nGP8v5SBJMBEmvJRDSNHAwDgcAG8x6a76gAAAABJRU5ErkJggg==";
const broken = Buffer.from("GIF89a" + "\0".repeat(20)).toString("base64");

async function openaiClient() {
  const { default: OpenAI } = await load("openai");
  return new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
}

const talks = {
  async openai_chat() {
    const own = await openaiClient();
    const messages = [];
    return async (text, { image, stream, stop } = {}) => {
      const shown = { type: "image_url", image_url: { url: `data:image/png;base64,${image}` } };
      const content = image ? [shown, { type: "text", text }] : text;
      messages.push({ role: "user", content });
      const given = { model, messages, stop };
      const reply = stream
        ? await own.chat.completions.stream(given).finalChatCompletion()
        : await own.chat.completions.create(given);
      messages.push(reply.choices[0].message);
      return reply.choices[0].message.content;
    };
  },
  async openai_responses() {
    const own = await openaiClient();
    let previous_response_id;
    return async (text, { image, stream, stop } = {}) => {
      const shown = { type: "input_image", image_url: `data:image/png;base64,${image}` };
      const content = [...(image ? [shown] : []), { type: "input_text", text }];
      const given = { model, input: [{ role: "user", content }], previous_response_id, stop };
      const reply = stream
        ? await own.responses.stream(given).finalResponse()
        : await own.responses.create(given);
      previous_response_id = reply.id;
      return reply.output_text;
    };
  },
  ai_responses: (options) => ai((provider) => provider(model), options),
  ai_responses_not_stored: () => talks.ai_responses({ openai: { store: false } }),
  ai_chat: () => ai((provider) => provider.chat(model)),
};

async function ai(choose, providerOptions) {
  const { generateText, streamText } = await load("ai");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const messages = [];
  const chosen = choose(createOpenAI({ baseURL: url, apiKey: key }));
  return async (text, { image, stream, stop } = {}) => {
    const shown = { type: "image", image, mediaType: "image/png" };
    const content = image ? [{ type: "text", text }, shown] : text;
    messages.push({ role: "user", content });
    const given = { model: chosen, messages, maxRetries: 0, system: "Be short." };
    Object.assign(given, { providerOptions, stopSequences: stop });
    if (!stream) {
      const reply = await generateText(given);
      messages.push(...reply.response.messages);
      return reply.text;
    }
    let failed;
    const reply = streamText({ ...given, onError: ({ error }) => (failed = error) });
    const told = [];
    for await (const piece of reply.textStream) told.push(piece);
    if (failed) throw failed;
    messages.push(...(await reply.response).messages);
    return told.join("");
  };
}

const told = {};
for (const [name, stream] of Object.entries({ whole: false, streamed: true })) {
  const ask = await talks[client]();
  told[name] = [await ask(question, { image: png, stream })];
  for (const text of next) told[name].push(await ask(text, { stream }));
}
const ask = await talks[client]();
told.stopped = [await ask(question, { image: png, stop: [stop] }), await ask(next[0])];
try {
  await (await talks[client]())(question, { image: broken });
} catch (error) {
  told.error = { type: error.constructor.name, message: error.message };
}
console.log(JSON.stringify(told));
