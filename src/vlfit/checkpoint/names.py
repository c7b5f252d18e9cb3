"""What a person may have meant by a name: a pasted address, a shortened or misspelt name of the catalog.

Knows how people write names. Does not know files or networks: a name that is not resolved here goes on as it
is, and may still be one on the hub.
"""

import re
from difflib import get_close_matches
from urllib.parse import urlsplit

from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import BF16, CatalogEntry

_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
_REVISION_AFTER = ("tree", "blob", "resolve", "raw")
_CLOSE = 0.55  # of ``difflib``: "Qwen3-VL-4b-Intsruct" is closer, "gpt2" is not


def without_address(name: str) -> str:
    """``org/name`` or ``org/name@revision`` of a pasted page of the hub; anything else as it is."""
    text = name.strip()
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
    except ValueError:  # half an address of IPv6, say
        return name
    path = [part for part in parts.path.split("/") if part]
    if parts.hostname not in _HUBS or len(path) < 2:
        return name
    repository = "/".join(path[:2])
    if len(path) > 3 and path[2] in _REVISION_AFTER and path[3] != "main":
        return f"{repository}@{path[3]}"
    return repository


def meant(name: str) -> list[CatalogEntry]:
    """The entries of the one model of the catalog that a shortened ``name`` means; empty if it is not one.

    ``4B-FP8``, ``qwen3-vl:4b`` and ``Phi-3-mini`` are a run of an entry's own words; without an edition it is
    Instruct. A name with its owner (org/name) is never guessed at: the hub may have it.
    """
    wanted = _words(name)
    if "/" in name or len(wanted) < 2:
        return []
    found = [entry for entry in catalog.entries() if _has_run(_words_of(entry), wanted)]
    if "thinking" not in wanted:
        found = [entry for entry in found if entry.edition != "Thinking"]
    return found if len({(entry.family, entry.edition) for entry in found}) == 1 else []


def near(name: str) -> list[str]:
    """Names of the catalog that look like ``name``, the nearest first; at most three."""
    names: dict[str, str] = {}
    for entry in catalog.entries():
        names.setdefault("-".join(_words(entry.name)), entry.name)
        names.setdefault(entry.name.lower().rpartition("/")[2], entry.name)
    wanted = name.partition("@")[0].lower().rpartition("/")[2]
    found = [names[key] for key in get_close_matches(wanted, names, 6, cutoff=_CLOSE)]
    return list(dict.fromkeys(found))[:3]


def _words(name: str) -> list[str]:
    """The words of a name without its owner; "instruct" is what everything is that is not said otherwise."""
    words = re.split(r"[^a-z0-9.]+", name.lower().rpartition("/")[2])
    return [word for word in words if word and word != "instruct"]


def _words_of(entry: CatalogEntry) -> list[str]:
    return [*_words(entry.name), *([BF16] if entry.weights == BF16 else [])]


def _has_run(words: list[str], run: list[str]) -> bool:
    return any(words[start : start + len(run)] == run for start in range(len(words)))
