"""Planned and held memory side by side, and the record of a start for the next plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.vllm.test_starting import reported_memory
from vlfit.backends.vllm import backend as account
from vlfit.backends.vllm.starting import ReportedMemory
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import starts
from vlfit.plan.vllm.args import as_vllm_settings
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def machine() -> Machine:
    return machine_with_card("RTX 4090", desktop=951 * MIB)


@pytest.fixture
def made(machine: Machine) -> Plan:
    wishes = Wishes(backend="vllm", vllm_version="0.28.0", context=4096, image_tokens=1024, sequences=2)
    return find_plan(find_exact_models("Qwen/Qwen3-VL-4B-Instruct-FP8"), machine, wishes)


def first_look(made: Plan, said: ReportedMemory) -> ReportedMemory:
    """The free memory at vLLM's first look: 500 MiB less for its own context."""
    return replace(said, free=made.gpu.free - 500 * MIB)


def test_ledger_rows_of_reported_memory(made: Plan) -> None:
    said = first_look(made, reported_memory("0.28.log"))
    rows = {row.line: row for row in account.compare_ledger(made, said, 7 * GIB)}
    planned = {line.line: line.bytes for line in made.ledger}
    assert rows["weights"].actual == round(4.88 * GIB)
    stored = sum(size for line, size in planned.items() if line.startswith("weights."))
    # vLLM counts the tables that it makes when it loads with the weights.
    assert rows["weights"].planned == stored + costs.bytes_loaded_with_weights(
        made.model, as_vllm_settings(made.settings)
    )
    assert rows["graphs"].actual == round(0.05 * GIB)
    assert rows["context"].actual == 500 * MIB
    assert rows["kv_cache"].planned == planned["kv_cache"]
    # Nobody told these: they have no number rather than a wrong one.
    assert (rows["workspace"].actual, rows["growth"].actual, rows["desktop"].actual) == (None, None, None)
    # Every line of the plan but the air is in one row.
    assert sum(row.planned or 0 for row in rows.values()) == made.total - planned["reserve"]


def test_memory_taken_by_others_is_not_the_context(made: Plan) -> None:
    for free in (made.gpu.free + 1, made.gpu.free - 9 * GIB):
        rows = account.compare_ledger(made, replace(reported_memory("0.28.log"), free=free), None)
        assert next(row for row in rows if row.line == "context").actual is None


def test_next_plan_uses_the_recorded_start(made: Plan, machine: Machine) -> None:
    assert next(line for line in made.ledger if line.line == "context").how == "modelled"
    kept = account.record_start(made, first_look(made, reported_memory("0.28.log")), 7 * GIB)
    assert kept is not None
    wishes = Wishes(backend="vllm", vllm_version="0.28.0", context=4096, image_tokens=1024, sequences=2)
    again = find_plan([made.model], machine, wishes)
    lines = {line.line: line for line in again.ledger}
    assert lines["context"].how == "measured"
    assert lines["graphs"].how == "measured"
    assert lines["graphs"].bytes == round(0.05 * GIB)
    # Another version's starts say nothing of this one.
    other = find_plan([made.model], machine, replace(wishes, vllm_version="0.30.0"))
    assert next(line for line in other.ledger if line.line == "context").how == "modelled"


def test_partial_reports_keep_earlier_numbers(made: Plan) -> None:
    account.record_start(made, first_look(made, reported_memory("0.12.log")), None)
    account.record_start(made, first_look(made, reported_memory("0.28.log")), None)
    place = starts.model_key(made.model, made.settings)
    began = starts.find_start(made.gpu.name, "0.28.0", place, made.settings)
    assert began is not None
    assert began.weights == round(4.88 * GIB)
    assert began.peak == round(1.32 * GIB)  # only the first told it


@pytest.mark.parametrize(
    "broken", ["", "[]", '{"version": 9}', '{"version": 1, "starts": [{"weights": -1}]}']
)
def test_broken_files_are_ignored(made: Plan, broken: str) -> None:
    kept = account.record_start(made, reported_memory("0.28.log"), None)
    assert kept is not None
    kept.write_text(broken)
    starts.read_records.cache_clear()
    place = starts.model_key(made.model, made.settings)
    assert starts.find_start(made.gpu.name, "0.28.0", place, made.settings) is None
    assert account.record_start(made, reported_memory("0.28.log"), None) == kept
    assert starts.find_start(made.gpu.name, "0.28.0", place, made.settings) is not None


def test_bytes_taken_since(made: Plan, machine: Machine) -> None:
    (gpu,) = machine.gpus
    later = replace(machine, gpus=(replace(gpu, free=gpu.free - 3 * GIB),))
    assert account.bytes_taken_since(made, later) == 3 * GIB
    assert account.bytes_taken_since(made, replace(machine, gpus=())) is None
