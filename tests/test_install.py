"""Installing vlfit: the wheel, the set-up that make runs, and the container image."""

import json
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlfit.settings import Settings

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "vlfit"
PICTURE = ROOT / "examples" / "pictures" / "tractor-and-cat.png"
MB = 10**6
CAPTION = "A tractor, a brown square, a yellow rectangle and a cat on a red background."


# --- the wheel ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from copies, because setuptools packs whatever an earlier build left beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(PACKAGE, folder / "src" / "vlfit", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "-w", folder / "dist", folder], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    [path] = (folder / "dist").glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    assert wheel.stat().st_size < 40 * MB
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in sources}


def test_mini_captions_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # -P: only from there. The checkout is importable here, too, but comes later.
    program = "import vlfit, vlfit.cli.main; print(vlfit.__file__); vlfit.cli.main.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "caption", "--model", "mini", "--quiet", str(PICTURE)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "vlfit" / "__init__.py"), CAPTION]


# --- scripts/set-up ----------------------------------------------------------------------------------------

FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$PWD/calls"
case "$*" in
    *"pip config list"*) echo "$FAKE_PIP_CONFIG" ;;
    *m.version*) exit "${FAKE_NO_TORCH:-1}" ;;
    *--index-url*) exit "${FAKE_INDEX_FAILS:-0}" ;;
