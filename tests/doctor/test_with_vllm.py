"""Every ``vllm serve`` command of the doctor, parsed by vLLM itself.

Needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names.
"""

import io
import re
import shlex

import pytest

from tests.doctor.real_lines import REAL_LINES
from tests.vllm_parser import PYTHON, refused_by_vllm
from vlfit.doctor.diagnose import diagnose_log
from vlfit.machine.cards import machine_with_card
from vlfit.units import MIB


def commands() -> list[list[str]]:
    """The words after ``vllm serve`` in each remedy, for real lines alone and in the log of a run."""
    machine = machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)
    run = (
        "INFO vLLM API server version 0.32.0\nnon-default args: {'model_tag': 'a/b', 'model': "
        "'Qwen/Qwen3-VL-4B-Instruct', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9, "
        "'enforce_eager': True, 'limit_mm_per_prompt': {'image': 2}, 'mm_processor_cache_gb': 0.0}\n"
    )
    found = set()
    for line in REAL_LINES:
        for text, place in ((line.text, None), (run + line.text, None), (run + line.text, machine)):
            for one in diagnose_log(io.BytesIO(text.encode()), place).diagnoses:
                command = one.command.partition(" 2>&1")[0]
                words = [word for word in shlex.split(command) if not re.match(r"[A-Z0-9_]+=", word)]
                if words[:2] == ["vllm", "serve"] and not words[2].startswith("--help"):
                    found.add(tuple(words[2:]))
    return [list(words) for words in sorted(found)]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 30
    assert any("--mm-processor-kwargs" in words for words in commands())


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_vllm_takes_every_command() -> None:
    assert refused_by_vllm(commands()) == {}
