"""What `vlfit plan` predicts for a processor, beside what the engine does there.

    python -m benchmarks.cpu_plan 2B-int4 2B-fp8 2B-bf16        minutes each
    python -m benchmarks.cpu_plan 4B-int4 --folder sparse       checkpoints are kept there

Checkpoints have true shapes and no content (`checkpoints.py`). Each runs in processes of its own, and the
best run counts, as other programs only ever take time away. The processor is measured before and after them
(`machine/processor.py`), and the better numbers count. The last column says by which factor the constants of
`plan/native/cpu_cost.py` are off.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    commit,
    cpu_name,
    in_mib,
    print_table,
    process_memory,
    run_worker,
    write_json,
)

CONTEXT, SIDES = 4096, (512, 1024)  # pixels of pictures: 256 and 1024 image tokens


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", metavar="SIZE-FORMAT")
    parser.add_argument("--folder", type=Path, help="of checkpoints, kept; default: a temporary one")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", type=int, nargs="*", default=list(SIDES), help="of pictures, in pixels")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[(job := json.loads(options.worker)).pop("kind")](**job)))
        return
    print(f"commit {commit()}; {cpu_name()}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as place:
        folder, results = options.folder or Path(place), []
        for name in options.checkpoints:
            model = str(checkpoint_of(name, folder))
            speeds, runs = [_work("processor")], []
            for _ in range(options.rounds):
                runs.append(_work("engine", model=model, tokens=options.tokens, sides=options.sides))
                print(f"  {name}: {runs[-1]}", file=sys.stderr)
                speeds.append(_work("processor"))
            speed = {key: max(each[key] for each in speeds) for key in speeds[0]}
            planned = _work("plan", model=model, sides=options.sides, **speed)
            results.append({"checkpoint": name, "speed": speed, "planned": planned, "runs": runs})
            write_json(options.json, results)
    print_table(_rows(results))


def _rows(results: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["checkpoint", "what", "predicted", "measured", "measured / predicted"]]
    for each in results:
        planned, runs = each["planned"], each["runs"]
        rows.append([each["checkpoint"], f"{each['speed']['bandwidth'] / 1e9:.1f} GB/s, "
                     f"{each['speed']['multiplications'] / 1e9:.0f} GFLOP/s", "", "", ""])  # fmt: skip
        rows.append(_row("tokens/s", planned["decode"], max(run["decode"] for run in runs)))
        for side in runs[0]["pictures"]:
            seconds = min(run["pictures"][side] for run in runs)
            rows.append(_row(f"first token, {side}x{side}, s", planned["pictures"][side], seconds))
        rows.append(_row("first token, text, s", planned["text"], min(run["text"] for run in runs)))
        for name in ("anonymous", "resident"):
            held, expected = max(run[name] for run in runs), planned[name]
            rows.append(
                ["", f"{name} at most, MiB", in_mib(expected), in_mib(held), f"{held / expected:.2f}"]
            )
    return rows


def _row(what: str, predicted: list[float], measured: float) -> list[str]:
    low, expected, high = predicted
    return [
        "",
        what,
        f"{low:.2f} < {expected:.2f} < {high:.2f}",
        f"{measured:.2f}",
        f"{measured / expected:.2f}",
    ]


def _work(kind: str, **job: Any) -> Any:
    return run_worker("benchmarks.cpu_plan", "--worker", json.dumps({"kind": kind, **job}), timeout=1800)


# --- in a process of its own -------------------------------------------------------------------------------

TEXT = "word and " * 120


def measure_processor() -> dict[str, float]:
    """Bandwidth and arithmetic, as `vlfit plan` measures them."""
    from vlfit.machine.processor import measure, read_processor

    found = measure(read_processor())
    return {"bandwidth": found.bandwidth or 0, "multiplications": found.multiplications or 0}


def predict(model: str, sides: list[int], bandwidth: int, multiplications: int) -> dict[str, Any]:
    """What the plan says of ``model`` for a processor of these speeds."""
    from dataclasses import replace

    from vlfit.machine.survey import survey
    from vlfit.plan.backends import CPU
    from vlfit.plan.model_lookup import find_exact_models
    from vlfit.plan.native import cpu_cost
    from vlfit.plan.planner import find_plan
    from vlfit.plan.wishes import Wishes

    machine = survey()
    assert machine.host.processor is not None
    processor = replace(machine.host.processor, bandwidth=bandwidth, multiplications=multiplications)
    machine = replace(machine, gpus=(), host=replace(machine.host, processor=processor))
    tokens = (max(sides) // 32) ** 2 if sides else 256
    wishes = Wishes(context=CONTEXT, image_tokens=tokens, sequences=1)
    plan = find_plan(find_exact_models(model), machine, wishes)
    of_side = {side: replace(plan.settings, image_tokens=(side // 32) ** 2) for side in sides}
    speeds = {side: CPU.speed(plan.model, plan.gpu, settings) for side, settings in of_side.items()}
    text = cpu_cost.first_token_seconds(plan.model, processor, 0, 256)
    assert plan.speed is not None
    return {
        "decode": _bounds(plan.speed.decode),
        "pictures": {side: _bounds(speed.first_token) for side, speed in speeds.items() if speed},
        "text": [text / cpu_cost.RANGE, text, text * cpu_cost.RANGE],
        "ledger": {line.line: line.bytes for line in plan.ledger},
        "anonymous": cpu_cost.anonymous_bytes(plan.model, processor, plan.ledger),
        "resident": cpu_cost.anonymous_bytes(plan.model, processor, plan.ledger)
        + cpu_cost.mapped_bytes(plan.model, processor),
    }


def _bounds(each: Any) -> list[float]:
    return [each.low, each.expected, each.high]


def run_engine(model: str, tokens: int, sides: list[int]) -> dict[str, Any]:
    """Load ``model``; best of several first tokens and of the times between tokens; the most RAM."""
    began = time.perf_counter()
    from vlfit.api.conversation import ImagePart, single_turn
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.backends.native import NativeBackend
    from vlfit.bench.workload import synthetic_picture

    tokens_of_picture = (max(sides) // 32) ** 2 if sides else 256
    options = EngineOptions(
        device="cpu", max_model_len=CONTEXT, max_num_seqs=1, image_tokens=tokens_of_picture, speculate=False
    )
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with NativeBackend.load(model, options) as backend, AnonymousPeak() as peak:
        ready = time.perf_counter() - began
        steps: list[float] = []
        peaks = {"loaded": process_memory("RssAnon")}

        def first_token(text: str, *pictures: ImagePart) -> float:
            times = [time.perf_counter()]
            for _ in backend.stream(single_turn(text, *pictures), sampling):
                times.append(time.perf_counter())
            steps.extend(after - before for before, after in pairwise(times[1:]))
            return times[1] - times[0]

        text = min(first_token(f"{number} {TEXT}") for number in range(3))
        peaks["text"] = peak.bytes
        pictures = {}
        for side in sides:
            each = [
                ImagePart(synthetic_picture(side, side, number)) for number in range(3 if side < 800 else 2)
            ]
            pictures[side] = min(first_token("What is this?", part) for part in each)
            peaks[f"{side}"] = peak.bytes
        return {
            "ready": ready,
            "text": text,
            "pictures": pictures,
            # The fastest quarter: other programs only ever take time away.
            "decode": 1 / statistics.mean(sorted(steps)[: max(len(steps) // 4, 1)]),
            "anonymous": peak.bytes,
            "peaks": peaks,
            "resident": process_memory("VmHWM"),
            "weights": sum(backend.account().memory.weights.values()),
            "load": os.getloadavg()[0],
        }


class AnonymousPeak:
    """The most anonymous RAM of this process within a block, by looking every few milliseconds."""

    def __enter__(self) -> Self:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.bytes = max(self.bytes, process_memory("RssAnon"))


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "processor": measure_processor,
    "plan": predict,
    "engine": run_engine,
}

if __name__ == "__main__":
    main()
