"""Fields and types of every ``--json`` page, without values: a renamed field of a record is seen here."""

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.golden.conftest import Vlfit
from tests.golden.kept import check_facts
from tests.golden.test_pages import in_a_folder

__all__ = ["in_a_folder"]

CARD = "--machine card.json"
VLLM = "--backend vllm --vllm-version 0.25.1"
PAGES = {
    "models": "models --json",
    "machine": f"machine {CARD} --json",
    "plan": f"plan {CARD} --json",
    "plan MODEL": f"plan 4B {CARD} --json",
    "plan MODEL that does not fit": f"plan 8B -w fp8 {CARD} --context 4096 --json",
    "plan MODEL --what-if": f"plan 4B {CARD} --what-if --json",
    "plan --compare": f"plan --compare 8B 9B {CARD} --json",
    "plan MODEL --backend vllm": f"plan 4B {CARD} {VLLM} --json",
    "plan MODEL --backend transformers": f"plan 2B {CARD} --backend transformers --json",
    "doctor": "doctor --json",
    "doctor --log": f"doctor {CARD} --log vllm-no-room.log --json",
    "convert": "convert mini -w int4 --out int4 --json --quiet",
    "bench": "bench mini --device cpu --batch 1 --tokens 4 --repeat 2 --json --quiet",
}
# Answered by a server with mini, which records itself as running.
SERVED = {
    "caption": "caption tractor-and-cat.png --json --server {url}",
    "ask": "ask shop.png 'Which word?' --max-tokens 3 --json --server {url}",
    "scene": "scene number-25.png --json --server {url}",
    "detect": "detect tractor-and-cat.png tractor --json --server {url}",
    "batch": "batch pictures --ask 'What is this?' -o {file} --server {url}",
    "batch --scene": "batch pictures --scene -o {file} --server {url}",
    "batch --detect": "batch pictures --detect cup -o {file} --server {url}",
    "status": "status --json",
    "top": "top --once --json --url {url}",
    "sleep": "sleep --url {url} --json",
    "wake": "wake --url {url} --json",
}
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
# Objects whose keys are data, not fields.
_MAPS = r"(relative_errors|nearest_errors|environment|versions|memory\.weights)$"
# Fields that depend on the computer that runs the tests, and on what it is doing.
_ANY = {
    "bench": {"machine.gpu"},
    "top": {"gpus", "alarms", "rates.decode_step_s", "rates.tokens_per_s", "rates.prompt_tokens_per_s"},
}


def fields(value: Any, any_type: Collection[str] = (), path: str = "") -> dict[str, set[str]]:
    """Types by path: ``images[].width``. Whole and other numbers are both ``number``."""
    if path in any_type:
        return {path: {"any"}}
    found = {path: {_KINDS.get(type(value), "number")}} if path else {}
    inner: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        is_map = bool(re.search(_MAPS, path))
        inner = [(f"{path}.{'*' if is_map else name}".lstrip("."), each) for name, each in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[]", each) for each in value]
    for name, each in inner:
        for where, kinds in fields(each, any_type, name).items():
            found.setdefault(where, set()).update(kinds)
    return found


def fields_of_lines(text: str, any_type: Collection[str] = ()) -> dict[str, str]:
    """The fields of all lines of JSON in ``text`` together."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        for where, kinds in fields(json.loads(line), any_type).items():
            found.setdefault(where, set()).update(kinds)
    assert found
    return {where: " or ".join(sorted(kinds)) for where, kinds in found.items()}


@pytest.mark.usefixtures("in_a_folder")
def test_fields_of_all_pages(vlfit: Vlfit, served: str) -> None:
    pages: dict[str, dict[str, str]] = {}
    for name, words in (PAGES | SERVED).items():
        file = Path(f"{len(pages)}.jsonl")
        ended = vlfit(*shlex.split(words.format(url=served, file=file)))
        assert ended.code in (0, 1, 3), (name, ended.err)
        pages[name] = fields_of_lines(
            file.read_text("utf-8") if file.exists() else ended.out, _ANY.get(name, ())
        )
    check_facts("json_fields.json", pages)


def test_a_renamed_field_and_a_changed_type_differ() -> None:
    before = fields_of_lines('{"a": [{"b": 1}], "c": null}')
    assert before == {"a": "array", "a[]": "object", "a[].b": "number", "c": "null"}
    assert fields_of_lines('{"a": [{"d": 1}], "c": null}') != before
    assert fields_of_lines('{"a": [{"b": "1"}], "c": null}') != before
    assert fields_of_lines('{"a": [{"b": 1.5}], "c": null}') == before
    assert fields_of_lines('{"a": 1}\n{"a": null}') == {"a": "null or number"}
