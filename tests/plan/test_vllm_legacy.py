"""Flags of vLLM as people's notes have them: understood, translated, or refused with what to use today."""

import shlex
from typing import Any

import pytest

from vlfit.errors import UsageError
from vlfit.machine.cards import card
from vlfit.plan.search import plan
from vlfit.plan.subjects import subjects
from vlfit.plan.vllm.args import VllmArgs
from vlfit.plan.vllm.flags import parse_version
from vlfit.plan.vllm.legacy import ParsedFlags, parse_flags, share_words
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

EXAMPLE = card("RTX 5060", desktop=951 * MIB, wsl2=True)


def read(line: str, version: str = "0.32", **environment: str) -> ParsedFlags:
    return parse_flags(shlex.split(line), parse_version(version), environment)


def test_the_owners_notes() -> None:
    """One line of the notes as they are: every word of it has an answer, and nothing is left for vLLM."""
    told = read(
        "--disable-v1-engine --gpu-memory-utilization 0.70 --max-model-len 4096 --enforce-eager "
        "--limit-mm-per-prompt image=1 --swap-space 4",
        VLLM_USE_V1="0",
        PATH="/bin",
    )
    assert told.words == ()
    assert told.share == 0.7
    assert told.wishes == {"context": 4096, "eager": True, "pictures": 1}
    assert told.unset == ("VLLM_USE_V1",)
    said = " ".join(told.said)
    for word in ("no version ever had it", "--context 4096", "JSON", "since 0.19", "VLLM_USE_V1=0"):
        assert word in said
    made = plan(subjects("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32", **told.wishes))
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
def test_what_the_plan_counts_with_becomes_a_wish(line: str, wishes: dict[str, Any]) -> None:
    told = read(line)
    assert told.wishes == wishes
    assert told.words == ()


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
def test_what_the_plan_does_not_know_goes_to_vllm_as_it_is(line: str) -> None:
    assert shlex.join(read(line, "0.22").words) == line


def test_a_flag_that_only_this_version_lacks_is_left_out_and_told() -> None:
    for version, kept in (("0.16", True), ("0.28", False)):
        told = read("--disable-log-requests", version)
        assert bool(told.words) is kept
        assert bool(told.said) is not kept


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--max-model-len", "has no value"),
        ("--max-model-len --enforce-eager", "has no value"),
        ("--max-model-len four", "is 'four'"),
        ("--max-num-seqs 1.5", "is '1.5'"),
        ("--kv-cache-memory-bytes 0", "^--kv-cache-memory-bytes is 0\n"),
        ("--max_num_seqs=0", "^--max-num-seqs is 0\n"),
        ("--max-num-seqs 999999999g", "is '999999999g'"),
        ("--gpu-memory-utilization 70", "is '70'"),
        ("--gpu-memory-utilization nan", "is 'nan'"),
        ("--gpu-memory-utilization", "is None"),
        ("--limit-mm-per-prompt image=0", "forbids pictures"),
        ("--limit-mm-per-prompt image", "image is ''"),
        ("--limit-mm-per-prompt {", "is '{'"),
        ("--mm-processor-kwargs {}", "has no size"),
        ("--mm-processor-kwargs 7", "is '7'"),
        ("--port 8000", "is vlfit's to say"),
        ("--model 4B", "is vlfit's to say"),
        ("4B", "'4B' is no flag"),
        ("--", "is no flag"),
        ("--enforce-eager yes", "'yes' is no flag"),
    ],
)
def test_what_makes_no_sense(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(line)


@pytest.mark.parametrize("asked", [0.3, 0.7, 0.79, 0.85, 0.95, 1.0])
def test_a_share_becomes_a_check(asked: float) -> None:
    """What it says is what vLLM would do: its start ends where less is free than the share asks for."""
    made = plan(subjects("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32"))
    own = float(next(flag.value for flag in made.flags if flag.flag == "--gpu-memory-utilization"))
    says = share_words(asked, made)
    free = made.gpu.free - 0.53 * GIB
    if asked * made.gpu.total > free:
        assert "would end the start" in says
    elif asked < own:
        assert "is less than" in says
    else:
        assert "holds this plan" in says
    assert f"{own:g}" in says
    assert share_words(None, made) == ""


def test_bytes_of_the_pool_are_tokens_of_the_model() -> None:
    made = plan(subjects("2B", "fp8"), EXAMPLE, Wishes(backend="vllm", vllm_version="0.32", kv_bytes=GIB))
    given = int(next(flag.value for flag in made.flags if flag.flag == "--kv-cache-memory-bytes"))
    assert GIB - 128 * 114_688 < given <= GIB


def test_a_kv_cache_in_bytes_takes_no_more_than_was_allowed() -> None:
    """In whole blocks of 128 tokens, rounded down; what holds no block is refused with what one takes."""
    told = read("--kv-cache-memory-bytes 3000000")
    made = plan(subjects("mini", None), EXAMPLE, Wishes(backend="vllm", context=512, **told.wishes))
    pool = next(line.bytes for line in made.ledger if line.line == "kv_cache")
    block = 128 * made.model.kv_bytes_per_token
    assert pool == 3_000_000 // block * block == 7 * block
    assert "at most 3000000 bytes" in told.said[0]
    with pytest.raises(UsageError, match=f"128 .* {block} bytes"):
        plan(subjects("mini", None), EXAMPLE, Wishes(backend="vllm", kv_bytes=block - 1))
