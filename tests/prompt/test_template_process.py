"""Chat templates run in a process of their own: hostile ones end at its limits, others render as Jinja does.

It is replaced when it was killed or stopped, and ends with its parent.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlfit.errors import CheckpointError, InvalidRequest, TemplatesUnavailable
from vlfit.prompt import template_process
from vlfit.prompt.chat_template import ChatTemplate
from vlfit.prompt.template_process import TEMPLATES, TemplateLimits, TemplateProcess
from vlfit.units import MIB

SMALL = TemplateLimits(memory=128 * MIB, cpu_seconds=1, wall_seconds=300, result_bytes=MIB)
DOUBLED = "{% set a=['xxxxxxxxxxxxxxxx'] %}" + "{% set a=[a,a] %}" * 27 + "{{ a }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH_MEMORY = [
    DOUBLED,
    "{{ messages[0].content * (10 ** 10) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{{ x.replace('a', x) }}",
    "{{ messages[0].content | center(10000000000) }}",
    "{{ '%*d' % (10000000000, messages | length) }}",
    "{{ messages | tojson(indent=10000000000) }}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
]
TOO_MUCH_TIME = [
    ENDLESS,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]
CONSTANTS = ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 10 }}", "{{ 'x' | center(10000000000) }}"]
REFUSED = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "{% if %}",
    "{{ '\\ud800' | nothing }}",
]
SOUND = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ': ' ~ m.content }}\n{% endfor %}",
    "{% for m in messages[::-1] if m.role == 'user' %}{{ m.content | upper }}{% else %}none{% endfor %}",
    "{{ '-' * 20 }}{{ '%02d|%5.2f' % (3, 2.5) }}{{ 7 % 4 }}{{ 3 * 4 + 2 ** 5 }}{{ [1] + [2] }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a\nb' | indent(2) }}{{ 'a'.center(5, '.') }}",
    "{% for c in 'abc' %}{{ c }}{% if c == 'b' %}{% break %}{% endif %}{% endfor %}",
    "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is sequence else i }}{{ loop.depth }}{% endfor %}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{% set t %}{{ f(2) }}{% endset %}{{ t }}",
    "{{ numbers }}{{ nothing is none }}{{ missing is defined }}{{ '\\ud800é🙂\\x00' }}{{ odd }}",
]
MESSAGES = [{"role": "user", "content": "one "}, {"role": "assistant", "content": "two"}]
VARIABLES = {"numbers": [1, 2.5, -0.0, 10**30, True], "nothing": None, "odd": "\udfff\u2028"}


@pytest.fixture(scope="module")
def small() -> Iterator[TemplateProcess]:
    process = TemplateProcess(limits=SMALL)
    yield process
    process.close()


@pytest.fixture(scope="module")
def narrow() -> Iterator[TemplateProcess]:
    """With little memory, and time enough to fill it on a busy computer."""
    process = TemplateProcess(limits=replace(SMALL, cpu_seconds=60))
    yield process
    process.close()


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def error_of(source: str, process: TemplateProcess) -> CheckpointError:
    """The error of rendering ``source``. The next template renders."""
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source, {}, process).render(MESSAGES)
    assert ChatTemplate("{{ messages | length }}", {}, process).render(MESSAGES) == "2"
    return caught.value


@pytest.mark.parametrize("source", TOO_MUCH_MEMORY)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not limit memory")
def test_a_template_that_takes_much_memory_fails(source: str, narrow: TemplateProcess) -> None:
    assert "128 MiB" in error_of(source, narrow).message


@pytest.mark.parametrize("source", TOO_MUCH_TIME)
def test_other_threads_run_until_an_endless_template_fails(source: str, small: TemplateProcess) -> None:
    template, steps, done = ChatTemplate(source, {}, small), 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not done.wait(0.01):
            steps += 1

    thread = threading.Thread(target=count)
    thread.start()
    with pytest.raises(CheckpointError) as caught:
        template.render(MESSAGES)
    done.set()
    thread.join()
    assert "1 s of CPU time" in caught.value.message
    assert steps > 10
    assert ChatTemplate(SOUND[-2], {}, small).render([]) == "<1><2>"


@pytest.mark.parametrize("source", CONSTANTS[1:])
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not limit memory")
def test_constants_are_computed_within_the_limits(source: str, small: TemplateProcess) -> None:
    """Jinja computes them when a template is compiled, and again with it if that failed."""
    error_of(source, small)


def test_a_template_that_cannot_be_compiled_in_time_fails_when_it_is_read(small: TemplateProcess) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(CONSTANTS[0], {}, small)
    assert "1 s of CPU time" in caught.value.message


@pytest.mark.parametrize("source", REFUSED)
def test_a_template_that_is_refused_leaves_the_process_running(source: str) -> None:
    TEMPLATES.render("", {})
    before = TEMPLATES.pid
    error_of(source, TEMPLATES)
    assert TEMPLATES.pid == before


def test_a_long_result_is_refused(small: TemplateProcess) -> None:
    assert "1 MiB" in error_of("{{ messages[0].content * (2 * 2 ** 20 // 4) }}", small).message


@pytest.mark.parametrize("source", SOUND)
def test_a_sound_template_renders_as_in_jinjas_sandbox(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = plain.from_string(source).render(messages=MESSAGES, **VARIABLES)
    assert ChatTemplate(source, {}).render(MESSAGES, variables=VARIABLES) == expected


def test_what_a_template_reads_and_writes() -> None:
    template = ChatTemplate(
        "<|a|>{{ x ~ '<|b|>' }}{% for m in messages %}{{ strftime_now('%Y') }}{% endfor %}", {}
    )
    assert template.variables == {"x", "messages"}
    assert set(template.literals.split("\0")) >= {"<|a|>", "<|b|>"}
    assert not template.takes_tools


def test_a_long_message_is_no_fault_of_the_template() -> None:
    content = "Łódź 🙂 <&> a\n" * 360_000  # some 5 MB
    template = ChatTemplate("{{ messages[0].content ~ messages[0].content }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": content}]) == content * 3


def test_many_long_messages_do_not_use_the_process_up(small: TemplateProcess) -> None:
    content = "a\n" * 2**19
    template = ChatTemplate("{{ messages[0].content }}{{ number }}", {}, small)
    for number in range(20):
        rendered = template.render([{"role": "user", "content": content}], variables={"number": number})
        assert rendered == f"{content}{number}"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not limit memory")
def test_the_default_limits_end_what_would_take_gigabytes() -> None:
    assert TemplateLimits() == TemplateLimits(512 * MIB, 10, 60.0, 16 * MIB)
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(DOUBLED.replace("x", "x" * 1000), {}).render(MESSAGES)
    assert "512 MiB" in caught.value.message


def test_values_too_deep_within_each_other_are_the_requests_fault() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": deep}])


def test_threads_get_their_own_results(process: TemplateProcess) -> None:
    template, results = ChatTemplate("{{ messages[0].content }}", {}, process), {}

    def render(number: int) -> None:
        results[number] = [template.render([{"content": f"{number}.{each}"}]) for each in range(30)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [f"{number}.{each}" for each in range(30)] for number in range(8)}


def test_a_killed_process_is_replaced(process: TemplateProcess) -> None:
    process.start()
    pids = set()
    for _ in range(3):  # the first while it starts
        pid = process.pid
        assert pid is not None
        pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        assert process.render("{{ x }}", {"x": "é"}) == "é"
    assert len(pids) == 3


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="it cannot be asked whether it was stopped")
def test_a_stopped_process_is_replaced(process: TemplateProcess) -> None:
    process.render("", {})
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert process.render("{{ x }}", {"x": 1}) == "1"
    assert process.pid != pid


def test_a_process_that_does_not_answer_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_is_stopped", lambda pid: False)
    process = TemplateProcess()
    process.read("")
    monkeypatch.setattr(process, "_limits", TemplateLimits(wall_seconds=0.2))
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CheckpointError) as caught:
        process.render("{{ x }}", {"x": 1})
    process.close()
    assert "0.2 s" in caught.value.message
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_is_killed_again_and_again_is_unavailable() -> None:
    process = TemplateProcess(limits=TemplateLimits(cpu_seconds=600, wall_seconds=600))
    failures: list[Exception] = []

    def render() -> None:
        try:
            process.render(ENDLESS, {})
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    while thread.is_alive():
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        thread.join(0.05)
    process.close()
    assert [type(each) for each in failures] == [TemplatesUnavailable]
    assert failures[0].http_status == 503  # type: ignore[attr-defined]


def test_a_process_that_does_not_start_is_unavailable() -> None:
    process = TemplateProcess("vlfit.no_such_module")
    with pytest.raises(TemplatesUnavailable):
        process.read("")
    process.close()


def test_a_closed_process_ends_a_render_that_runs() -> None:
    process = TemplateProcess(limits=TemplateLimits(cpu_seconds=600, wall_seconds=600))
    process.read("")
    failures: list[type[Exception]] = []

    def render() -> None:
        try:
            process.render(ENDLESS, {})
        except Exception as error:
            failures.append(type(error))

    thread = threading.Thread(target=render)
    thread.start()
    process.close()
    thread.join()
    assert failures == [TemplatesUnavailable]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_has_neither_keys_nor_open_files_and_writes_none(
    process: TemplateProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLFIT_API_KEY", "a-secret")
    with open(tmp_path / "log", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        process.read("")
        proc = Path(f"/proc/{process.pid}")
        assert b"a-secret" not in (proc / "environ").read_bytes()
        assert str(tmp_path / "log") not in [os.readlink(each) for each in (proc / "fd").iterdir()]
    limits = (proc / "limits").read_text().splitlines()
    assert next(line.split()[3:5] for line in limits if line.startswith("Max file size")) == ["0", "0"]


FORKS = """
import os, sys
from vlfit.prompt.template_process import TEMPLATES
assert TEMPLATES.render("{{ x }}", {"x": 1}) == "1"
reader, writer = os.pipe()
child = os.fork()
if not child:
    assert TEMPLATES.pid is None
    assert TEMPLATES.render("{{ x }}", {"x": 2}) == "2"
    os.write(writer, str(TEMPLATES.pid).encode())
    TEMPLATES.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
before = TEMPLATES.pid
assert TEMPLATES.render("{{ x }}", {"x": 3}) == "3"
assert TEMPLATES.pid == before != int(os.read(reader, 20))
"""


def test_a_fork_has_a_process_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["", ENDLESS], ids=["waits", "renders"])
def test_the_process_ends_with_a_parent_that_was_killed(source: str) -> None:
    program = f"""
import os, threading
from vlfit.prompt.template_process import TemplateLimits, TemplateProcess
def start():  # a thread that ends
    process.read("")
process = TemplateProcess(limits=TemplateLimits(cpu_seconds=2))
thread = threading.Thread(target=start)
thread.start()
thread.join()
process.read("")
print(process.pid, flush=True)
process.render({source!r}, {{}})
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: not runs(pid))


def runs(pid: int) -> bool:
    """Whether the process ``pid`` has not ended; it may not be a child of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
