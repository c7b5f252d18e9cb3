"""vLLM flags from old guides: understood, translated, or refused with today's flag."""

import shlex
from typing import Any

import pytest

from tests.plan.example import EXAMPLE
from tests.wording import figures_in
from vlfit.errors import UsageError
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.vllm.args import VllmArgs
from vlfit.plan.vllm.flags import parse_version
from vlfit.plan.vllm.typed_flags import ParsedFlags, describe_utilization, parse_flags
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB


def read(line: str, version: str = "0.32", **environment: str) -> ParsedFlags:
    return parse_flags(shlex.split(line), parse_version(version), environment)


def test_flags_of_an_old_guide() -> None:
    """Every flag of a typical command line has an answer, and none goes to vLLM."""
    told = read(
        "--disable-v1-engine --gpu-memory-utilization 0.70 --max-model-len 4096 --enforce-eager "
        "--limit-mm-per-prompt image=1 --swap-space 4",
        VLLM_USE_V1="0",
        PATH="/bin",
    )
    assert told.args == ()
    assert told.utilization == 0.7
    assert told.wishes == {"context": 4096, "eager": True, "pictures": 1}
    assert told.unset == ("VLLM_USE_V1",)
    said = " ".join(told.notes)
    for word in ("--disable-v1-engine", "--context 4096", "JSON", "0.19", "VLLM_USE_V1=0"):
        assert word in said
    made = find_plan(
        find_exact_models("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32", **told.wishes)
    )
    assert made.settings.context == 4096
    assert not made.settings.graphs
    assert ("--limit-mm-per-prompt", '{"image": 1, "video": 0}') in {(f.flag, f.value) for f in made.flags}


