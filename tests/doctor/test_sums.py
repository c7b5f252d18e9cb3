"""Numbers of remedies: what is advised fits, and is not much less than would fit."""

import json
import re
from dataclasses import replace
from io import BytesIO

import pytest

from tests.doctor.helpers import WORKED_EXAMPLE, diagnoses, flags, only_diagnosis, vllm_start_log
from vlfit.doctor.diagnose import diagnose_log
from vlfit.doctor.remedies import (
    CUDA_CONTEXT_GIB,
    VLLM_GROWTH_GIB,
    fp8_model_name,
    kv_cache_gib,
    qwen3_vl_memory,
)
from vlfit.machine.cards import machine_with_card
from vlfit.plan.model_lookup import find_exact_models, find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.wishes import Wishes
from vlfit.units import MIB


@pytest.mark.parametrize(
    ("free", "total", "share", "wanted"),
    [(3.22, 4.0, 0.9, 3.6), (6.93, 7.96, 0.92, 7.32), (31.44, 47.38, 0.95, 45.01)],
)
def test_the_advised_utilization_is_free(free: float, total: float, share: float, wanted: float) -> None:
    found = only_diagnosis(
        f"ValueError: Free memory on device ({free}/{total} GiB) on startup is less than desired GPU memory "
        f"utilization ({share}, {wanted} GiB). Decrease GPU memory utilization"
    )
    assert f"{free:g} GiB" in found.cause
    assert f"{wanted:g} GiB" in found.cause
    advised = float(flags(found.command)["gpu-memory-utilization"])
    assert advised * total + VLLM_GROWTH_GIB <= free
    assert (advised + 0.01) * total + VLLM_GROWTH_GIB > free  # and no less than is free


def test_no_utilization_is_advised_if_nothing_is_free() -> None:
    found = only_diagnosis(
        "ValueError: Free memory on device cuda:0 (0.6/8.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 7.36 GiB)."
    )
    assert found.command == "nvidia-smi"


@pytest.mark.parametrize(
    ("length", "needed", "available", "estimate"),
    [(131072, 16.0, 0.71, 5632), (1048576, 24.0, 9.97, None), (32768, 4.5, 1.0, None)],
)
def test_the_advised_context_fits(length: int, needed: float, available: float, estimate: int | None) -> None:
    known = (
        f" Based on the available memory, the estimated maximum model length is {estimate}."
        if estimate
        else ""
    )
    found = only_diagnosis(
        f"ValueError: To serve at least one request with the models's max seq len ({length}), ({needed:.2f} "
        f"GiB KV cache is needed, which is larger than the available KV cache memory ({available:.2f} "
        f"GiB).{known} Try increasing"
    )
    advised = int(flags(found.command)["max-model-len"])
    assert advised % 16 == 0
    assert advised <= (estimate or length)
    assert advised * needed / length <= available
    assert advised * needed / length > 0.95 * available  # and not much less than would fit


