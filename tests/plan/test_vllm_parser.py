"""Every flag that a plan for vLLM can emit, read by vLLM's own parser.

Needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names. Its version is the one that
is planned for, so another Python there checks another version.
"""

from dataclasses import replace
from itertools import product

import pytest

from tests.vllm_parser import PYTHON, refused_by_vllm, vllm_version
from vlfit.errors import UsageError
from vlfit.machine.cards import card
from vlfit.machine.model import Machine
from vlfit.plan.ledger import VLLM
from vlfit.plan.search import Plan, Wishes, plan
from vlfit.plan.subjects import subjects
from vlfit.units import MIB

# What is known of its flags changed between these; a plan for each differs in flags, variables or remarks.
FAMILIES = ("0.11", "0.12", "0.14.1", "0.19.1", "0.24", "0.25.1", "0.30", "0.31", "0.33")
MODELS = ("mini", "2B", "Qwen/Qwen3-VL-4B-Instruct-FP8", "8B", "Qwen/Qwen2.5-3B-Instruct")


def machines() -> list[Machine]:
    example, old = card("RTX 5060", desktop=951 * MIB, wsl2=True), card("RTX 2080 Ti")
    two = replace(card("RTX 3090"), gpus=(example.gpus[0], replace(card("RTX 3090").gpus[0], index=1)))
    return [example, old, two]


def plans(version: str) -> list[Plan]:
    """Plans that fit, with all flags that there are."""
    made = []
    for name, machine, tight in product(MODELS, machines(), (False, True)):
        wishes = Wishes(backend=VLLM, vllm_version=version, sequences=1 if tight else None)
        try:
            planned = plan(subjects(name), machine, wishes)
        except UsageError:  # no kernels for this format on this card, in some versions
            continue
        if planned.fits:
            made.append(planned)
    return made


@pytest.mark.parametrize("version", FAMILIES)
def test_plans_for_each_family_have_every_flag(version: str) -> None:
    """What the parser reads below is all that can be emitted: these flags and no others."""
    seen = {flag.flag for made in plans(version) for flag in made.flags}
    variables = {name for made in plans(version) for name in made.environment}
    assert seen - variables == {
        "--max-model-len",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--enforce-eager",
        "--dtype",
        "--mm-processor-kwargs",
        "--limit-mm-per-prompt",
        "--mm-processor-cache-gb",
    }
    assert {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"} <= variables


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_vllm_takes_every_command() -> None:
    version = vllm_version()
    commands = [list(made.command[2:]) for made in plans(version) if made.command is not None]
    assert len(commands) > 10
    assert refused_by_vllm(commands) == {}
