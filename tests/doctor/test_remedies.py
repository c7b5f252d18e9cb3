"""Remedies work: builds that suit the card, commands that run, plans that fit."""

import re
import shlex
from dataclasses import replace
from itertools import product

import pytest

from tests.doctor.helpers import OOM, WORKED_EXAMPLE, flags, only_diagnosis, traceback, vllm_start_log
from vlfit.checkpoint.source import resolve_name
from vlfit.doctor.checks import (
    TORCH_WHEELS,
    best_wheel_name,
    card_problem,
    check_torch,
    min_driver_cuda,
)
from vlfit.machine.model import Machine
from vlfit.machine.torch_build import TorchBuild, driver_is_too_old
from vlfit.plan.model_lookup import find_exact_models, find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.recommend import catalog_plans, commands_to_type, recommended
from vlfit.plan.wishes import Wishes

NO_CODE = (
    "NVIDIA GeForce RTX 5060 with CUDA capability sm_{sm} is not compatible with the current PyTorch "
    "installation.\n"
)
OLD_DRIVER = "RuntimeError: The NVIDIA driver on your system is too old (found version {number})\n"


def with_driver(cuda: str) -> Machine:
    return replace(WORKED_EXAMPLE, gpus=(replace(WORKED_EXAMPLE.gpus[0], cuda=cuda),))


# --- builds of PyTorch -------------------------------------------------------------------------------------

CAPABILITIES = [(5, 0), (6, 1), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_best_build_suits_card_and_driver(capability: tuple[int, int]) -> None:
    for driver in [(11, 8), (12, 2), (12, 6), (12, 9), (13, 0), (13, 2)]:
        name = best_wheel_name(capability, driver)
        suiting = [
            build.name
            for build in TORCH_WHEELS
            if not card_problem(build.cuda, capability)
            and not driver_is_too_old(build.cuda, driver)
            and capability <= max(build.newest, (9, 0))
        ]
        assert (name in suiting) if suiting else name == "", (driver, suiting)


def test_remedies_for_card_and_driver_agree() -> None:
    """The build advised for the card is also the one advised for its driver."""
    for sm, cuda in product(("61", "86", "120"), ("12.4", "12.9", "13.0")):
        machine = replace(
            WORKED_EXAMPLE,
            gpus=(
                replace(WORKED_EXAMPLE.gpus[0], cuda=cuda, compute_capability=(int(sm[:-1]), int(sm[-1]))),
            ),
        )
        first = only_diagnosis(NO_CODE.format(sm=sm), machine).command
        number = int(cuda.split(".")[0]) * 1000 + int(cuda.split(".")[1]) * 10
        assert only_diagnosis(OLD_DRIVER.format(number=number), machine).command == first, (sm, cuda)


def test_a_driver_for_cuda_12_9_gets_a_build_for_12_8() -> None:
    assert only_diagnosis(NO_CODE.format(sm=120), with_driver("12.9")).command.endswith("cu128")
    assert only_diagnosis(NO_CODE.format(sm=120), with_driver("13.0")).command.endswith("cu130")
    # From nvidia-smi in the log; if the driver is unknown, the build that supports the oldest drivers.
    assert only_diagnosis(
        "| NVIDIA-SMI 580.95  CUDA Version: 13.0 |\n" + NO_CODE.format(sm=120)
    ).command.endswith("cu130")
    assert only_diagnosis(NO_CODE.format(sm=120)).command.endswith("cu128")


def test_the_driver_is_to_be_updated_if_no_build_suits_it() -> None:
    found = only_diagnosis(NO_CODE.format(sm=120), with_driver("11.8"))
    assert "12.8" in found.remedy
    assert "pip" not in found.command
    assert min_driver_cuda((6, 1)) == "12.6"
    old = replace(WORKED_EXAMPLE.gpus[0], cuda="11.8")
    check = check_torch(TorchBuild("2.9.0", (12, 8)), (old,))
    assert "pip" not in check.fix
    assert "pip" not in check_torch(None, (old,)).fix


def test_ptxas_is_updated_with_pytorch() -> None:
    line = "ptxas fatal   : Value 'sm_{}' is not defined for option 'gpu-name'\n"
    assert only_diagnosis(line.format("120a"), with_driver("12.9")).command.endswith("cu128")
    assert "TRITON_PTXAS_PATH" in only_diagnosis(line.format("121a")).command


def test_headers_for_the_python_in_use() -> None:
    text = "main.c:5:10: fatal error: Python.h: No such file or directory\n"
    assert only_diagnosis(text).command == "sudo apt install build-essential python3-dev"
    named = text + "Command '['/usr/bin/gcc', 'main.c', '-I/usr/include/python3.12']' returned non-zero\n"
    assert only_diagnosis(named).command == "sudo apt install build-essential python3.12-dev"


# --- commands that run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        traceback("transformers/modeling_utils.py", "from_pretrained"),
        "vllm serve Qwen/Qwen3-VL-8B-Instruct-FP8\n" + traceback("vllm/v1/x.py", "load_model"),
        vllm_start_log("Qwen/Qwen3-VL-8B-Instruct-FP8", 9.86, -3.2),
        OOM,
    ],
)
def test_a_served_model_is_on_the_hub_or_converted_first(text: str) -> None:
    command = only_diagnosis(text, WORKED_EXAMPLE).command
    made: list[list[str]] = []
    for step in command.split(" && "):
        words = shlex.split(step)
        if words[:2] == ["vlfit", "convert"]:
            made.append([each.name for each in resolve_name(words[2])])
        else:
            (served,) = resolve_name(words[words.index("serve") + 1])
            assert served.entry is not None
            assert served.on_hub or served.entry.converted_from in made[-1], command
    assert "serve" in command


