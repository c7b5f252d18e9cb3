"""A stand-in for ``benchmarks.ledger_workers`` with made-up numbers: no torch, no GPU."""

import json
import sys

from benchmarks.ledger_workers import HeldMemory, LedgerJob, report, wait_for_start
from vlfit.units import MIB

job = LedgerJob(**json.loads(sys.argv[1]))
wait_for_start()
if job.size == "4B":
    sys.exit("CUDA error: no room\nfor this")
lines = {"weights.text": 1, "weights.vision": 2, "weights.embedding": 3, "kv_cache": 4}
report(
    HeldMemory(
        process=(99_000 if job.weights == "bf16" else 1_000) * MIB,
        own=None,
        reserved=900 * MIB,
        reserved_loaded=600 * MIB,
        peak=800 * MIB,
        loaded=600 * MIB,
        bare_context=90 * MIB,
        workspace=32 * MIB,
        lines=lines,
    )
)
