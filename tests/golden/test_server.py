"""A served mini: the API's description, the metrics, and what mini says over HTTP."""

import re
from typing import Any

import httpx

from tests.golden.conftest import ROOT
from tests.golden.kept import check_facts
from vlfit.client import Client

PICTURES = ROOT / "examples" / "pictures"
QUESTION = "How many animals are there?"
TAKEN_APART = ("motorcycles.png",)
_TYPE = re.compile(r"# TYPE (\S+) (\S+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+")
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')


def test_openapi(served: str) -> None:
    check_facts("openapi.json", httpx.get(f"{served}/openapi.json").raise_for_status().json())


def test_metrics(served: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    httpx.post(f"{served}/v1/chat/completions", json=body).raise_for_status()
    check_facts("metrics.json", families(httpx.get(f"{served}/metrics").raise_for_status().text))


def families(text: str) -> dict[str, dict[str, Any]]:
    """Each metric family's type, and each of its samples' names with the names of their labels."""
    found: dict[str, dict[str, Any]] = {}
    now = ""
    for line in text.splitlines():
        if head := _TYPE.fullmatch(line):
            now = head[1]
            found[now] = {"type": head[2], "samples": {}}
        elif not line.startswith("#"):
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample[1].startswith(now), line
            labels = _LABEL.findall(sample[2] or "")
            found[now]["samples"].setdefault(sample[1], sorted(labels))
            assert found[now]["samples"][sample[1]] == sorted(labels), line
    assert found
    return found


def test_mini_sees_the_pictures(served: str) -> None:
    found: dict[str, Any] = {}
    with Client(served) as client:
        for picture in sorted(PICTURES.iterdir()):
            answer = client.caption(picture)
            (seen,) = answer.images
            usage = answer.usage
            found[picture.name] = {
                "caption": answer.text,
                "finish_reason": answer.finish_reason,
                "tokens": [usage.prompt_tokens, usage.image_tokens, usage.completion_tokens],
                "seen": f"{seen.width}x{seen.height} as {seen.seen_width}x{seen.seen_height}",
                "notes": list(seen.notes),
                QUESTION: client.ask(QUESTION, picture).text,
            }
        for name in TAKEN_APART:
            picture = PICTURES / name
            scene = client.scene(picture)
            found[name] |= {
                "long": client.caption(picture, "long").text,
                "scene": scene.summary,
                "objects": [
                    f"{thing.label} {tuple(thing.box_1000)} {tuple(thing.box)}" for thing in scene.objects
                ],
                "words": scene.text,
            }
    check_facts("mini.json", found)
