"""The house keeps its word: what the documents, the Makefile and pyproject.toml say is what is there."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from importlib.resources import files
from pathlib import Path

import pytest

import vlfit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CODE_FOLDERS = ("src", "tests", "examples", "benchmarks", "training", "scripts")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LONGEST_MODULE = 800
LARGEST_FOLDER = 25
# Base names that every family of models or every backend may have one file of.
ONE_A_FAMILY_OR_BACKEND = {
    "backend",
    "builders",
    "config",
    "cost",
    "cost_model",
    "decoder",
    "lines",
    "tokenizer",
}
# Parts of a declared package that go by a name of their own.
COMES_WITH = {"triton": "torch", "httpcore": "httpx", "langchain_core": "langchain-openai"}
COMES_WITH |= {"llama_cpp": "llama-cpp-python"}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def read(path: Path) -> str:
    return path.read_text("utf-8")


@cache
def facts_of(path: Path) -> tuple[bool, frozenset[str]]:
    """Whether a module opens with a docstring, and the packages that it imports.

    No tree outlives this: the collector would go through all of them again and again.
    """
    tree = ast.parse(read(path))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return bool(ast.get_docstring(tree)), frozenset(names)


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_module_opens_by_saying_what_it_is() -> None:
    silent = [
        shown(path) for path in python_files(*CODE_FOLDERS) if read(path).strip() and not facts_of(path)[0]
    ]
    assert [path for path in silent if not path.endswith("_version.py")] == []


def test_modules_stay_short() -> None:
    lengths = {shown(path): len(read(path).splitlines()) for path in python_files("src")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_MODULE} == {}


def test_folders_stay_small() -> None:
    folders = Counter(shown(path.parent) for path in python_files("src") if path.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > LARGEST_FOLDER} == {}


def test_no_base_name_is_in_two_rooms() -> None:
    """A name alone says which file is meant, but for those that a family or a backend has one of."""
    rooms = Counter(path.stem for path in python_files("src") if not path.stem.startswith("__"))
    twice = {name for name, count in rooms.items() if count > 1}
    assert twice - ONE_A_FAMILY_OR_BACKEND == set()


def test_nothing_is_left_for_later_in_the_code() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    left = [
        f"{shown(path)}:{number}"
        for path in python_files(*CODE_FOLDERS)
        for number, line in enumerate(read(path).splitlines(), 1)
        if marks.search(line)
    ]
    assert left == []


def test_the_changelog_begins_with_this_version() -> None:
    heading = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heading is not None
    assert heading.group(1) == vlfit.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert files("vlfit").joinpath("py.typed").is_file()


def test_the_licence_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


# --- documents ---------------------------------------------------------------------------------------------


def fenced_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    links += re.findall(r'src="([^"]+)"', path.read_text("utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


# --- packages ----------------------------------------------------------------------------------------------


def plain_name(requirement: str) -> str:
    """``Hugging_Face.hub>=1`` and ``hugging-face-hub`` are the same project."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~\[;]", requirement.strip())[0]).lower()


DECLARED = {plain_name(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {
    extra: {plain_name(requirement) for requirement in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
}

# Programs that are tried against a server, in environments of their own.
CLIENTS = {
    plain_name(requirement)
    for folder in ("clients", "gguf")
    for path in (ROOT / "tests" / folder).glob("*.txt")
    for requirement in path.read_text("utf-8").splitlines()
}


def foreign_imports(path: Path) -> frozenset[str]:
    """Top-level names of imported packages that are neither ours nor Python's own."""
    return facts_of(path)[1] - sys.stdlib_module_names - {"vlfit", *CODE_FOLDERS}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (
            "src",
            DECLARED
            | EXTRAS["parquet"]
            | EXTRAS["ray"]
            | EXTRAS["transformers"]
            | EXTRAS["files"]
            | EXTRAS["mcp"],
        ),
        ("examples", DECLARED | EXTRAS["dev"]),
        ("tests", DECLARED | EXTRAS["dev"] | CLIENTS),
        ("benchmarks", DECLARED | EXTRAS["dev"]),
        ("training", DECLARED | EXTRAS["dev"] | EXTRAS.get("training", set())),
    ],
)
def test_every_imported_package_is_declared(folder: str, allowed: set[str]) -> None:
    homes = packages_distributions()
    undeclared = {
        f"{shown(path)} imports {name}"
        for path in python_files(folder)
        for name in foreign_imports(path)
        if not {plain_name(home) for home in homes.get(name, [name])} & allowed
        and COMES_WITH.get(name) not in allowed
    }
    assert undeclared == set()


def test_every_declared_package_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {plain_name(line) for line in lines if "==" in line}
    wanted = DECLARED | EXTRAS["dev"] | EXTRAS["transformers"]
    assert wanted - pinned == set()
