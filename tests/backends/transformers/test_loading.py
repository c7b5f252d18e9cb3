"""Errors before and during loading, and the placement of weights."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.backends.transformers.models import FAMILIES
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import Grammar
from vlfit.backends.opening import BackendSpec, open_backend
from vlfit.backends.transformers import (
    auto_model as loading,
)
from vlfit.backends.transformers import (
    auto_model as package,
)
from vlfit.backends.transformers import (
    generate_engine,
)
from vlfit.backends.transformers.backend import TransformersBackend, files_to_download
from vlfit.backends.transformers.generate import ModelTokenizer, WindowDetokenizer
from vlfit.checkpoint.any_model import PARTS, open_any_checkpoint, read_any_checkpoint
from vlfit.checkpoint.hub import is_complete
from vlfit.errors import (
    BrokenShard,
    CheckpointError,
    DoesNotFit,
    InvalidRequest,
    MissingFile,
    MissingTensor,
    NotACheckpoint,
    UnknownArchitecture,
    UsageError,
    VlfitError,
)
from vlfit.machine.model import Host
from vlfit.models.registry import read_config
from vlfit.plan.calibration import EXACT, MODELLED
from vlfit.units import GIB

Checkpoints = Callable[[str], Path]

ON_CPU = EngineOptions(device="cpu", max_model_len=512)


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may break."""
    return Path(shutil.copytree(checkpoints("llava"), tmp_path / "spoilt"))


def load(folder: Path, options: EngineOptions = ON_CPU, **wishes: Any) -> None:
    TransformersBackend.load(folder, options, **wishes).close()


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), "utf-8")


def test_opened_by_backend_name(checkpoints: Checkpoints) -> None:
    phases: list[str] = []
    wanted = BackendSpec(kind="transformers", model=checkpoints("llava"), options=ON_CPU)
    backend = open_backend(wanted, lambda what, _: phases.append(what))
    try:
        assert (backend.kind, backend.model, backend.device, backend.context) == (
            "transformers",
            "llava",
            "cpu",
            512,
        )
        assert len(set(phases)) >= 2
        sampling = backend.default_sampling()
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.7, 20, 1.05)
    finally:
        backend.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_match_the_headers(family: str, backends: Callable[[str], TransformersBackend]) -> None:
    backend = backends(family)
    weights = backend.account().memory.weights
    lines = {line.line: line for line in backend.expectation.lines}
    for part in PARTS:
        # Beside weights there are a few numbers that no file holds: frequencies of positions.
        assert 0 <= weights[part] - lines[part].bytes < 1024
        assert lines[part].how == EXACT
    hybrid = family == "qwen3_5"  # half of its layers keep something else than keys and values
    assert lines["kv_cache"].how == (MODELLED if hybrid else EXACT)
    assert lines["kv_cache"].bytes == backend.account().memory.kv_cache > 0


