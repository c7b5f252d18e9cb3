"""What stands in the way before any memory is used: the hub, the disk, the port.

Knows: the messages of huggingface_hub, the operating system and uvicorn.
"""

from difflib import get_close_matches

from vlfit.checkpoint.catalog import entries
from vlfit.checkpoint.hub import is_hub_name
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


def _not_found(case: Case) -> Values:
    name = case.found.groups["name"]
    short = name.rpartition("/")[2].lower()
    known = {entry.name.rpartition("/")[2].lower(): entry.name for entry in entries() if "/" in entry.name}
    near = [known[each] for each in get_close_matches(short, known, n=3, cutoff=0.8) if each != short]
    return {"name": name, "meant": f" Names like it: {', '.join(near)}." if near else ""}


def _offline(case: Case) -> Values:
    online = "env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE"
    model = case.facts.model
    if model and is_hub_name(model):
        return {"advice": "Download it once with the network.", "run": f"{online} hf download {model}"}
    return {
        "advice": "Run it once with the network, or name the folder in which the model lies.",
        "run": "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
    }


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
        id="hub.not_found",
        words=("Repository Not Found for url",),
        pattern=(
            r"Repository Not Found for url: https?://[^/ ]+/(?:api/models/)?"
            r"(?P<name>[\w.-]{1,96}(?:/(?!resolve/|revision/|tree/)[\w.-]{1,96}?)?)(?=[/ ?]|\.?(?:\s|$))"
        ),
        cause=(
            "The hub has no {name}, or does not show it: it answers the same for a name that is misspelt "
            "and for a "
            "private model without the right token.{meant}"
        ),
        remedy="Check the name on the hub. If the model is private, see whether a token is there, and whose.",
        command="hf auth whoami",
        compute=_not_found,
        hides=("hub.gated",),
    ),
    Rule(
        id="hub.offline",
        words=("outgoing traffic has been disabled", "offline mode is enabled", "OfflineModeIsEnabled"),
        pattern=(
            r"(?:Cannot find (?:the requested files|an appropriate cached snapshot folder).{1,80}"
            r"outgoing traffic has been disabled|OfflineModeIsEnabled|offline mode is enabled)"
        ),
        cause=(
            "A file of the model is not on this disk, and the program was told not to ask the hub "
            "(HF_HUB_OFFLINE, "
            "or local_files_only)."
        ),
        remedy="{advice} The folder that is searched is ~/.cache/huggingface unless HF_HOME says otherwise.",
        command="{run}",
        compute=_offline,
        hides=("hub.unreachable", "hub.gated"),
    ),
    Rule(
        id="hub.unreachable",
        words=(
            "t connect to 'https://huggingface.co'",
            "happened while trying to locate the file on the Hub",
            "host='huggingface.co'",
        ),
        pattern=(
            r"(?:We couldn't connect to 'https://huggingface\.co'"
            r"|An error happened while trying to locate the file(?:s)? on the Hub"
            r"|host='huggingface\.co', port=443\): Max retries exceeded)"
        ),
        cause="The hub was not reached, and the model is not on this disk: no network, a proxy, or no DNS.",
        remedy="See what stands in the way; behind a proxy set HTTPS_PROXY. A downloaded model needs no hub.",
        command="curl -sSI https://huggingface.co",
        hides=("hub.gated",),
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
