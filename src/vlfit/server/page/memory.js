// The memory ledger as a bar: the server's lines, other programs, and free memory.

const NAMES = {
  desktop: "desktop", context: "CUDA", "weights.text": "text model", "weights.vision": "vision tower",
  "weights.embedding": "embedding", kv_cache: "KV cache", graphs: "graphs", workspace: "workspace",
}; // other lines keep their names

export const size = (bytes) =>
  bytes === null || bytes === undefined ? "–"
  : bytes < 1024 ** 3 ? `${(bytes / 1024 ** 2).toFixed(0)} MiB`
  : `${(bytes / 1024 ** 3).toFixed(2)} GiB`;

/** Shows `facts` (of /v1/vlfit/status) in `section`. */
export function show(section, facts) {
  const rows = facts.ledger ?? [];
  section.hidden = rows.length === 0;
  if (section.hidden) return;
  const gpu = facts.memory?.gpu;
  const shown = rows.map((row) => ({ name: NAMES[row.line] ?? row.line, planned: row.planned, held: row.actual }));
  const total = gpu?.total ?? shown.reduce((sum, row) => sum + (row.held ?? row.planned ?? 0), 0);
  const bar = section.querySelector("#bar");
  bar.replaceChildren(...shown.map((row, number) => slice(row, number, total)));
  const words = shown.map((row) => `${row.name} ${size(row.held ?? row.planned)}`).join(", ");
  bar.setAttribute("aria-label", gpu ? `${words}, free ${size(gpu.free)}` : words);
  section.querySelector("#memory-sum").textContent = gpu
    ? `${gpu.name}: ${size(total - gpu.free)} of ${size(total)} in use, ${size(gpu.desktop)} of it by other programs`
    : `RAM: ${size(facts.total?.actual)} in use`;
  section.querySelector("#lines").replaceChildren(...shown.map(lineOf));
}

function slice(row, number, total) {
  const part = document.createElement("span");
  part.style.width = `${(100 * (row.held ?? row.planned ?? 0)) / total}%`;
  part.style.background = `var(--bar-${number % 6})`;
  part.title = `${row.name}: ${size(row.held ?? row.planned)}`;
  return part;
}

function lineOf(row) {
  const line = document.createElement("tr");
  for (const text of [row.name, size(row.planned), size(row.held)]) {
    const cell = document.createElement("td");
    cell.textContent = text;
    line.append(cell);
  }
  return line;
}
