"""What Triton demands of kernels without saying so. The interpreter, which other tests use, does not mind.

**Constants.** Triton hashes the constants that a kernel and the functions it calls read from their modules,
ordered by name and then by the address of the module's dictionary. Two constants of one name and different
values would therefore give another key in every other process, and compile the kernel anew at a start.

**Parameters.** Triton launches a kernel by a Python function that it generates, with local variables of
its own.
"""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil
from triton.runtime.jit import JITFunction
import vlfit.kernels
from vlfit.kernels.launch import LaunchCache

found = 0
for info in pkgutil.walk_packages(vlfit.kernels.__path__, "vlfit.kernels."):
    module = importlib.import_module(info.name)
    for name, kernel in vars(module).items():
        kernel = kernel.kernel if isinstance(kernel, LaunchCache) else kernel
        if not isinstance(kernel, JITFunction) or kernel.fn.__module__ != info.name:
            continue
        kernel.cache_key
        found += 1
        for parameter in kernel.params:
            if parameter.name in ("params", "specialization", "options", "backend", "specialize_impl"):
                print(f"{info.name}.{name} has a parameter called {parameter.name}")
        values = {}
        for (constant, _), (value, _) in kernel.used_global_vals.items():
            if values.setdefault(constant, value) != value:
                print(f"{info.name}.{name} reads two constants called {constant}")
print(found > 30)
"""


def test_constants_have_one_value_and_parameters_no_reserved_name() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
