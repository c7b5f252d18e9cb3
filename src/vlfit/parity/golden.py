"""Answers of known checkpoints to the drawn scenes: how well they find the boxes, and what they say.

A checkpoint is known by the names, shapes and formats of its tensors and its first bytes of weights, not by
the folder it lies in. Others can be added by posts (docs/cards.md).
"""

import hashlib
from dataclasses import dataclass

from vlfit.checkpoint.source import Checkpoint

_BYTES = 2**16


@dataclass(frozen=True)
class Golden:
    """What a known checkpoint answers about the drawn scenes, by the scene's name.

    ``overlaps``: least mean overlap (intersection over union) of its boxes with the true ones. ``words``: its
    captions. Both were measured in float32; overlaps leave a pixel or two to other formats.
    """

    name: str
    overlaps: dict[str, float]
    words: dict[str, str]


_MINI_CAPTION = (
    "A red circle, an orange diamond, a green triangle, a blue square and a purple star "
    "on a white background."
)
GOLDEN: dict[str, Golden] = {
    "e243d905365ac866": Golden(
        "mini",
        {"square": 0.9, "wide": 0.88, "tall": 0.87, "wide_turned": 0.88},
        dict.fromkeys(("square", "wide", "tall"), _MINI_CAPTION),
    )
}


def identity(checkpoint: Checkpoint) -> str:
    """Sixteen hexadecimal digits: a hash of the tensors' names, dtypes and shapes and the first weights."""
    digest = hashlib.sha256()
    infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
    for info in infos:
        digest.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
    with infos[0].file.open("rb") as file:
        file.seek(infos[0].start)
        digest.update(file.read(min(infos[0].bytes, _BYTES)))
    return digest.hexdigest()[:16]
