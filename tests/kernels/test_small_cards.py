"""The kernels of linear attention and of heads of 256 fit consumer cards, compiled without one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 * 1024  # bytes that a program may have from compute capability 8.6 on, but for data centres
# A thread's spilled registers. A few come from L1 in no time; where the compiler gives up, it is kilobytes.
STACK = 1024


@pytest.mark.parametrize(
    "capability", [86, pytest.param(89, marks=pytest.mark.slow), pytest.param(120, marks=pytest.mark.slow)]
)
def test_shared_memory_and_registers(capability: int) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed (torch's CPU build comes without it)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for", str(capability)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[2],
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = {name.partition(": ")[2] for name in found}
    assert kernels >= {
        "gated_delta_steps_kernel",
        "convolve_rows_kernel",
        "chunk_system_kernel",
        "chunk_scan_kernel",
        "gated_rms_norm_kernel",
        "paged_decode_kernel",
        "paged_prefill_kernel",
        "rope_store_kv_kernel",
        "gate_rows_kernel",
    }
    too_large = {name: used for name, used in found.items() if used["shared"] > SHARED}
    assert not too_large
    assert not {name: used for name, used in found.items() if used["stack"] > STACK}
