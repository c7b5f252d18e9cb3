"""The floors of the house (docs/structure.md): imports run down, torch stays where it may be.

Every import statement counts, those inside functions and under ``TYPE_CHECKING`` too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

# A module belongs to the floor of the longest name here that it starts with.
FLOORS = {
    "vlfit._version": 0,
    "vlfit.errors": 0,
    "vlfit.units": 0,
    "vlfit.atomic_write": 0,
    "vlfit.settings": 0,
    "vlfit.api": 0,
    "vlfit.machine": 0,
    "vlfit.checkpoint": 0,
    "vlfit.images": 0,
    "vlfit.mini": 0,
    "vlfit.plan": 1,
    "vlfit.kernels": 2,
    "vlfit.layers": 2,
    "vlfit.loading": 2,
    "vlfit.models": 2,
    "vlfit.models.registry": 0,
    "vlfit.models.cache_spec": 0,
    "vlfit.prompt": 2,
    "vlfit.engine": 2,
    "vlfit.quantize": 2,
    "vlfit.tuning": 2,
    "vlfit.parity": 2,
    "vlfit.backends": 3,
    "vlfit.bench": 4,
    "vlfit.verify": 4,
    "vlfit.tasks": 4,
    "vlfit.client": 4,
    "vlfit.doctor": 4,
    "vlfit.cli": 5,
    "vlfit.server": 5,
    "vlfit.__main__": 5,
    "vlfit": 5,  # the package itself only hands out names of the floors below, lazily
    "examples": 5,
}
# The torch-free parts of every family's folder.
FLOORS_IN_FAMILIES = {"config": 0, "cost": 1}
TENSOR_LIBRARIES = {"torch", "triton"}
# An engine of its own: the other place that imports torch.
TRANSFORMERS_BACKEND = "vlfit.backends.transformers"
# What `vlfit --help` must not wait for: each costs a tenth of a second or more to import.
SLOW_TO_IMPORT = (
    *("torch", "transformers", "huggingface_hub", "openai"),
    *("starlette", "pydantic_settings", "PIL"),
)


@dataclass(frozen=True)
class Import:
    """One import statement: the module it stands in and the dotted name it asks for."""

    module: str
    line: int
    wanted: str

    @property
    def top(self) -> str:
        return self.wanted.split(".")[0]

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.wanted}"


def floor_of(name: str) -> int:
    parts = name.split(".")
    if parts[:2] == ["vlfit", "models"] and len(parts) == 4 and parts[3] in FLOORS_IN_FAMILIES:
        return FLOORS_IN_FAMILIES[parts[3]]
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix == "vlfit" and length < len(parts):
            break  # a new top-level module must be given a floor, not inherit the package's
        if prefix in FLOORS:
            return FLOORS[prefix]
    raise KeyError(f"{name} has no floor: add it to FLOORS and to docs/structure.md")


def modules() -> dict[str, Path]:
    """Every module of the package and the examples, by dotted name."""
    found = {}
    for base, folder in ((SOURCE, SOURCE / "vlfit"), (ROOT, ROOT / "examples")):
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(base).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, text: str, *, is_package: bool) -> Iterator[Import]:
    """All imports in ``text``; ``from a import b`` names ``a.b`` where that is a module of ours."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: None if is_package else -1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(name, node.lineno, inner if inner in MODULES else base)


@cache
def all_imports() -> list[Import]:
    return [
        found
        for name, path in MODULES.items()
        for found in imports_of(name, path.read_text("utf-8"), is_package=path.name == "__init__.py")
    ]


def test_every_module_has_a_floor() -> None:
    assert {floor_of(name) for name in MODULES} >= {0, 2, 3, 5}


def test_imports_run_down_the_floors() -> None:
    climbing = [
        str(found)
        for found in all_imports()
        if found.top in ("vlfit", "examples") and floor_of(found.wanted) > floor_of(found.module)
    ]
    assert climbing == []


def may_import_torch(module: str) -> bool:
    return floor_of(module) == FLOORS["vlfit.engine"] or module.startswith(TRANSFORMERS_BACKEND)


