"""Writes the table of modules in docs/structure.md from the first sentence of each module (``make docs``).

A test compares the page with the modules: no new module is missing, and no removed one haunts it.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vlfit"
PAGE = ROOT / "docs" / "structure.md"
START, END = "<!-- modules: written by make docs -->\n", "<!-- end of modules -->\n"

# From what a person touches down to what knows nobody else; the number is the floor.
PARTS = {
    5: ("__init__.py", "__main__.py", "cli/", "server/"),
    4: ("client.py", "tasks/", "bench/", "doctor/"),
    3: ("backends/",),
    2: ("engine/",),
    1: ("plan/",),
    0: ("checkpoint/", "machine/", "mini/", "settings.py", "errors.py", "units.py", "_version.py"),
}


def table() -> str:
    """All modules as Markdown, floor by floor. Raises ``ValueError`` for one that no part above covers."""
    modules = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    modules = {name: path for name, path in modules.items() if path.read_text("utf-8").strip()}
    lines = []
    for floor, parts in PARTS.items():
        lines += [f"### Floor {floor}", "", "| module | what it is |", "|---|---|"]
        for part in parts:
            for name in [name for name in modules if name == part or name.startswith(f"{part.rstrip('/')}/")]:
                lines.append(f"| `{name}` | {first_sentence(modules.pop(name))} |")
        lines.append("")
    if modules:
        raise ValueError(f"no floor in scripts/structure.py for {', '.join(modules)}")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """What a module says of itself, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "The version number."
    opening = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.match(r".*?[.:](?= [A-Z]|$)", opening)
    return (sentence.group() if sentence else opening).replace("``", "`").replace("|", "\\|")


def page_with(modules: str) -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text("utf-8").split(START)
    return f"{before}{START}\n{modules}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), "utf-8")
