"""What is refused before and while a model is loaded, and where weights are told to go."""

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
    generate_engine as engine,
)
from vlfit.backends.transformers import (
    generate_engine as rehearsal,
)
from vlfit.backends.transformers.backend import TransformersBackend, wanted_files
from vlfit.backends.transformers.generate import ModelTokenizer, WindowDetokenizer
from vlfit.checkpoint.any_model import PARTS, open_any, read_any
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
    """A checkpoint to be spoilt."""
    return Path(shutil.copytree(checkpoints("llava"), tmp_path / "spoilt"))


def load(folder: Path, options: EngineOptions = ON_CPU, **wishes: Any) -> None:
    TransformersBackend.load(folder, options, **wishes).close()


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | values), "utf-8")


def test_opened_by_its_name(checkpoints: Checkpoints) -> None:
    told: list[str] = []
    wanted = BackendSpec(kind="transformers", model=checkpoints("llava"), options=ON_CPU)
    backend = open_backend(wanted, lambda what, _: told.append(what))
    try:
        assert (backend.kind, backend.model, backend.device, backend.context) == (
            "transformers",
            "llava",
            "cpu",
            512,
        )
        assert told[-2:] == ["reading the processor's files", "loading weights"]
        sampling = backend.default_sampling()
        assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.7, 20, 1.05)
    finally:
        backend.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_their_headers_say(
    family: str, backends: Callable[[str], TransformersBackend]
) -> None:
    backend = backends(family)
    held = backend.account().memory.weights
    lines = {line.line: line for line in backend.expectation.lines}
    for part in PARTS:
        # Beside weights there are a few numbers that no file holds: frequencies of positions.
        assert 0 <= held[part] - lines[part].bytes < 1024
        assert lines[part].how == EXACT
    hybrid = family == "qwen3_5"  # half of its layers keep something else than keys and values
    assert lines["kv_cache"].how == (MODELLED if hybrid else EXACT)
    assert lines["kv_cache"].bytes == backend.account().memory.kv_cache > 0


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "mlp" in name and "language" in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match="1 tensors"):
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
def test_broken_folders_are_told_in_words(
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


def test_code_that_comes_with_a_model_is_run_only_if_that_is_typed(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n", "utf-8")
    change_config(
        folder,
        model_type="their_own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.M"},
    )
    with pytest.raises(UnknownArchitecture, match="Python code") as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.hint
    assert not ran.exists()
    with pytest.raises(VlfitError):
        load(folder, trust_remote_code=True)
    assert ran.exists()
    assert "*.py" in wanted_files(code=True).small
    assert "*.py" not in wanted_files().small


def test_without_the_package_it_is_said_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        load(folder)
    assert "vlfit[transformers]" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (EngineOptions(device="cpu", kv_dtype="fp8"), "--kv-dtype"),
        (EngineOptions(device="cpu", kv_tokens=4096), "--kv is a setting of the native engine: the KV cache"),
        (EngineOptions(device="cpu", idle_sleep=5.0), "--idle-sleep is .* never sleeps"),
        (EngineOptions(device="cpu", offload="auto"), "--offload"),
    ],
)
def test_options_of_the_native_engine_are_refused(options: EngineOptions, what: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=what):
        load(folder, options)


def test_what_does_not_fit_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Host(GIB, 100_000, 0, None, False, False, "none", 2, "Linux")
    monkeypatch.setattr(engine, "read_host", lambda: small)
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(DoesNotFit, match="too few"):
        load(folder)
    with pytest.raises(DoesNotFit, match="positions"):
        load(folder, EngineOptions(device="cpu", max_model_len=4096))


def test_offload_tells_transformers_how_much_may_be_on_the_gpu(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    class Loader:
        @staticmethod
        def from_pretrained(_: str, **wishes: Any) -> tuple[Any, dict[str, Any]]:
            told.update(wishes)
            return torch.nn.Linear(1, 1), {"missing_keys": [], "mismatched_keys": []}

    found = read_any("llava", checkpoints("llava"))
    monkeypatch.setattr(loading, "transformers", lambda: SimpleNamespace(AutoModelForImageTextToText=Loader))
    loading.load_model(found, torch.device("cuda", 1), torch.float16, 5 * GIB, code=False)
    assert (told["device_map"], told["max_memory"][1], told["dtype"]) == ("auto", 5 * GIB, torch.float16)
    assert told["trust_remote_code"] is False
    assert told["local_files_only"] is True
    monkeypatch.setattr(package, "has_accelerate", lambda: False)
    with pytest.raises(UsageError, match="accelerate") as caught:
        loading.load_model(found, torch.device("cuda", 1), torch.float16, 5 * GIB, code=False)
    assert caught.value.hint == "pip install accelerate"


def test_the_worst_is_run_at_the_start_and_pictures_shrink_to_what_there_is_room_for(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose memory an engine pretends to be short of."""
    ran: list[tuple[int, int]] = []
    monkeypatch.setattr(rehearsal, "_MIN_IMAGE_TOKENS", 8)
    for wished in (None, 200):
        options = EngineOptions(device="cpu", max_model_len=512, image_tokens=wished)
        with TransformersBackend.load(checkpoints("qwen2_5_vl"), options) as backend:
            pretending = backend._engine_thread.engine
            answer = pretending.run_request

            def short(request: Any, answer: Any = answer) -> None:
                if request.prompt.num_image_tokens > 130:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                ran.append((request.prompt.num_tokens, request.prompt.num_image_tokens))
                answer(request)

            monkeypatch.setattr(pretending, "run_request", short)
            if wished is not None:
                with pytest.raises(DoesNotFit, match=r"a picture of \d+ tokens does not fit"):
                    rehearsal.largest_picture(pretending)
                continue
            rehearsal.largest_picture(pretending)
            rehearsal.longest_text(pretending)
            assert 100 < pretending.prompts.image_limit <= 130
            assert backend.account().settings.image_tokens == pretending.prompts.image_limit
            assert [tokens for tokens, _ in ran][-1] == 510
            assert 64 < ran[0][1] <= pretending.prompts.image_limit


def test_layers_that_wait_are_counted() -> None:
    model = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "cpu"})
    assert loading.num_offloaded_modules(model) == 2
    assert loading.num_offloaded_modules(SimpleNamespace(hf_device_map={"": 0})) == 0


def test_the_native_engine_says_who_runs_what_it_does_not_know(
    checkpoints: Checkpoints, folder: Path
) -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        read_config(checkpoints("qwen2_5_vl"))
    assert "--backend transformers" in caught.value.hint
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}), "utf-8")
    with pytest.raises(UnknownArchitecture) as caught:
        read_config(folder)
    assert "--backend transformers" not in caught.value.hint


def test_any_architecture_is_opened_and_complete_with_any_tokenizer(folder: Path) -> None:
    found = open_any(folder, wanted_files())
    assert (found.model_type, found.weights_format, found.quantized) == ("llava", "fp32", False)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert is_complete(folder, wanted_files())
    assert not is_complete(folder)


def test_a_tokenizer_that_does_not_spell_is_followed_and_no_form_is_kept_to(checkpoints: Checkpoints) -> None:
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
    with pytest.raises(InvalidRequest, match="llguidance"):
        words.grammar_matcher(Grammar("json", "{}"))
