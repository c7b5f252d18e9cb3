"""What stands in the way before any memory is used: the hub, the disk, the port.

Knows: the messages of huggingface_hub, the operating system and uvicorn.
"""

from vlfit.doctor.command import serve
from vlfit.doctor.rule import Case, Rule, Values


def _port(case: Case) -> Values:
    groups = case.found.groups
    port = groups.get("port") or str(case.facts.whole("port", 8000))
    other = int(port) % 65535 + 1
    run = serve(case.facts, {"port": other}) if case.facts.model else f"ss -ltnp 'sport = :{port}'"
    return {"port": port, "other": str(other), "run": run}


def _repository(case: Case) -> Values:
    groups = case.found.groups
    name = groups.get("name") or groups.get("name_too") or "the model"
    return {"name": name.strip(". ")}


FILES = (
    Rule(
        id="disk.full",
        words=("No space left on device",),
        pattern=r"No space left on device",
        cause="A disk is full. Downloads of models go to ~/.cache/huggingface unless HF_HOME says otherwise.",
        remedy=(
            "Make room (`vlfit models` lists what is there, `vlfit models rm NAME` removes one), or move "
            "the cache."
        ),
        command="df -h ~ /tmp && vlfit models",
    ),
    Rule(
        id="hub.gated",
        words=(
            "Cannot access gated repo",
            "is not a local folder and is not a valid model identifier",
            "gated repo",
        ),
        pattern=(
            r"(?:Cannot access gated repo for url https?://[^/ ]+/(?P<name>[\w.-]+/[\w.-]+)"
            r"|(?P<name_too>\S{1,120}) is not a local folder and is not a valid model identifier)"
        ),
        cause="The hub does not hand out {name}: it is gated, private, misspelt, or the token is wrong.",
        remedy="Check the name; if it is gated, agree to its terms on the hub and log in.",
        command="hf auth login",
        compute=_repository,
    ),
    Rule(
        id="port.in_use",
        words=("ddress already in use",),
        pattern=r"(?:[Aa]ddress already in use(?:[^\n]{0,40}?port[ =:]+(?P<port>\d{2,5}))?)",
        cause=(
            "Another program listens on port {port} already, perhaps an earlier server that still holds the "
            "GPU, too."
        ),
        remedy="End that program, or take another port: {other}.",
        command="{run}",
        compute=_port,
    ),
)
