"""Jinja in a sandbox that also bounds how long a template runs and how large its texts get.

Jinja's own sandbox keeps a template from Python's internals, but lets it multiply a text by ten billion or
loop within loops for hours. Here every loop counts its items and every call itself, and what makes a text
longer than its parts is looked at before or right after. That bounds what such templates do, not what a
process may take: a text of lists within lists can still be some gigabytes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 10_000_000  # items of loops of one rendering, and its calls: some seconds
MAX_TEXT = 2**24  # characters of a text, or items of a list, beyond what is long already
_GROWTH = 8  # times as long as it is a text may become, as when it is written as JSON
_CALL_STEPS = 50  # that a call counts as
_MAX_BITS = 4096  # of a power
_MAX_WIDTH = 10_000  # that a text is padded to, or that its lines are indented by
# A format that is wider, or as wide as a value says.
_WIDE = re.compile(r"[%{][^a-zA-Z%{}]*(\d{5}|\*)|\{[^{}]*[:.{][^{}]*(\d{5}|\{)")
_WIDENING = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson"]
)


@dataclass(slots=True)
class _Limits:
    """What is left of the steps of a rendering, and how long its texts may be."""

    steps: int = MAX_STEPS
    text: int = MAX_TEXT


_limits: ContextVar[_Limits | None] = ContextVar("limits", default=None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile with ``compile_bounded``, render with ``render_bounded``, which raises ``SecurityError``.

    ``filters``: others than Jinja's.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # a text of any length
        self.globals["_step"] = str  # calling anything is a step
        self.filters.update(filters)
        self.filters["_count_items"] = _count_items
        self.filters["_check_length"] = _check_length
        self.filters.update({name: _bounded(name, function) for name, function in self.filters.items()})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``, unless it is too large."""
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    _require_length(len(one) * other)
                elif isinstance(one, int) and isinstance(other, int):
                    _require(one.bit_length() + other.bit_length() <= _MAX_BITS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * abs(right) <= _MAX_BITS)
        elif operator == "%" and isinstance(left, str):
            _require_format(left, right if isinstance(right, tuple) else (right,))
        return _check_length(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call ``__obj``, which counts as ``_CALL_STEPS``."""
        _take(_CALL_STEPS)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps ``str.format``
        _require_sizes(getattr(method, "__name__", ""), (getattr(method, "__self__", ""), *args), kwargs)
        return _check_length(super().call(__context, __obj, *args, **kwargs))


def compile_bounded(environment: BoundedEnvironment, parsed: nodes.Template) -> Template:
    """Compile ``parsed``, which is changed: its loops count, and joined texts are looked at."""
    for loop in parsed.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, "_count_items")
        if loop.recursive:  # goes through further items without ``iter``
            where = {"lineno": loop.lineno, "environment": environment}
            call = nodes.Call(nodes.Name("_step", "load", **where), [], [], None, None, **where)
            loop.body.insert(0, nodes.ExprStmt(call, **where))
    _check_joined(parsed)
    return environment.from_string(parsed)


def render_bounded(template: Template, variables: Mapping[str, Any]) -> str:
    """Render ``template`` of a ``BoundedEnvironment``."""
    before = _limits.set(_Limits(text=MAX_TEXT + _GROWTH * _characters(variables)))
    try:
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            _require_length(length)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _limits.reset(before)


def _characters(value: Any) -> int:
    """How many there are in all texts in ``value``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(each) for key, each in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def _check_joined(node: nodes.Node) -> None:
    """Let each ``a ~ b`` below ``node`` be looked at."""
    for name in node.fields:
        value = getattr(node, name)
        if isinstance(value, list):
            for each in value:
                if isinstance(each, nodes.Node):
                    _check_joined(each)
            setattr(node, name, [_looked_at(each) for each in value])
        elif isinstance(value, nodes.Node):
            _check_joined(value)
            setattr(node, name, _looked_at(value))


def _looked_at(value: Any) -> Any:
    return _filtered(value, "_check_length") if isinstance(value, nodes.Concat) else value


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _count_items(items: Iterable[Any]) -> Any:
    """``items``, which a loop goes through, as something whose length is known."""
    known = items if hasattr(items, "__len__") else list(items)
    _take(len(known))  # type: ignore[arg-type]
    return known


def _check_length(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple):
        _require_length(len(value))
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, which first looks at its arguments and then at what it returns."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        passed = hasattr(function, "jinja_pass_arg")
        _require_sizes(name, args[passed:], kwargs)
        return _check_length(function(*args, **kwargs))

    return bounded


def _require_sizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Look at the arguments of the filter or method ``name``; the first is what it is applied to."""
    given = (*args, *kwargs.values())
    if name in _WIDENING:
        _require(all(not isinstance(each, int) or each <= _MAX_WIDTH for each in given[1:]))
    elif name == "replace" and len(args) > 2:
        text, old, new = (str(each) for each in args[:3])
        _require_length(text.count(old) * len(new))
    elif name == "join" and len(args) > 1:
        between, items = (args[0], args[1]) if isinstance(args[0], str) else (args[1], args[0])
        if hasattr(items, "__len__") and isinstance(between, str):
            _require_length(len(between) * len(items) + sum(map(_length, items)))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _require_length(sum(map(_length, args[0])))
    elif name in ("format", "format_map") and args and isinstance(args[0], str):
        _require_format(args[0], given[1:])


def _require_format(text: str, values: tuple[Any, ...]) -> None:
    places = text.count("{") + text.count("%")
    longest = max(map(_length, values), default=0)
    _require(_WIDE.search(text) is None)
    _require_length(places * longest)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _take(steps: int) -> None:
    limits = _limits.get()
    if limits is not None:
        limits.steps -= steps
        _require(limits.steps >= 0)


def _require_length(length: int) -> None:
    limits = _limits.get()  # None while a template is compiled
    _require(length <= (MAX_TEXT if limits is None else limits.text))


def _require(holds: bool) -> None:
    if not holds:
        raise SecurityError("it takes more steps, or makes a longer text, than vlfit lets it")
