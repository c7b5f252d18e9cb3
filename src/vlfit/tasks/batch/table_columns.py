"""Which column of a Parquet file holds pictures, and how: bytes, a record of bytes and path, or a name.

Knows the forms in which data sets keep pictures, Hugging Face's among them, and what to say of files that are
none of these. Imports pyarrow when it is used. Does not know how rows are read (``table_rows.py``).
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from vlfit.errors import UsageError
from vlfit.tasks.batch.names import shown_name

Form = Literal["bytes", "record", "name"]

_PICTURE_NAMES = ("image", "picture", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content")
_ADDRESS_NAMES = (
    *("image", "picture", "url", "image_url", "img_url", "image_path", "path"),
    *("file_name", "filename", "file", "filepath"),
)


@dataclass(frozen=True, slots=True)
class Column:
    """Where pictures are. ``name`` form: a path below the table's folder, or a URL."""

    name: str
    form: Form


def arrow_parquet() -> ModuleType:
    """``pyarrow.parquet``. Raises ``UsageError`` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"Parquet files need pyarrow, which cannot be imported: {error}", "pip install 'vlfit[parquet]'"
        ) from None
    parquet: ModuleType = pyarrow.parquet
    return parquet


def open_table(path: Path) -> Any:
    """A ``ParquetFile`` that reads as little ahead as it can.

    Raises ``UsageError`` for a file that is gone, cut off or no Parquet, in words.
    """
    parquet = arrow_parquet()
    shown = shown_name(path)
    try:
        # Not ahead of what is asked for, and in pieces: by itself it reads whole row groups.
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except FileNotFoundError:
        raise UsageError(f"{shown}: no such file", f"You are in {Path.cwd()}.") from None
    except Exception as error:  # a footer may hold anything
        raise UsageError(
            f"{shown} is no Parquet file, or broken: {first_line(error)}",
            "Copy it again. A Parquet file is only whole when its writer has closed it.",
        ) from None


def picture_column(schema: Any, wanted: str | None, shown: str) -> Column:
    """The column ``wanted``, or the one that can only be meant. Raises ``UsageError``, naming those there."""
    columns = {field.name: form_of(field.type) for field in schema}
    if wanted is not None:
        if wanted not in columns:
            raise UsageError(f"{shown} has no column {wanted!r}", f"It has {_listed(schema)}.")
        form = columns[wanted]
        if form is None:
            raise UsageError(
                f"{shown}: column {wanted!r} holds {schema.field(wanted).type}, which is no picture",
                f"It has {_listed(schema)}.",
            )
        return Column(wanted, form)
    held = [Column(name, form) for name, form in columns.items() if form in ("bytes", "record")]
    named = [Column(name, form) for name, form in columns.items() if name.lower() in _ADDRESS_NAMES and form]
    found = held if len(held) != 0 else named
    if len(found) > 1:
        best = [column for column in found if column.name.lower() in _PICTURE_NAMES]
        found = best or found
    if len(found) == 1:
        return found[0]
    names = " or ".join(f"--column {column.name}" for column in found)
    what = "several columns that may hold pictures" if found else "no column that is sure to hold pictures"
    hint = f"Say which: {names}." if found else f"Say which with --column. It has {_listed(schema)}."
    raise UsageError(f"{shown} has {what}", hint)


def form_of(kind: Any) -> Form | None:
    """How a column of the Arrow type ``kind`` may hold pictures."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "name"
    if types.is_struct(kind):
        inner = {field.name: form_of(field.type) for field in kind}
        return "record" if inner.get("bytes") == "bytes" and inner.get("path", "name") == "name" else None
    return None


def check_kept(schema: Any, keep: tuple[str, ...], shown: str) -> None:
    """Raises ``UsageError`` for columns to be carried along that are not there, or that JSON cannot hold."""
    import pyarrow.types as types

    for name in keep:
        if name not in schema.names:
            raise UsageError(f"{shown} has no column {name!r}", f"It has {_listed(schema)}.")
        kind = schema.field(name).type
        if form_of(kind) in ("bytes", "record") or types.is_fixed_size_binary(kind):
            raise UsageError(
                f"{shown}: column {name!r} holds bytes, which cannot be carried along",
                "Keep columns of numbers and words.",
            )


def first_line(error: Exception) -> str:
    """What Arrow says first; the rest is of its own code."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _listed(schema: Any) -> str:
    names = [f"{field.name} ({str(field.type)[:40]})" for field in schema]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
