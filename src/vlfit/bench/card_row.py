"""A row of the table in ``docs/cards.md``, with which ``vlfit bench`` and ``vlfit verify --share`` end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlfit.api.engine_options import KERNEL_GROUPS, EngineOptions, plain_groups
from vlfit.api.stats import EngineSettings
from vlfit.checkpoint.catalog import find_entry
from vlfit.checkpoint.gguf.repository import parse_name
from vlfit.checkpoint.hub import is_hub_name
from vlfit.checkpoint.quantization import FP8
from vlfit.checkpoint.source import is_mini
from vlfit.machine.model import Gpu
from vlfit.units import MIB, counted

if TYPE_CHECKING:
    from vlfit.bench.workload import BenchOptions

LOCAL = "a local checkpoint"
NOT_VERIFIED = "not verified"
COLUMNS = (
    *("device", "driver", "vlfit", "model", "verdict", "memory, held of planned", "tokens/s", "first token"),
)


@dataclass(frozen=True, slots=True)
class CardRow:
    """What one person measured on one card, with one request at a time.

    ``driver``: "" on a processor. ``model``: as the checkpoint is named, which is shown only if everybody can
    fetch it. ``format_name``: of its weights. ``verdict``: of ``vlfit verify``. ``held_bytes`` of
    ``planned_bytes``: both 0 if memory was not compared; on a processor those of weights and caches, as no
    more is known of a process there. ``tokens_per_s``, ``first_token_s``: None if no speed was measured.
    ``asked``: the picture's size, or text, and what of the requests was not as usual. ``unusual``: settings
    of the engine that were not.
    """

    device: str
    driver: str
    vlfit: str
    model: str
    format_name: str
    verdict: str
    held_bytes: int
    planned_bytes: int
    tokens_per_s: float | None
    first_token_s: float | None
    asked: str
    unusual: tuple[str, ...] = ()

    def cells(self) -> list[str]:
        """The texts of ``COLUMNS``."""
        memory = "-"
        if self.planned_bytes:
            memory = f"{self.held_bytes / MIB:,.0f} of {self.planned_bytes / MIB:,.0f} MiB"
            memory += "" if self.driver else ", weights and caches"
        pace = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.1f}"
        first = "-" if self.first_token_s is None else f"{self.first_token_s * 1000:,.0f} ms, {self.asked}"
        model = ", ".join((shared_name(self.model), self.format_name, *self.unusual))
        return [self.device, self.driver or "-", self.vlfit, model, self.verdict, memory, pace, first]


def row_block(row: CardRow) -> list[str]:
    """The table's header and ``row`` in Markdown; the last line is the one to add to ``docs/cards.md``."""
    return [table_line(COLUMNS), table_rule(len(COLUMNS)), table_line(row.cells())]


def table_line(cells: Sequence[str]) -> str:
    """A line of a Markdown table, whatever is in its ``cells``."""
    return f"| {' | '.join(cell_text(each) for each in cells)} |"


def table_rule(columns: int) -> str:
    """The line below a Markdown table's header."""
    return f"|{'---|' * columns}"


def cell_text(text: str) -> str:
    """``text`` as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def unusual_settings(asked: "BenchOptions | EngineOptions", ran: EngineSettings) -> tuple[str, ...]:
    """What of an engine's settings is not the default and changes speed or memory, in words.

    ``asked``: as it was asked for; ``ran``: as it came out.
    """
    named = [] if asked.dtype == "auto" else [f"computed in {ran.dtype}"]
    named += unusual_weights(asked, ran)
    if asked.max_num_batched_tokens != EngineOptions().max_num_batched_tokens:
        named.append(f"passes of {counted(asked.max_num_batched_tokens, 'token')}")
    if asked.image_tokens is not None:
        named.append(f"pictures of at most {counted(ran.image_tokens, 'token')}")
    return tuple(named)


def unusual_weights(asked: "BenchOptions | EngineOptions", ran: EngineSettings) -> tuple[str, ...]:
    """The part of ``unusual_settings`` that says what computes, and from where."""
    named = ["KV cache in fp8"] if ran.kv_dtype == FP8 else []
    if ran.offload:
        named.append(f"{counted(ran.offload, 'layer')} in RAM")
    if plain := plain_groups(asked.kernels):
        which = [group for group in KERNEL_GROUPS if group in plain]
        named.append("plain kernels" if len(which) == len(KERNEL_GROUPS) else f"plain {' and '.join(which)}")
    return tuple(named)


def driver_text(gpu: Gpu) -> str:
    """Driver and CUDA of ``gpu``."""
    return f"{gpu.driver}, CUDA {gpu.cuda}"


def is_public(name: str) -> bool:
    """Whether ``name`` is mini's, of the catalog or of the hub."""
    repository = name.partition("@")[0]
    known = is_mini(name) or find_entry(repository) is not None
    return known or is_hub_name(name) or parse_name(name) is not None


def shared_name(name: str) -> str:
    """``name`` if everybody can fetch it, as the name of a folder or file may tell whose it is."""
    return name if is_public(name) else LOCAL
