"""The models that this server answers for, and the names that mean them."""

import time
from dataclasses import dataclass, field
from functools import lru_cache

from vlfit.backends.base import Backend
from vlfit.errors import UnknownModel, VlfitError

_LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
_PATH_CHARACTERS = ("\\", "~", "..", ":/")
_MAX_NAME = 200  # characters; no longer name is looked up


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name.

    ``aliases``: other names for it, such as the one typed on the command line. ``context``: most tokens of
    one request, prompt and output; None: unknown. ``created``: Unix time, in ``/v1/models``.
    """

    backend: Backend
    aliases: tuple[str, ...] = ()
    context: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.backend.model

    def is_called(self, name: str) -> bool:
        """Whether ``name`` means this model: its name, an alias, or another name that the CLI takes for it.

        ``qwen3-vl:4b`` means any weights format of Qwen3-VL-4B-Instruct. ``:latest`` changes nothing.
        """
        known = (self.name, *self.aliases)
        if name in known:
            return True
        plain = name.removesuffix(_LATEST)
        if plain.lower() in map(str.lower, known):
            return True
        return is_plain_name(plain) and _last_word(self.name) in _names_meant(plain)


class ServedModels:
    """All models of a server; the first is the default."""

    def __init__(self, *models: ServedModel) -> None:
        self.all = models

    def find(self, name: str | None) -> ServedModel:
        """The model that ``name`` means, the first for None and empty. Raises ``UnknownModel``."""
        if not name:
            return self.all[0]
        for model in self.all:
            if model.is_called(name):
                return model
        served = ", ".join(repr(model.name) for model in self.all)
        raise UnknownModel(
            f"the model {name[:_MAX_NAME]!r} is not served here",
            f"This server serves {served}.",
            param="model",
        )


def _last_word(name: str) -> str:
    """``name`` without its owner and revision, in lower case."""
    return name.rpartition("/")[2].partition("@")[0].lower()


def is_plain_name(name: str) -> bool:
    """Whether ``name`` cannot be a file path, so that looking it up tells clients nothing about the disk.

    ``org/name`` is plain; empty, unprintable and very long names are not.
    """
    return (
        0 < len(name) <= _MAX_NAME
        and name.isprintable()
        and name.count("/") <= 1
        and not name.startswith((".", "/"))
        and not any(each in name for each in _PATH_CHARACTERS)
    )


@lru_cache(maxsize=256)
def _names_meant(name: str) -> frozenset[str]:
    """Last words of the checkpoints that ``name`` means, by the catalog and what is on this computer."""
    from vlfit.checkpoint.source import resolve_name

    try:
        return frozenset(_last_word(each.name) for each in resolve_name(name))
    except VlfitError:
        return frozenset()
