// The last request as a curl command or a Python program.

const kindOf = (picture) => picture.url.slice(0, picture.url.indexOf(",") + 1);
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** `messages` with random markers in place of the pictures, and the markers. */
function marked(messages, pictures) {
  const secret = Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(36)).join("");
  const marks = pictures.map((_, number) => `@${secret}.${number}@`);
  let number = 0;
  const mark = (part) => (part.type === "image_url" ? { type: part.type, image_url: { url: marks[number++] } } : part);
  const without = messages.map((message) => ({
    ...message,
    content: Array.isArray(message.content) ? message.content.map(mark) : message.content,
  }));
  return { messages: without, marks };
}

/** A command line that reads the pictures from files in the current folder. */
export function asCurl(url, body, pictures, hasKey) {
  const { messages, marks } = marked(body.messages, pictures);
  let text = quoted(JSON.stringify({ ...body, messages }, null, 1));
  marks.forEach((mark, number) => {
    const { name } = pictures[number];
    text = text.split(mark).join(`${kindOf(pictures[number])}'"$(base64 -w0 -- ${quoted(name)})"'`);
  });
  const key = hasKey ? ` -H "Authorization: Bearer $VLFIT_API_KEY"` : "";
  // On standard input, since a picture exceeds the length limit of an argument.
  return `printf %s ${text} |\n  curl -s ${quoted(url)} -H 'Content-Type: application/json'${key} --data-binary @-\n`;
}

/** A Python program that uses the openai package. */
export function asPython(base, body, pictures, hasKey) {
  const { messages, marks } = marked(body.messages, pictures);
  let text = JSON.stringify(messages, null, 4).replaceAll("\n", "\n    ");
  marks.forEach((mark, number) => {
    text = text.split(`"${mark}"`).join(`picture(${JSON.stringify(pictures[number].name)})`);
  });
  const options = Object.entries(body).filter(([name]) => !["messages", "model"].includes(name));
  return `import base64
${hasKey ? "import os\n" : ""}from pathlib import Path

from openai import OpenAI


def picture(name: str) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(Path(name).read_bytes()).decode()


client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${hasKey ? `os.environ["VLFIT_API_KEY"]` : `"none"`})
answer = client.chat.completions.create(
    model=${JSON.stringify(body.model)},
    messages=${text},
${options.map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`).join("")})
print(answer.choices[0].message.content)
`;
}