esac
"""
HAS_DRIVER = any(
    Path(trace).exists()
    for trace in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
) or bool(shutil.which("nvidia-smi"))


def installs(folder: Path, **environment: str) -> list[str]:
    """pip's command lines in a run of scripts/set-up, with a Python that only writes them down."""
    (folder / "scripts").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "set-up", folder / "scripts")
    executable(folder / ".venv" / "bin" / "python", FAKE_PYTHON)
    done = subprocess.run(
        [folder / "scripts" / "set-up", "run"],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_INDEX": "https://index.example/cpu", "FAKE_PIP_CONFIG": "", **environment},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in (folder / "calls").read_text().splitlines() if " install " in line]


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver")
@pytest.mark.parametrize("fails", ["0", "1"])
def test_without_a_driver_set_up_takes_the_cpu_build_of_torch(tmp_path: Path, fails: str) -> None:
    """Also if that index cannot be reached: what follows takes PyPI's."""
    *_, torch, vlfit = installs(tmp_path, FAKE_INDEX_FAILS=fails)
    assert torch.endswith("torch --index-url https://index.example/cpu")
    assert "-c constraints.txt -e ." in vlfit


@pytest.mark.parametrize("config", ["global.index-url='x'", ":env:.find-links='/x'", "user.no-index='1'"])
def test_set_up_leaves_the_choice_to_whoever_configured_pip(tmp_path: Path, config: str) -> None:
    assert not any("index.example" in line for line in installs(tmp_path, FAKE_PIP_CONFIG=config))


def test_set_up_leaves_an_installed_torch_alone(tmp_path: Path) -> None:
    assert not any("index.example" in line for line in installs(tmp_path, FAKE_NO_TORCH="0"))


def test_with_a_driver_set_up_takes_the_torch_of_pypi(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    executable(tmp_path / "tools" / "nvidia-smi", "#!/bin/sh\n")
    path = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    assert not any("index.example" in line for line in installs(tmp_path, PATH=path))


# --- the container -----------------------------------------------------------------------------------------

CONTAINERFILE = (ROOT / "Containerfile").read_text("utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text("utf-8")


def test_hadolint_finds_nothing_in_the_containerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Containerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_containerfile_copies_is_sent_to_the_builder() -> None:
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.MULTILINE)
    assert sorted(sent) == sorted(name for line in copied for name in line.split())
    assert all((ROOT / name).exists() for name in sent)


def test_the_variables_of_the_container_are_settings() -> None:
    documents = CONTAINERFILE + COMPOSE + (ROOT / "docs" / "install.md").read_text("utf-8")
    names = set(re.findall(r"\bVLFIT_[A-Z_]+\b(?!\*)", documents)) - {"VLFIT_", "VLFIT_PUBLISH"}
    names -= {"VLFIT_TEST_BUILD", "VLFIT_TEST_RUN"}  # of this file
    assert names <= {f"VLFIT_{name.upper()}" for name in Settings.model_fields}


def builder() -> str | None:
    """A container engine that works here."""
    for name in ("podman", "docker"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True).returncode:
            return name
    return None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    # Images are kept in the home of whoever tests: tests have another.
    monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    name = builder()
    if name is None:
        pytest.skip("no podman, and no docker with its engine")
    return name


UNREACHABLE = re.compile(
    r"no such host|dial tcp|i/o timeout|connection refused|network is unreachable|proxyconnect"
    r"|TLS handshake|deadline exceeded|temporary failure in name resolution",
    re.IGNORECASE,
)


@pytest.fixture
def base(engine: str) -> None:
    """Debian's image is here or was fetched; skips where no registry is reached, fails for other errors."""
    options = os.environ.get("VLFIT_TEST_BUILD", "")
    [image] = re.findall(r"--build-arg[= ]BASE=(\S+)", options) or re.findall(
        r"^ARG BASE=(\S+)$", CONTAINERFILE, re.MULTILINE
    )
    if not subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode:
        return
    try:
        pulled = subprocess.run([engine, "pull", image], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{engine} did not get {image} within 5 minutes")
    reason = (pulled.stderr.strip() or "no reason given").splitlines()[-1]
    if pulled.returncode and UNREACHABLE.search(pulled.stderr):
        pytest.skip(f"no registry is reached for {image}: {reason}")
    assert not pulled.returncode, reason


@pytest.fixture
def container(engine: str, base: None) -> Iterator[str]:
    """A server with mini under the restrictions of compose.yaml; its id.

    ``VLFIT_TEST_BUILD``, ``VLFIT_TEST_RUN``: more options for the engine, as where no registry is reached.
    """
    cpu_torch = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    build = [engine, "build", "--tag", "vlfit:test", "--build-arg", cpu_torch]
    subprocess.run([*build, *shlex.split(os.environ.get("VLFIT_TEST_BUILD", "")), ROOT], check=True)
    run = [engine, "run", "--detach", "--init", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
    run += ["--security-opt", "no-new-privileges", "--network", "none"]
    run += ["--volume", f"{PICTURE.parent}:/pictures:ro"]
    for variable in ("API_KEY=secret", "SERVER_KEY=secret", "MODEL=mini", "RESTART=true"):
        run += ["--env", f"VLFIT_{variable}"]
    run += shlex.split(os.environ.get("VLFIT_TEST_RUN", ""))
    started = subprocess.run([*run, "vlfit:test"], check=True, stdout=subprocess.PIPE, text=True)
    name = started.stdout.strip()
    try:
        yield name
    finally:
        subprocess.run([engine, "rm", "--force", "--volumes", name], check=True, capture_output=True)


HEALTHCHECK = json.loads(re.findall(r"test: (\[.*\])", COMPOSE)[0])[1:]
IN_THE_CONTAINER = """
import json, pathlib, resource
status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
decoders = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if (process / "comm").read_text() == "vlfit-decode\\n":
        [line] = [x for x in (process / "limits").read_text().splitlines() if "address space" in x]
        decoders.append(line.split()[-2])
try:
    pathlib.Path("/opt/vlfit/written").touch()
except OSError as error:
    root = error.errno
pathlib.Path("/data/written").touch()
print(json.dumps([status["Uid"].split(), int(status["CapBnd"], 16), status["NoNewPrivs"], root, decoders]))
"""


@pytest.mark.container
@pytest.mark.timeout(1500)
def test_the_image_serves_without_privileges(engine: str, container: str) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([engine, "exec", container, *command], capture_output=True, text=True)

    deadline = time.monotonic() + 120
    while (health := run(*HEALTHCHECK)).returncode:
        assert time.monotonic() < deadline, health.stderr
        time.sleep(1)
    client = ["vlfit", "caption", f"/pictures/{PICTURE.name}", "--server", "http://127.0.0.1:8000", "--quiet"]
    deadline = time.monotonic() + 120
    while (answer := run(*client)).returncode:  # 503: healthy, and still loading
        assert time.monotonic() < deadline, answer.stderr
        time.sleep(1)
    assert answer.stdout.strip() == CAPTION

    uids, capabilities, no_new_privileges, errno_of_root, decoders = json.loads(
        run("python3", "-c", IN_THE_CONTAINER).stdout
    )
    assert set(uids) == {"1000"}
    assert capabilities == 0
    assert no_new_privileges == "1"
    assert errno_of_root in (13, 30)  # EACCES, EROFS
    assert decoders
    assert all(limit.isdecimal() for limit in decoders)

    assert run("vlfit", "status").stdout.startswith("http://127.0.0.1:8000")
    subprocess.run([engine, "stop", "--time", "40", container], check=True, capture_output=True)
    inspect = [engine, "inspect", container, "--format", "{{.State.ExitCode}}"]
    assert subprocess.run(inspect, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() == "0"
