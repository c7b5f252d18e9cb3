"""The check of what Triton needs to launch a kernel, equal to the engine's own."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vlfit.doctor import checks
from vlfit.doctor.checks import check_compiler
from vlfit.errors import DeviceError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine


def pretend_triton(monkeypatch: pytest.MonkeyPatch, *, here: bool) -> None:
    find_spec = importlib.util.find_spec
    spec = importlib.util.spec_from_loader("triton", None) if here else None
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: spec if name == "triton" else find_spec(name, *more)
    )


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with gcc and Python's headers, in an environment with Triton."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gcc").touch(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda *_, **__: {"include": str(tmp_path / "include")})
    pretend_triton(monkeypatch, here=True)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def environment(tools: Path, **more: str) -> Mapping[str, str]:
    return {"PATH": str(tools / "bin"), **more}


def test_nothing_is_missing(tools: Path) -> None:
    check = check_compiler(environment(tools))
    assert (check.level, check.fix) == ("green", "")
    assert "gcc" in check.says
    (tools / "bin" / "gcc").rename(tools / "bin" / "clang")
    assert "clang" in check_compiler(environment(tools)).says


def test_missing_tools_and_the_command_that_installs_them(tools: Path) -> None:
    (tools / "bin" / "gcc").unlink()
    check = check_compiler(environment(tools))
    assert check.level == "red"
    assert "C compiler" in check.says
    assert "Python.h" not in check.says
    assert "sudo apt install build-essential python3-dev" in check.fix
    (tools / "include" / "Python.h").unlink()
    both = check_compiler(environment(tools))
    assert "C compiler" in both.says
    assert str(tools / "include" / "Python.h") in both.says


def test_the_compiler_in_cc(tools: Path) -> None:
    check = check_compiler(environment(tools, CC="icc"))
    assert check.level == "red"
    assert "'icc'" in check.says
    assert "CC" in check.fix
    assert check_compiler(environment(tools, CC="gcc")).level == "green"


def test_without_triton(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_triton(monkeypatch, here=False)
    check = check_compiler(environment(tools))
    assert check.level == "red"
    assert "Triton" in check.says
    assert "C compiler" not in check.says


@pytest.mark.parametrize("missing", ["", "bin/gcc", "include/Python.h", "CC", "triton"])
def test_the_engine_checks_the_same(missing: str, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlfit.kernels.launch import check_toolchain

    more = {}
    if missing == "CC":
        more["CC"] = "no-such-compiler"
        monkeypatch.setenv("CC", more["CC"])
    elif missing == "triton":
        pretend_triton(monkeypatch, here=False)
    elif missing:
        (tools / missing).unlink()
    level = check_compiler(environment(tools, **more)).level
    if not missing:
        check_toolchain()
        assert level == "green"
    else:
        with pytest.raises(DeviceError):
            check_toolchain()
        assert level == "red"


@pytest.mark.parametrize("described", [machine_with_card("RTX 5060"), None])
def test_the_compiler_check_needs_a_gpu(described: Machine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(replace(gpu, driver="581.15", cuda="13.0") for gpu in described.gpus) if described else ()
    monkeypatch.setattr(checks, "read_gpus", lambda *_: (gpus, ()))
    ids = [check.id for check in checks.check_all(0)]
    assert ("compiler" in ids) == bool(described)


def test_the_folder_of_pythons_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.python_include_folder().name.startswith("python3.")
    # Debian's default scheme is in /usr/local, without the headers.
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": f"/usr/{scheme}"})
    assert checks.python_include_folder() == Path("/usr/posix_prefix")
