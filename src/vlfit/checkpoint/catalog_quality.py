"""Published quality of the catalog's models, each figure with its source; what each series is good for."""

from dataclasses import dataclass

from vlfit.checkpoint import catalog

# The first is what names and plans prefer: Frigate's documentation finds Qwen3.5, whose tower has no
# deepstack, worse on small details.
GOOD_FOR = {
    "Qwen3-VL": "small details and boxes",
    "Qwen3.5": "long contexts and many turns",
}
DEFAULT_SERIES = next(iter(GOOD_FOR))
BENCHMARKS = ("MMMU", "RealWorldQA", "OCRBench")
_REPORT = "Qwen3-VL technical report, arXiv 2511.21631"
_EMBEDL = "embedl/Edge-Inference-Benchmarks"


@dataclass(frozen=True, slots=True)
class Quality:
    """A published ``score`` in percent of 16-bit weights; ``thinking``: the model reasoned first."""

    benchmark: str
    score: float
    thinking: bool
    source: str


def _card(size: str) -> str:
    return f"model card of Qwen/Qwen3.5-{size}"


def _figures(source: str, scores: dict[str, float], *, thinking: bool = False) -> tuple[Quality, ...]:
    return tuple(Quality(benchmark, score, thinking, source) for benchmark, score in scores.items())


# By family and edition. A figure that was not found in a source is missing.
_PUBLISHED = {
    ("Qwen3-VL-8B", "Instruct"): _figures(_REPORT, {"MMMU": 69.6, "RealWorldQA": 71.5, "OCRBench": 89.6}),
    ("Qwen3-VL-4B", "Instruct"): _figures(_REPORT, {"MMMU": 67.4, "RealWorldQA": 70.9, "OCRBench": 88.1}),
    ("Qwen3-VL-2B", "Instruct"): _figures(_REPORT, {"MMMU": 53.4}),
    ("Qwen3.5-9B", ""): _figures(
        _card("9B"), {"MMMU": 78.4, "RealWorldQA": 80.3, "OCRBench": 89.2}, thinking=True
    ),
    ("Qwen3.5-4B", ""): _figures(
        _card("4B"), {"MMMU": 77.6, "RealWorldQA": 79.5, "OCRBench": 85.0}, thinking=True
    ),
    ("Qwen3.5-2B", ""): (
        *_figures(_card("2B"), {"MMMU": 64.2, "RealWorldQA": 71.2}),
        *_figures(_EMBEDL, {"OCRBench": 84.0}),
    ),
    ("Qwen3.5-0.8B", ""): (
        *_figures(_card("0.8B"), {"MMMU": 47.4, "RealWorldQA": 61.6}),
        *_figures(_EMBEDL, {"OCRBench": 77.5}),
    ),
}


def series_of(family: str) -> str:
    """The series of a family, its name without the size: ``Qwen3-VL`` of ``Qwen3-VL-8B``."""
    return family.rpartition("-")[0]


def published_quality(name: str) -> tuple[Quality, ...]:
    """What was published of the checkpoint ``name``, in any weights format; empty outside the catalog."""
    entry = catalog.find_entry(name)
    return () if entry is None else _PUBLISHED.get((entry.family, entry.edition), ())
