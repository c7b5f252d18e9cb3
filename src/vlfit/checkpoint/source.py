"""Open a checkpoint: ``mini`` (bundled), a folder, or a name on the model hub."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vlfit.api.progress import ByteProgress
from vlfit.checkpoint import cache, hub
from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.tensors import check_tensors, count_parameters, normalize_gptq_awq, weights_format
from vlfit.errors import NotACheckpoint, UsageError
from vlfit.models.registry import read_config

MINI = "mini"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: its config and its headers, checked against each other. No weights are in memory."""

    name: str
    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(info.bytes for info in self.tensors.values())

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        return count_parameters(self.tensors, self.config.quantization)

    @property
    def weights_format(self) -> str:
        """Format of the text layers: ``fp8``, ``int8``, ``int4``, ``bf16``, ``fp16`` or ``fp32``."""
        return weights_format(self.tensors, self.config.quantization)


def open_checkpoint(model: str | Path, progress: ByteProgress | None = None) -> Checkpoint:
    """Open ``mini``, a folder, or a hub name ``org/name`` or ``org/name@revision``.

    A hub name that is not in the cache is downloaded: ``progress`` gets bytes done and in total; without it
    they are printed on stderr. Raises ``CheckpointError`` for invalid files, ``HubError`` if the download
    fails.
    """
    name, folder = locate(model, progress)
    return read_checkpoint(name, folder)


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Config and headers of ``folder``, checked against each other."""
    config, tensors = normalize_gptq_awq(read_config(folder), read_headers(folder))
    check_tensors(config, tensors)
    return Checkpoint(name, folder, config, tensors)


def locate(
    model: str | Path, progress: ByteProgress | None = None, files: hub.FileSelection | None = None
) -> tuple[str, Path]:
    """Name and folder of ``model``; a hub name that is not in the cache is downloaded.

    ``files``: what to download, if not what the native engine reads.
    """
    text = str(model)
    if text == MINI:
        return MINI, mini_folder()
    folder = Path(text).expanduser()
    if folder.is_file():
        raise _is_file_error(text, folder)
    # An existing folder wins over a hub name: tab completion gives it, and nothing is downloaded by surprise.
    if isinstance(model, Path) or folder.is_dir() or not hub.is_hub_name(text):
        if not folder.is_dir():
            raise NotACheckpoint(
                f"{text!r} is not a folder, a hub name (org/name) or mini",
                "Check the path, or try mini or Qwen/Qwen3-VL-2B-Instruct-FP8.",
            )
        return folder.resolve().name, folder
    return text, hub.fetch(text, progress) if files is None else hub.fetch(text, progress, files)


def _is_file_error(text: str, path: Path) -> NotACheckpoint:
    if (path.parent / "config.json").is_file():
        return NotACheckpoint(f"{text!r} is a file", f"Give the folder that it is in: {path.parent}.")
    return NotACheckpoint(
        f"{text!r} is a file; a checkpoint is a folder with config.json and *.safetensors",
        "Give such a folder, mini, or a name like Qwen/Qwen3-VL-2B-Instruct-FP8; .gguf is not read.",
    )


def mini_folder() -> Path:
    """Folder of the bundled checkpoint. Raises ``NotACheckpoint`` if this installation has none."""
    folder = Path(str(resources.files("vlfit") / "mini"))
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(
            f"this installation of vlfit has no bundled checkpoint in {folder}",
            "Install vlfit again, or name another checkpoint with --model.",
        )
    return folder


def local_models() -> list[LocalModel]:
    """Checkpoints that need no download: those in the hub's cache, then mini."""
    models = cache.cached_models()
    try:
        mini = cache.local_model(MINI, mini_folder())
    except NotACheckpoint:
        return models
    return [*models, mini] if mini is not None else models


def remove_model(name: str) -> int:
    """Delete a downloaded checkpoint; return the bytes freed. Raises as ``check_removable``."""
    check_removable(name)
    return cache.remove(name)


def check_removable(name: str) -> Path:
    """The folder that ``remove_model`` would delete.

    Raises ``UsageError`` for mini and folders, ``NotDownloaded`` for what is not in the cache.
    """
    if name == MINI or not hub.is_hub_name(name):
        raise UsageError(
            f"{name!r} was not downloaded from the hub, so it is not removed",
            "Name a model that vlfit models lists as org/name; mini is part of vlfit.",
        )
    return cache.cached_path(name)
