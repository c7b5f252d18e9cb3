"""Checks over clean engines find nothing; faults are found and named. All faults: the marker ``slow``."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity.faults import FAULTS, build_spec, run_fault
from tests.tiny import TINY
from tests.tiny_decoders import DECODERS
from tests.tiny_qwen3_5 import QWEN3_5
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.parity.findings import CheckProgress, CheckReport, Component, Level, Likely
from vlfit.parity.run_checks import float_reference, run_checks
from vlfit.parity.scenes import known_answers

# Each engine of a check is collected by itself.
pytestmark = pytest.mark.usefixtures("only_its_own_to_collect")
Folder = Callable[[str], Path]
slow = pytest.mark.slow
QUICK = ("tied", "small", "llama2")
# One of each kind that `make test` sees; the rest are as quick, and many.
SEEN_ALWAYS = (
    "corners not aligned",
    "deepstack added in reverse",
    "sections of M-RoPE in another order",
    "one scale block off by one",
    "one bit of a shard",
    "the highest bit of an exponent in a file",
    "a weight that is not a number",
    "a download that left a matrix of zeros",
    "a kernel that gives NaN",
    "a kernel that gives NaN while decoding",
    "a stale prefix block: pictures not in the key",
    "wrong slots after preemption",
    "no line break after the role",
    "decay of one head 1 % off",
    "GPTQ: a zero point of each eight one off",
    "GGUF Q4_0: one block in the place of the next",
    "LongRoPE: attention factor left out",
    "clips: two frames of a step swapped",
    "compiled: inputs of prompts in 8 bits",
    "compiled: a decoding step writes one slot further",
)
# What a quick check does not see. The others above are found by one, which takes a third of the time.
SEEN_BY_MORE_THAN_QUICK = (
    "one bit of a shard",
    "wrong slots after preemption",
    "clips: two frames of a step swapped",
)
# Smaller than rounding with these weights; the table counts them as missed.
BELOW_ROUNDING = ("FP8: denormal numbers become 0",)


def check(folder: Path, level: Level = "normal", seen: list[CheckProgress] | None = None) -> CheckReport:
    checkpoint = open_checkpoint(folder)
    options = EngineOptions(device="cpu", max_model_len=1024)

    def build(**changes: Any) -> NativeEngine:
        return NativeEngine(checkpoint, dataclasses.replace(options, **changes))

    return run_checks(build, checkpoint, level, None if seen is None else seen.append)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else slow) for name in (*TINY, *QWEN3_5, *DECODERS)],
)
def test_a_clean_engine_has_no_finding(
    tiny: Folder, tiny_qwen3_5: Folder, tiny_decoder: Folder, name: str
) -> None:
    folder = (tiny if name in TINY else tiny_qwen3_5 if name in QWEN3_5 else tiny_decoder)(name)
    report = check(folder)
    assert report.findings == []
    assert report.ok
    assert report.verdict is None
    shares = [each.share for each in report.measured]
    assert len(shares) > 50
    assert max(shares) <= 1.0


def test_mini_finds_boxes_and_says_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known of mini; and words that it does not say, which are the only finding."""
    known = known_answers(open_checkpoint(mini_folder()))
    assert known is not None
    changed = dataclasses.replace(known.words[1], picture="changed", answer='It says "barden".')
    known = dataclasses.replace(known, words=(*known.words, changed))
    monkeypatch.setattr("vlfit.parity.run_checks.known_answers", lambda checkpoint: known)
    seen: list[CheckProgress] = []
    report = check(mini_folder(), seen=seen)
    (found,) = report.findings
    assert (found.code, found.stage, found.condition) == ("words_differ", "words", "changed")
    assert found.likely is Likely.FILE  # engine and reference agree about all else
    assert found.way_around
    assert {each.condition for each in report.measured if each.stage == "boxes"} >= {"square", "wide", "tall"}
    said = {each.condition for each in report.measured if each.stage == "words"}
    assert said == {"shapes.jpg", "word.webp", "count.png", "changed"}
    assert [each.done for each in seen] == list(range(seen[0].total))
    assert {"CUDA graphs"} <= {each.check for each in report.skipped}
    assert report.as_json()["ok"] is False


def test_a_quick_check_runs_fewer_engines(tiny: Folder) -> None:
    report = check(tiny("tied"), "quick")
    assert report.ok
    conditions = {each.condition for each in report.measured}
    assert "FP8 KV" not in conditions
    assert any("prefix" in each for each in conditions)


def test_the_table_has_a_hundred_faults() -> None:
    assert len(FAULTS) >= 100
    assert set(SEEN_ALWAYS) | set(BELOW_ROUNDING) <= set(FAULTS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The checkpoint of a fault's spec, built when asked for. Not to be changed."""
    root = tmp_path_factory.mktemp("specs")
    return cache(lambda spec: build_spec(spec, root / spec.replace(" ", "-")))


def runs_of_faults() -> Iterator[Any]:
    """Each fault at its own level, and at the quickest that finds it where `make test` sees it."""
    for name, fault in FAULTS.items():
        if name in BELOW_ROUNDING:
            continue
        quickest = fault.level if name in SEEN_BY_MORE_THAN_QUICK else "quick"
        if name in SEEN_ALWAYS and quickest != fault.level:
            yield pytest.param(name, quickest, id=f"{name}, {quickest}")
        seen = name in SEEN_ALWAYS and quickest == fault.level
        yield pytest.param(name, fault.level, id=name, marks=() if seen else slow)


@pytest.mark.parametrize(("name", "level"), [*runs_of_faults()])
def test_a_fault_is_found_and_named(built: Folder, tmp_path: Path, name: str, level: Level) -> None:
    fault = dataclasses.replace(FAULTS[name], level=level)
    report = run_fault(fault, built(fault.spec), tmp_path, float_reference)
    assert report.verdict is not None, "not found"
    assert report.verdict.component in fault.names
    assert isinstance(report.verdict.component, Component)
    assert report.verdict.note
    json.dumps(report.as_json(), allow_nan=False)


def test_a_checkpoint_is_known_by_its_weights(tiny: Folder) -> None:
    assert known_answers(open_checkpoint(tiny("tied"))) is None