def test_missing_weights_are_an_error(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "mlp" in name and "language" in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match=r"\b1\b"):
        load(folder)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: change_config(folder, model_type="no_such_model"), UnknownArchitecture),
        (lambda folder: (folder / "config.json").unlink(), NotACheckpoint),
        (lambda folder: (folder / "model.safetensors").unlink(), MissingFile),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\1\0"), BrokenShard),
        (lambda folder: (folder / "config.json").write_text("{"), CheckpointError),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), VlfitError),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), VlfitError),
        (
            lambda folder: change_config(folder, text_config={"model_type": "llama", "hidden_size": -5}),
            VlfitError,
        ),
    ],
)
def test_broken_folders_raise_vlfit_errors(
    spoil: Callable[[Path], object],
    error: type[Exception],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    spoil(folder)
    with pytest.raises(error):
        load(folder)


def test_remote_code_needs_trust_remote_code(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n", "utf-8")
    change_config(
        folder,
        model_type="their_own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.M"},
    )
    with pytest.raises(UnknownArchitecture, match="their_own") as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert not ran.exists()
    with pytest.raises(VlfitError):
        load(folder, trust_remote_code=True)
    assert ran.exists()
    assert "*.py" in files_to_download(trust_remote_code=True).small_files
    assert "*.py" not in files_to_download().small_files


def test_missing_package_is_an_error_with_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="transformers") as caught:
        load(folder)
    assert "vlfit[transformers]" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (EngineOptions(device="cpu", kv_dtype="fp8"), "kv_dtype"),
        (EngineOptions(device="cpu", kv_tokens=4096), "kv_tokens"),
        (EngineOptions(device="cpu", idle_sleep=5.0), "idle_sleep"),
        (EngineOptions(device="cpu", offload="auto"), "offload"),
    ],
)
def test_options_of_the_native_engine_are_refused(options: EngineOptions, param: str, folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(folder, options)
    assert caught.value.param == param


def test_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Host(GIB, 100_000, 0, None, False, False, "none", 2, "Linux")
    monkeypatch.setattr(generate_engine, "read_host", lambda: small)
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(DoesNotFit):
        load(folder)
    with pytest.raises(DoesNotFit, match="4,096"):
        load(folder, EngineOptions(device="cpu", max_model_len=4096))


def test_offload_sets_max_memory(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    class Loader:
        @staticmethod
        def from_pretrained(_: str, **wishes: Any) -> tuple[Any, dict[str, Any]]:
            arguments.update(wishes)
            return torch.nn.Linear(1, 1), {"missing_keys": [], "mismatched_keys": []}

    found = read_any_checkpoint("llava", checkpoints("llava"))
    monkeypatch.setattr(
        loading, "import_transformers", lambda: SimpleNamespace(AutoModelForImageTextToText=Loader)
    )
    loading.load_model(found, torch.device("cuda", 1), torch.float16, 5 * GIB, trust_remote_code=False)
    assert (arguments["device_map"], arguments["max_memory"][1], arguments["dtype"]) == (
        "auto",
        5 * GIB,
        torch.float16,
    )
    assert arguments["trust_remote_code"] is False
    assert arguments["local_files_only"] is True
    monkeypatch.setattr(package, "has_accelerate", lambda: False)
    with pytest.raises(UsageError) as caught:
        loading.load_model(found, torch.device("cuda", 1), torch.float16, 5 * GIB, trust_remote_code=False)
    assert caught.value.param == "offload"
    assert "pip install accelerate" in caught.value.hint


def test_profiling_run_shrinks_the_image_limit(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, with simulated out-of-memory errors."""
    ran: list[tuple[int, int]] = []
    monkeypatch.setattr(generate_engine, "MIN_IMAGE_TOKENS", 8)
    for wished in (None, 200):
        options = EngineOptions(device="cpu", max_model_len=512, image_tokens=wished)
        with TransformersBackend.load(checkpoints("qwen2_5_vl"), options) as backend:
            engine_under_test = backend.engine
            answer = engine_under_test.run_request

            def short(request: Any, answer: Any = answer) -> None:
                if request.prompt.num_image_tokens > 130:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                ran.append((request.prompt.num_tokens, request.prompt.num_image_tokens))
                answer(request)

            monkeypatch.setattr(engine_under_test, "run_request", short)
            if wished is not None:
                with pytest.raises(DoesNotFit, match=r"\d+ tokens"):
                    generate_engine.profile_largest_picture(engine_under_test)
                continue
            generate_engine.profile_largest_picture(engine_under_test)
            generate_engine.profile_longest_text(engine_under_test)
            assert 100 < engine_under_test.prompts.image_limit <= 130
            assert backend.account().settings.image_tokens == engine_under_test.prompts.image_limit
            assert [tokens for tokens, _ in ran][-1] == 510
            assert 64 < ran[0][1] <= engine_under_test.prompts.image_limit


def test_offloaded_modules_are_counted() -> None:
    model = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "cpu"})
    assert loading.num_offloaded_modules(model) == 2
    assert loading.num_offloaded_modules(SimpleNamespace(hf_device_map={"": 0})) == 0


def test_native_errors_name_the_transformers_backend(checkpoints: Checkpoints, folder: Path) -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        read_config(checkpoints("qwen2_5_vl"))
    assert "--backend transformers" in caught.value.hint
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}), "utf-8")
    with pytest.raises(UnknownArchitecture) as caught:
        read_config(folder)
    assert "--backend transformers" not in caught.value.hint


def test_any_architecture_and_tokenizer_file(folder: Path) -> None:
    found = open_any_checkpoint(folder, files_to_download())
    assert (found.model_type, found.weights_format, found.is_quantized) == ("llava", "fp32", False)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert is_complete(folder, files_to_download())
    assert not is_complete(folder)


def test_tokenizers_without_spelling_stream_but_have_no_grammar(checkpoints: Checkpoints) -> None:
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(checkpoints("llava"))
    hidden = SimpleNamespace(decode=whole.decode)
    words = ModelTokenizer(hidden, frozenset({2}))
    ids = whole("hello 图片里有什么 🙂🙂 the quick brown fox")["input_ids"]
    follower = words.detokenizer()
    assert isinstance(follower, WindowDetokenizer)
    pieces = [follower.add(each) for each in ids]
    assert "".join(pieces) + follower.flush() == whole.decode(ids, skip_special_tokens=True)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    with pytest.raises(InvalidRequest, match="SimpleNamespace"):
        words.grammar_matcher(Grammar("json", "{}"))
