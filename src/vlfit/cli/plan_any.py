"""``vlfit plan --backend transformers`` for a model that the native engine does not know: its ledger.

Knows: where such a checkpoint is found, and how its ledger is shown. Does not know: what the lines are made
of (``plan/any_model.py``).
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vlfit.cli.plan_page import LETTERS, new_console, text_of
from vlfit.cli.printing import Printer, plain
from vlfit.units import MIB

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.machine.model import Gpu, Machine
    from vlfit.plan.ledger import Line
    from vlfit.plan.search import Wishes

_WORDS = 128  # tokens of a question and a template, as the backend leaves them free
_BF16_BYTES = 2
_GUESSED = "What passes take is a guess until the model has run: vlfit serve measures it at its start."


def plan_any(name: str, machine: "Machine", wishes: "Wishes", printer: Printer, *, json: bool) -> bool:
    """Show the ledger of ``name`` on the emptiest card of ``machine``, computed in bfloat16. Whether it fits.

    Raises what reading config and headers raises; weights are not fetched.
    """
    from vlfit.plan.any_model import Wish, context_of, lines_on_gpu, text_shape
    from vlfit.plan.search import emptiest

    gpu = emptiest(machine)
    checkpoint = _headers_of(name)
    shape = text_shape(checkpoint.config)
    context = context_of(shape, wishes.context)
    wish = Wish(context, min(wishes.image_tokens or context, context - _WORDS), _BF16_BYTES)
    lines = lines_on_gpu(checkpoint, shape, gpu, wish)
    total = sum(line.bytes for line in lines)
    fits = total <= gpu.total
    if json:
        printer.data(_facts(checkpoint, gpu, wish.image_tokens, context, lines))
    else:
        printer.line(_page(checkpoint, name, gpu, context, lines))
    return fits


def _headers_of(name: str) -> "AnyCheckpoint":
    from vlfit.checkpoint import hub
    from vlfit.checkpoint.any_model import read_any
    from vlfit.checkpoint.remote import read_remote_any

    folder = Path(name).expanduser()
    if folder.is_dir():
        return read_any(folder.resolve().name, folder)
    cached = hub.cached_folder(name, hub.any_model(lambda _: None))
    return read_any(name, cached) if cached is not None else read_remote_any(name)


def _facts(
    checkpoint: "AnyCheckpoint", gpu: "Gpu", image_tokens: int, context: int, lines: "tuple[Line, ...]"
) -> dict[str, Any]:
    total = sum(line.bytes for line in lines)
    return {
        "version": 1,
        "model": checkpoint.name,
        "backend": "transformers",
        "fits": total <= gpu.total,
        "machine": {"gpu": gpu.name, "total": gpu.total, "free": gpu.free},
        "settings": {"context": context, "image_tokens": image_tokens, "sequences": 1, "dtype": "bfloat16"},
        "ledger": [
            {"line": line.line, "bytes": line.bytes, "how": line.how, "note": line.note} for line in lines
        ],
        "total": total,
        "headroom": gpu.total - total,
        "remarks": [_GUESSED],
    }


def _page(checkpoint: "AnyCheckpoint", name: str, gpu: "Gpu", context: int, lines: "tuple[Line, ...]") -> str:
    page = new_console()
    kind, card = plain(checkpoint.model_type or "?", terminal=True), plain(gpu.name, terminal=True)
    page.print(f"{plain(checkpoint.name, terminal=True)} ({kind}) with transformers in bfloat16 on {card}")
    page.print(f"context {context} tokens, one request at a time\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for line in lines:
        sign = LETTERS.get(line.line, "")
        table.add_row(sign, line.line, f"{line.bytes / MIB:,.0f}", line.how, plain(line.note, terminal=True))
    total = sum(line.bytes for line in lines)
    table.add_row("", "total", f"{total / MIB:,.0f}", "", f"of {gpu.total / MIB:,.0f} MiB")
    page.print(table)
    left = (gpu.total - total) / MIB
    page.print(
        f"\nFits, with {left:,.0f} MiB left." if left >= 0 else f"\nDoes not fit: {-left:,.0f} MiB too few."
    )
    page.print(_GUESSED)
    command = f"vlfit serve {shlex.quote(name)} --backend transformers --context {context}"
    page.print(f"Start it with: {plain(command, terminal=True)}{'' if left >= 0 else ' --offload auto'}")
    return text_of(page)
