"""Every rule against real output of programs."""

import hashlib
import re
from functools import cache
from pathlib import Path

import pytest

from tests.doctor.helpers import WORKED_EXAMPLE, diagnoses, flags, only_diagnosis, traceback, vllm_start_log
from tests.doctor.real_lines import REAL_LINES, RealLine
from vlfit.doctor.rules import RULES

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "doctor.md"
IDS = [rule.id for rule in RULES]


# --- each rule ---------------------------------------------------------------------------------------------


def test_rule_ids_are_unique() -> None:
    assert len(set(IDS)) == len(IDS)
    assert {name for rule in RULES for name in rule.hides} <= set(IDS)


def test_every_rule_has_a_real_line() -> None:
    assert set(IDS) == {line.rule for line in REAL_LINES}


@pytest.mark.parametrize("line", REAL_LINES, ids=str)
def test_a_real_line_has_its_diagnosis(line: RealLine) -> None:
    found = only_diagnosis(line.text)
    assert found.id == line.rule
    # Templates are filled, and the evidence is in the log.
    for text in (found.cause, found.remedy, found.command):
        assert not re.search(r"\{\w+\}|None|\(\)|  ", text), text
    assert found.cause.endswith(".")
    assert found.remedy.endswith(".")
    assert found.command
    for shown in found.evidence.split("\n"):
        assert shown.removesuffix("...")[:100] in line.text


@cache
def found_without(rule: str) -> list[str]:
    """The rules of all lines but those of ``rule``."""
    return [one.id for one in diagnoses("\n".join(each.text for each in REAL_LINES if each.rule != rule))]


@pytest.mark.parametrize("line", REAL_LINES, ids=str)
def test_a_rule_matches_only_its_own_lines(line: RealLine) -> None:
    overlapping = {"cuda.oom", "torch.oom", "cuda.graph_oom", "ggml.buffer"}
    overlapping |= {"kernel.killed", "kernel.oom_kill"}
    assert line.rule in overlapping or line.rule not in found_without(line.rule)


@pytest.mark.parametrize("rule", IDS)
def test_the_document_has_every_rule(rule: str) -> None:
    assert f"`{rule}`" in DOCUMENT.read_text("utf-8")


def test_the_document_has_no_other_rule() -> None:
    named = re.findall(r"^\| `([\w.]+)` \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    rules = [name for name in named if name in IDS]
    assert sorted(rules) == sorted(IDS)


# --- odd and unknown values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "non-default args: {'model': 'Qwen/Qwen3-VL-4B-Instruct', 'max_model_len': 'auto', 'max_num_seqs': "
        "'4k'}\nAvailable KV cache memory: -0.5 GiB",
        "non-default args: {'model': 'Qwen/Qwen3-VL-4B-Instruct', 'max_model_len': -1, 'max_num_seqs': None}"
        "\nAvailable KV cache memory: -0.5 GiB",
        "Free memory on device (0/0 GiB) on startup is less than desired GPU memory utilization (0.9, 0 GiB)",
        "To serve at least one request with the model's max seq len (2048), (0.3 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (-1.00 GiB).",
        "CUDA out of memory occurred when warming up sampler with 0 dummy requests",
        "vllm serve a/b --port x\naddress already in use",
        "vllm serve a/b --max-num-batched-tokens auto\nChunked MM input disabled but max_tokens_per_mm_item "
        "(16384)",
        "The quantization method x is not supported for the current GPU. Minimum capability: 9. Current "
        "capability: 0.",
        "RTX with CUDA capability sm_75 is not compatible with the current PyTorch installation",
        "driver on your system is too old (found version 11040)",
        "NVRM: Xid (PCI:0000:01:00): 999, what is this",
    ],
)
def test_odd_numbers(text: str) -> None:
    found = only_diagnosis(text, WORKED_EXAMPLE)
    assert found.command
    assert "the this" not in found.cause


def test_unknown_sizes_and_models() -> None:
    no_number = only_diagnosis(
        "ValueError: No available memory for the cache blocks.\nconfig: model='Qwen/Qwen3-VL-2B-Instruct', x"
    )
    assert "Together" not in no_number.remedy
    assert flags(no_number.command)["model"] == "Qwen/Qwen3-VL-2B-Instruct"
    other_model = only_diagnosis(vllm_start_log("Qwen/Qwen2.5-7B-Instruct", 14.2, -2.0))
    assert flags(other_model.command)["model"] == "Qwen/Qwen2.5-7B-Instruct"


# --- stages of an out-of-memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "stage", "flag"),
    [
        (("profile_run", "embed_multimodal"), "pictures", "mm-processor-kwargs"),
        (("profile_run", "_dummy_run"), "pass", "max-num-batched-tokens"),
        (("compile_or_warm_up_model", "capture_model", "_dummy_run"), "graphs", "enforce-eager"),
        (("execute_model", "forward"), "requests", "mm-processor-kwargs"),
    ],
)
def test_the_stage_decides_the_remedy(functions: tuple[str, ...], stage: str, flag: str) -> None:
    found = only_diagnosis(traceback("vllm/v1/worker/gpu_model_runner.py", *functions))
    assert found.values["stage"] == stage
    assert "1.25 GiB" in found.cause
    assert "0.41 GiB" in found.cause
    assert "17179869184" not in found.cause  # a known wrong value under WSL2
    assert flag in flags(found.command)


