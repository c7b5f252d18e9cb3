"""The small files beside the weights: picture processing, chat template, generation settings, tokenizer.

The files moved between versions of transformers: every place is read, with the defaults of transformers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.errors import CheckpointError, MissingFile

_HALF = (0.5, 0.5, 0.5)
# What transformers' Qwen3VLVideoProcessor does when no file says otherwise.
_VIDEO_MIN_PIXELS = 128 * 32 * 32
_VIDEO_MAX_PIXELS = 768 * 32 * 32
_BICUBIC = 3
_TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """How a picture (or clip) becomes patches.

    ``min_pixels`` and ``max_pixels`` are areas: of a picture, or of all frames of a clip together.
    A channel value v of 0-255 becomes ``(v * rescale_factor - mean) / std``.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest picture."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    @classmethod
    def read(cls, folder: Path) -> "ImageProcessing":
        """For pictures. Raises ``MissingFile``, or ``CheckpointError`` for a wrong field."""
        fields = _processor(folder, "image_processor", "preprocessor_config.json")
        if fields is None:
            raise MissingFile(
                f"preprocessor_config.json is missing in {folder}",
                "Fetch the whole checkpoint: it says how large pictures may be. vlfit pull NAME does.",
            )
        least, most = _pixels(fields, 56 * 56, 28 * 28 * 1280)
        return cls._from(fields, least, most)

    @classmethod
    def read_video(cls, folder: Path) -> "ImageProcessing":
        """For clips: the checkpoint's video settings, else its picture settings, else transformers'."""
        fields = (
            _processor(folder, "video_processor", "video_preprocessor_config.json")
            or _processor(folder, "image_processor", "preprocessor_config.json")
            or Fields({}, "video_preprocessor_config.json")
        )
        least, most = _pixels(fields, _VIDEO_MIN_PIXELS, _VIDEO_MAX_PIXELS)
        return cls._from(fields, least, most)

    @classmethod
    def _from(cls, fields: Fields, least: int, most: int) -> "ImageProcessing":
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not fields.flag(step, True):
                raise fields.wrong(step, "is false", "true: vlfit always does this step")
        if fields.integer("resample", _BICUBIC, least=0) != _BICUBIC:
            raise fields.wrong("resample", f"is {fields.values['resample']}", f"{_BICUBIC} (bicubic)")
        return cls(
            min_pixels=least,
            max_pixels=most,
            patch_size=fields.integer("patch_size", 16),
            temporal_patch_size=fields.integer("temporal_patch_size", 2),
            merge_size=fields.integer("merge_size", 2),
            mean=_three(fields, "image_mean"),
            std=_three(fields, "image_std", above_zero=True),
            rescale_factor=fields.number("rescale_factor", 1 / 255, above=0),
        )


def _processor(folder: Path, section: str, file: str) -> Fields | None:
    """transformers 5 writes one ``processor_config.json`` with sections; before, each had its own file."""
    if (folder / "processor_config.json").is_file():
        nested = Fields.read(folder / "processor_config.json")
        if nested.has(section):
            return nested.section(section)
    return Fields.read(folder / file) if (folder / file).is_file() else None


def _pixels(fields: Fields, least: int, most: int) -> tuple[int, int]:
    """Least and most pixels. ``shortest_edge`` and ``longest_edge`` are areas in Qwen's files, not edges."""
    size = fields.section("size")
    least = size.integer("shortest_edge", size.integer("min_pixels", least))
    most = size.integer("longest_edge", size.integer("max_pixels", most))
    # On its own at the top the older pair wins, as in transformers.
    least, most = fields.integer("min_pixels", least), fields.integer("max_pixels", most)
    if least > most:
        raise fields.wrong("size", f"allows {least} pixels at least but {most} at most", "least below most")
    return least, most


def _three(fields: Fields, name: str, *, above_zero: bool = False) -> tuple[float, float, float]:
    values = fields.numbers(name, _HALF)
    if len(values) != 3 or (above_zero and min(values) <= 0):
        wanted = "three numbers above 0" if above_zero else "three numbers"
        raise fields.wrong(name, f"is {list(values)}", wanted)
    return values[0], values[1], values[2]


def read_chat_template(folder: Path) -> str:
    """The Jinja source of the checkpoint's chat template.

    It stands in ``chat_template.json``, ``chat_template.jinja`` or ``tokenizer_config.json``, in this order.
    Where there are several by name, the one called ``default`` is meant. Raises ``MissingFile``.
    """
    for path in (
        folder / "chat_template.json",
        folder / "chat_template.jinja",
        folder / "tokenizer_config.json",
    ):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return _read_text(path)
        fields = Fields.read(path)
        if fields.has("chat_template"):
            return _one_template(fields)
    raise MissingFile(
        f"{folder} holds no chat template (looked in: {', '.join(_TEMPLATE_FILES)})",
        "Fetch the whole checkpoint (vlfit pull NAME), or copy chat_template.json from the original model.",
    )


def _one_template(fields: Fields) -> str:
    template: Any = fields.values["chat_template"]
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    elif isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise fields.wrong(
            "chat_template", "is of no known form", 'a string, or a list with one named "default"'
        )
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from None


def tokenizer_file(folder: Path) -> Path:
    """Path of ``tokenizer.json``. Raises ``MissingFile``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFile(
            f"tokenizer.json is missing in {folder}",
            "Fetch the whole checkpoint (vlfit pull NAME); vocab.json and merges.txt alone are not read.",
        )
    return path


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the checkpoint's makers want it sampled. Greedy when it says nothing.

    Sampling fields hold what transformers would use; they count only where ``do_sample`` is true.
    """

    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int | None

    @classmethod
    def read(cls, folder: Path) -> "GenerationDefaults":
        """From ``generation_config.json``; end-of-text tokens from ``config.json`` where that says none.

        Raises ``CheckpointError`` naming a field of a wrong type.
        """
        path = folder / "generation_config.json"
        fields = Fields.read(path) if path.is_file() else Fields({}, path.name)
        do_sample = fields.flag("do_sample", False)
        return cls(
            do_sample=do_sample,
            temperature=fields.number("temperature", 1.0, above=-1e-9) if do_sample else 0.0,
            top_p=fields.number("top_p", 1.0, above=0),
            top_k=fields.integer("top_k", 50, least=0),
            min_p=fields.number("min_p", 0.0, above=-1e-9),
            repetition_penalty=fields.number("repetition_penalty", 1.0, above=0),
            eos_token_ids=_eos(fields) or _config_eos(folder),
            max_new_tokens=fields.integer("max_new_tokens") if fields.has("max_new_tokens") else None,
        )


def _config_eos(folder: Path) -> tuple[int, ...]:
    if not (folder / "config.json").is_file():
        return ()
    config = Fields.read(folder / "config.json")
    return _eos(config) or _eos(config.section("text_config"))


def _eos(fields: Fields) -> tuple[int, ...]:
    """``eos_token_id`` as a tuple: one number or a list of them; empty when it is not said."""
    if not fields.has("eos_token_id"):
        return ()
    if isinstance(fields.values["eos_token_id"], list):
        return fields.integers("eos_token_id")
    return (fields.integer("eos_token_id", least=0),)
