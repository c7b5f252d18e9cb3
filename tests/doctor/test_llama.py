"""llama.cpp's command as a log shows it, written again, and the context that fits a named machine."""

import re
import shlex
from dataclasses import replace

import pytest

from tests.doctor.asking import WORKED_EXAMPLE, only
from tests.doctor.real_lines import REAL_LINES
from vlfit.doctor.logs import Llama
from vlfit.plan.subjects import subjects
from vlfit.units import MIB

COMMAND = (
    "llama-server -m Qwen3VL-8B-Instruct-Q4_K_M.gguf --mmproj mmproj-F16.gguf -ngl 99 -c 32768 --port 9000"
)
# As in real_lines.txt, after the size of the model.
KV = "load_tensors:        CUDA0 model buffer size =  4455.34 MiB\n" + next(
    line.text for line in REAL_LINES if line.rule == "ggml.cuda_malloc" and "32768 cells" in line.text
)


def run(command: str) -> Llama:
    read = Llama()
    read.read(f"$ {command}\n")
    return read


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
def test_the_command_that_failed_with_a_few_flags_changed(
    command: str, changes: dict[str, str | None], again: str
) -> None:
    assert run(command).again(changes) == again


def test_a_log_without_a_command_names_the_file() -> None:
    assert Llama(file="x.gguf").again({"--fit": "on"}) == "llama-server -m x.gguf --fit on"
    assert run("llama-server is slow").command == ()


def test_the_kv_cache_is_the_cause_with_its_numbers() -> None:
    found = only(f"$ {COMMAND}\n{KV}")
    assert found.id == "ggml.cuda_malloc"
    assert "32,768 tokens x 144 KiB" in found.cause
    assert "unchecked" in found.remedy
    assert found.command == COMMAND.replace(" -ngl 99", "").replace("32768", "4096") + " --fit on"


def test_on_a_named_machine_the_context_fits_what_is_left() -> None:
    found = only(f"$ {COMMAND}\n{KV}", WORKED_EXAMPLE)
    words = shlex.split(found.command)
    context = int(words[words.index("-c") + 1])
    assert found.command == COMMAND.replace("32768", str(context))
    gpu, encoder = WORKED_EXAMPLE.gpus[0], subjects("8B")[0].vision_bytes / MIB
    left = gpu.free / MIB - 4455.34 - encoder - 1024
    assert context % 256 == 0
    assert context * 144 / 1024 <= left < (context + 256) * 144 / 1024
    assert f"{4455:,}" in found.remedy
    assert "not measured" in found.remedy


def test_where_too_little_is_left_layers_go_to_ram() -> None:
    gpu = WORKED_EXAMPLE.gpus[0]
    small = replace(WORKED_EXAMPLE, gpus=(replace(gpu, free=5000 * MIB, desktop=gpu.total - 5000 * MIB),))
    found = only(f"$ {COMMAND}\n{KV}", small)
    assert "too little is left" in found.remedy
    assert "--fit on" in found.command
    assert "-ngl" not in found.command


def test_an_encoder_that_is_not_known_is_said() -> None:
    other = f"$ {COMMAND}\n{KV}".replace("Qwen3VL-8B", "Other-8B")
    assert "not known here" in only(other, WORKED_EXAMPLE).remedy
    alone = f"$ {COMMAND}\n{KV}".replace(" --mmproj mmproj-F16.gguf", "")
    assert "encoder" not in only(alone, WORKED_EXAMPLE).remedy


def test_the_encoders_command_keeps_its_files() -> None:
    found = only(
        f"$ {COMMAND}\nclip_model_loader: model name:   Qwen3VL\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 3012.50 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
    )
    assert found.command == COMMAND + " --image-max-tokens 1024 --no-mmproj-offload"
    assert "What is free is not in the log" in found.remedy
    assert "7,200 MiB that are free" in only(found.evidence, WORKED_EXAMPLE).remedy


@pytest.mark.parametrize(
    ("above", "said", "command"),
    [
        (
            "ggml_cuda_init: found 1 CUDA devices (Total VRAM: 8150 MiB):",
            "Further up it found one",
            "nvidia-smi",
        ),
        (
            "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
            "driver",
            "vlfit doctor",
        ),
        ("load_backend: loaded CPU backend", "a build without CUDA", "llama-server --list-devices"),
    ],
)
def test_why_llama_cpp_found_no_gpu(above: str, said: str, command: str) -> None:
    found = only(f"{above}\nwarning: no usable GPU found, --gpu-layers option will be ignored\n")
    assert said in found.cause
    assert found.command == command


def test_an_older_llama_cpp_in_ollama() -> None:
    line = "llama_model_load: error loading model architecture: unknown model architecture: 'qwen3vl'\n"
    assert only(line).command == "llama-server --version"
    assert (
        only(f'time=x source=server.go:400 msg="starting runner"\n{line}').command
        == "ollama pull qwen3-vl:4b"
    )
    assert not re.search("Qwen3-VL", only(line.replace("qwen3vl", "gemma9")).remedy)
