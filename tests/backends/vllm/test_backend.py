"""The vLLM backend over a fake vLLM: start, requests, step-down, death."""

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.vllm.conftest import TOKEN_BYTES, Stage
from tests.backends.vllm.fake_vllm import environment
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.vllm import attempts, starting
from vlfit.backends.vllm.attempts import adapt_to_deaths, record_death
from vlfit.backends.vllm.backend import VllmBackend
from vlfit.backends.vllm.installed import find_vllm
from vlfit.backends.vllm.planning import plan_start
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.doctor.diagnose import find_failure
from vlfit.errors import DeviceError, DoesNotFit, EngineLost, EngineStopped, UsageError, VllmFailed
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.machine.survey import survey
from vlfit.plan.plans import Plan
from vlfit.plan.vllm.args import vllm_args_of
from vlfit.plan.vllm.step_down import Failure


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_answers_and_leaves_no_process(stage: Stage) -> None:
    with stage.load() as backend:
        answer = backend.stream(single_turn("hello"), SamplingParams()).answer()
        assert (backend.kind, backend.model, backend.device) == ("vllm", "mini", "cpu")
        assert backend.context == 4096
        assert backend.default_sampling() == SamplingParams()
        assert "Application startup complete" in backend.log_path.read_text()
    assert answer.text == "a fake answer"
    assert answer.usage.completion_tokens == 3
    assert stage.phases[0] == starting.IMPORTING
    assert stage.phases[-1] == starting.SERVER
    assert stage.status_lines == []
    assert stage.is_gone


