"""Logs as people paste them: any size, any encoding, incomplete."""

import io
import random
import tracemalloc
from pathlib import Path

import pytest

from tests.doctor.real_lines import REAL_LINES, RealLine
from vlfit.doctor import logs
from vlfit.doctor.diagnose import LogReport, diagnose_log
from vlfit.doctor.logs import CONTEXT_AFTER, LogFacts, clean_lines, read_chunks

CAUSE = (
    "ValueError: Free memory on device cuda:0 (6.9/7.96 GiB) on startup is less than desired GPU memory "
    "utilization (0.92, 7.32 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes."
)
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def diagnose_bytes(data: bytes) -> LogReport:
    return diagnose_log(io.BytesIO(data))


def ids(data: bytes | str) -> list[str]:
    return [one.id for one in diagnose_bytes(data.encode() if isinstance(data, str) else data).diagnoses]


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("(EngineCore_DP0 pid=123) ERROR 09-28 15:47:24 [core.py:718] ValueError: x", "ValueError: x"),
        ("(APIServer pid=1) (EngineCore pid=2) INFO 11-21 10:00:01 [v1/core.py:1]   x", "x"),
        ("(VllmWorker rank=7 pid=10948) ERROR 03-16 06:12:38 [multiproc_executor.py:375] x", "x"),
        ("(RayWorkerWrapper pid=1463574, ip=192.168.10.60) INFO 03-27 10:29:01 [worker.py:267] x", "x"),
        ("[rank0]: Traceback", "Traceback"),
        ("vllm-1  | INFO 11-18 18:07:17 api_server.py:175] x", "x"),
        ("2026-04-10T08:53:23.883661459+08:00 stderr F   x", "x"),
        ("Apr 17 09:17:11 host kernel: x", "x"),
        ("[Sun Mar 24 23:54:53 2024] x", "x"),
        ("[ 1843.308145] NVRM: x", "NVRM: x"),
        ("> > x", "x"),
        ("[llamacpp-router stdout] [60611] 0.00.133.956 I x", "x"),
        ("\x1b[1;31mError\x1b[0m: \x1b]8;;http://a\x07x\x1b]8;;\x07", "Error: x"),
        ("10%|#   |\r50%|##  |\r100%|####|\r\nx\r\n", "10%|#   |\n50%|##  |\n100%|####|\nx\n"),
        ("a\x00b\x07c", "abc"),
        ("not (a prefix) x", "not (a prefix) x"),
    ],
)
def test_clean(raw: str, plain: str) -> None:
    assert clean_lines(raw) == plain


def test_cleaning_twice_changes_nothing() -> None:
    for line in REAL_LINES:
        assert clean_lines(clean_lines(line.text)) == clean_lines(line.text)


@pytest.mark.parametrize("line", REAL_LINES, ids=str)
def test_pasted_logs_have_the_same_diagnosis(line: RealLine) -> None:
    whole = diagnose_bytes(line.text.encode()).diagnoses
    windows = "\r\n".join(line.text.split("\n"))
    coloured = "\n".join(f"\x1b[31m{each}\x1b[0m" for each in line.text.split("\n"))
    quoted = "\n".join(f"> {each}" for each in line.text.split("\n"))
    prefixed = "\n".join(
        f"(APIServer pid=1) (EngineCore_DP0 pid=3301) ERROR 11-21 10:11:12 [core.py:718] {each}"
        for each in line.text.split("\n")
    )
    ways = (windows, coloured, quoted, prefixed)
    for data in (*(way.encode() for way in ways), line.text.encode("utf-16")):
        assert diagnose_bytes(data).diagnoses == whole


def test_a_cause_hides_its_wrapper() -> None:
    assert ids(f"{CAUSE}\n{WRAPPER}") == ["vllm.free_lt_util"]
    assert ids(f"{WRAPPER}\n{CAUSE}") == ["vllm.free_lt_util"]
    assert diagnose_bytes(f"{CAUSE}\n{WRAPPER}".encode()).has_cause


def test_a_wrapper_alone() -> None:
    examined = diagnose_bytes(WRAPPER.encode())
    assert [one.id for one in examined.diagnoses] == ["vllm.wrapper"]
    assert examined.only_wrappers


@pytest.mark.parametrize(
    "data",
    [
        b"everything is fine\nINFO: Application startup complete.\n",
        b"Free memory on device\n",
        b"\x7fELF" + bytes(range(256)) * 100,
        b"\xff\xfe",
        "Speicher ist voll, 显存不足, память\n".encode(),
        # Normal output with words of a failure.
        b"Free memory on device (7.2/7.96 GiB) on startup. Desired GPU memory utilization is (0.85, 6.77 "
        b"GiB). "
        b"Actual usage is 4.85 GiB for consumed memory (weights + non-torch), 0.4 GiB for peak activation",
        b"Available KV cache memory: 1.69 GiB",
        b"the job was Killed by the user",
        b"CUDA out of memory occurred when warming up sampler with " + b"9" * 5000 + b" dummy requests",
    ],
)
def test_no_diagnosis_without_a_failure(data: bytes) -> None:
    examined = diagnose_bytes(data)
    assert examined.diagnoses == ()
    assert not examined.only_wrappers


def test_an_empty_log_has_no_characters() -> None:
    assert diagnose_bytes(b"").characters == 0
    assert diagnose_bytes(b"\n").characters >= 0


def test_a_log_cut_off_anywhere() -> None:
    whole = f"{CAUSE}\n{WRAPPER}".encode()
    for end in range(0, len(whole), 7):
        assert set(ids(whole[:end])) <= {"vllm.free_lt_util", "vllm.wrapper"}


