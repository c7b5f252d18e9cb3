"""Small files beside the weights: image processor, chat template, generation config, tokenizer.

Their places changed between versions of transformers; all are read, with transformers' defaults.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.gguf_folder import is_gguf_folder, read_sources
from vlfit.errors import CheckpointError, MissingFile

_TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """Settings of an image or video processor: limits, patches, normalization.

    ``min_pixels`` and ``max_pixels`` are areas, of a picture or of all frames of a clip together. A channel
    value v of 0-255 becomes ``(v * rescale_factor - mean) / std``.
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
    def max_tokens(self) -> int:
        """The most image tokens that one picture takes in the prompt."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2


def processor_fields(folder: Path, section: str, file: str) -> Fields | None:
    """The settings in ``section`` of ``processor_config.json`` (transformers 5), else all those in ``file``.

    ``file``: such as ``preprocessor_config.json``, which older versions write. None if neither exists.
    """
    if (folder / "processor_config.json").is_file():
        nested = Fields.read(folder / "processor_config.json")
        if nested.has(section):
            return nested.section(section)
    return Fields.read(folder / file) if (folder / file).is_file() else None


def read_chat_template(folder: Path) -> str:
    """The Jinja source of the checkpoint's chat template; if it has several, the one called ``default``.

    Raises ``MissingFile`` if no file has a template, ``CheckpointError`` if it cannot be read.
    """
    for path in (folder / name for name in _TEMPLATE_FILES):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return _read_text(path)
        fields = Fields.read(path)
        if fields.has("chat_template"):
            return _default_template(fields)
    if is_gguf_folder(folder):
        raise no_gguf_template(read_sources(folder).model[0].name)
    raise MissingFile(
        f"{folder} holds no chat template (looked in: {', '.join(_TEMPLATE_FILES)})",
        "Fetch the whole checkpoint (vlfit pull NAME), or copy chat_template.json from the original model.",
    )


def no_gguf_template(name: str) -> MissingFile:
    """The error for the GGUF file ``name``, if it has no chat template."""
    return MissingFile(
        f"{name} has no chat template (tokenizer.chat_template)",
        "Get another conversion of the model, such as unsloth/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M.",
    )


def _default_template(fields: Fields) -> str:
    template: Any = fields.values["chat_template"]
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    elif isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise fields.field_error(
            "chat_template", "has an unknown form", 'a string, or a list with one named "default"'
        )
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch this file again.") from None


def tokenizer_file(folder: Path) -> Path:
    """Path of ``tokenizer.json`` in ``folder``. Raises ``MissingFile`` if it does not exist."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFile(
            f"tokenizer.json is missing in {folder}",
            "Fetch the whole checkpoint (vlfit pull NAME); vocab.json and merges.txt alone are not read.",
        )
    return path


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling that the checkpoint recommends, with transformers' defaults for missing fields.

    Without ``do_sample`` decoding is greedy: ``temperature`` is 0, and ``top_p``, ``top_k`` and ``min_p``
    have no effect. ``eos_token_ids``: empty if the checkpoint names none. ``max_new_tokens``: None if the
    checkpoint sets no limit.
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
        """Read ``generation_config.json``, which may be missing. ``eos_token_id`` may be in config.json.

        Raises ``CheckpointError`` for a field of the wrong type.
        """
        path = folder / "generation_config.json"
        fields = Fields.read(path) if path.is_file() else Fields({}, path.name)
        do_sample = fields.flag("do_sample", False)
        return cls(
            do_sample=do_sample,
            temperature=fields.number("temperature", 1.0, above=-1e-9) if do_sample else 0.0,
            top_p=fields.number("top_p", 1.0, above=0),
            top_k=fields.integer("top_k", 50, minimum=0),
            min_p=fields.number("min_p", 0.0, above=-1e-9),
            repetition_penalty=fields.number("repetition_penalty", 1.0, above=0),
            eos_token_ids=_eos_ids(fields) or _eos_ids_of_config(folder),
            max_new_tokens=fields.integer("max_new_tokens") if fields.has("max_new_tokens") else None,
        )


def _eos_ids_of_config(folder: Path) -> tuple[int, ...]:
    if not (folder / "config.json").is_file():
        return ()
    config = Fields.read(folder / "config.json")
    return _eos_ids(config) or _eos_ids(config.section("text_config"))


def _eos_ids(fields: Fields) -> tuple[int, ...]:
    """``eos_token_id``, a number or a list, as a tuple; empty without one."""
    if not fields.has("eos_token_id"):
        return ()
    if isinstance(fields.values["eos_token_id"], list):
        return fields.integers("eos_token_id")
    return (fields.integer("eos_token_id", minimum=0),)
