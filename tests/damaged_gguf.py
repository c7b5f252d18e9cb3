"""Copies of a GGUF file with other metadata or tensors: what a person meets after a wrong conversion."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_TEXT = gguf.GGUFValueType.STRING


def rewritten(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any] | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
    reshape: Mapping[str, tuple[int, ...]] | None = None,
    added: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write ``source`` to ``target`` with changes; return ``target``.

    ``metadata``: new values by key; None removes the key. ``rename``: a tensor's new name; None leaves it
    out. ``reshape``: zeros of another shape, outputs first, by a tensor's old name.
    ``added``: further tensors of zeros.
    """
    reader, changes = gguf.GGUFReader(source), dict(metadata or {})
    kept = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    architecture = changes.pop("general.architecture", kept.pop("general.architecture").contents())
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in kept.items():
        value = changes.pop(name, field.contents()) if name in changes else field.contents()
        if value is not None:
            kind, items = field.types[0], field.types[-1]
            if kind == gguf.GGUFValueType.ARRAY and isinstance(value[0], str) is not (items == _TEXT):
                items = gguf.GGUFValueType.get_type(value[0])  # changed to another type
            writer.add_key_value(name, value, kind, items if kind == gguf.GGUFValueType.ARRAY else None)
    for name, value in changes.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        renamed = rename(tensor.name)
        if renamed is not None:
            shape = (reshape or {}).get(tensor.name)
            if shape is None:
                writer.add_tensor(renamed, tensor.data, raw_dtype=tensor.tensor_type)
            else:
                writer.add_tensor(renamed, np.zeros(shape, np.float32))
    for name, shape in (added or {}).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def merges_of(source: Path) -> list[str]:
    """``tokenizer.ggml.merges`` of ``source``."""
    merges: list[str] = gguf.GGUFReader(source).fields["tokenizer.ggml.merges"].contents()
    return merges