def test_a_cause_at_the_end_of_a_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, across and after each boundary of chunks."""
    block = 1 << 16
    monkeypatch.setattr(logs, "BLOCK_BYTES", block)
    for place in (block, block - CONTEXT_AFTER, 2 * block - CONTEXT_AFTER):
        for shift in range(-300, 301, 60):
            start = place + shift
            filler = ("x" * 79 + "\n") * (start // 80) + "y" * (start % 80 - 1) + "\n"
            after = "z" * 79 + "\n"
            assert ids(f"{filler}{CAUSE}\n{after * 2000}") == ["vllm.free_lt_util"], (place, shift)


def test_chunks_partition_the_log() -> None:
    randomness = random.Random(5)
    text = "".join("word " * randomness.randrange(1, 30) + "\n" for _ in range(60_000))
    seen = ""
    for chunk in read_chunks(io.BytesIO(text.encode())):
        assert len(chunk.text) == len(chunk.flat)
        assert chunk.start + chunk.first == len(seen)
        seen += chunk.text[chunk.first : chunk.last]
    assert seen == clean_lines(text)


def test_a_huge_log_takes_little_memory() -> None:
    class Endless(io.RawIOBase):
        """50 MiB, generated while reading."""

        def __init__(self) -> None:
            self.left = 50
            self.line = b"(EngineCore pid=1) INFO 11-21 10:00:01 [a.py:1] Engine 000: prompt\n"

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            if self.left < 0:
                return b""
            return (
                CAUSE.encode() + b"\n"
                if self.left == 25
                else b"\x00" * size
                if self.left % 2
                else self.line * 2000
            )

    tracemalloc.start()
    examined = diagnose_log(Endless())  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.id for one in examined.diagnoses] == ["vllm.free_lt_util"]
    assert peak < 64 * 2**20


def test_the_last_run_comes_first() -> None:
    first = "INFO vLLM API server version 0.22.0\n" + CAUSE + "\n" + WRAPPER + "\n"
    second = (
        "INFO vLLM API server version 0.22.0\nRuntimeError: CUDA out of memory occurred when warming up "
        "sampler with 256 "
        "dummy requests.\n" + WRAPPER
    )
    assert ids(first + second) == ["vllm.sampler_oom", "vllm.free_lt_util"]
    assert ids(second + "\n" + first) == ["vllm.free_lt_util", "vllm.sampler_oom"]


def test_the_last_match_gives_the_numbers() -> None:
    again = CAUSE.replace("6.9/7.96", "5.5/7.96")
    (found,) = diagnose_bytes(f"{CAUSE}\n{again}".encode()).diagnoses
    assert "5.5 GiB" in found.cause


def test_consequences_are_hidden() -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity "
        "of 23.57 GiB of "
        "which 605.88 MiB is free.\nRuntimeError: CUDA out of memory occurred when warming up sampler with "
        "1024 dummy "
        "requests. Please try lowering `max_num_seqs`\n"
    )
    assert ids(log) == ["vllm.sampler_oom"]


def facts_of(text: str) -> LogFacts:
    facts = LogFacts()
    for chunk in read_chunks(io.BytesIO(text.encode())):
        facts.update(chunk)
    return facts


def test_facts_of_a_shell_line() -> None:
    facts = facts_of(
        "$ VLLM_USE_V1=0 vllm serve Qwen/Qwen3-VL-2B-Instruct \\\n  --max-model-len 2048 \\\n  "
        "--enforce-eager \\\n"
        """  --limit-mm-per-prompt '{"image": 1, "video": 0}' --port=8001 2>&1 | tee log\n"""
    )
    assert facts.model == "Qwen/Qwen3-VL-2B-Instruct"
    assert facts.arguments["max_model_len"] == 2048
    assert facts.arguments["enforce_eager"] is True
    assert facts.arguments["limit_mm_per_prompt"] == {"image": 1, "video": 0}
    assert facts.arguments["port"] == 8001


@pytest.mark.parametrize(
    "line",
    [
        "I ran vllm serve and it died",
        "non-default args: {'model': 'a/b', 'x': Namespace(1)}",
        "non-default args: {'model': 'a/b', ",
        "vllm serve 'unclosed --max-model-len 2048",
    ],
)
def test_facts_of_broken_lines(line: str) -> None:
    assert facts_of(line).arguments.get("max_model_len") in (None, 2048)


def test_facts_of_the_servers_log() -> None:
    facts = facts_of(
        "(APIServer pid=1) INFO 11-21 10:00:01 [utils.py:299] non-default args: {'model_tag': 'a/b', "
        "'model': 'a/b', "
        "'max_model_len': 4096, 'gpu_memory_utilization': 0.8, 'enforce_eager': True}\n"
        "(EngineCore_DP0 pid=2) INFO 11-21 10:00:09 [core.py:77] Initializing a V1 LLM engine (v0.11.0) "
        "with config: "
        "model='a/b', speculative_config=None, max_seq_len=4096\nWARNING Using 'pin_memory=False' as WSL is "
        "detected."
    )
    assert facts.version == (0, 11, 0)
    assert facts.arguments == {"max_model_len": 4096, "gpu_memory_utilization": 0.8, "enforce_eager": True}
    assert facts.max_model_len == 4096
    assert facts.wsl2


def test_a_whole_log_of_vllm() -> None:
    """vLLM 0.32 on a CPU, paths changed. With the advised command that server started."""
    log = Path(__file__).parent / "logs" / "vllm-0.32-context-too-long.log"
    (found,) = diagnose_bytes(log.read_bytes()).diagnoses
    assert found.id == "vllm.kv_too_small"
    assert "262144" in found.cause
    assert found.command == (
        "vllm serve /models/tiny --host 127.0.0.1 --port 8077 --max-num-seqs 2 --enforce-eager "
        "--kv-cache-memory-bytes 16M --max-model-len 32640"
    )
