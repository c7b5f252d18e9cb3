"""Where a checkpoint comes from: ``mini`` (bundled), a folder, or a name on the model hub.

A checkpoint is opened only when its headers are sound.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import cache, hub
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.tensors import check_tensors, normalize_gptq_awq
from vlfit.errors import NotACheckpoint, UsageError
from vlfit.models.registry import read_config

MINI = "mini"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose config and headers have been read and agree. No weights are in memory."""

    name: str
    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        return cache.count_parameters(self.tensors, self.config.quantization)

    @property
    def weights_format(self) -> str:
        """``fp8``, ``int8``, ``int4``, ``bf16``, ``fp16`` or ``fp32``: what the text layers are stored in."""
        return cache.weights_format(self.tensors, self.config.quantization)


def open_checkpoint(model: str | Path, progress: ByteProgress | None = None) -> Checkpoint:
    """Open ``mini``, a folder, or a hub name ``org/name`` or ``org/name@revision``.

    A hub name that is not in the cache is downloaded; stderr says so, or ``progress`` is called with bytes
    done and bytes in all. Raises ``CheckpointError`` when
    the files are not what they should be, and ``HubError`` when they cannot be fetched.
    """
    name, folder = locate(model, progress)
    return read_checkpoint(name, folder)


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Config and headers of ``folder``, checked against each other."""
    config, tensors = normalize_gptq_awq(read_config(folder), read_headers(folder))
    check_tensors(config, tensors)
    return Checkpoint(name, folder, config, tensors)


def locate(
    model: str | Path, progress: ByteProgress | None = None, files: hub.Files | None = None
) -> tuple[str, Path]:
    """Name and folder of ``model``; a hub name is downloaded first if it has to be: ``files`` of it, if
    others than the native engine reads.
    """
    text = str(model)
    if text == MINI:
        return MINI, mini_folder()
    folder = Path(text).expanduser()
    if folder.is_file():
        raise _a_file(text, folder)
    # A folder that is there wins: it is what tab completion gives, and nothing is fetched by surprise.
    if isinstance(model, Path) or folder.is_dir() or not hub.is_hub_name(text):
        if not folder.is_dir():
            raise NotACheckpoint(
                f"{text!r} is neither a folder, nor a name on the hub (org/name), nor mini",
                "Check the path, or try mini or Qwen/Qwen3-VL-2B-Instruct-FP8.",
            )
        return folder.resolve().name, folder
    return text, hub.fetch(text, progress) if files is None else hub.fetch(text, progress, files)


def _a_file(text: str, path: Path) -> NotACheckpoint:
    if (path.parent / "config.json").is_file():
        return NotACheckpoint(f"{text!r} is a file", f"Give the folder that it is in: {path.parent}")
    return NotACheckpoint(
        f"{text!r} is a file; a checkpoint is a folder with config.json and *.safetensors",
        "Give such a folder, mini, or a name like Qwen/Qwen3-VL-2B-Instruct-FP8. (.gguf is not read.)",
    )


def mini_folder() -> Path:
    """Where the bundled checkpoint lies. Raises ``NotACheckpoint`` when this build of vlfit has none."""
    folder = Path(str(resources.files("vlfit") / "mini"))
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(
            f"this installation of vlfit has no bundled checkpoint in {folder}",
            "Install vlfit again, or name another checkpoint with --model.",
        )
    return folder


def local_models() -> list[LocalModel]:
    """The checkpoints that can be used without a download: those of the hub's cache, then mini."""
    models = cache.cached_models()
    try:
        mini = cache.describe(MINI, mini_folder())
    except NotACheckpoint:
        return models
    return [*models, mini] if mini is not None else models


def remove_model(name: str) -> int:
    """Delete a checkpoint that was pulled; the bytes that this freed. Raises what ``removable`` raises."""
    removable(name)
    return cache.remove(name)


def removable(name: str) -> Path:
    """The folder that ``remove_model`` would delete.

    Raises ``UsageError`` for what was not pulled (mini, a folder), ``NotDownloaded`` when it is not there.
    """
    if name == MINI or not hub.is_hub_name(name):
        raise UsageError(
            f"{name!r} was not pulled from the hub, so it is not removed",
            "Only names that vlfit models lists as org/name are removed; mini is part of vlfit.",
        )
    return cache.find(name)
