"""XMP sidecars (``photo.jpg.xmp``), as darktable and digiKam read them: sets the description, nothing else.

The description is replaced by its byte offsets, found with expat, so that everything else stays byte for
byte: XML libraries would change prefixes, comments and white space, and programs keep their settings there.
Entity declarations are refused ("billion laughs"). XMP is ISO 16684-1: ``dc:description`` is an Alt array of
texts, one per language, ``x-default`` first.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from xml.parsers import expat
from xml.sax.saxutils import escape

from vlfit.errors import CannotWrite
from vlfit.tasks.batch.items import display_name
from vlfit.tasks.batch.sidecars.writer import (
    SidecarWriter,
    check_sidecar_not_shared,
    read_original,
    replace_file,
    write_new,
)
from vlfit.units import MIB

_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_DC = "http://purl.org/dc/elements/1.1/"
_XML = "http://www.w3.org/XML/1998/namespace"
_TAG = re.compile(rb"""<([^\s<>/"']+)(?:[^<>"']|"[^"]*"|'[^']*')*>""")
_MAX_DEPTH = 200
_MAX_TEXT = 2**20
_NEW_PACKET = """\
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


class InvalidXmp(Exception):
    """An XMP file that cannot be parsed or changed. ``hint``: what the user can do."""

    def __init__(self, message: str, hint: str = "Look at it with: exiftool -validate") -> None:
        super().__init__(message)
        self.hint = hint


def new_packet(text: str) -> bytes:
    """A new XMP packet, the whole content of a sidecar file, with only ``text`` as its description."""
    return _NEW_PACKET.format(rdf=_RDF, description=_description(text)).encode()


@dataclass(slots=True, eq=False)
class _Element:
    """Byte offsets of an element: start tag from ``start`` to ``inside``, end tag up to ``end``."""

    name: str
    start: int
    inside: int
    tag: bytes
    outside: int = 0  # start of the end tag; ``inside`` for an empty-element tag
    end: int = 0
    language: str = ""
    text: str = ""


@dataclass(slots=True)
class XmpPacket:
    """A parsed XMP packet, with the byte offsets of the elements that hold its description."""

    data: bytes
    rdf: _Element | None = None
    rdf_description: _Element | None = None
    description_element: _Element | None = None
    alternatives: _Element | None = None
    texts: list[_Element] = field(default_factory=list)
    _open: list[_Element] = field(default_factory=list)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse the content of an XMP file.

        Raises ``InvalidXmp`` if it is not XMP in UTF-8, has two descriptions, or declares entities.
        """
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            _check_encoding("", "UTF-16", -1)
        packet = cls(data)
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse_entities
        parser.XmlDeclHandler = _check_encoding
        parser.StartElementHandler = lambda name, given: packet._start_element(
            name, given, parser.CurrentByteIndex
        )
        parser.EndElementHandler = lambda name: packet._end_element(parser.CurrentByteIndex)
        parser.CharacterDataHandler = packet._character_data
        try:
            parser.Parse(data, True)
        except expat.ExpatError as error:
            raise InvalidXmp(f"it is not valid XML ({error})") from None
        if packet.rdf is None:
            raise InvalidXmp("it is XML, but not XMP")
        return packet

    @property
    def description(self) -> str:
        """The description for ``x-default``, else in the first language; empty if there is none."""
        default = [text for text in self.texts if text.language == "x-default"] or self.texts
        if default:
            return default[0].text.strip()
        return self.description_element.text.strip() if self.description_element else ""

    def with_description(self, text: str) -> bytes:
        """The bytes of the packet with ``text`` as the ``x-default`` description; all others are kept.

        Raises ``InvalidXmp`` if the result would not read back as ``text`` (a bug).
        """
        changed = self._replaced(text)
        if type(self).read(changed).description != text.strip():
            raise InvalidXmp("its description cannot be replaced")
        return changed

    def _replaced(self, text: str) -> bytes:
        default = next((each for each in self.texts if each.language == "x-default"), None)
        if default is not None:
            return self._with_content(default, escape(text))
        if self.alternatives is not None and self.alternatives.end > self.alternatives.inside:
            offset = self.alternatives.inside
            return self.data[:offset] + _text(text).encode() + self.data[offset:]
        if self.description_element is not None:
            element = self.description_element
            return self.data[: element.start] + _description(text).encode() + self.data[element.end :]
        if self.rdf_description is not None:
            return self._with_content(self.rdf_description, _description(text), keep=True)
        assert self.rdf is not None
        inner = f'<rdf:Description xmlns:rdf="{_RDF}" rdf:about="">{_description(text)}</rdf:Description>'
        return self._with_content(self.rdf, inner, keep=True)

    def _with_content(self, element: _Element, inner: str, *, keep: bool = False) -> bytes:
        """The packet with ``inner`` as the content of ``element``; ``keep``: after its present content."""
        tag = self.data[element.start : element.inside]
        content = self.data[element.inside : element.outside] if keep else b""
        end_tag = self.data[element.outside : element.end]
        if tag.endswith(b"/>"):
            tag, end_tag = tag[:-2] + b">", b"</" + element.tag + b">"
        parts = (self.data[: element.start], tag, content, inner.encode(), end_tag, self.data[element.end :])
        return b"".join(parts)

    def _start_element(self, name: str, attributes: dict[str, str], start: int) -> None:
        tag = _TAG.match(self.data, start)
        if tag is None or len(self._open) >= _MAX_DEPTH:
            raise InvalidXmp("its nesting or tags are not those of any program that writes XMP")
        element = _Element(name, start, tag.end(), tag[1], language=attributes.get(f"{_XML} lang", ""))
        ancestors = [outer.name for outer in self._open]
        self._open.append(element)
        if name == f"{_RDF} RDF" and self.rdf is None:
            self.rdf = element
        elif name == f"{_RDF} Description" and ancestors[-1:] == [f"{_RDF} RDF"]:
            if f"{_DC} description" in attributes:
                raise InvalidXmp("its description is an attribute, which XMP does not allow")
            self.rdf_description = self.rdf_description or element
        elif name == f"{_DC} description" and ancestors[-2:] == [f"{_RDF} RDF", f"{_RDF} Description"]:
            if self.description_element is not None:
                raise InvalidXmp("it has two descriptions")
            self.description_element = element
        elif self.description_element is not None:
            if name == f"{_RDF} Alt" and len(self._open) >= 2 and self._open[-2] is self.description_element:
                self.alternatives = element
            elif (
                name == f"{_RDF} li" and self.alternatives is not None and self._open[-2] is self.alternatives
            ):
                self.texts.append(element)

    def _end_element(self, index: int) -> None:
        element = self._open.pop()
        if self.data[element.inside - 2 : element.inside] == b"/>":
            element.outside = element.end = element.inside
        else:
            element.outside, element.end = index, self.data.index(b">", index) + 1

    def _character_data(self, text: str) -> None:
        if self._open and len(self._open[-1].text) < _MAX_TEXT:
            self._open[-1].text += text


def _refuse_entities(*_: object) -> None:
    raise InvalidXmp("it declares entities (DOCTYPE), which XMP does not need and which can be malicious")


def _check_encoding(_version: str, encoding: str | None, _standalone: int) -> None:
    if encoding is not None and encoding.lower() not in ("utf-8", "us-ascii", "ascii"):
        raise InvalidXmp(f"its encoding is {encoding}", "Save it as UTF-8 in the program that wrote it.")


def _description(text: str) -> str:
    return (
        f'<dc:description xmlns:dc="{_DC}"><rdf:Alt xmlns:rdf="{_RDF}">{_text(text)}</rdf:Alt>'
        "</dc:description>"
    )


def _text(text: str) -> str:
    return f'<rdf:li xmlns:rdf="{_RDF}" xml:lang="x-default">{escape(text)}</rdf:li>'


# darktable's, with a long editing history, stay below 1 MiB.
_MAX_BYTES = 16 * MIB


class XmpSidecar(SidecarWriter):
    """Writes the text as the description in ``photo.jpg.xmp``; all else in an existing file is kept.

    ``overwrite``: replace another description. ``stem``: name the file ``photo.xmp``, as Adobe's programs and
    Capture One do.
    """

    def __init__(self, overwrite: bool, *, stem: bool = False) -> None:
        super().__init__(overwrite)
        self.stem = stem

    def _write(self, path: Path, text: str) -> None:
        sidecar = path.with_suffix(".xmp") if self.stem else path.with_name(f"{path.name}.xmp")
        original = read_original(sidecar, _MAX_BYTES)
        if original is None:
            write_new(sidecar, new_packet(text))
            return
        try:
            packet = XmpPacket.read(original.data)
            if self._may_replace(packet.description, text, "the existing XMP sidecar"):
                if self.stem and packet.description:
                    check_sidecar_not_shared(path)
                replace_file(original, packet.with_description(text))
        except InvalidXmp as error:
            raise CannotWrite(f"{display_name(sidecar)} was not changed: {error}", error.hint) from None
