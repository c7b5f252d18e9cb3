"""Imports of the planner: its core names no backend, and there are no circles.

Every import statement counts, those inside functions and under ``TYPE_CHECKING`` too.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import vlfit.plan
from vlfit.plan.backends import NATIVE, TRANSFORMERS, VLLM

PLAN = Path(next(iter(vlfit.plan.__path__)))
ROOMS = {"native", "transformers", "vllm"}
REGISTRY = "vlfit.plan.backends"


def modules() -> dict[str, Path]:
    """Paths by dotted name."""
    names = {}
    for path in PLAN.rglob("*.py"):
        parts = path.relative_to(PLAN.parent.parent).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
    return found & known.keys()


def room_of(module: str) -> str:
    """``native``, ``transformers`` or ``vllm``; "" for the core."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in ROOMS else ""


def test_plan_has_no_import_circles() -> None:
    known = modules()
    graph = {name: imports_of(path, known) - {name} for name, path in known.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


def test_only_the_registry_imports_backends() -> None:
    known = modules()
    for name, path in known.items():
        if name != REGISTRY:
            rooms = {room_of(imported) for imported in imports_of(path, known)} - {"", room_of(name)}
            assert not rooms, f"{name} imports {rooms}"


def test_core_compares_no_backend_name() -> None:
    names = {costs.name for costs in (NATIVE, VLLM, TRANSFORMERS)}
    for module, path in modules().items():
        if room_of(module):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                words = {each.value for each in sides if isinstance(each, ast.Constant)}
                assert not words & names, f"{module} line {node.lineno}"
