"""The next plan after a failed start: it fits the cause, keeps wishes while it can, and stepping ends."""

import random
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest

from tests.plan.example import EXAMPLE
from tests.wording import figures_in
from vlfit.doctor.diagnose import find_failure
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.backends import VLLM
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import step_down
from vlfit.plan.vllm.args import OLDER_RUNNER, vllm_args_of
from vlfit.plan.vllm.flags import PINNED
from vlfit.plan.vllm.step_down import Failure, NextPlan, next_plan
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

FOUR = replace(
    machine_with_card("RTX 4090"),
    gpus=tuple(replace(machine_with_card("RTX 4090").gpus[0], index=index) for index in range(4)),
)


def wished(**wishes: Any) -> Wishes:
    return Wishes(**{"backend": VLLM.name, "vllm_version": "0.25.1", **wishes})


def first(name: str = "2B", machine: Machine = EXAMPLE, **wishes: Any) -> Plan:
    asked = wished(**wishes)
    return find_plan(find_exact_models(name, asked.weights or "fp8"), machine, asked)


def stepped(failure: Failure, failed: Plan, own: tuple[str, ...] = (), **wishes: Any) -> NextPlan:
    found = next_plan(failure, [failed], EXAMPLE, wished(**wishes), own)
    assert found is not None
    return found


# --- each cause ---------------------------------------------------------------------------------------------


def test_context_is_cut_to_vllms_count() -> None:
    """A wish is broken, as nothing else helps, and reported as such."""
    failed = first(context=8192, kv_tokens=2048)
    assert VLLM.pool_tokens(failed.settings) == 2048
    values = {"length": "8192", "needed": "0.88", "available": "0.22", "estimate": "1936"}
    step = stepped(Failure("vllm.kv_too_small", values), failed, context=8192, kv_tokens=2048)
    assert step.plan.settings.context == 1936
    assert step.plan.settings.image_tokens <= 968
    assert step.broken == ("--context 8192 -> 1936",)
    assert {8192, 1936, 2048} <= set(figures_in(step.what_changed))  # before, now, and what the cache holds
    assert "1936" in (step.plan.command or ())


def test_context_is_cut_by_log_numbers_or_pool() -> None:
    failed = first(context=8192, kv_tokens=2048)
    counted = {"length": "8192", "needed": "0.88", "available": "0.22"}
    assert stepped(Failure("vllm.kv_too_small", counted), failed).plan.settings.context == 1952
    assert stepped(Failure("vllm.kv_too_small"), failed).plan.settings.context == 2048 - 128


def test_too_small_pool_becomes_the_plans_own() -> None:
    failed = first(context=4096, kv_tokens=128)
    values = {"length": "4096", "needed": "0.44", "available": "0.01", "estimate": "0"}
    step = stepped(Failure("vllm.kv_too_small", values), failed, context=4096, kv_tokens=128)
    assert step.broken == ("--kv 128 -> 16512",)
    assert step.plan.settings.context == 4096
    assert figures_in(step.what_changed)[:2] == [128, 16512]


def test_less_free_memory_means_smaller_settings() -> None:
    failed = first("4B", context=4096)
    free = {"free": "6.2", "total": "7.96"}
    step = stepped(Failure("vllm.free_lt_util", free), failed, context=4096)
    sizes = {line.line: line.bytes for line in step.plan.ledger}
    inside = step.plan.total - sizes["desktop"] - sizes["reserve"] - 0.53 * GIB
    assert inside <= 6.2 * GIB
    # Nothing is lowered that need not be: each setting put back alone would be too much.
    for name in ("context", "image_tokens", "sequences", "chunk", "graphs"):
        now, before = getattr(step.plan.settings, name), getattr(failed.settings, name)
        if now != before:
            larger = replace(step.plan.settings, **{name: before})
            lines = VLLM.lines(failed.model, failed.gpu, larger)
            held = sum(line.bytes for line in lines) - sizes["desktop"] - sizes["reserve"] - 0.53 * GIB
            assert held > 6.2 * GIB, name


