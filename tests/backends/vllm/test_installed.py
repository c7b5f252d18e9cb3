"""Finding vLLM and its version, without starting it."""

import os
import sys
from pathlib import Path

import pytest

from tests.backends.vllm.fake_vllm import environment
from vlfit.backends.vllm import installed as where
from vlfit.errors import UsageError


def test_named_python(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", "0.22.1", cpu=False)
    found = where.find_vllm(str(python))
    assert found.program == (str(tmp_path / "env" / "bin" / "vllm"),)
    assert (found.version, found.on_cpu) == ("0.22.1", False)
    assert where.find_vllm(str(tmp_path / "env")) == where.find_vllm(str(python.parent)) == found
    assert where.find_vllm(str(tmp_path / "env" / "bin" / "vllm")).version == "0.22.1"


def test_a_python_named_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "env", "0.22.1", cpu=False)
    monkeypatch.chdir(tmp_path)
    assert where.find_vllm("env/bin/python") == where.find_vllm(str(python))
    python.with_name("vllm").unlink()  # then the Python itself is run, from another folder perhaps
    assert where.find_vllm("env/bin/python").program[0] == str(python)


def test_a_python_named_as_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "env", "0.22.1", cpu=False)
    named = python.rename(python.with_name("python3.99"))
    monkeypatch.setenv("PATH", f"{named.parent}{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    assert where.find_vllm("python3.99").version == "0.22.1"


def test_cpu_build(tmp_path: Path) -> None:
    found = where.find_vllm(str(environment(tmp_path / "env")))
    assert (found.version, found.on_cpu) == ("0.32.0+cpu", True)


def test_module_is_run_without_a_program(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    python.with_name("vllm").unlink()
    assert where.find_vllm(str(python)).program == (str(python), "-m", "vllm.entrypoints.cli.main")


def test_program_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "env", "0.30.2")
    # As pip writes it: its first line names the Python of its environment.
    words = python.with_name("vllm").read_text().split("\n", 1)
    python.with_name("vllm").write_text(f"#!{python}\n{words[1]}")
    monkeypatch.delenv("VLFIT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}/bin")
    found = where.find_vllm()
    assert found.program == (str(python.with_name("vllm")),)
    assert found.version == "0.30.2+cpu"


@pytest.mark.parametrize(
    "named",
    [
        "none",
        "file",
        "bare",
    ],
)
def test_wrong_python_is_an_error(tmp_path: Path, named: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bare").symlink_to(tmp_path / "bin" / "python")
    name = str(tmp_path / named) if named != "bare" else str(tmp_path / "bin" / "python")
    with pytest.raises(UsageError) as raised:
        where.find_vllm(name)
    assert name in raised.value.message
    assert "pip install vllm" in raised.value.hint


def test_the_python_itself_says_what_it_sees(tmp_path: Path) -> None:
    """As an environment does that finds vLLM through a .pth file, or in the packages of its base."""
    python = environment(tmp_path / "sees")
    environment(tmp_path / "has")
    [site] = (tmp_path / "has" / "lib").glob("python3*/site-packages")
    [own] = (tmp_path / "sees" / "lib").glob("python3*/site-packages")
    for info in own.iterdir():
        info.rename(tmp_path / info.name)
    with pytest.raises(UsageError):
        where.find_vllm(str(python))
    (own / "other.pth").write_text(f"{site}\n")
    assert where.find_vllm(str(python)).version == "0.32.0+cpu"


def source_tree(folder: Path, text: str) -> Path:
    """A vLLM that is never installed, as a clone of its repository."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(text)
    return folder


def python_that_sees(folder: Path, tree: Path) -> Path:
    """The Python of an environment without metadata of vLLM, and with ``tree`` on its path."""
    python = environment(folder)
    python.with_name("vllm").unlink()
    [site] = (folder / "lib").glob("python3*/site-packages")
    for info in site.iterdir():
        info.rename(folder / info.name)
    (site / "tree.pth").write_text(f"{tree}\n")
    return python


@pytest.mark.parametrize(
    ("version", "on_cpu"),
    [("0.32.1.dev3+g1a2b3c4", False), ("0.32.1.dev3+g1a2b3c4.cpu", True), ("0.32.0+cpu", True)],
)
def test_a_source_tree_without_metadata_is_asked_itself(tmp_path: Path, version: str, on_cpu: bool) -> None:
    tree = source_tree(tmp_path / "clone", f"print('INFO hello')\n__version__ = {version!r}\n")
    python = python_that_sees(tmp_path / "env", tree)
    found = where.find_vllm(str(python))
    assert (found.version, found.on_cpu) == (version, on_cpu)
    assert found.program == (str(python), "-m", "vllm.entrypoints.cli.main")


@pytest.mark.parametrize(
    ("text", "why"), [("import no_torch_here\n", "no_torch_here"), ("__version__ = 'dev'\n", "'dev'")]
)
def test_a_source_tree_without_a_version_is_an_error_that_says_why(
    tmp_path: Path, text: str, why: str
) -> None:
    python = python_that_sees(tmp_path / "env", source_tree(tmp_path / "clone", text))
    with pytest.raises(UsageError) as raised:
        where.find_vllm(str(python))
    assert why in raised.value.message
    assert f"{python} -m pip install -e" in raised.value.hint


def test_a_folder_of_that_name_is_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "other" / "vllm").mkdir(parents=True)
    with pytest.raises(UsageError) as raised:
        where.find_vllm(str(python_that_sees(tmp_path / "env", tmp_path / "other")))
    assert "-m pip install vllm" in raised.value.hint


@pytest.mark.parametrize("does", ["exit 0", "exit 3", "echo []", "echo '{'"])
def test_a_program_that_is_no_python_is_an_error(tmp_path: Path, does: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    with pytest.raises(UsageError) as raised:
        where.find_vllm(str(program))
    assert str(program) in raised.value.message


def test_missing_vllm_is_an_error_with_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as raised:
        where.find_vllm()
    assert "python3 -m venv" in raised.value.hint


def test_variable_is_read_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", str(environment(tmp_path / "env", "0.22.1", cpu=False)))
    assert where.find_vllm().version == "0.22.1"
    other = environment(tmp_path / "other", "0.30.2")
    assert where.find_vllm(str(other)).version == "0.30.2+cpu"  # what is said goes before it
