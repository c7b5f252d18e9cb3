"""Named faults, put into the engine or into its copy of a checkpoint, and the component that must be named.

A fault changes what the engine runs and nothing that the reference uses. ``run_fault`` runs all checks over
one; ``benchmarks/verify_faults.py`` runs the table.
"""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.parity.findings import CheckReport, Component, Level
from vlfit.parity.run_checks import ReferenceFactory, run_checks

Patch = pytest.MonkeyPatch
C = Component


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``names``: components that name it rightly. ``patch``: changes modules before an engine is built;
    ``change``: an engine after; ``edit``: its copy of the checkpoint (of a GGUF model, its file). ``spec``:
    see ``build_spec``.
    ``both``: the copy is the reference's, too, as a file on the user's disk is.
    """

    name: str
    names: tuple[Component, ...]
    patch: Callable[[Patch], None] | None = None
    change: Callable[[NativeEngine], None] | None = None
    edit: Callable[[Path], None] | None = None
    spec: str = "tied"
    level: Level = "normal"
    both: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, *names: Component, how: str, **more: Any) -> Callable[[Any], Any]:
    """Add the decorated function to the table, as ``patch``, ``change`` or ``edit``."""

    def add(function: Any) -> Any:
        FAULTS[name] = Fault(name, names, **{how: function}, **more)
        return function

    return add


def build_spec(spec: str, folder: Path) -> Path:
    """Write the checkpoint ``spec`` into ``folder``; return its folder, or file.

    A name of ``tests/tiny.py``, ``tiny_qwen3_5.py`` or ``tiny_decoders.py``; ``awq``, ``gptq, zero points``
    and the like; a case of compressed-tensors; or ``gguf TYPE SPEC``.
    """
    from tests.compressed import compress
    from tests.gguf_files import as_gguf
    from tests.loading.test_awq_gptq import FORMS
    from tests.loading.test_compressed import CASES
    from tests.tiny import TINY, build_tiny
    from tests.tiny_decoders import DECODERS, build_decoder
    from tests.tiny_qwen3_5 import QWEN3_5, build_qwen3_5

    if spec in TINY:
        return build_tiny(spec, folder)
    if spec in QWEN3_5:
        return build_qwen3_5(spec, folder)
    if spec in DECODERS:
        return build_decoder(spec, folder)
    folder.mkdir(parents=True, exist_ok=True)
    if spec in FORMS:
        source, form, options = FORMS[spec]
        return form(build_spec(source, folder / "source"), folder, **options)[0]
    if spec in CASES:
        source, groups, choose, _ = CASES[spec]
        return compress(build_spec(source, folder / "source"), folder, groups, choose)[0]
    kind, weights, source = spec.split(" ", 2)
    assert kind == "gguf"
    return as_gguf(build_spec(source, folder / "source"), folder / "gguf", weights)[0]


def run_fault(each: Fault, clean: Path, scratch: Path, reference: ReferenceFactory) -> CheckReport:
    """Run the checks over an engine with the fault.

    ``clean``: the checkpoint; ``scratch``: an empty folder.
    """
    folder = clean
    if each.edit is not None:
        if clean.is_file():
            folder = shutil.copytree(clean.parent, scratch / "copy") / clean.name
        else:
            folder = shutil.copytree(clean, scratch / "copy")
        each.edit(folder)
    checkpoint = open_checkpoint(folder)
    options = EngineOptions(device="cpu", max_model_len=1024)
    judge = reference(open_checkpoint(folder if each.both else clean))  # before anything is patched
    with pytest.MonkeyPatch.context() as patch:
        if each.patch is not None:
            each.patch(patch)

        def build(**changes: Any) -> NativeEngine:
            engine = NativeEngine(checkpoint, dataclasses.replace(options, **changes))
            if each.change is not None:
                with torch.inference_mode():
                    each.change(engine)
            return engine

        return run_checks(build, checkpoint, each.level, reference_factory=lambda _: judge)


def add_to(out: torch.Tensor, where: Any, value: float) -> torch.Tensor:
    out[where] += value * float(out.abs().mean())
    return out


def alter_linear(owner: Any, name: str, alter: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, lambda x: alter(inner(x)))


def layer_of(engine: NativeEngine, index: int = 1) -> Any:
    return engine.runner.text.layers[index]


def scale_columns(out: torch.Tensor, columns: slice, factor: float) -> torch.Tensor:
    out[:, columns] *= factor
    return out
