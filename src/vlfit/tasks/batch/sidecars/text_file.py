"""``photo.txt`` beside ``photo.jpg``, as programs that train on pictures read captions: one line of UTF-8.

Does not know what else may be said in files.
"""

from pathlib import Path

from vlfit.tasks.batch.folders import PICTURES
from vlfit.tasks.batch.sidecars.replacing import read_original, replace_file, write_new
from vlfit.tasks.batch.sidecars.writer import Left, Writer
from vlfit.units import MIB

_MOST = MIB


class TextSidecar(Writer):
    """One line, because there are programs that read no second one."""

    def _write(self, path: Path, words: str) -> None:
        place = path.with_suffix(".txt")
        line = " ".join(words.split())
        original = read_original(place, _MOST)
        if original is None:
            write_new(place, f"{line}\n".encode())
            return
        old = original.data.decode("utf-8", "replace").removeprefix("\ufeff")
        if self._may_replace(old, line, "the .txt that is there"):
            check_alone(path)
            replace_file(original, f"{line}\n".encode())


def check_alone(path: Path) -> None:
    """Raises ``Left`` where ``photo.jpg`` and ``photo.png`` would replace each other's words for ever."""
    for kind in PICTURES - {path.suffix.lower()}:
        if path.with_suffix(kind).exists() or path.with_suffix(kind.upper()).exists():
            raise Left("another picture has the same name but for its kind, and the sidecar")
