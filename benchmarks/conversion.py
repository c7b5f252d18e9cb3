"""What `vlfit convert` costs: processor time for each weight and RAM, beside what `vlfit plan` states.

    python -m benchmarks.conversion                         2B to int4, int4 with int8 parts, and FP8: minutes
    python -m benchmarks.conversion --model 4B --json FILE

Each conversion is a process of its own. The checkpoint has true shapes and zeros for weights, in a sparse
file, so that no disk is measured. Processor time counts, which other programs hardly change. The first thread
reads and writes; weights are rounded on the others, so what these took is what more cores shorten. The plan's
numbers are in ``plan/needs.py``.
"""

import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import ram_folder, write_sparse_checkpoint
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    commit,
    cpu_name,
    print_row,
    run_worker,
    versions_of,
    write_json,
)
from vlfit.plan.needs import CONVERSION_PARALLEL, CONVERSION_RAM, CONVERSION_SERIAL

COPIES: dict[str, dict[str, str]] = {
    "int4": {"weights": "int4"},
    "int4, embedding and vision int8": {"weights": "int4", "embedding": "int8", "vision": "int8"},
    "fp8": {"weights": "fp8"},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one conversion: weights rounded, processor seconds of all threads and of those beside the first one,
    seconds in all, and the most bytes resident.
    """

    weights: int
    processor_s: float
    beside_s: float
    seconds: float
    peak_bytes: int

    def parallel_ns(self) -> float:
        """Processor nanoseconds for each weight in what runs on several threads."""
        return self.beside_s / self.weights * 1e9

    def total_ns(self) -> float:
        """Processor nanoseconds for each weight."""
        return self.processor_s / self.weights * 1e9


def convert_once(source: str, target: str, copy: str) -> Cost:
    """Convert ``source`` into the new folder ``target``, in this process."""
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.quantize.conversion import convert

    all_before, own_before = time.process_time(), time.thread_time()
    done = convert(open_checkpoint(source), target=Path(target), **COPIES[copy])  # type: ignore[arg-type]
    processor_s, own_s = time.process_time() - all_before, time.thread_time() - own_before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(done.converted_parameters, processor_s, processor_s - own_s, done.seconds, peak)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="2B", choices=["2B", "4B", "8B"])
    parser.add_argument("--worker", nargs=3, metavar=("SOURCE", "TARGET", "COPY"), help="used by itself")
    add_json_option(parser)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(asdict(convert_once(*options.worker))))
        return
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch")}
    facts["model"] = options.model
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    print_row(["copy", "ns a weight", "plan", "of it parallel", "plan", "peak MiB", "plan", "seconds"])
    print_row(["---"] * 8)
    results: dict[str, Any] = {"facts": facts, "rows": {}}
    with tempfile.TemporaryDirectory(dir=ram_folder()) as folder:
        source = write_sparse_checkpoint(Path(folder) / "source", options.model, "bf16")
        for number, copy in enumerate(COPIES):
            target = f"{folder}/copy-{number}"
            worker = ("--worker", str(source), target, copy)
            cost = Cost(**run_worker("benchmarks.conversion", *worker))
            results["rows"][copy] = asdict(cost)
            parallel = CONVERSION_PARALLEL[COPIES[copy]["weights"]]
            planned = (CONVERSION_SERIAL.value + parallel) * 1e9
            print_row(
                [
                    copy,
                    f"{cost.total_ns():.0f}",
                    f"{planned:.0f}",
                    f"{cost.parallel_ns():.0f}",
                    f"{parallel * 1e9:.0f}",
                    f"{cost.peak_bytes / MIB:.0f}",
                    f"{CONVERSION_RAM.bytes / MIB:.0f}",
                    f"{cost.seconds:.0f}",
                ]
            )
            write_json(options.json, results)


if __name__ == "__main__":
    main()
