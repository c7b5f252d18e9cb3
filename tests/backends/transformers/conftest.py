"""Tiny checkpoints, their backends, each loaded once, and transformers' own models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.transformers.models import build
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.transformers.backend import TransformersBackend

CONTEXT = 512


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint, written when it is first asked for."""
    folders: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("any_model")

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = build(family, root / family)
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def backends(checkpoints: Callable[[str], Path]) -> Iterator[Callable[[str], TransformersBackend]]:
    """A family's backend, loaded when it is first asked for."""
    loaded: dict[str, TransformersBackend] = {}

    def backend(family: str) -> TransformersBackend:
        if family not in loaded:
            options = EngineOptions(device="cpu", max_model_len=CONTEXT, max_tokens=24)
            loaded[family] = TransformersBackend.load(checkpoints(family), options)
        return loaded[family]

    yield backend
    for each in loaded.values():
        each.close()


@pytest.fixture
def qwen(backends: Callable[[str], TransformersBackend]) -> TransformersBackend:
    """The tiny Qwen2.5-VL, whose template takes pictures and tools."""
    return backends("qwen2_5_vl")


@pytest.fixture(scope="session")
def reference(checkpoints: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """A family's model and processor, as anybody would load them."""
    found: dict[str, tuple[Any, Any]] = {}

    def both(family: str) -> tuple[Any, Any]:
        from transformers import AutoModelForImageTextToText

        from vlfit.backends.transformers.auto_model import load_processor

        if family not in found:
            folder = checkpoints(family)
            model = AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
            found[family] = model.eval(), load_processor(folder, trust_remote_code=False)
        return found[family]

    return both
