"""Programs that run with Triton's compiler: these tests' own process has its interpreter instead."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(*arguments: str, timeout: float = 110, **settings: str) -> str:
    """What ``python ARGUMENTS`` prints, without Triton's interpreter; ``settings``: environment variables."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**environment, **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