def test_weights_that_do_not_fit_lead_to_fp8() -> None:
    text = "vllm serve Qwen/Qwen3-VL-8B-Instruct --max-model-len 4096\n"
    found = only_diagnosis(
        text + traceback("vllm/model_executor/models/qwen3.py", "load_model", "create_weights")
    )
    assert flags(found.command) == {"model": "Qwen/Qwen3-VL-8B-Instruct-FP8", "max-model-len": "4096"}


def test_out_of_memory_in_transformers() -> None:
    found = only_diagnosis(traceback("transformers/modeling_utils.py", "from_pretrained"))
    assert "transformers" in found.cause
    assert found.command == "vlfit plan"


# --- the command that failed -------------------------------------------------------------------------------


def test_an_unknown_flag_is_removed_from_the_command() -> None:
    found = only_diagnosis(
        "$ vllm serve Qwen/Qwen3-VL-2B-Instruct --disable-v1-engine \\\n    --max-model-len=2048 "
        "--swap-space 4\n"
        "vllm: error: unrecognized arguments: --disable-v1-engine --swap-space 4\n"
    )
    assert all(flag in found.cause for flag in ("--disable-v1-engine", "--swap-space"))
    assert found.command == "vllm serve Qwen/Qwen3-VL-2B-Instruct --max-model-len 2048"


def test_uva_depends_on_the_version() -> None:
    line = "RuntimeError: UVA is not available\n"
    new = only_diagnosis("vLLM API server version 0.25.1\nvllm serve a/b --port 8001\n" + line)
    assert new.command == "VLLM_WSL2_ENABLE_PIN_MEMORY=1 vllm serve a/b --port 8001"
    old = only_diagnosis("vLLM API server version 0.22.0\nvllm serve a/b --cpu-offload-gb 2\n" + line)
    assert old.command == "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve a/b"


def test_a_library_of_wsl_off_the_search_path() -> None:
    line = "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
    assert "/usr/lib/wsl/lib" in only_diagnosis(line, WORKED_EXAMPLE).command
    assert only_diagnosis(line).command == "nvidia-smi"


def test_without_peer_access_cards_communicate_through_ram() -> None:
    run = "vllm serve a/b --tensor-parallel-size 2\n"
    refused = "Cuda failure 217 'peer access is not supported between these two devices'"
    by_cards = only_diagnosis(f"{run}transport/p2p.cc:238 NCCL WARN {refused}")
    assert by_cards.command.startswith("NCCL_P2P_DISABLE=1 vllm serve a/b --tensor-parallel-size 2")
    assert "--disable-custom-all-reduce" in by_cards.command
    by_ram = only_diagnosis(f"{run}transport/shm.cc:590 NCCL WARN {refused}")
    assert by_ram.command == "NCCL_CUMEM_HOST_ENABLE=0 vllm serve a/b --tensor-parallel-size 2"
    waited = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, Timeout(ms)=600000)"
    assert "600 s" in only_diagnosis(waited).cause
    assert "IOMMU" in only_diagnosis(waited).remedy
    assert "WSL2" in only_diagnosis(waited, WORKED_EXAMPLE).remedy


def test_tensor_parallel_size_is_limited_by_gpus_and_heads() -> None:
    run = "vllm serve a/b --tensor-parallel-size 3\n"
    heads = "Total number of attention heads (40) must be divisible by tensor parallel size (3)."
    assert flags(only_diagnosis(run + heads).command)["tensor-parallel-size"] == "2"
    few = "World size (3) is larger than the number of available GPUs (1) in this node."
    assert flags(only_diagnosis(run + few).command)["tensor-parallel-size"] == "1"


def test_llama_cpp_without_memory_for_the_picture_encoder() -> None:
    encoder = only_diagnosis(
        "main: loading model '/models/Qwen3-VL-4B-Q4_K_M.gguf'\n"
        "clip_ctx: CLIP using CUDA0 backend\nload_hparams: projector: qwen3vl_merger\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4521.02 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
    )
    assert "mmproj" in encoder.cause
    assert "4,521 MiB" in encoder.cause
    assert "--image-max-tokens" in encoder.command
    assert "/models/Qwen3-VL-4B-Q4_K_M.gguf" in encoder.command


# --- damaged downloads -------------------------------------------------------------------------------------


def test_a_damaged_download_of_ollama() -> None:
    want, empty = "c5" * 32, hashlib.sha256().hexdigest()
    said = f"digest mismatch, file must be downloaded again: want sha256:{want}, got sha256:"
    log = f"$ ollama pull qwen3-vl:4b\npulling manifest\nverifying sha256 digest\nError: {said}"
    found = only_diagnosis(log + "ab" * 32)
    assert (found.id, found.command) == ("ollama.digest", "ollama pull qwen3-vl:4b")
    assert want[:12] in found.cause
    assert "abababababab" in found.cause
    assert len(only_diagnosis(log + empty).cause) > len(found.cause)  # an empty file is called so
    streamed = only_diagnosis('{"error":"digest mismatch, file must be downloaded again"}')
    assert streamed.id == "ollama.digest"


def test_ollama_says_how_much_of_a_file_is_there() -> None:
    found = only_diagnosis(
        'Error: tensor "blk.3.ffn_up.weight" offset+size (2000160) exceeds file size (1184)'
    )
    assert (found.id, found.values["tensor2"]) == ("gguf.truncated", "blk.3.ffn_up.weight")
    assert "2,000,160" in found.cause
    assert "1,184" in found.cause
