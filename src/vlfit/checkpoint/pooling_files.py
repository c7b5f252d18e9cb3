"""What a checkpoint is made for: chat, vectors or scores, by the files of sentence-transformers beside it.

``modules.json`` lists what follows the model: ``Pooling`` (an embedding model) or ``LogitScore`` (a
reranker). Older copies of Qwen3-VL-Embedding and -Reranker have no such files: their names tell.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vlfit.api.pooling import DEFAULT_INSTRUCTION, RERANK_INSTRUCTION, ModelKind, ModelPooling
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.fields import Fields
from vlfit.errors import CheckpointError
from vlfit.units import MIB

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_POOLING, _SCORE = "1_Pooling/config.json", "1_LogitScore/config.json"
FILES = (MODULES, PROMPTS, _POOLING, _SCORE)
_HARMLESS = ("Transformer", "Normalize")  # vectors are normalized in any case
_NAMED = re.compile(r"-(embedding|reranker)(-|$)", re.IGNORECASE)
_MAX_MODULES = 16
_HINT = "Use Qwen3-VL-Embedding or Qwen3-VL-Reranker, or open the model elsewhere."


def read_pooling(folder: Path, name: str, config: ModelConfig) -> ModelPooling:
    """Read what the checkpoint in ``folder`` is made for; ``name`` tells if no file does.

    Raises ``CheckpointError`` for damaged files, and for models whose vectors vlfit would compute wrongly:
    without a vision tower, with another pooling than that of the last token, or with further layers.
    """
    size = config.text.hidden_size
    modules = _modules(folder)
    kind = _kind(modules, name)
    if kind == "chat":
        return ModelPooling(kind, size)
    if config.vision is None:
        if not modules:
            return ModelPooling("chat", size)
        raise CheckpointError(f"{name} is a text-only {kind} model, which vlfit does not run", _HINT)
    instruction = _instruction(folder)
    if kind == "embedding":
        _check_pooling(folder, modules.get("Pooling", ""))
        return ModelPooling(kind, size, instruction or DEFAULT_INSTRUCTION)
    return ModelPooling(
        kind, size, instruction or RERANK_INSTRUCTION, _score_tokens(folder, modules.get("LogitScore", ""))
    )


def without_missing_head(config: ModelConfig, folder: Path, name: str, tensors: Iterable[str]) -> ModelConfig:
    """``config`` with a tied output head if an embedding model has none in its files: ``tensors``, names.

    Qwen3-VL-Embedding-8B is such a one: its config.json says that there is a head.
    """
    if config.tie_word_embeddings or any(each.startswith("lm_head.") for each in tensors):
        return config
    is_embedding = read_pooling(folder, name, config).kind == "embedding"
    return replace(config, tie_word_embeddings=True) if is_embedding else config


def kind_of_name(name: str) -> ModelKind:
    """What the model ``name`` is made for, as far as its name tells (``Qwen3-VL-Embedding-2B``)."""
    match = _NAMED.search(name.rpartition("/")[2].partition("@")[0])
    if match is None:
        return "chat"
    return "embedding" if match[1].lower() == "embedding" else "reranker"


def _kind(modules: dict[str, str], name: str) -> ModelKind:
    if not modules:
        return kind_of_name(name)
    if "LogitScore" in modules:
        return "reranker"
    if "Pooling" not in modules:
        return "chat"
    other = [each for each in modules if each not in ("Pooling", *_HARMLESS)]
    if other:
        raise CheckpointError(f"{MODULES}: {name} ends in {other[0]!r}, which vlfit does not run", _HINT)
    return "embedding"


def _modules(folder: Path) -> dict[str, str]:
    """Class and folder of each module in ``modules.json``; empty without the file."""
    path = folder / MODULES
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MIB:
            raise ValueError("larger than 1 MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, list) or len(values) > _MAX_MODULES:
            raise ValueError(f"not a list of at most {_MAX_MODULES} modules")
        return {str(each["type"]).rpartition(".")[2]: str(each.get("path", "")) for each in values}
    except (ValueError, OSError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not readable: {error}", "Fetch this file again.") from None


def _module_config(folder: Path, subfolder: str, usual: str) -> Fields | None:
    """The config of a module: in ``subfolder``, else in its ``usual`` place; None if there is none."""
    places = [usual]
    named = PurePosixPath(subfolder)
    if subfolder and not named.is_absolute() and ".." not in named.parts:
        places.insert(0, f"{subfolder}/config.json")
    path = next((folder / place for place in places if (folder / place).is_file()), None)
    return None if path is None else Fields.read(path)


def _check_pooling(folder: Path, subfolder: str) -> None:
    fields = _module_config(folder, subfolder, _POOLING)
    if fields is None:
        return
    modes = [name for name, value in fields.values.items() if name.startswith("pooling_mode_") and value]
    mode = fields.text("pooling_mode", modes[0].removeprefix("pooling_mode_") if modes else "lasttoken")
    if mode != "lasttoken":
        raise CheckpointError(
            f"{_POOLING}: pooling_mode is {mode[:40]!r}; vlfit pools the last token only", _HINT
        )


def _instruction(folder: Path) -> str:
    """The default prompt of sentence-transformers; "" without one."""
    path = folder / PROMPTS
    if not path.is_file():
        return ""
    fields = Fields.read(path)
    name = fields.text("default_prompt_name", "")
    return fields.section("prompts").text(name, "").strip() if name else ""


def _score_tokens(folder: Path, subfolder: str) -> tuple[int, int | None] | None:
    fields = _module_config(folder, subfolder, _SCORE)
    if fields is None:
        return None
    no = fields.integer("false_token_id", minimum=0) if fields.has("false_token_id") else None
    return fields.integer("true_token_id", minimum=0), no
