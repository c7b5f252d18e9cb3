"""``photo.jpg.xmp`` beside ``photo.jpg``, as darktable and digiKam read it: the description, nothing else.

What other programs wrote there stays, byte for byte. Does not know XML (``tasks/batch/sidecars/xmp.py``).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from xml.parsers import expat
from xml.sax.saxutils import escape

from vlfit.errors import CannotWrite
from vlfit.tasks.batch.items import shown_name
from vlfit.tasks.batch.sidecars.writer import Writer, check_alone, read_original, replace_file, write_new
from vlfit.units import MIB

# The description in an XMP packet, read and replaced by its place in the bytes: all others stay as they
# are.
#
# No library: those that write XML again change what they do not know (prefixes, comments, spaces), and
# programs have their settings there. expat, of Python's own library, says where things are; what declares
# entities, which is how a short file becomes a long one, is refused. XMP is ISO 16684-1: ``dc:description``
# is an Alt array of texts, each with its language, ``x-default`` first.


_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_DC = "http://purl.org/dc/elements/1.1/"
_XML = "http://www.w3.org/XML/1998/namespace"
_TAG = re.compile(rb"""<([^\s<>/"']+)(?:[^<>"']|"[^"]*"|'[^']*')*>""")
_DEPTH = 200
_LONGEST = 2**20
_NEW = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="{rdf}">
  <rdf:Description rdf:about="">
   {description}
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


class BadPacket(Exception):
    """What is wrong with a sidecar, and what to do."""

    def __init__(self, message: str, hint: str = "Look at it with: exiftool -validate") -> None:
        super().__init__(message)
        self.hint = hint


def new_packet(words: str) -> bytes:
    """A packet that says ``words`` and nothing else."""
    return _NEW.format(rdf=_RDF, description=_description(words)).encode()


@dataclass(slots=True, eq=False)
class _Element:
    """Where an element is: from ``start``, its own tag up to ``inside``, up to ``end`` (of its last tag)."""

    name: str
    start: int
    inside: int
    tag: bytes
    outside: int = 0  # where its last tag begins; the same as ``inside`` where it has none
    end: int = 0
    language: str = ""
    text: str = ""


@dataclass(slots=True)
class Packet:
    """``description`` is what the packet says now: in no particular language, else in the first one."""

    data: bytes
    rdf: _Element | None = None
    about: _Element | None = None
    described: _Element | None = None
    choice: _Element | None = None
    texts: list[_Element] = field(default_factory=list)
    _open: list[_Element] = field(default_factory=list)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Raises ``BadPacket`` for what is no XMP, or is made to do harm."""
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            _check_encoding("", "UTF-16", -1)
        packet = cls(data)
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse_entities
        parser.XmlDeclHandler = _check_encoding
        parser.StartElementHandler = lambda name, given: packet._starts(name, given, parser.CurrentByteIndex)
        parser.EndElementHandler = lambda name: packet._ends(parser.CurrentByteIndex)
        parser.CharacterDataHandler = packet._says
        try:
            parser.Parse(data, True)
        except expat.ExpatError as error:
            raise BadPacket(f"it is no XML that can be read ({error})") from None
        if packet.rdf is None:
            raise BadPacket("it is XML, but no XMP")
        return packet

    @property
    def description(self) -> str:
        default = [text for text in self.texts if text.language == "x-default"] or self.texts
        return default[0].text.strip() if default else (self.described.text.strip() if self.described else "")

    def with_description(self, words: str) -> bytes:
        """The packet with ``words`` in no particular language; other languages keep theirs.

        Raises ``BadPacket`` if what comes out would not say it, which would be our mistake.
        """
        changed = self._changed(words)
        if type(self).read(changed).description != words.strip():
            raise BadPacket("the description in it cannot be replaced")
        return changed

    def _changed(self, words: str) -> bytes:
        default = next((text for text in self.texts if text.language == "x-default"), None)
        if default is not None:
            return self._filled(default, escape(words))
        if self.choice is not None and self.choice.end > self.choice.inside:
            place = self.choice.inside
            return self.data[:place] + _text(words).encode() + self.data[place:]
        if self.described is not None:
            found = self.described
            return self.data[: found.start] + _description(words).encode() + self.data[found.end :]
        if self.about is not None:
            return self._filled(self.about, _description(words), keep=True)
        assert self.rdf is not None
        inner = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about="">{_description(words)}</rdf:Description>'
        return self._filled(self.rdf, inner, keep=True)

    def _filled(self, element: _Element, inner: str, *, keep: bool = False) -> bytes:
        """``inner`` in place of what ``element`` holds, or (``keep``) behind it."""
        tag = self.data[element.start : element.inside]
        held = self.data[element.inside : element.outside] if keep else b""
        last = self.data[element.outside : element.end]
        if tag.endswith(b"/>"):
            tag, last = tag[:-2] + b">", b"</" + element.tag + b">"
        return self.data[: element.start] + tag + held + inner.encode() + last + self.data[element.end :]

    def _starts(self, name: str, given: dict[str, str], start: int) -> None:
        found = _TAG.match(self.data, start)
        if found is None or len(self._open) >= _DEPTH:
            raise BadPacket("it is nested, or written, as no program writes XMP")
        element = _Element(name, start, found.end(), found[1], language=given.get(f"{_XML} lang", ""))
        place = [outer.name for outer in self._open]
        self._open.append(element)
        if name == f"{_RDF} RDF" and self.rdf is None:
            self.rdf = element
        elif name == f"{_RDF} Description" and place[-1:] == [f"{_RDF} RDF"]:
            if f"{_DC} description" in given:
                raise BadPacket("it has its description as an attribute, which XMP does not allow")
            self.about = self.about or element
        elif name == f"{_DC} description" and place[-2:] == [f"{_RDF} RDF", f"{_RDF} Description"]:
            if self.described is not None:
                raise BadPacket("it has two descriptions")
            self.described = element
        elif self.described is not None:
            if name == f"{_RDF} Alt" and len(self._open) >= 2 and self._open[-2] is self.described:
                self.choice = element
            elif name == f"{_RDF} li" and self.choice is not None and self._open[-2] is self.choice:
                self.texts.append(element)

    def _ends(self, index: int) -> None:
        element = self._open.pop()
        if self.data[element.inside - 2 : element.inside] == b"/>":
            element.outside = element.end = element.inside
        else:
            element.outside, element.end = index, self.data.index(b">", index) + 1

    def _says(self, text: str) -> None:
        if self._open and len(self._open[-1].text) < _LONGEST:
            self._open[-1].text += text


def _refuse_entities(*_: object) -> None:
    raise BadPacket("it declares entities (DOCTYPE), which XMP has no use for and which can do harm")


def _check_encoding(_version: str, encoding: str | None, _standalone: int) -> None:
    if encoding is not None and encoding.lower() not in ("utf-8", "us-ascii", "ascii"):
        raise BadPacket(f"it is written in {encoding}", "Let the program that wrote it write it in UTF-8.")


def _description(words: str) -> str:
    return (
        f'<dc:description xmlns:dc="{_DC}"><rdf:Alt xmlns:rdf="{_RDF}">{_text(words)}</rdf:Alt>'
        "</dc:description>"
    )


def _text(words: str) -> str:
    return f'<rdf:li xmlns:rdf="{_RDF}" xml:lang="x-default">{escape(words)}</rdf:li>'


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
