"""Every flag that a plan for vLLM can emit, read by vLLM's own parser, and plans by its own configuration.

What is marked needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names. Its version is
the one that is planned for, so another Python there checks another version.
"""

import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.plan.vllm_plans import CHECKPOINTS, FAMILIES, sample, whole
from tests.vllm_parser import PYTHON, configured_by_vllm, options_of_vllm, refused_by_vllm, vllm_version
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import mini_folder
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm.args import as_vllm_settings, vllm_args_of
from vlfit.plan.vllm.flags import FLAG_VERSIONS, has_flag, parse_version

ALL_FLAGS = {
    "--max-model-len",
    "--kv-cache-memory-bytes",
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--enforce-eager",
    "--dtype",
    "--tensor-parallel-size",
    "--mm-encoder-tp-mode",
    "--data-parallel-size",
    "--mm-processor-kwargs",
    "--limit-mm-per-prompt",
    "--mm-processor-cache-gb",
    "--structured-outputs-config",
}


def flags_of(made: Plan) -> set[str]:
    return {flag.flag for flag in made.flags if flag.flag not in made.environment}


@pytest.fixture(scope="module")
def every() -> list[Plan]:
    """All plans for the installed vLLM; takes some minutes."""
    return list(whole(vllm_version()))


def test_plans_use_every_known_flag() -> None:
    """The parser below reads every flag that can be emitted, and each has a row in the table of versions."""
    seen = Counter(flag for made in sample() for flag in flags_of(made))
    assert set(seen) == ALL_FLAGS
    assert set(FLAG_VERSIONS) >= ALL_FLAGS


@pytest.mark.parametrize("version", FAMILIES)
def test_every_planned_version_has_every_flag(version: str) -> None:
    """So no flag that a plan relies on is silently left out."""
    number = parse_version(version).number
    assert [flag for flag in ALL_FLAGS if not has_flag(number, flag)] == []


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_vllm_parses_every_command(every: list[Plan]) -> None:
    """40 cards, 8 checkpoints, all wishes, one, two and four cards: every command line once."""
    commands = {made.command[3:]: list(made.command[2:]) for made in every if made.command}
    assert len(commands) > 500
    assert refused_by_vllm(list(commands.values())) == {}


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_flag_table_matches_the_installed_vllm() -> None:
    options, number = options_of_vllm(), parse_version(vllm_version()).number
    assert {flag: flag in options for flag in FLAG_VERSIONS} == {
        flag: has_flag(number, flag) for flag in FLAG_VERSIONS
    }


def config_of(name: str) -> dict[str, Any]:
    """A ``config.json`` with the sizes that the catalog has, all else as mini has it."""
    entry = catalog.find_entry(name)
    assert entry is not None
    facts: dict[str, Any] = json.loads((mini_folder() / "config.json").read_text())
    text = asdict(entry.config.text)
    sizes = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    ]
    facts["text_config"] |= {size: text[size] for size in sizes}
    facts["text_config"]["rope_scaling"]["mrope_section"] = list(entry.config.text.mrope_section)
    assert entry.config.vision is not None
    facts["vision_config"] |= asdict(entry.config.vision)
    facts["tie_word_embeddings"] = entry.config.tie_word_embeddings
    if entry.weights == "fp8":
        facts["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    return facts


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_vllm_config_matches_the_plan(every: list[Plan], tmp_path: Path) -> None:
    """vLLM's own configuration for some thirty plans, without weights or a GPU."""
    seen, plans = set(), []
    for made in every:
        told = vllm_args_of(made.settings)
        kind = (made.model.name, told.tensor, told.data > 1, made.settings.graphs, made.settings.kv_dtype)
        if made.model.name in CHECKPOINTS[:6] and kind not in seen and told.data == 1:
            seen.add(kind)
            plans.append(made)
    chosen = plans[:: max(len(plans) // 30, 1)][:30]
    assert len(chosen) >= 20
    for name in CHECKPOINTS[:6]:
        folder = tmp_path / name
        shutil.copytree(mini_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        (folder / "config.json").write_text(json.dumps(config_of(name)))
    commands = [[str(tmp_path / made.model.name), *(made.command or ())[3:]] for made in chosen]
    for made, found in zip(chosen, configured_by_vllm(commands), strict=True):
        settings, told = made.settings, vllm_args_of(made.settings)
        pool = next(line.bytes for line in made.ledger if line.line == "kv_cache")
        wanted = {
            "context": settings.context,
            "pool": pool,
            "sequences": settings.sequences,
            "chunk": settings.chunk,
            "eager": not settings.graphs,
            "tensor": told.tensor,
            "data": told.data,
            "pictures": costs.max_pictures_per_prompt(as_vllm_settings(settings)),
        }
        assert found == wanted, (made.model.name, made.command)