@pytest.mark.parametrize(
    ("failure", "field", "least"),
    [
        (Failure("cuda.graph_oom"), "graphs", False),
        (Failure("torch.oom", stage="graphs"), "graphs", False),
        (Failure("torch.oom", stage="pictures"), "chunk", 1024),
        (Failure("torch.oom", stage="pass"), "chunk", 1024),
        (Failure("torch.oom", stage="sampler"), "sequences", 2),
        (Failure("torch.oom", stage="requests"), "image_tokens", 1280),
        (Failure("vllm.sampler_oom", {"rows": "4"}), "sequences", 2),
        (Failure("vllm.no_kv"), "chunk", 1024),
    ],
)
def test_out_of_memory_lowers_the_failing_stage_first(failure: Failure, field: str, least: object) -> None:
    failed = first(context=8192, sequences=4)
    large = replace(failed, settings=replace(failed.settings, chunk=2048, graphs=True, image_tokens=2560))
    assert getattr(stepped(failure, large).plan.settings, field) == least


def test_wishes_are_lowered_last() -> None:
    failed = first(context=8192)
    wishes = {"context": 8192, "sequences": failed.settings.sequences}
    tried, broken = [failed], []
    while (step := next_plan(Failure("torch.oom"), tried, EXAMPLE, wished(**wishes))) is not None:
        tried.append(step.plan)
        broken.append(step.broken)
    first_broken = next(place for place, names in enumerate(broken) if names)
    kept = tried[first_broken].settings  # graphs, passes and pictures went before
    assert (kept.context, kept.sequences) == (8192, wishes["sequences"])
    assert (kept.graphs, kept.chunk) == (False, 256)
    smallest = VLLM.lines(failed.model, failed.gpu, replace(kept, image_tokens=64))
    assert sum(line.bytes for line in smallest) >= tried[first_broken].total - MIB
    assert tried[-1].settings.sequences == 1


def test_race_is_retried_once() -> None:
    failed = first()
    step = stepped(Failure("vllm.profile_race"), failed)
    assert step.plan.command == failed.command
    assert next_plan(Failure("vllm.profile_race"), [failed, step.plan], EXAMPLE, wished()) is None


def test_uva_failure_tries_pinned_memory_then_older_runner() -> None:
    failed = first()
    assert failed.environment == {PINNED: "1"}
    step = stepped(Failure("wsl.uva"), failed)
    assert step.plan.environment == {OLDER_RUNNER: "0"}
    assert next_plan(Failure("wsl.uva"), [failed, step.plan], EXAMPLE, wished()) is None
    on_linux = first(machine=machine_with_card("RTX 5060"))
    assert stepped(Failure("wsl.uva"), on_linux).plan.environment[PINNED] == "1"


