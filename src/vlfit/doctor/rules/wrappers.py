"""Lines that only say that something failed elsewhere. They are told when nothing else was found.

Knows: the last words of vLLM's and Ollama's outer processes, which people paste because they come last.
"""

from vlfit.doctor.command import serve
from vlfit.doctor.rule import Rule

WRAPPERS = (
    Rule(
        id="vllm.wrapper",
        words=(
            "Engine core initialization failed",
            "EngineCore failed to start",
            "WorkerProc initialization failed",
        ),
        pattern=(
            r"(?:Engine core initialization failed\. See root cause above|EngineCore failed to start"
            r"|WorkerProc initialization failed due to an exception)"
        ),
        cause=(
            "These lines only say that a process of vLLM died. Its own last words, the cause, stand further "
            "up and are not in this log."
        ),
        remedy="Paste the log from its first line, or let the doctor read it whole.",
        command="{run} 2>&1 | tee vllm.log; vlfit doctor --log vllm.log",
        compute=lambda case: {"run": serve(case.facts)},
        wrapper=True,
    ),
    Rule(
        id="vllm.engine_dead",
        words=("EngineDeadError", "EngineCore encountered an issue"),
        pattern=r"(?:EngineDeadError|EngineCore encountered an issue)",
        cause=(
            "vLLM's engine died while it served. These lines only report it; the cause stands further up, "
            "unless a signal ended it, or the system for want of RAM: then this log has none."
        ),
        remedy="Paste the lines above the first EngineDeadError, and what the kernel wrote.",
        command="sudo dmesg -T | tail -50 | vlfit doctor --log -",
        wrapper=True,
    ),
    Rule(
        id="ollama.wrapper",
        words=("llama runner process has terminated",),
        pattern=r"llama runner process has terminated(?:: [^\n]{1,200})?$",
        one_line=True,
        cause="Ollama's inner process died. This line only reports it; the cause stands in the server's log.",
        remedy="Read the server's log instead.",
        command="journalctl -u ollama --no-pager -n 400 | vlfit doctor --log -",
        wrapper=True,
    ),
)