def test_4b_in_fp8_fits_with_smaller_pictures() -> None:
    """Measured: -0.30 GiB with the defaults, 1.69 GiB with pictures capped and two sequences."""
    found = only_diagnosis(
        vllm_start_log("Qwen/Qwen3-VL-4B-Instruct-FP8", 4.85, -0.30, gpu_memory_utilization=0.9)
    )
    assert found.id == "vllm.kv_negative"
    assert "-0.30 GiB" in found.cause or "-0.3 GiB" in found.cause
    assert "4.85 GiB" in found.cause
    set_to = flags(found.command)
    assert set_to["model"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    assert json.loads(set_to["limit-mm-per-prompt"]) == {"image": 1, "video": 0}
    assert json.loads(set_to["mm-processor-kwargs"])["size"]["longest_edge"] == 1024 * 1024
    assert set_to["gpu-memory-utilization"] == "0.9"  # what the user chose stays
    freed = sum(float(part) for part in re.findall(r"\(([\d.]+) GiB\)", found.remedy))
    assert freed >= 0.30 + kv_cache_gib(qwen3_vl_memory("4B"), 4096)
    # No more than the measured difference, so that the estimate holds.
    assert freed <= 1.69 + 0.30


def test_4b_in_bf16_gets_fp8() -> None:
    """Measured: -3.99 GiB with the defaults; FP8 of the same model starts."""
    found = only_diagnosis(
        vllm_start_log("Qwen/Qwen3-VL-4B-Instruct", 8.60, -3.99, gpu_memory_utilization=0.9)
    )
    assert flags(found.command)["model"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"


def test_no_flag_makes_8b_in_4_bits_fit() -> None:
    """Measured: -0.73 GiB with pictures capped and two sequences already."""
    capped = {"mm_processor_kwargs": {"size": {"longest_edge": 1048576}}, "max_num_seqs": 2}
    found = only_diagnosis(vllm_start_log("me/Qwen3-VL-8B-Instruct-AWQ", 7.20, -0.73, **capped))
    assert found.command == "vlfit plan"
    # If the machine is known, the planner says what fits it.
    planned = only_diagnosis(
        vllm_start_log("me/Qwen3-VL-8B-Instruct-AWQ", 7.20, -3.5, **capped), WORKED_EXAMPLE
    )
    named = find_models("8B")
    best = find_plan(named.exact, WORKED_EXAMPLE, Wishes(), smaller_variants=named.smaller_variants)
    assert best.fits
    assert best.model.name in planned.remedy
    assert f"context {best.settings.context}" in planned.remedy
    small = replace(
        WORKED_EXAMPLE, gpus=(replace(WORKED_EXAMPLE.gpus[0], total=10**9, free=10**9, desktop=0),)
    )
    assert (
        only_diagnosis(vllm_start_log("Qwen/Qwen3-VL-2B-Instruct-FP8", 2.6, -9), small).command
        == "vlfit plan"
    )


@pytest.mark.parametrize(
    ("size", "bf16", "fp8", "kv_per_token"),
    [("2B", 3.96, 2.65, 114_688), ("4B", 8.27, 4.88, 147_456), ("8B", 16.33, 9.86, 147_456)],
)
def test_sizes_of_qwen3_vl(size: str, bf16: float, fp8: float, kv_per_token: int) -> None:
    """GiB counted on the meta device; KV = layers x 2 x 8 heads x 128 x 2 bytes."""
    sizes = qwen3_vl_memory(size)
    assert (round(sizes.bf16_gib, 2), round(sizes.fp8_gib, 2)) == (bf16, fp8)
    assert sizes.kv_bytes_per_token == kv_per_token
    names = {model.weights: model.name for model in find_exact_models(size)}
    assert fp8_model_name(f"Qwen/Qwen3-VL-{size}-Instruct") == names["fp8"]


def test_a_known_machine_allows_a_larger_utilization() -> None:
    capped = {"mm_processor_kwargs": {"size": {"longest_edge": 1048576}}, "max_num_seqs": 2}
    text = vllm_start_log("me/Qwen3-VL-4B-Instruct-AWQ", 3.62, -0.2, gpu_memory_utilization=0.5, **capped)
    found = only_diagnosis(text, WORKED_EXAMPLE)
    gpu = WORKED_EXAMPLE.gpus[0]
    share = float(flags(found.command)["gpu-memory-utilization"])
    assert share > 0.5
    assert share * gpu.total <= gpu.free
    # Without the machine nothing is left to change.
    assert only_diagnosis(text).command == "vlfit plan"


def test_free_memory_of_an_earlier_run_counts() -> None:
    """Two runs in one log: the first has the free memory, so the second can use more."""
    first = (
        "ValueError: Free memory on device cuda:0 (6.94/7.96 GiB) on startup is less than desired GPU memory "
        "utilization (0.95, 7.56 GiB).\n"
    )
    second = vllm_start_log("Qwen/Qwen3-VL-4B-Instruct-FP8", 4.85, -1.93, gpu_memory_utilization=0.7)
    alone = only_diagnosis(second)
    assert alone.command == "vlfit plan"
    assert "--gpu NAME" in alone.remedy
    both = diagnoses(first + second)
    assert [one.id for one in both] == ["vllm.kv_negative", "vllm.free_lt_util"]
    share = float(flags(both[0].command)["gpu-memory-utilization"])
    assert share > 0.7
    assert share * 7.96 + VLLM_GROWTH_GIB <= 6.94


def test_a_utilization_above_what_is_free_is_lowered() -> None:
    """0.80 starts on the worked example, but leaves nothing for its growth."""
    text = vllm_start_log("Qwen/Qwen3-VL-4B-Instruct", 8.60, -3.79, gpu_memory_utilization=0.8)
    set_to = flags(only_diagnosis(text, WORKED_EXAMPLE).command)
    gpu = WORKED_EXAMPLE.gpus[0]
    assert set_to["model"].endswith("-FP8")
    assert float(set_to["gpu-memory-utilization"]) * gpu.total + CUDA_CONTEXT_GIB * 2**30 <= gpu.free
    assert "7.96 GiB" in only_diagnosis(text, WORKED_EXAMPLE).remedy  # of the plan


def test_the_command_for_a_known_machine_is_the_planners() -> None:
    """Every flag of the plan, for the version in the log; other flags of the log stay."""
    text = vllm_start_log("Qwen/Qwen3-VL-4B-Instruct", 8.60, -3.79, port=8123, gpu_memory_utilization=0.95)
    found = only_diagnosis(text.replace("version 0.22.0", "version 0.25.1"), WORKED_EXAMPLE)
    name = "Qwen/Qwen3-VL-4B-Instruct-FP8"
    made = find_plan(
        find_exact_models(name), WORKED_EXAMPLE, Wishes(context=4096, backend="vllm", vllm_version="0.25.1")
    )
    assert made.fits
    set_to = flags(found.command)
    assert set_to.pop("model") == name
    assert set_to.pop("port") == "8123"
    wanted = {flag.flag.removeprefix("--"): flag.value or True for flag in made.flags}
    assert wanted.pop("VLLM_WSL2_ENABLE_PIN_MEMORY") == "1"
    assert set_to == wanted
    assert found.command.startswith("VLLM_WSL2_ENABLE_PIN_MEMORY=1 vllm serve ")


def test_no_flags_are_proposed_if_the_planner_fits_nothing() -> None:
    text = vllm_start_log("Qwen/Qwen3-VL-8B-Instruct-FP8", 9.86, -0.2)
    found = only_diagnosis(text, WORKED_EXAMPLE)
    assert "vllm serve" not in found.command
    # With tensor parallelism the planner is not asked, and the log's own numbers decide.
    two = vllm_start_log("Qwen/Qwen3-VL-8B-Instruct-FP8", 4.9, -0.2, tensor_parallel_size=2)
    assert only_diagnosis(two, WORKED_EXAMPLE).remedy != found.remedy


def test_a_context_too_short_for_a_picture_is_not_advised() -> None:
    found = only_diagnosis(
        "config: model='Qwen/Qwen3-VL-4B-Instruct-FP8', max_seq_len=262144\n"
        "ValueError: To serve at least one request with the model's max seq len (262144), (36.00 GiB KV "
        "cache is needed, which is larger than the available KV cache memory (0.10 GiB). Based on the "
        "available memory, the estimated maximum model length is 720."
    )
    set_to = flags(found.command)
    assert int(set_to["max-model-len"]) == 4096
    assert "mm-processor-kwargs" in set_to


def test_a_utilization_that_is_not_free_gets_the_planners_command() -> None:
    """The most common first error: a lower utilization alone would lead to the next one."""
    log = (
        "INFO vLLM API server version 0.25.1\nnon-default args: {'model': 'Qwen/Qwen3-VL-4B-Instruct-FP8'}\n"
        "ValueError: Free memory on device cuda:0 (6.9/7.96 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 7.32 GiB). Decrease GPU memory utilization."
    )
    place = machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)
    [found] = diagnose_log(BytesIO(log.encode()), place).diagnoses
    assert found.id == "vllm.free_lt_util"
    assert "--max-model-len" in found.command
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY=1" in found.command
    [without] = diagnose_log(BytesIO(log.encode()), None).diagnoses
    assert "0.8" in without.command