def test_no_peer_access_tries_ram_then_a_copy_per_card() -> None:
    failed = first("4B", FOUR, weights="fp8", tensor_parallel=2, vllm_version="0.32.0")
    assert vllm_args_of(failed.settings).tensor == 2
    says = "Cuda failure 217 'peer access is not supported between these two devices'"
    failure, _ = find_failure(BytesIO(f"transport/shm.cc:590 NCCL WARN {says}".encode()))
    tried = [failed]
    while (step := next_plan(failure, tried, FOUR, wished(vllm_version="0.32.0"))) is not None:
        tried.append(step.plan)
    assert tried[1].environment["NCCL_CUMEM_HOST_ENABLE"] == "0"
    assert tried[2].environment["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in (tried[2].command or ())
    assert (vllm_args_of(tried[3].settings).tensor, vllm_args_of(tried[3].settings).data) == (1, 4)
    assert len(tried) == 4
    # Who asked for two cards a layer keeps them.
    kept = wished(tensor_parallel=2, vllm_version="0.32.0")
    assert next_plan(failure, tried[:3], FOUR, kept) is None
    alone = first()  # one card has no other to read
    assert next_plan(failure, [alone], EXAMPLE, wished()) is None


def test_full_dev_shm_tries_sockets() -> None:
    failed = first("4B", FOUR, tensor_parallel=2)
    step = stepped(Failure("nccl.shm"), failed, tensor_parallel=2)
    assert step.plan.environment["NCCL_SHM_DISABLE"] == "1"


def test_bfloat16_failure_tries_float16_once() -> None:
    failed = first()
    step = stepped(Failure("vllm.bf16"), failed)
    assert ("--dtype", "float16") in {(flag.flag, flag.value) for flag in step.plan.flags}
    assert next_plan(Failure("vllm.bf16"), [failed, step.plan], EXAMPLE, wished()) is None


def test_unknown_planned_flags_are_omitted_but_typed_ones_never() -> None:
    failed = first()
    unknown = Failure("vllm.unknown_flag", {"flags": "--mm-processor-cache-gb 0"})
    step = stepped(unknown, failed)
    assert "--mm-processor-cache-gb" not in (step.plan.command or ())
    assert "--mm-processor-cache-gb" in step.what_changed
    assert next_plan(unknown, [failed], EXAMPLE, wished(), ["--mm-processor-cache-gb=0"]) is None
    for flags in ("--their-own 3", "--mm-processor-cache-gb 0 --their-own", "--max-model-len 4096"):
        failure = Failure("vllm.unknown_flag", {"flags": flags})
        assert next_plan(failure, [failed], EXAMPLE, wished(), ["--their-own"]) is None


def test_weights_too_large_use_more_cards_per_copy() -> None:
    failed = first("8B", machine=FOUR)
    assert (vllm_args_of(failed.settings).tensor, vllm_args_of(failed.settings).data) == (1, 4)
    step = next_plan(Failure("torch.oom", stage="weights"), [failed], FOUR, wished())
    assert step is not None
    assert (vllm_args_of(step.plan.settings).tensor, vllm_args_of(step.plan.settings).data) == (2, 2)
    assert next_plan(Failure("torch.oom", stage="weights"), [first()], EXAMPLE, wished()) is None


def test_out_of_ram_lowers_the_number_of_processes() -> None:
    failed = first("8B", machine=FOUR)
    step = next_plan(Failure("kernel.oom_kill"), [failed], FOUR, wished())
    assert step is not None
    assert "--api-server-count" in (step.plan.command or ())
    second = next_plan(Failure("kernel.oom_kill"), [failed, step.plan], FOUR, wished())
    assert second is not None
    assert vllm_args_of(second.plan.settings).data == 2
    assert next_plan(Failure("kernel.oom_kill"), [first()], EXAMPLE, wished()) is None


@pytest.mark.parametrize("name", ["", "vllm.wrapper", "port.in_use", "hub.gated", "vllm.quant_gpu"])
def test_failures_without_a_proposal(name: str) -> None:
    assert next_plan(Failure(name), [first()], EXAMPLE, wished()) is None


def test_next_plan_uses_the_machine_as_it_is_now() -> None:
    fuller = machine_with_card("RTX 5060", desktop=1200 * MIB, wsl2=True)
    step = next_plan(Failure("torch.oom"), [first()], fuller, wished())
    assert step is not None
    assert step.plan.ledger[0].bytes == 1200 * MIB


# --- all of them --------------------------------------------------------------------------------------------

FAILURES = (
    Failure("vllm.kv_too_small", {"length": "8192", "needed": "1.0", "available": "0.6", "estimate": "4000"}),
    Failure("vllm.kv_too_small", {"length": "8192", "needed": "1.0", "available": "-1"}),
    Failure("vllm.kv_too_small"),
    Failure("vllm.kv_too_small_v0", {"length": "8192", "stored": "5000"}),
    Failure("vllm.max_len_over_model", {"length": "8192", "most": "4096"}),
    Failure("vllm.free_lt_util", {"free": "6.0", "total": "7.96", "share": "0.8", "wanted": "6.4"}),
    Failure("vllm.free_lt_util", {"free": "nonsense", "total": ""}),
    Failure("vllm.kv_negative", {"kv": "-0.4"}),
    *(
        Failure("torch.oom", stage=stage)
        for stage in ("", "pictures", "pass", "graphs", "weights", "requests")
    ),
    *(
        Failure(name)
        for name in step_down._PROPOSALS  # every cause that has an answer
    ),
    Failure("vllm.unknown_flag", {"flags": "--enforce-eager --mm-processor-kwargs {}"}),
    Failure("vllm.bad_value", {"flag": "--limit-mm-per-prompt"}),
)


@pytest.mark.parametrize("seed", range(6))
def test_stepping_down_ends_and_never_repeats(seed: int) -> None:
    chance = random.Random(seed)
    machine, name, wishes = chance.choice(
        [
            (EXAMPLE, "4B", {}),
            (EXAMPLE, "2B", {"context": 8192, "kv_tokens": 2048}),
            (FOUR, "8B", {"sequences": 8}),
            (machine_with_card("RTX 3090"), "8B", {"image_tokens": 2560, "eager": True}),
        ]
    )
    tried = [first(name, machine, **wishes)]
    nothing = 0
    while nothing < 60:
        step = next_plan(chance.choice(FAILURES), tried, machine, wished(**wishes))
        if step is None:
            nothing += 1
            continue
        assert step.plan.settings not in [each.settings for each in tried]
        assert step.what_changed
        assert step.plan.command is not None
        tried.append(step.plan)
        assert len(tried) < 80
    for failure in FAILURES:  # nothing is left
        assert next_plan(failure, tried, machine, wished(**wishes)) is None or len(tried) < 80


def test_cpu_plans_step_down() -> None:
    machine, wishes = EXAMPLE, wished(context=4096, kv_tokens=1024)
    failed = find_plan(find_exact_models("mini"), replace(machine, gpus=()), wishes)
    assert "--gpu-memory-utilization" not in (failed.command or ())
    assert "--enforce-eager" in (failed.command or ())
    tiny = {"length": "4096", "needed": "0.01", "available": "0.0", "estimate": "896"}
    step = next_plan(Failure("vllm.kv_too_small", tiny), [failed], machine, wishes)
    assert step is not None
    assert step.plan.settings.context == 896
    assert vllm_args_of(step.plan.settings).on_cpu
    assert "--gpu-memory-utilization" not in (step.plan.command or ())


# --- from a log ---------------------------------------------------------------------------------------------

LOG = b"""(EngineCore pid=1) ERROR 11-22 10:00:00 [core.py:1] ValueError: To serve at least one request with \
the model's max seq len (8192), (0.88 GiB KV cache is needed, which is larger than the available KV cache \
memory (0.22 GiB). Based on the available memory, the estimated maximum model length is 1936. Try increasing
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
OUT_OF_MEMORY = b"""Traceback (most recent call last):
  File "/venv/vllm/v1/worker/gpu_model_runner.py", line 1, in profile_run
    self.model.embed_multimodal(**batched)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 25.00 MiB. GPU 0 has a total capacity of 7.9 GiB
"""


def test_doctor_passes_numbers_of_the_log() -> None:
    failure, diagnosis = find_failure(BytesIO(LOG))
    assert failure.id == "vllm.kv_too_small"
    assert failure.number("estimate") == 1936
    assert diagnosis is not None
    assert diagnosis.id == failure.id


def test_doctor_passes_the_stage_of_a_traceback() -> None:
    failure, _ = find_failure(BytesIO(OUT_OF_MEMORY))
    assert (failure.id, failure.stage) == ("torch.oom", "pictures")


@pytest.mark.parametrize("log", [b"", b"all is well\n", LOG.splitlines()[-1], b"\xff\x00" * 1000])
def test_log_without_a_cause_gives_no_failure(log: bytes) -> None:
    assert find_failure(BytesIO(log))[0] == Failure("")
