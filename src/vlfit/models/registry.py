"""The registry of model families that the native engine runs.

A family is a folder whose ``config`` module describes it as a ``ModelSpec``, without torch. Modules that the
spec names (cost of the vision tower on floor 1; builders and tokenizer on floor 2) are imported when first
needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.errors import NotACheckpoint, UnknownArchitecture
from vlfit.models.cache_spec import CacheSpec

_WHAT_RUNS = (
    "vlfit runs Qwen3.5 and Qwen3-VL (dense), and without pictures Qwen2.5, Qwen3, Llama and Phi-3 (dense). "
    "Try vlfit pull Qwen/Qwen3-VL-2B-Instruct-FP8."
)
# Precedes ``_WHAT_RUNS`` for other vision-language models.
_WHAT_ELSE_RUNS = "Add --backend transformers, which runs every model that transformers does. By itself "

# ``model_type`` of config.json to the module that defines the family's ``SPEC``, or "module:NAME" of another.
_FAMILIES = {
    "qwen3_vl": "vlfit.models.qwen3_vl.config",
    "qwen3_5": "vlfit.models.qwen3_5.config",
    "qwen3_5_text": "vlfit.models.qwen3_5.config:TEXT_SPEC",
    "qwen3": "vlfit.models.qwen3.config",
    "qwen2": "vlfit.models.qwen2.config",
    "llama": "vlfit.models.llama.config",
    "phi3": "vlfit.models.phi3.config",
}


@dataclass(frozen=True, slots=True)
class ToolCallSyntax:
    """A tool call between ``open`` and ``close``.

    ``form``: "json": an object with ``name`` and ``arguments``. "xml": ``<function=NAME>``, then for each
    argument ``<parameter=KEY>``, a line break, its value, a line break and ``</parameter>``, then
    ``</function>``; strings as they are, other values as JSON.
    """

    open: str
    close: str
    form: Literal["json", "xml"] = "json"


@dataclass(frozen=True, slots=True)
class ThinkingSyntax:
    """Reasoning between ``open`` and ``close`` at the start of an answer; the template may write ``open``."""

    open: str
    close: str


HERMES_TOOL_CALLS = ToolCallSyntax("<tool_call>", "</tool_call>")
XML_TOOL_CALLS = ToolCallSyntax("<tool_call>", "</tool_call>", "xml")  # Qwen3-Coder, Qwen3.5
QWEN_THINKING = ThinkingSyntax("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class VisionModules:
    """Names of a vision tower's modules in checkpoints.

    ``root``: the tower. ``blocks``: the list of its blocks (a block's number follows). ``quantized``: the
    linear layers that ``vlfit convert --vision`` quantizes, as a compressed-tensors target ("re:...").
    """

    root: str
    blocks: str
    quantized: str


def text_cache(config: ModelConfig) -> CacheSpec:
    """The cache spec of a plain decoder: keys and values in every text layer."""
    return config.text.cache_spec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A family of models: what the native engine needs to know of it.

    ``architecture``: the class that config.json must name. ``read_config``: reads config.json.
    ``tensors``: returns name and shape of every tensor before quantization. ``optional_tensors``: prefixes of
    names; a checkpoint may lack all tensors of a prefix. ``float32_tensors``: endings of names of tensors
    that are float32 in the engine, whatever it computes in. ``unquantized``: endings of names of matrices
    that ``vlfit convert`` keeps as they are. ``cache_spec``: returns what each text layer caches.
    ``tool_calls``: how the model writes tool calls. ``thinking``: how the family's thinking models mark their
    reasoning, None if it has none; ``prompt/reasoning.py`` splits it from the answer where an API has a
    place for it.

    Only with a vision tower: ``read_image_processor`` reads the image processor settings,
    ``vision_modules`` names the tower's modules, and ``cost`` is a module with ``TOWER_COST``
    (``plan/shapes.py``).

    ``builders``: a module with ``BUILDERS`` (``models/interface.py``), or "module:NAME"; "" for a plain
    decoder. ``tokenizer``: a module with ``adjust_tokenizer`` (``prompt/tokenizer.py``), "" if
    tokenizer.json is used as it is.
    """

    architecture: str
    read_config: Callable[[Fields], ModelConfig]
    tensors: Callable[[ModelConfig], dict[str, tuple[int, ...]]]
    optional_tensors: tuple[str, ...] = ()
    float32_tensors: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    cache_spec: Callable[[ModelConfig], CacheSpec] = text_cache
    tool_calls: ToolCallSyntax = HERMES_TOOL_CALLS
    thinking: ThinkingSyntax | None = None
    read_image_processor: Callable[[Path], ImageProcessorConfig] | None = None
    vision_modules: VisionModules | None = None
    cost: str = ""
    builders: str = ""
    tokenizer: str = ""


def register(model_type: str, module: str) -> None:
    """Add or replace the family of ``model_type`` (of config.json) in this process.

    ``module``: import path of the module that defines its ``SPEC``, or "module:NAME" if the spec has another
    name. Imported when first needed.
    """
    _FAMILIES[model_type] = module


def is_registered(model_type: str) -> bool:
    """Whether a family is registered for ``model_type``, so that the native engine runs it."""
    return model_type in _FAMILIES


def spec_of(model_type: str) -> ModelSpec:
    """The family of ``model_type``. Raises ``KeyError`` if it is not registered."""
    spec: ModelSpec = import_object(_FAMILIES[model_type], "SPEC")
    return spec


def import_object(path: str, name: str) -> Any:
    """The object of "module:NAME", or ``name`` of the module if ``path`` names a module alone."""
    module, _, own = path.partition(":")
    return getattr(import_module(module), own or name)


def read_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``.

    Raises ``NotACheckpoint`` without one, ``UnknownArchitecture`` and ``UnknownWeightsFormat`` for
    models that vlfit does not run, and ``CheckpointError`` for a missing or invalid field.
    """
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise NotACheckpoint(
            f"{folder} {what}",
            "Give a checkpoint's folder, a name such as 4B, or mini.",
        )
    return parse_config(Fields.read(folder / "config.json"))


def parse_config(fields: Fields) -> ModelConfig:
    """The config in the fields of config.json. Raises what ``read_config`` raises for these."""
    model_type = fields.text("model_type", "none")
    if not is_registered(model_type):
        raise UnknownArchitecture(
            f"config.json: model_type is {model_type!r}, which vlfit does not run", _what_runs(fields)
        )
    spec = spec_of(model_type)
    architectures = fields.texts("architectures", (spec.architecture,))
    if spec.architecture not in architectures:
        raise UnknownArchitecture(
            f"config.json: architectures is {list(architectures)}, without {spec.architecture}",
            _what_runs(fields),
        )
    return spec.read_config(fields)


def tool_call_syntax(model_type: str) -> ToolCallSyntax:
    """How models of ``model_type`` write tool calls; as Hermes if the family is not registered."""
    return spec_of(model_type).tool_calls if is_registered(model_type) else HERMES_TOOL_CALLS


def cache_spec_of(config: ModelConfig, *, drafts: bool = False) -> CacheSpec:
    """What each text layer of a model caches. Raises ``KeyError`` if its family is not registered."""
    spec = spec_of(config.model_type).cache_spec(config)
    return (*spec, *config.text.draft_cache) if drafts else spec


def read_image_processor_config(config: ModelConfig, folder: Path) -> ImageProcessorConfig | None:
    """Settings of the image processor, read from ``folder``; None for a text-only model.

    Raises ``CheckpointError`` if they are missing or invalid.
    """
    read = spec_of(config.model_type).read_image_processor
    return read(folder) if read is not None and config.vision is not None else None


def _what_runs(fields: Fields) -> str:
    """The hint for a model that the native engine does not run."""
    return (_WHAT_ELSE_RUNS if fields.has("vision_config") else "") + _WHAT_RUNS
