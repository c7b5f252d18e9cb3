"""Plans: the catalog on cards of 6 to 96 GB for each backend, and wishes, one line for each plan.

A line has the numbers that people look at, and the beginning of the sha256 of the whole plan's JSON, so that
nothing in it changes unseen. ``vlfit plan ... --json`` of the case shows what did.
"""

import hashlib
import json
import re
import shlex
from typing import Any

from tests.golden.conftest import Cards, Ended, Vlfit
from tests.golden.kept import check_rows

CARDS: tuple[tuple[str, ...], ...] = (
    ("RTX 3050 6GB",),
    ("RTX 2060 6GB", "--desktop", "300MiB"),  # Turing
    ("RTX 5060", "--desktop", "951MiB", "--wsl2"),
    ("RTX 4060", "--desktop", "600MiB"),
    ("RTX 3070",),
    ("RTX 3060 12GB", "--desktop", "1200MiB", "--wsl2"),
    ("RTX 4070", "--desktop", "500MiB"),
    ("Tesla T4",),  # Turing
    ("RTX 5060 Ti 16GB",),
    ("RTX A4500",),
    ("RTX 4090", "--desktop", "700MiB"),
    ("A100-PCIE-40GB",),
    ("H100 PCIe",),  # Hopper
    ("RTX PRO 6000 Blackwell Workstation Edition", "--desktop", "2GiB"),
)
FEW = (CARDS[2], CARDS[7], CARDS[10])
BACKENDS = ("native", "vllm --vllm-version 0.25.1", "transformers")
NAMED = (
    *("8B", "4B", "2B", "8B -w fp8", "4B -w bf16", "4B -w int4", "2B -w fp8"),
    *("Qwen/Qwen3-VL-8B-Thinking", "Qwen/Qwen3-VL-8B-Thinking-FP8", "Qwen3-VL-4B-Thinking-INT4"),
    *("Qwen3-VL-8B-Instruct-INT4-E8-V8", "Qwen3-VL-8B-Instruct-INT4", "Qwen3-VL-2B-Instruct-FP8", "mini"),
    *("Qwen/Qwen2.5-3B-Instruct", "Llama-2-7b-hf-INT4", "Phi-3-mini-4k-instruct -w fp8"),
    *("9B", "qwen3.5:4b", "0.8B -w bf16", "Qwen3.5-2B-INT4"),
)
WISHES = (
    "4B --context 4096",
    "4B --context 65536",
    "8B --context 2048 --image-tokens 256",
    "2B --image-tokens 4096",
    "2B --sequences 16",
    "4B -w int4 --sequences 1 --context 32768",
    "4B --kv-dtype fp8",
    "4B --kv-dtype fp8 --context 16384 --sequences 2",
    "8B -w int4 --kv-dtype fp8 --image-tokens 1024",
    "8B -w fp8 --offload auto",
    "8B -w bf16 --offload 4",
    "4B -w bf16 --offload 800MiB --context 4096",
    "Llama-2-7b-hf --offload auto",
    "Qwen/Qwen2.5-3B-Instruct --context 8192 --sequences 4",
    "Qwen/Qwen2.5-3B-Instruct --image-tokens 1024",
    "4B --what-if",
    "9B --context 65536 --kv-dtype fp8 --sequences 1",
    "9B -w fp8 --offload auto",
    "no-such-model",
)
VERSIONS = ("0.18", "0.22", "0.26", "0.31", "0.32.0")
SHARED = ("8B", "8B -w bf16 --tensor-parallel 2", "4B --data-parallel 2", "4B --tensor-parallel 4")


def row(plan: dict[str, Any]) -> str:
    settings, speed = plan["settings"], plan.get("speed")
    exact = json.dumps(plan, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    exact = re.sub(r'"/[^"]*/mini"', '"mini"', exact)  # where it lies is of this computer
    low, high = speed["decode_tokens_per_s_range"] if speed else ("-", "-")
    offload = f" in RAM {plan['offload']['ram']:,}" if "offload" in plan else ""
    fits = "fits" if plan["fits"] else "TOO BIG"
    return (
        f"{plan['model'].removeprefix('Qwen/')} {settings['weights']} {fits} "
        f"ctx {settings['context']} img {settings['image_tokens']} x{settings['sequences']} "
        f"kv {settings['kv_tokens']} {settings['kv_dtype']} bytes {plan['total']:,}{offload} "
        f"left {plan['headroom']:,} "
        f"{low}-{high}/s #{hashlib.sha256(exact.encode()).hexdigest()[:16]}"
    )


def rows(case: str, ended: Ended) -> dict[str, str]:
    """One for each plan that was printed, or what was said instead."""
    if ended.code not in (0, 3):
        return {case: f"exit {ended.code}: {' '.join(ended.err.split())[:150]}"}
    facts = json.loads(ended.out)
    plans = list(facts["plans"]) if "plans" in facts else [facts]
    plans += [each["plan"] for each in facts.get("what_if", [])]
    assert (ended.code == 0) == plans[0]["fits"]
    if len(plans) == 1:
        return {case: row(plans[0])}
    return {f"{case} | {number}": row(plan) for number, plan in enumerate(plans, 1)}


def planned(
    vlfit: Vlfit, card: Cards, words: str, options: tuple[str, ...], copies: int = 1
) -> dict[str, str]:
    file = card(*options, copies=copies)
    place = " ".join(options) if copies == 1 else f"{copies} x {' '.join(options)}"
    return rows(
        f"{place} | {words}".replace("--", ""),
        vlfit("plan", *shlex.split(words), "--machine", file, "--json"),
    )


def test_plans(vlfit: Vlfit, card: Cards) -> None:
    found: dict[str, str] = {}
    for options in CARDS:
        for backend in BACKENDS:
            found |= planned(vlfit, card, f"--backend {backend}", options)
    for options in FEW:
        for wish in (*NAMED, *WISHES):
            for backend in BACKENDS[:2]:
                found |= planned(vlfit, card, f"{wish} --backend {backend}", options)
    for wish in (*NAMED, *WISHES):
        found |= planned(vlfit, card, f"{wish} --backend transformers", FEW[2])
    for version in VERSIONS:
        found |= planned(vlfit, card, f"4B --backend vllm --vllm-version {version}", FEW[0])
    for wish in SHARED:
        for copies in (2, 4):
            words = f"{wish} --backend vllm --vllm-version 0.25.1"
            found |= planned(vlfit, card, words, ("RTX 3060 12GB",), copies)
    check_rows("plans.json", found)
