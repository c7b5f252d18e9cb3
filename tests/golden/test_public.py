"""Public names: of the package, of VLM and Client, and of all that their methods give, with signatures.

In which module a class lives is nobody's business: it is left out.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vlfit
from tests.golden.conftest import ROOT
from tests.golden.kept import check_facts
from vlfit.client import VLM, Client

_MODULES = re.compile(r"\b[a-z_]+(?:\.\w+)*\.(?=[A-Za-z])")  # vlfit.api.outputs. before Answer


class Spelled(str):
    """Text that a signature shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def spelled(annotation: object) -> Spelled:
    """An annotation in the same words whatever Python shows it and whichever module its classes are in."""
    if isinstance(annotation, str):
        return Spelled(_MODULES.sub("", annotation))
    if isinstance(annotation, typing.ForwardRef):
        return spelled(annotation.__forward_arg__)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return Spelled(f"Literal[{', '.join(map(repr, inner))}]")
    if origin in (typing.Union, types.UnionType):
        return Spelled(" | ".join(spelled(each) for each in inner))
    if isinstance(annotation, list):
        return Spelled(f"[{', '.join(spelled(each) for each in annotation)}]")
    if origin is not None:
        return Spelled(f"{_name(origin)}[{', '.join(spelled(each) for each in inner)}]")
    if annotation is None or annotation is types.NoneType:
        return Spelled("None")
    return Spelled("..." if annotation is ... else _name(annotation))


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or _MODULES.sub("", str(kind))


def signature(function: Any) -> str:
    found = inspect.signature(function)
    given = [
        each if each.annotation is each.empty else each.replace(annotation=spelled(each.annotation))
        for each in found.parameters.values()
    ]
    back = found.return_annotation
    return str(
        found.replace(parameters=given, return_annotation=back if back is found.empty else spelled(back))
    )


def described(kind: type) -> dict[str, Any]:
    """Public members of a class: signatures of methods, types of fields and properties."""
    found: dict[str, Any] = {
        "bases": [base.__name__ for base in kind.__mro__[1:-1] if base is not typing.Generic]
    }
    if not issubclass(kind, dict):
        found["__init__"] = signature(kind)
    fields = {name: str(spelled(of)) for name, of in inspect.get_annotations(kind).items()}
    found |= {name: of for name, of in fields.items() if not name.startswith("_")}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_") or (issubclass(kind, dict) and name in dir(dict)):
            continue
        if isinstance(member, property):
            assert member.fget is not None
            found[name] = f"property {signature(member.fget)}"
        elif isinstance(member, staticmethod | classmethod):
            found[name] = f"{type(member).__name__} {signature(member.__func__)}"
        elif inspect.isfunction(member):
            found[name] = signature(member)
        else:
            found.setdefault(name, type(member).__name__)
    return found


def named_in(annotation: object) -> Iterator[type]:
    """Classes of vlfit in an annotation, however deep."""
    if isinstance(annotation, type) and annotation.__module__.startswith("vlfit"):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from named_in(inner)


def given_by(kind: type) -> Iterator[type]:
    """Classes of vlfit that public fields and methods of ``kind`` give or take."""
    annotations: list[Any] = []
    if dataclasses.is_dataclass(kind):
        annotations += [field.type for field in dataclasses.fields(kind)]
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(function):
            annotations += inspect.get_annotations(function).values()
    for annotation in annotations:
        yield from named_in(annotation)


def reached(*kinds: type) -> set[type]:
    found: set[type] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += given_by(kind)
    return found


def test_public_names(served: str, tmp_path: Path) -> None:
    with Client(served) as client:  # what is imported late has no class in an annotation
        picture = ROOT / "examples" / "pictures" / "shop.png"
        tally = client.batch(picture, tmp_path / "out.jsonl")
    kinds = reached(VLM, Client, type(tally))
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    errors = every(vlfit.VlfitError)
    check_facts(
        "public.json",
        {
            "vlfit": sorted(vlfit.__all__),
            "classes": {kind.__name__: described(kind) for kind in kinds},
            "errors": {
                kind.__name__: {
                    "bases": [base.__name__ for base in kind.__mro__[1:-3]],
                    "exit_code": getattr(kind, "exit_code", None),
                    "__init__": signature(kind),
                }
                for kind in errors
                if kind.__module__ == "vlfit.errors"
            },
        },
    )


def every(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind, *(each for one in below for each in every(one))]