def test_tensor_libraries_are_imported_by_engines_alone() -> None:
    stray = [
        str(found)
        for found in all_imports()
        if found.top in TENSOR_LIBRARIES and not may_import_torch(found.module)
    ]
    assert stray == []


def test_transformers_is_imported_by_its_backend_alone() -> None:
    stray = [
        str(found)
        for found in all_imports()
        if found.top == "transformers" and not found.module.startswith(TRANSFORMERS_BACKEND)
    ]
    assert stray == []


def test_the_engine_knows_nothing_of_http() -> None:
    web = {"starlette", "uvicorn", "httpx", "openai", "requests", "urllib"}
    stray = [str(f) for f in all_imports() if floor_of(f.module) in (1, 2) and f.top in web]
    assert stray == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("import torch.nn as nn", "torch.nn"),
        ("def f():\n    from vlfit.server import a_name", "vlfit.server"),
        ("from ..errors import VlfitError", "vlfit.errors"),
        ("from vlfit import errors", "vlfit.errors"),
    ],
)
def test_the_reader_of_imports_sees_every_form(line: str, wanted: str) -> None:
    assert [found.wanted for found in imports_of("vlfit.engine.engine", line, is_package=False)] == [wanted]


def fresh_python(program: str, *arguments: str) -> str:
    """Run ``program`` in a new interpreter and give what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_other_floor_loads_torch_when_imported() -> None:
    names = [name for name in MODULES if not may_import_torch(name) and not name.startswith("examples")]
    names = [name for name in names if not name.endswith("__main__")]
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    for heavy in ("torch", "transformers"):
        if heavy in sys.modules:
            print(f"importing {name} loads {heavy}")
            sys.exit()
"""
    assert fresh_python(program, *names) == ""


@pytest.mark.parametrize(
    "action",
    [
        "import vlfit; vlfit.__version__",
        "import vlfit; vlfit.VlfitError, vlfit.Answer",
        "import vlfit.cli.main, contextlib, os\n"
        "sys.argv = ['vlfit', '--help']\n"
        "with contextlib.redirect_stdout(open(os.devnull, 'w')), contextlib.suppress(SystemExit):\n"
        "    vlfit.cli.main.main()",
    ],
    ids=["import vlfit", "errors and answers", "vlfit --help"],
)
def test_cheap_things_load_nothing_slow(action: str) -> None:
    program = f"import sys\n{action}\nprint([name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])"
    assert fresh_python(program).strip() == "[]"


def test_help_imports_the_command_line_alone() -> None:
    """Modules of our own take time to import, too: with all of them `vlfit --help` took twice as long."""
    program = """
import sys
import vlfit.cli.main
light = ("vlfit.cli", "vlfit._version", "vlfit.errors", "vlfit.units")
print([name for name in sys.modules if name.startswith("vlfit.") and not name.startswith(light)])
"""
    assert fresh_python(program).strip() == "[]"


def circles() -> list[list[str]]:
    """Sets of modules that import one another (Tarjan's strongly connected components)."""
    wants = {
        name: {found.wanted for found in all_imports() if found.module == name}
        & MODULES.keys() - {name, "vlfit"}
        for name in MODULES
    }
    found: list[list[str]] = []
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for wanted in wants[name]:
            if wanted not in numbers:
                visit(wanted)
                lowest[name] = min(lowest[name], lowest[wanted])
            elif wanted in stack:
                lowest[name] = min(lowest[name], numbers[wanted])
        if lowest[name] == numbers[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in wants:
        if name not in numbers:
            visit(name)
    return found


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles() == []


def test_prompts_are_prepared_without_torch() -> None:
    """`vlfit bench` prepares them first: torch is imported beside other work of a start."""
    program = """
import sys
from vlfit.checkpoint.source import open_checkpoint
from vlfit.prompt.builder import PromptBuilder
checkpoint = open_checkpoint("mini")
PromptBuilder(checkpoint.folder, checkpoint.config)
print("torch" in sys.modules)
"""
    assert fresh_python(program).strip() == "False"