def test_without_a_model_in_the_log_it_is_what_the_plan_recommends() -> None:
    found = only_diagnosis(OOM, WORKED_EXAMPLE)
    best = recommended(catalog_plans(WORKED_EXAMPLE, Wishes()))
    assert best is not None
    assert [shlex.split(step) for step in found.command.split(" && ")] == commands_to_type(best, ready=True)


def test_of_a_model_in_the_log_it_is_what_the_plan_says_of_that_model() -> None:
    text = "vllm serve Qwen/Qwen3-VL-8B-Instruct-FP8\n" + traceback("vllm/v1/x.py", "load_model")
    found = only_diagnosis(text, WORKED_EXAMPLE)
    named = find_models("8B")
    best = find_plan(named.exact, WORKED_EXAMPLE, Wishes(), smaller_variants=named.smaller_variants)
    assert [shlex.split(step) for step in found.command.split(" && ")] == commands_to_type(best, ready=False)


# --- plans that fit ----------------------------------------------------------------------------------------

TOO_SHORT = (
    "$ vllm serve Qwen/Qwen3-VL-2B-Instruct --gpu-memory-utilization 0.8 --port 8123\n"
    "ValueError: To serve at least one request with the models's max seq len (262144), (28.00 GiB KV cache "
    "is needed, which is larger than the available KV cache memory (0.91 GiB). Based on the available "
    "memory, the estimated maximum model length is 8512."
)


def test_a_context_estimated_by_vllm_is_planned_for_the_machine() -> None:
    found = only_diagnosis(TOO_SHORT, WORKED_EXAMPLE)
    set_to = flags(found.command)
    context = int(set_to["max-model-len"])
    assert context <= 8512
    made = find_plan(
        find_exact_models(set_to["model"]), WORKED_EXAMPLE, Wishes(context=context, backend="vllm")
    )
    assert made.fits
    assert set_to["kv-cache-memory-bytes"] == next(
        flag.value for flag in made.flags if flag.flag == "--kv-cache-memory-bytes"
    )
    assert set_to["port"] == "8123"
    alone = only_diagnosis(TOO_SHORT)
    assert flags(alone.command)["max-model-len"] == "8512"
    assert "--gpu" in alone.remedy


LONGER = (
    "ValueError: User-specified max_model_len (500000) is greater than the derived max_model_len "
    "(max_position_embeddings=262144 or model_max_length=None in model's config.json)."
)


def test_the_models_own_context_may_not_fit() -> None:
    run = "$ vllm serve Qwen/Qwen3-VL-4B-Instruct-FP8 --max-model-len 500000\n"
    planned = flags(only_diagnosis(run + LONGER, WORKED_EXAMPLE).command)
    made = find_plan(
        find_exact_models(planned["model"]),
        WORKED_EXAMPLE,
        Wishes(context=int(planned["max-model-len"]), backend="vllm"),
    )
    assert made.fits
    assert int(planned["max-model-len"]) >= 4096
    unnamed = only_diagnosis(run + LONGER)
    assert flags(unnamed.command)["max-model-len"] == "262144"
    assert "36.0 GiB" in unnamed.remedy
    assert "--gpu" in unnamed.remedy
    # An unknown model, on a card too small for any Qwen3-VL with that context.
    assert flags(only_diagnosis(LONGER, WORKED_EXAMPLE).command)["max-model-len"] == "8192"


