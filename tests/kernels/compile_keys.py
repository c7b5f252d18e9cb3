"""Keys of a launch of an int4 product of one row as it is, and with a change each; prints JSON.

    python -m tests.kernels.compile_keys

For a process of its own, and not for Triton's interpreter.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context

from triton.experimental.gluon import language as gl

from tests.kernels.compile_for import keys_of, launches_of
from vlfit.kernels.gemm import one_row, one_row_kernels, row_integers
from vlfit.kernels.launches import Launch, Pointer, import_kernels

CAPABILITY = (8, 6)


def nothing() -> None:
    pass


def lines_above() -> None:
    row_integers.quantize_row.starting_line_number += 1


def kernel() -> None:
    function = one_row_kernels.one_row_kernel.kernel
    function._unsafe_update_src(function.src + "    # changed\n")


def called_function() -> None:
    function = row_integers.wanted_places
    function._unsafe_update_src(function.src + "    # changed\n")


def constant_of_the_module() -> None:
    row_integers.LEAST_EXPONENT = gl.constexpr(41)


def what_the_form_says() -> None:
    one_row.RowForm.shift = property(lambda form: 3)  # type: ignore[assignment,method-assign]


# Kinds of change: of what is imported, before keys are asked for; and of the launch.
CODE: dict[str, Callable[[], None]] = {
    "as it is": nothing,
    "lines above": lines_above,
    "kernel": kernel,
    "called function": called_function,
    "constant of the module": constant_of_the_module,
    "what the form says": what_the_form_says,
}


def changed_launches(launch: Launch) -> dict[str, Launch]:
    constants = dict(launch.constants)
    first, *others = launch.arguments
    assert isinstance(first, Pointer)

    def with_constant(name: str, value: object) -> Launch:
        return replace(launch, constants=tuple(sorted({**constants, name: value}.items())))

    return {
        "type": replace(launch, arguments=(replace(first, dtype="float16"), *others)),
        "alignment": replace(launch, arguments=(replace(first, aligned=False), *others)),
        "form": with_constant("FORM", replace(constants["FORM"], has_bias=True)),
        "compiler option": with_constant("maxnreg", constants["maxnreg"] + 8),
    }


def key_after(change: str, launch: Launch, capability: tuple[int, int]) -> str:
    CODE[change]()
    [key] = keys_of([launch], capability)
    return key


def main() -> None:
    launch = next(each for each in launches_of("4B-int4", CAPABILITY) if each.name == "one_row_kernel")
    import_kernels()
    asked = {name: (name, launch, CAPABILITY) for name in CODE}
    asked |= {name: ("as it is", each, CAPABILITY) for name, each in changed_launches(launch).items()}
    asked["card"] = "as it is", launch, (8, 9)
    with get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        keys = pool.starmap(key_after, asked.values(), chunksize=1)
    print(json.dumps(dict(zip(asked, keys, strict=True))))


if __name__ == "__main__":
    main()
