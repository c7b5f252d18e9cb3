// The request that was just made, as a person would make it from a shell or from Python.

const kindOf = (picture) => picture.url.slice(0, picture.url.indexOf(",") + 1);
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** `messages` with `url(picture)` in place of the bytes of each of `pictures`. */
function withFiles(messages, pictures, url) {
  let number = 0;
  return messages.map((message) => ({
    ...message,
    content: Array.isArray(message.content)
      ? message.content.map((part) => (part.type === "image_url" ? { type: "image_url", image_url: { url: url(pictures[number++]) } } : part))
      : message.content,
  }));
}

/** A command line; pictures are read from files of their names in the current folder. */
export function asCurl(url, body, pictures, hasKey) {
  const messages = withFiles(body.messages, pictures, (picture) => `${kindOf(picture)}@@${picture.name}@@`);
  const text = JSON.stringify({ ...body, messages }, null, 1);
  const filled = quoted(text).replace(/@@(.*?)@@/g, (_, name) => `'"$(base64 -w0 ${quoted(name)})"'`);
  const key = hasKey ? ` -H "Authorization: Bearer $VLFIT_API_KEY"` : "";
  // By standard input: a picture is longer than an argument may be.
  return `printf %s ${filled} |\n  curl -s ${quoted(url)} -H 'Content-Type: application/json'${key} --data-binary @-\n`;
}

/** A program for the openai package. */
export function asPython(base, body, pictures, hasKey) {
  const messages = withFiles(body.messages, pictures, (picture) => `@@${picture.name}@@`);
  const text = JSON.stringify(messages, null, 4).replace(/"@@(.*?)@@"/g, (_, name) => `picture("${name}")`);
  const options = Object.entries(body).filter(([name]) => !["messages", "model"].includes(name));
  return `import base64
${hasKey ? "import os\n" : ""}from pathlib import Path

from openai import OpenAI


def picture(name: str) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(Path(name).read_bytes()).decode()


client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${hasKey ? `os.environ["VLFIT_API_KEY"]` : `"none"`})
answer = client.chat.completions.create(
    model=${JSON.stringify(body.model)},
    messages=${text.replaceAll("\n", "\n    ")},
${options.map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`).join("")})
print(answer.choices[0].message.content)
`;
}