@pytest.mark.parametrize(
    ("line", "wishes"),
    [
        ("--max-model-len=8k", {"context": 8000}),
        ("--max_model_len 8K", {"context": 8192}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max-num-seqs 4 --max-num-batched-tokens 1024", {"sequences": 4, "chunk": 1024}),
        ("--kv-cache-memory-bytes 1g", {"kv_bytes": 10**9}),
        ("-tp 2 --data-parallel-size 4", {"tensor_parallel": 2, "data_parallel": 4}),
        ("--tensor-parallel 2 --data-parallel=4", {"tensor_parallel": 2, "data_parallel": 4}),
        ("--kv-cache-dtype fp8_e4m3", {"kv_dtype": "fp8"}),
        ("--kv-cache-dtype auto", {}),
        ("--dtype half", {"vllm": VllmArgs(dtype="float16")}),
        ("--limit-mm-per-prompt.image 2 --limit-mm-per-prompt.video 0", {"pictures": 2}),
        ("""--limit-mm-per-prompt '{"image": {"count": 3, "width": 512}}'""", {"pictures": 3}),
        ("""--mm-processor-kwargs '{"max_pixels": 1003520}'""", {"image_tokens": 980}),
        ("--mm-processor-kwargs.size.longest_edge 1048576", {"image_tokens": 1024}),
    ],
)
def test_memory_flags_become_wishes(line: str, wishes: dict[str, Any]) -> None:
    told = read(line)
    assert told.wishes == wishes
    assert told.args == ()


@pytest.mark.parametrize(
    "line",
    [
        "--enable-prefix-caching",
        "--cudagraph-capture-sizes 1 2 4",
        "--cpu-offload-gb 2",
        "--quantization=fp8",
        "--kv-cache-dtype fp8_e5m2",
        "--chat-template ./my.jinja --seed 3",
        "--calculate-kv-scales --swap-space-of-my-own 3",
    ],
)
def test_other_flags_go_to_vllm(line: str) -> None:
    assert shlex.join(read(line, "0.22").args) == line


def test_flags_that_this_version_lacks_are_left_out() -> None:
    for version, kept in (("0.16", True), ("0.28", False)):
        told = read("--disable-log-requests", version)
        assert bool(told.args) is kept
        assert bool(told.notes) is not kept


@pytest.mark.parametrize(
    ("line", "param", "value"),
    [
        ("--max-model-len", "--max-model-len", ""),
        ("--max-model-len --enforce-eager", "--max-model-len", ""),
        ("--max-model-len four", "--max-model-len", "'four'"),
        ("--max-num-seqs 1.5", "--max-num-seqs", "'1.5'"),
        ("--kv-cache-memory-bytes 0", "--kv-cache-memory-bytes", "0"),
        ("--max_num_seqs=0", "--max-num-seqs", "0"),
        ("--max-num-seqs 999999999g", "--max-num-seqs", "'999999999g'"),
        ("--gpu-memory-utilization 70", "--gpu-memory-utilization", "'70'"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization", "'nan'"),
        ("--gpu-memory-utilization", "--gpu-memory-utilization", "None"),
        ("--limit-mm-per-prompt image=0", "--limit-mm-per-prompt", ""),
        ("--limit-mm-per-prompt image", "--limit-mm-per-prompt: image", "''"),
        ("--limit-mm-per-prompt {", "--limit-mm-per-prompt", "'{'"),
        ("--mm-processor-kwargs {}", "--mm-processor-kwargs", ""),
        ("--mm-processor-kwargs 7", "--mm-processor-kwargs", "'7'"),
        ("--port 8000", "--port", ""),
        ("--model 4B", "--model", ""),
        ("4B", "4B", "'4B'"),
        ("--", "--", "'--'"),
        ("--enforce-eager yes", "yes", "'yes'"),
    ],
)
def test_invalid_flags_are_refused_by_name(line: str, param: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert caught.value.param == param
    assert value in caught.value.message


@pytest.mark.parametrize("asked", [0.3, 0.7, 0.79, 0.85, 0.95, 1.0])
def test_utilization_is_described(asked: float) -> None:
    """The description matches vLLM, whose start ends if less than the share is free."""
    made = find_plan(find_exact_models("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32"))
    own = float(next(flag.value for flag in made.flags if flag.flag == "--gpu-memory-utilization"))
    says = describe_utilization(asked, made)
    free = made.gpu.free - 0.53 * GIB
    # Why it stays at ``own``: what is free, or what vLLM comes to hold; nothing more if it fits.
    known = (asked, own, asked * made.gpu.total / GIB, made.gpu.total / GIB)
    told = [each for each in figures_in(says) if not any(abs(each - other) < 0.005 for other in known)]
    if asked * made.gpu.total > free:
        assert told == [pytest.approx(free / GIB, abs=0.005)]
    else:
        assert len(told) == (asked < own)
    assert own in figures_in(says)
    assert describe_utilization(None, made) == ""


def test_kv_cache_bytes_become_tokens() -> None:
    made = find_plan(
        find_exact_models("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32", kv_bytes=GIB)
    )
    given = int(next(flag.value for flag in made.flags if flag.flag == "--kv-cache-memory-bytes"))
    assert GIB - 128 * 114_688 < given <= GIB


def test_kv_cache_bytes_are_rounded_down_to_blocks() -> None:
    """In whole blocks of 128 tokens, rounded down; less than a block is refused with its size."""
    told = read("--kv-cache-memory-bytes 3000000")
    made = find_plan(
        find_exact_models("mini", None), EXAMPLE, Wishes(backend="vllm", context=512, **told.wishes)
    )
    pool = next(line.bytes for line in made.ledger if line.line == "kv_cache")
    block = 128 * made.model.kv_bytes_per_token
    assert pool == 3_000_000 // block * block == 7 * block
    assert 3_000_000 in figures_in(told.notes[0])
    with pytest.raises(UsageError, match=f"128 .* {block} bytes"):
        find_plan(find_exact_models("mini", None), EXAMPLE, Wishes(backend="vllm", kv_bytes=block - 1))
