"""What Triton demands of kernels without saying so. The interpreter, which other tests use, does not mind.

**Constants.** Triton hashes the constants that a kernel and the functions it calls read from their modules,
ordered by name and then by the address of the module's dictionary. Two constants of one name and different
values would therefore give another key in every other process, and compile the kernel anew at a start.

**Parameters.** Triton launches a kernel by a Python function that it generates, with local variables of
its own.

**Strings of records.** Triton 3.6 (torch 2.11) takes a field of a constant record as an argument, but not one
that is a string: it must be a constant of the function that calls, first.
"""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import vlfit.kernels
from tests.kernels.uninterpreted import output_of
from vlfit.kernels.gemm.weights import WeightForm

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
    assert output_of("-c", PROGRAM) == "True\n"


def test_strings_of_records_are_no_arguments() -> None:
    strings = {field.name for field in fields(WeightForm) if field.type is str}
    assert strings == {"format", "codebook"}
    found = []
    for path in Path(vlfit.kernels.__path__[0]).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call):
                found += [
                    f"{path.name}:{argument.lineno}: {ast.unparse(argument)}"
                    for argument in (*call.args, *(keyword.value for keyword in call.keywords))
                    if isinstance(argument, ast.Attribute) and argument.attr in strings
                    if ast.unparse(argument).startswith("FORM.")
                ]
    assert not found