def test_command_and_environment(stage: Stage) -> None:
    options = EngineOptions(max_model_len=2048, image_tokens=256, dtype="float32")
    with stage.load(options, "--seed", "3", "--max_num_batched_tokens=512", sequences=3) as backend:
        shown = backend.serving.started.command.shell_line
    (start,) = stage.starts
    words, environment = start["words"], start["environment"]
    assert words[0] == "serve"
    assert flag(words, "--max-model-len") == "2048"
    assert flag(words, "--max-num-seqs") == "3"
    assert flag(words, "--served-model-name") == "mini"
    assert flag(words, "--host") == "127.0.0.1"
    assert flag(words, "--dtype") == "float32"
    # The cache is given in bytes: else a build for processors takes nine tenths of the RAM.
    assert int(flag(words, "--kv-cache-memory-bytes")) < 2**30
    assert "--gpu-memory-utilization" not in words
    assert flag(words, "--seed") == "3"
    # The key that only we know is in no list of processes and on no screen.
    key = environment["VLLM_API_KEY"]
    assert len(key) > 20
    assert key not in " ".join(words) + shown
    assert not [name for name in environment if name.startswith("VLFIT_")]
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize("word", ["--port", "--host=0.0.0.0", "--api_key", "--served-model-name"])
def test_flags_set_by_vlfit_are_refused(stage: Stage, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        stage.load(None, word, "1")
    assert caught.value.param == word.partition("=")[0].replace("_", "-")


def test_too_small_kv_cache_is_replanned_before_the_start(stage: Stage) -> None:
    stage.configure(tokens=TOKEN_BYTES)
    with stage.load(EngineOptions(max_model_len=4096, kv_tokens=1024)) as backend:
        assert backend.stream(single_turn("hello"), SamplingParams()).answer().text == "a fake answer"
        assert backend.context == 1024 - 128  # less the block that vLLM keeps for nobody
    assert len(stage.starts) == 1
    assert "4096" in stage.status_lines[0]
    assert "context 4096 -> 896" in stage.status_lines[1]
    assert "--context 4096 -> 896" in stage.status_lines[2]
    assert stage.is_gone


def test_too_small_kv_cache_by_vllms_count_is_stepped_down(stage: Stage) -> None:
    """vLLM counts the KV cache differently from the plan."""
    stage.configure(tokens=2 * TOKEN_BYTES)
    with stage.load(EngineOptions(max_model_len=1024, kv_tokens=1280)) as backend:
        assert backend.context == 640
    assert len(stage.starts) == 2
    assert "vllm.kv_too_small" in stage.status_lines[0]
    assert "context 1024 -> 640" in stage.status_lines[1]
    assert "--context 1024 -> 640" in stage.status_lines[2]
    assert stage.is_gone


def test_no_retry_raises_the_cause(stage: Stage) -> None:
    stage.configure(tokens=TOKEN_BYTES)
    with pytest.raises(VllmFailed, match=r"vllm\.kv_too_small") as raised:
        stage.load(EngineOptions(max_model_len=4096, kv_tokens=1024), retry=False)
    assert len(stage.starts) == 1
    assert "vlfit serve mini" in raised.value.hint
    assert str(stage.folder / "state") in raised.value.hint
    assert stage.is_gone


def test_unknown_typed_flags_are_explained(stage: Stage) -> None:
    stage.configure(unknown=["--trust-me"])
    with pytest.raises(VllmFailed, match=r"--trust-me.*vllm\.unknown_flag"):
        stage.load(None, "--trust-me", "4")
    assert len(stage.starts) == 1  # the same would be refused again


def test_old_flags_are_understood(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "0")
    words = ("--disable-v1-engine", "--max-model-len", "2048", "--gpu-memory-utilization", "0.70")
    with stage.load(None, *words, retry=False) as backend:
        assert backend.context == 2048
    (start,) = stage.starts
    assert not {"--disable-v1-engine", "--gpu-memory-utilization"} & set(start["words"])
    assert start["words"].count("--max-model-len") == 1
    assert "VLLM_USE_V1" not in start["environment"]


def test_unknown_planned_flags_are_omitted(stage: Stage) -> None:
    stage.configure(unknown=["--mm-processor-cache-gb"])
    with stage.load():
        pass
    assert len(stage.starts) == 2
    assert "--mm-processor-cache-gb" not in stage.starts[1]["words"]
    assert "--mm-processor-cache-gb" in stage.status_lines[1]


def test_unknown_added_flags_are_omitted(stage: Stage) -> None:
    stage.configure(unknown=["--generation-config"])
    with stage.load(None, retry=False) as backend:
        assert backend.serving.failed_plans == ()  # the plan is not at fault
    first, second = (start["words"] for start in stage.starts)
    assert "--generation-config" in first
    assert "--generation-config" not in second
    assert "--tool-call-parser" in second
    [said] = stage.status_lines
    assert "--generation-config" in said


def test_unknown_failures_show_the_last_lines(stage: Stage) -> None:
    stage.configure(fails="SomethingError: nobody has seen this before")
    with pytest.raises(VllmFailed, match=r"\b1\b") as raised:
        stage.load()
    assert raised.value.message.endswith("SomethingError: nobody has seen this before")
    assert len(stage.starts) == 1


def test_taken_ports_are_replaced(stage: Stage) -> None:
    taken = "OSError: [Errno 98] Address already in use"
    stage.configure(fails=taken, fails_once=str(stage.folder / "failed"))
    with stage.load():
        ports = [flag(start["words"], "--port") for start in stage.starts]
    assert len(set(ports)) == 2
    assert stage.status_lines == []


def test_death_while_serving_is_reported_with_the_cause(stage: Stage) -> None:
    lost: list[Exception] = []
    seen = threading.Event()
    with stage.load() as backend:
        backend.when_lost(lost.append)
        backend.when_lost(lambda _: seen.set())
        with pytest.raises(EngineLost, match=r"torch\.oom") as raised:
            backend.stream(single_turn("die now"), SamplingParams()).answer()
        assert raised.value.http_status == 503
        assert str(backend.log_path) in raised.value.hint
        assert seen.wait(5)
        assert lost == [raised.value]
        with pytest.raises(EngineLost):
            backend.prepare(single_turn("hello"), SamplingParams())
    assert stage.is_gone


def test_interrupt_during_start_leaves_no_process(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.configure(stops_after="Starting to load model")
    monkeypatch.setattr(starting, "SILENCE_SECONDS", 0.2)
    heard: list[str] = []

    def interrupt(words: str) -> None:
        heard.append(words)
        if starting.WEIGHTS in words:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        VllmBackend.load("mini", None, VllmOptions(python=stage.python, on_status=interrupt))
    assert starting.WEIGHTS in heard[-1]
    assert stage.is_gone


def test_a_failure_that_closing_overtakes_ends_as_stopped(stage: Stage) -> None:
    """Whether vLLM has died is waited for with each failure of a request; here it is closed meanwhile."""
    arrived: queue.Queue[Chunk | Exception] = queue.Queue()
    with stage.load() as backend:
        prepared = backend.prepare(single_turn("refuse this"), SamplingParams())
        backend.start(prepared, SamplingParams(), arrived.put)
        end = time.monotonic() + 20
        while " 500 " not in backend.log_path.read_text() and time.monotonic() < end:
            time.sleep(0.01)
    assert isinstance(arrived.get(timeout=20), EngineStopped)


def test_engine_death_is_noticed_before_the_server_ends(stage: Stage) -> None:
    with stage.load() as backend:
        with pytest.raises(EngineLost) as raised:
            backend.stream(single_turn("lose your engine"), SamplingParams()).answer()
        assert str(backend.log_path) in raised.value.message
        assert not backend.serving.started.ended
    assert stage.is_gone


def test_deaths_are_recorded_for_the_next_start(stage: Stage, tmp_path: Path) -> None:
    """Less after running out of memory, less again after the next; the same plan after any other death."""
    word, told = tmp_path / "word", threading.Event()
    planned = plan_start("mini", EngineOptions(), VllmOptions(), find_vllm(stage.python), survey())
    assert adapt_to_deaths(planned, word) is planned  # nothing has died yet

    def died(plan: Plan, failure: Failure) -> None:
        record_death(word, plan, failure)
        told.set()

    with stage.load(on_death=died) as backend, pytest.raises(EngineLost):
        backend.stream(single_turn("die now"), SamplingParams()).answer()
    assert told.wait(5)
    second = adapt_to_deaths(planned, word)
    assert (planned.plan.settings.chunk, second.plan.settings.chunk) == (2048, 1024)
    assert "torch.oom" in second.notes[-2]
    assert "2048 -> 1024" in second.notes[-1]
    record_death(word, second.plan, Failure("kernel.oom_kill"))
    third = adapt_to_deaths(planned, word)
    assert vllm_args_of(third.plan.settings).kv_tokens is not None  # half of the pool
    record_death(word, third.plan, Failure("kernel.killed"))  # by whom is not known
    assert adapt_to_deaths(planned, word).plan.settings == third.plan.settings


def test_oom_kills_are_told_from_other_kills(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlfit.backends.vllm.process.VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    with stage.load() as backend:
        started = backend.serving.started
    for count, cause in ((3, ""), (4, "kernel.oom_kill")):
        (tmp_path / "vmstat").write_text(f"nr_free_pages 7\noom_kill {count}\n")
        assert attempts.diagnose_failure(started, find_failure)[0].id == cause


def test_loads_in_any_thread(stage: Stage) -> None:
    loaded: list[VllmBackend] = []
    thread = threading.Thread(target=lambda: loaded.append(stage.load()))
    thread.start()
    thread.join()
    time.sleep(0.1)  # what is bound to the thread that started it would be gone by now
    with loaded[0] as backend:
        assert backend.stream(single_turn("hello"), SamplingParams()).answer().text == "a fake answer"


def test_native_only_options_are_refused(stage: Stage) -> None:
    with pytest.raises(UsageError) as caught:
        stage.load(EngineOptions(idle_sleep=5.0))
    assert caught.value.param == "idle_sleep"


def test_plans_that_do_not_fit_are_not_started(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(machine_with_card("RTX 5060").host, ram_available=64 * 2**20)
    monkeypatch.setattr("vlfit.backends.vllm.backend.survey", lambda: Machine((), host, ()))
    with pytest.raises(DoesNotFit, match="mini"):
        stage.load()
    assert not (stage.folder / "starts").exists()


def test_gpu_build_without_a_gpu(stage: Stage) -> None:
    stage.python = str(environment(stage.folder / "gpu", "0.32.0", cpu=False))
    with pytest.raises(DeviceError, match=r"0\.32\.0"):
        stage.load()
