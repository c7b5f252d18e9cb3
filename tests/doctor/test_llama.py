"""llama.cpp's command in a log, rewritten, and the context that fits a described machine."""

import re
import shlex
from dataclasses import replace

import pytest

from tests.doctor.helpers import WORKED_EXAMPLE, only_diagnosis
from tests.doctor.real_lines import REAL_LINES
from vlfit.doctor.logs import LlamaCppRun
from vlfit.plan.model_lookup import find_exact_models
from vlfit.units import MIB

COMMAND = (
    "llama-server -m Qwen3VL-8B-Instruct-Q4_K_M.gguf --mmproj mmproj-F16.gguf -ngl 99 -c 32768 --port 9000"
)
# From real_lines.txt, after a line with the size of the model.
KV = "load_tensors:        CUDA0 model buffer size =  4455.34 MiB\n" + next(
    line.text for line in REAL_LINES if line.rule == "ggml.cuda_malloc" and "32768 cells" in line.text
)


def run(command: str) -> LlamaCppRun:
    parsed = LlamaCppRun()
    parsed.update(f"$ {command}\n")
    return parsed


@pytest.mark.parametrize(
    ("command", "changes", "again"),
    [
        (COMMAND, {"--ctx-size": "4096"}, COMMAND.replace("32768", "4096")),
        (COMMAND, {"--gpu-layers": None}, COMMAND.replace(" -ngl 99", "")),
        (COMMAND, {"--fit": "on"}, COMMAND + " --fit on"),
        (COMMAND, {"--no-mmproj-offload": ""}, COMMAND + " --no-mmproj-offload"),
        (
            "llama-server -m a.gguf -ngl -1 --jinja",
            {"--gpu-layers": "8"},
            "llama-server -m a.gguf -ngl 8 --jinja",
        ),
        ("llama-server --ctx-size=8192 --jinja", {"--ctx-size": "1"}, "llama-server --ctx-size 1 --jinja"),
        ("./bin/llama-server -m a.gguf 2>&1 | tee log", {}, "./bin/llama-server -m a.gguf"),
        (
            "llama-cli -hf org/name -p 'two words' \\\n  -c 9",
            {"--ctx-size": "8"},
            "llama-cli -hf org/name -p 'two words' -c 8",
        ),
    ],
)
def test_the_command_with_changed_flags(command: str, changes: dict[str, str | None], again: str) -> None:
    assert run(command).command_with(changes) == again


def test_a_log_without_a_command_names_the_file() -> None:
    assert LlamaCppRun(model_file="x.gguf").command_with({"--fit": "on"}) == "llama-server -m x.gguf --fit on"
    assert run("llama-server is slow").command == ()


def test_a_kv_cache_that_does_not_fit() -> None:
    found = only_diagnosis(f"$ {COMMAND}\n{KV}")
    assert found.id == "ggml.cuda_malloc"
    assert "32,768" in found.cause
    assert "144 KiB" in found.cause
    assert found.command == COMMAND.replace(" -ngl 99", "").replace("32768", "4096") + " --fit on"


def test_the_context_fits_a_described_machine() -> None:
    found = only_diagnosis(f"$ {COMMAND}\n{KV}", WORKED_EXAMPLE)
    words = shlex.split(found.command)
    context = int(words[words.index("-c") + 1])
    assert found.command == COMMAND.replace("32768", str(context))
    gpu, encoder = WORKED_EXAMPLE.gpus[0], find_exact_models("8B")[0].vision_bytes / MIB
    left = gpu.free / MIB - 4455.34 - encoder - 1024
    assert context % 256 == 0
    assert context * 144 / 1024 <= left < (context + 256) * 144 / 1024
    assert f"{4455:,}" in found.remedy
    assert f"{1024:,}" in found.remedy


def test_layers_go_to_ram_if_too_little_is_left() -> None:
    gpu = WORKED_EXAMPLE.gpus[0]
    small = replace(WORKED_EXAMPLE, gpus=(replace(gpu, free=5000 * MIB, desktop=gpu.total - 5000 * MIB),))
    found = only_diagnosis(f"$ {COMMAND}\n{KV}", small)
    assert f"{2048:,}" in found.remedy
    assert "--fit on" in found.command
    assert "-ngl" not in found.command


def test_an_unknown_encoder_is_not_counted() -> None:
    other = f"$ {COMMAND}\n{KV}".replace("Qwen3VL-8B", "Other-8B")
    alone = f"$ {COMMAND}\n{KV}".replace(" --mmproj mmproj-F16.gguf", "")
    counted = f"{WORKED_EXAMPLE.gpus[0].free / MIB - 4455.34 - 1024:,.0f} MiB"
    assert counted in only_diagnosis(other, WORKED_EXAMPLE).remedy
    assert counted in only_diagnosis(alone, WORKED_EXAMPLE).remedy
    assert "encoder" in only_diagnosis(other, WORKED_EXAMPLE).remedy
    assert "encoder" not in only_diagnosis(alone, WORKED_EXAMPLE).remedy


def test_the_encoders_command_keeps_its_files() -> None:
    found = only_diagnosis(
        f"$ {COMMAND}\nclip_model_loader: model name:   Qwen3VL\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 3012.50 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
    )
    assert found.command == COMMAND + " --image-max-tokens 1024 --no-mmproj-offload"
    assert "7,200 MiB" not in found.remedy
    assert "7,200 MiB" in only_diagnosis(found.evidence, WORKED_EXAMPLE).remedy


@pytest.mark.parametrize(
    ("above", "command"),
    [
        ("ggml_cuda_init: found 1 CUDA devices (Total VRAM: 8150 MiB):", "nvidia-smi"),
        (
            "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
            "vlfit doctor",
        ),
        ("load_backend: loaded CPU backend", "llama-server --list-devices"),
    ],
)
def test_why_llama_cpp_found_no_gpu(above: str, command: str) -> None:
    found = only_diagnosis(f"{above}\nwarning: no usable GPU found, --gpu-layers option will be ignored\n")
    assert (found.id, found.command) == ("llama.no_gpu", command)


def test_an_older_llama_cpp_in_ollama() -> None:
    line = "llama_model_load: error loading model architecture: unknown model architecture: 'qwen3vl'\n"
    assert only_diagnosis(line).command == "llama-server --version"
    assert (
        only_diagnosis(f'time=x source=server.go:400 msg="starting runner"\n{line}').command
        == "ollama pull qwen3-vl:4b"
    )
    assert not re.search("Qwen3-VL", only_diagnosis(line.replace("qwen3vl", "gemma9")).remedy)