def test_weights_larger_than_the_card() -> None:
    run = "vllm serve Qwen/Qwen3-VL-4B-Instruct --max-model-len 8192\nModel loading took 8.59 GiB and 12 s\n"
    found = only_diagnosis(run + OOM, WORKED_EXAMPLE)
    assert "8.59 GiB" in found.cause
    assert flags(found.command)["model"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    unnamed = only_diagnosis(run + OOM)
    assert "8.59 GiB" in unnamed.cause
    assert flags(unnamed.command)["model"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    assert "4.88 GiB" not in only_diagnosis(run.replace("8.59", "4.88") + OOM).cause


def test_no_byte_is_free() -> None:
    assert "0 bytes" in only_diagnosis(OOM.replace("0.41 GiB", "0 bytes")).cause


# --- versions, the hub, faults -----------------------------------------------------------------------------


def test_vllm_is_older_than_the_model() -> None:
    line = "ValueError: Model architectures ['{}'] are not supported for now. Supported architectures: []"
    found = only_diagnosis(
        "vLLM API server version 0.10.2\n" + line.format("Qwen3VLForConditionalGeneration")
    )
    assert "0.10.2" in found.cause
    assert found.command == "pip install --upgrade 'vllm>=0.11'".replace("'", '"')
    assert only_diagnosis(line.format("NewForCausalLM")).command == "pip install --upgrade vllm"


def test_similar_names_for_a_model_that_the_hub_lacks() -> None:
    line = "Repository Not Found for url: https://huggingface.co/{}.\n"
    found = only_diagnosis(line.format("api/models/Qwen/Qwen3-VL-3B-Instruct"))
    assert "Qwen/Qwen3-VL-3B-Instruct" in found.cause
    assert "Qwen/Qwen3-VL-4B-Instruct" in found.cause
    other = only_diagnosis(line.format("someone/other/resolve/main/config.json"))
    assert "someone/other," in other.cause
    assert "Qwen" not in other.cause


def test_offline_is_not_unreachable() -> None:
    text = (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache "
        "and outgoing traffic has been disabled. To enable\nOSError: We couldn't connect to "
        "'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
    )
    assert only_diagnosis(text).id == "hub.offline"
    named = only_diagnosis("$ vllm serve Qwen/Qwen3-VL-4B-Instruct-FP8\n" + text)
    assert named.command.endswith("hf download Qwen/Qwen3-VL-4B-Instruct-FP8")
    assert "-u HF_HUB_OFFLINE" in named.command


def test_a_kernel_fault_under_vllm_is_reproduced_without_graphs() -> None:
    line = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    found = only_diagnosis("$ vllm serve Qwen/Qwen3-VL-4B-Instruct-FP8 --port 8001\n" + line)
    assert found.command.startswith("CUDA_LAUNCH_BLOCKING=1 vllm serve ")
    assert flags(found.command)["enforce-eager"] is True
    assert "vllm" not in only_diagnosis(line).command


@pytest.mark.parametrize(
    ("assertion", "is_index"), [("srcIndex < srcSelectDimSize", True), ("probability > 0", False)]
)
def test_a_device_side_assertion(assertion: str, is_index: bool) -> None:
    above = f"Indexing.cu:1308: thread: [32,0,0] Assertion `{assertion}` failed.\n"
    found = only_diagnosis(above + "CUDA error: device-side assert triggered")
    assert f"({assertion})" in found.cause
    assert ("vocabulary" in found.cause) is is_index
    assert not re.search(r"[`']", only_diagnosis("CUDA error: device-side assert triggered").cause)


def test_a_fixed_kv_cache_size_is_shown_in_bytes() -> None:
    """The message's two decimals of GiB are too coarse for a small one."""
    run = (
        "INFO [utils.py:299] non-default args: {'model_tag': 'a/b', 'model': 'a/b', 'max_model_len': 4096, "
        "'kv_cache_memory_bytes': 9437184}\n"
    )
    said = (
        "ValueError: To serve at least one request with the model's max seq len (4096), (0.01 GiB KV cache "
        "is needed, which is larger than the available KV cache memory (0.01 GiB). Based on the available "
        "memory, the estimated maximum model length is 2944.\n"
    )
    found = only_diagnosis(run + said)
    shown = ("12.5 MiB", "9.0 MiB", "--kv-cache-memory-bytes", "2944")
    assert [part for part in shown if part not in found.cause] == []
    assert flags(found.command)["max-model-len"] == "2944"
    unnamed = only_diagnosis(said.replace("(0.01 GiB)", "(0.0 GiB)"))
    assert "0.01 GiB" in unnamed.cause
