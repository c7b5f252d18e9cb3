"""Where a checkpoint comes from: ``mini`` (bundled), a folder, or a name on the model hub.

Knows: how a name is told from a folder, and that a checkpoint is opened only when its headers are sound.
Does not know: how files are fetched (``hub.py`` does), or tensor values.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vlfit.checkpoint import hub
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.headers import TensorInfo, read_headers
from vlfit.checkpoint.progress import Progress
from vlfit.checkpoint.tensors import check_tensors
from vlfit.errors import NotACheckpoint

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
        """Number of weights, FP8 scales left out."""
        return sum(info.count for name, info in self.tensors.items() if not name.endswith("_scale_inv"))

    @property
    def weights_format(self) -> str:
        """``fp8``, or the type most of the weights are in: ``bf16``, ``fp16``, ``fp32``."""
        return _weights_format(self.config, self.tensors)


def open_checkpoint(model: str | Path, progress: Progress | None = None) -> Checkpoint:
    """Open ``mini``, a folder, or a hub name ``org/name`` or ``org/name@revision``.

    A hub name that is not in the cache is downloaded; stderr says so, or ``progress`` is called with bytes
    done and bytes in all. Raises ``CheckpointError`` when
    the files are not what they should be, and ``HubError`` when they cannot be fetched.
    """
    name, folder = locate(model, progress)
    return read_checkpoint(name, folder)


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Config and headers of ``folder``, checked against each other."""
    config = ModelConfig.read(folder)
    tensors = read_headers(folder)
    check_tensors(config, tensors)
    return Checkpoint(name, folder, config, tensors)


def locate(model: str | Path, progress: Progress | None = None) -> tuple[str, Path]:
    """Name and folder of ``model``; a hub name is downloaded first if it has to be."""
    text = str(model)
    if text == MINI:
        return MINI, mini_folder()
    folder = Path(text).expanduser()
    # A folder that is there wins: it is what tab completion gives, and nothing is fetched by surprise.
    if isinstance(model, Path) or folder.is_dir() or not hub.is_hub_name(text):
        if not folder.is_dir():
            raise NotACheckpoint(
                f"{text!r} is neither a folder, nor a name on the hub (org/name), nor mini",
                "Check the path, or try mini or Qwen/Qwen3-VL-2B-Instruct-FP8.",
            )
        return folder.resolve().name, folder
    return text, hub.fetch(text, progress)


def mini_folder() -> Path:
    """Where the bundled checkpoint lies. Raises ``NotACheckpoint`` when this build of vlfit has none."""
    folder = Path(str(resources.files("vlfit") / "mini"))
    if not (folder / "config.json").is_file():
        raise NotACheckpoint(
            f"this installation of vlfit has no bundled checkpoint in {folder}",
            "Install vlfit again, or name another checkpoint with --model.",
        )
    return folder


def _weights_format(config: ModelConfig, tensors: dict[str, TensorInfo]) -> str:
    if config.fp8 is not None:
        return "fp8"
    bytes_by_type: dict[str, int] = {}
    for info in tensors.values():
        bytes_by_type[info.dtype] = bytes_by_type.get(info.dtype, 0) + info.bytes
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    most = max(bytes_by_type, key=lambda dtype: bytes_by_type[dtype])
    return names.get(most, most.lower())
