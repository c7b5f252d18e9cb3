"""What Ollama's clients learn of a model: names, sizes, capabilities, template."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlfit.backends.base import Backend
from vlfit.checkpoint import catalog
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.checkpoint.gguf.gguf_folder import GGUFKind
from vlfit.checkpoint.source import Checkpoint
from vlfit.prompt.reasoning import Thinking
from vlfit.server.chat.model_facts import checkpoint_of, sees_pictures, thinking_of
from vlfit.server.models.served_models import ServedModel
from vlfit.server.ollama.ollama_replies import timestamp
from vlfit.units import KIB

_SIZED_NAME = re.compile(r"(?P<family>.+)-(?P<size>\d+(?:\.\d+)?b)", re.IGNORECASE)
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
_MAX_LICENSE = 64 * KIB


@dataclass(frozen=True, slots=True)
class _Known:
    """What does not change while a model is served."""

    template: str
    thinking: Thinking | None


class ModelDetails:
    """Details of served models; chat templates are read once and kept."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def thinking(self, backend: Backend) -> Thinking | None:
        """How the model of ``backend`` writes its reasoning (``thinking_of``); None if it does not reason."""
        return self._of(backend).thinking

    def rows(self, model: ServedModel) -> list[dict[str, Any]]:
        """The rows of ``/api/tags``: one for each of ``shown_names``, with the same digest."""
        return [self._row(model, name) for name in shown_names(model)]

    def show(self, model: ServedModel) -> dict[str, Any]:
        """The response of ``/api/show``."""
        checkpoint = checkpoint_of(model.backend)
        template = self._of(model.backend).template
        sampling = model.backend.default_sampling()
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
        }
        lines = "\n".join(f"{name:<30} {value}" for name, value in parameters.items())
        license_text = _license(checkpoint.folder) if checkpoint is not None else ""
        return {
            **({"license": license_text} if license_text else {}),
            "modelfile": f"# Served by vlfit.\nFROM {model.name}\n",
            "parameters": lines,
            "template": template,
            "details": details(model),
            "model_info": _model_info(model),
            "capabilities": self.capabilities(model),
            "modified_at": _modified_at(model),
        }

    def capabilities(self, model: ServedModel) -> list[str]:
        """``completion``, and those of ``vision``, ``tools`` and ``thinking`` that the model has.

        A model on another server is taken to have ``vision`` and ``tools``. An embedding model has
        ``embedding`` and perhaps ``vision``; a reranker, for which Ollama has no word, at most ``vision``.
        """
        if not model.backend.capabilities.generates:
            able = model.backend.capabilities
            has_vision = ["vision"] if sees_pictures(model.backend) else []
            return [*(["embedding"] if able.embeds else []), *has_vision]
        known = self._of(model.backend)
        has = {
            "vision": sees_pictures(model.backend),
            "tools": "tools" in known.template or checkpoint_of(model.backend) is None,
            "thinking": known.thinking is not None,
        }
        return ["completion", *(name for name, value in has.items() if value)]

    def _row(self, model: ServedModel, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": _modified_at(model),
            "size": size_of(model),
            "digest": digest(model),
            "details": details(model),
        }

    def _of(self, backend: Backend) -> _Known:
        known = self._known.get(backend.model)
        if known is None:
            known = self._known[backend.model] = _Known(backend.chat_template, thinking_of(backend))
        return known


def with_tag(name: str) -> str:
    """``name``, with Ollama's default tag ``:latest`` if it has none; clients compare whole names."""
    return name if ":" in name else f"{name}:latest"


def shown_names(model: ServedModel) -> list[str]:
    """Names of ``model`` in lists: Ollama's (``qwen3-vl:4b``) if it is in the catalog, then its own."""
    short = short_name(model.name)
    return list(dict.fromkeys([*([short] if short else []), with_tag(model.name)]))


def short_name(name: str) -> str:
    """Ollama's name, such as ``qwen3-vl:4b`` for Qwen3-VL-4B-Instruct in any weights format.

    "" for models not in the catalog, or without a size in their name.
    """
    entry = catalog.find_entry(name)
    if entry is None:
        return ""
    match = _SIZED_NAME.fullmatch(entry.family)
    if match is None:
        return ""
    tag = match["size"].lower()
    if entry.edition == "Thinking":
        tag += "-thinking"
    return f"{match['family'].lower()}:{tag}"


def digest(model: ServedModel) -> str:
    """64 hexadecimal digits that identify ``model``: a hash of its own name and size, not of its files."""
    return hashlib.sha256(f"{model.name} {size_of(model)}".encode()).hexdigest()


