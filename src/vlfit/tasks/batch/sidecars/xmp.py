"""``photo.jpg.xmp`` beside ``photo.jpg``, as darktable and digiKam read it: the description, nothing else.

What other programs wrote there stays, byte for byte. Does not know XML (``xmp_packet.py``).
"""

from pathlib import Path

from vlfit.errors import CannotWrite
from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.sidecars.replacing import read_original, replace_file, write_new
from vlfit.tasks.batch.sidecars.text_file import check_alone
from vlfit.tasks.batch.sidecars.writer import Writer
from vlfit.tasks.batch.sidecars.xmp_packet import BadPacket, Packet, new_packet
from vlfit.units import MIB

# darktable's with every step of a long history stay below one.
_MOST = 16 * MIB


class XmpSidecar(Writer):
    """``stem``: ``photo.xmp``, as Adobe's programs and Capture One call it."""

    def __init__(self, overwrite: bool, *, stem: bool = False) -> None:
        super().__init__(overwrite)
        self.stem = stem

    def _write(self, path: Path, words: str) -> None:
        place = path.with_suffix(".xmp") if self.stem else path.with_name(f"{path.name}.xmp")
        original = read_original(place, _MOST)
        if original is None:
            write_new(place, new_packet(words))
            return
        try:
            packet = Packet.read(original.data)
            if self._may_replace(packet.description, words, "the XMP sidecar that is there"):
                if self.stem and packet.description:
                    check_alone(path)
                replace_file(original, packet.with_description(words))
        except BadPacket as error:
            raise CannotWrite(f"{shown_name(place)} is left as it is: {error}", error.hint) from None
