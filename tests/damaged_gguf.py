"""Copies of a GGUF file with other metadata or tensors: what a person meets after a wrong conversion."""

from collections.abc import Callable, Mapping
from functools import lru_cache
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
    facts, changes = source.stat(), dict(metadata or {})
    reader, all_kept = _read(source, facts.st_mtime_ns, facts.st_size)
    kept = dict(all_kept)
    architecture = changes.pop("general.architecture", kept.pop("general.architecture")[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target, architecture)
    for name, (before, kind, items) in kept.items():
        value = changes.pop(name, before)
        if value is not None:
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


@lru_cache(maxsize=4)  # most tests change the same file
def _read(source: Path, changed: int, size: int) -> tuple[gguf.GGUFReader, dict[str, tuple[Any, Any, Any]]]:
    """A reader, whose file stays mapped; by key the value, its type and that of its items."""
    reader = gguf.GGUFReader(source)
    fields = [field for field in reader.fields.values() if not field.name.startswith("GGUF.")]
    return reader, {field.name: (field.contents(), field.types[0], field.types[-1]) for field in fields}


def merges_of(source: Path) -> list[str]:
    """``tokenizer.ggml.merges`` of ``source``."""
    merges: list[str] = gguf.GGUFReader(source).fields["tokenizer.ggml.merges"].contents()
    return merges