def size_of(model: ServedModel) -> int:
    """Bytes of the weights; 0 if the model runs on another server."""
    checkpoint = checkpoint_of(model.backend)
    return checkpoint.weight_bytes if checkpoint is not None else 0


def details(model: ServedModel) -> dict[str, Any]:
    """Family, parameter count and weights format, as Ollama's ``details``.

    Of GGUF models families are the architectures of its file and of its mmproj (``clip``), as in Ollama.
    Empty strings if the model runs on another server.
    """
    checkpoint = checkpoint_of(model.backend)
    if checkpoint is None:
        families: tuple[str, ...] = ()
        stored = level = size = ""
    else:
        gguf = _gguf_of(checkpoint)
        families = (_family(checkpoint),) if gguf is None else gguf.architectures
        stored = "safetensors" if gguf is None else "gguf"
        level = checkpoint.weights_format.upper() if gguf is None else gguf.file_type
        size = _parameters_in_words(checkpoint.parameter_count)
    return {
        "parent_model": "",
        "format": stored,
        "family": families[0] if families else "",
        "families": list(families),
        "parameter_size": size,
        "quantization_level": level,
    }


def _gguf_of(checkpoint: Checkpoint | AnyCheckpoint) -> GGUFKind | None:
    return checkpoint.gguf if isinstance(checkpoint, Checkpoint) else None


def _family(checkpoint: Checkpoint | AnyCheckpoint) -> str:
    """A GGUF's architecture; else the model type as Ollama spells it: ``qwen3_vl`` is ``qwen3vl``."""
    gguf = _gguf_of(checkpoint)
    return checkpoint.model_type.replace("_", "") if gguf is None else gguf.architectures[0]


def _parameters_in_words(count: int) -> str:
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.1f}M" if count >= 10**6 else f"{count / 1e3:.0f}K"


def _model_info(model: ServedModel) -> dict[str, Any]:
    """GGUF's names; ``context_length`` is what this server takes, so that clients send no more."""
    checkpoint = checkpoint_of(model.backend)
    context = model.context or model.backend.context
    if checkpoint is None:
        return {"general.architecture": "", **({".context_length": context} if context else {})}
    family = _family(checkpoint)
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": model.name,
        "general.parameter_count": checkpoint.parameter_count,
    }
    if context:
        info[f"{family}.context_length"] = context
    if isinstance(checkpoint, Checkpoint):
        text, vision = checkpoint.config.text, checkpoint.config.vision
        info |= {
            f"{family}.embedding_length": text.hidden_size,
            f"{family}.block_count": text.num_hidden_layers,
            f"{family}.feed_forward_length": text.intermediate_size,
            f"{family}.attention.head_count": text.num_attention_heads,
            f"{family}.attention.head_count_kv": text.num_key_value_heads,
            f"{family}.vocab_size": text.vocab_size,
        }
        if vision is not None:
            info |= {
                f"{family}.vision.block_count": vision.depth,
                f"{family}.vision.embedding_length": vision.hidden_size,
                f"{family}.vision.patch_size": vision.patch_size,
            }
    return info


def _modified_at(model: ServedModel) -> str:
    """When the checkpoint's files were written; of a model elsewhere, when the server started."""
    checkpoint = checkpoint_of(model.backend)
    seconds = float(model.created)
    if checkpoint is not None:
        with suppress(OSError):
            seconds = (checkpoint.folder / "config.json").stat().st_mtime
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _license(folder: Path) -> str:
    """The text of the checkpoint's license file; "" without one."""
    for name in _LICENSES:
        try:
            with (folder / name).open("rb") as file:
                return file.read(_MAX_LICENSE).decode("utf-8", "replace")
        except OSError:
            continue
    return ""


def loaded_row(
    row: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    expires_at: str,
    context: int | None,
    held: int | None = None,
) -> dict[str, Any]:
    """A row of ``/api/ps``. ``row``: the model's in ``/api/tags``. ``facts``: the server's status.

    ``expires_at``: when the model will sleep, in RFC 3339. ``context``: in tokens; None becomes 0.
    ``held``: bytes of memory that the model holds; None: all that the server holds. They become ``size`` of
    the result, and its ``size_vram``, which is 0 on a CPU.
    """
    if held is None:
        held = int((facts.get("memory") or {}).get("held") or (facts.get("total") or {}).get("actual") or 0)
    on_gpu = held if facts.get("device", "cpu") != "cpu" and (facts.get("memory") or {}).get("gpu") else 0
    return {
        **{name: row[name] for name in ("name", "model", "digest", "details")},
        "size": held or row["size"],
        "size_vram": on_gpu,
        "expires_at": expires_at,
        "context_length": context or 0,
    }
