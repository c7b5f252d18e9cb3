"""Failures of GGUF files in logs of llama.cpp, Ollama and their kin: truncated, split, mismatched, old.

What helps is said in the words of vlfit's own checks when it opens such a file.
"""

import hashlib
import re
import shlex

from vlfit.checkpoint.gguf.advice import (
    FETCH_AGAIN,
    KEEP_NAMES,
    NAME_MMPROJ,
    OTHER_CONVERSION,
    OTHER_VOCABULARY,
)
from vlfit.doctor.logs import GGUF_PLACEHOLDER
from vlfit.doctor.rule import Finding, Rule, TemplateValues

_NOT_GGUF = {
    "ver": "It is a git-lfs pointer, not the weights themselves",
    "<": "It is a web page (HTML): the address of the file's page was fetched, not the file",
    "tjgg": "It is in a format from before GGUF (2023)",
    "lmgg": "It is in a format from before GGUF (2023)",
}
_PULLED = re.compile(r"\bollama (?:pull|run|create) ([\w./:-]{1,200})")
_EMPTY_SHA256 = hashlib.sha256().hexdigest()
_MERGED = 4  # patches of an image token, by which some builds multiply wrongly


def _file(finding: Finding) -> str:
    run = finding.facts.llama
    return run.flag_value("-m") or run.model_file or GGUF_PLACEHOLDER


def _check(finding: Finding) -> TemplateValues:
    return {"check": f"vlfit doctor --model {shlex.quote(_file(finding))}"}


def _not_gguf(finding: Finding) -> TemplateValues:
    start = finding.match.groups["start"].strip("'\" ").lower()
    what = next((text for begin, text in _NOT_GGUF.items() if start.startswith(begin)), "")
    return {"what": f"{what}. " if what else "", "start": start or "zeros", **_check(finding)}


def _other_model(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    text, tower = (int(groups[name] or groups[f"{name}2"]) for name in ("text", "tower"))
    wrongly = (
        f" Or the file is right, and this llama.cpp multiplies wrongly ({tower} is {_MERGED} x {text}; "
        "ggml-org/llama.cpp#20899): then update it."
        if tower == _MERGED * text
        else ""
    )
    run = finding.facts.llama
    encoder = run.flag_value("--mmproj") or "mmproj.gguf"
    return {
        "numbers": f"it makes {tower} numbers for an image token; the model wants {text}",
        "wrongly": wrongly,
        "check": f"vlfit doctor --model {shlex.quote(f'{_file(finding)}+{encoder}')}",
    }


def _truncated(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    sizes = ""
    if groups["found"]:
        sizes = f" ({int(groups['wanted']):,} bytes expected, {int(groups['found']):,} bytes found)"
    return {"tensor": groups["tensor"] or groups["tensor2"], "sizes": sizes, **_check(finding)}


def _damaged_download(finding: Finding) -> TemplateValues:
    """Hashes as ``ollama list`` shortens them, and the model if the log has the command."""
    groups = finding.match.groups
    named = _PULLED.findall(finding.match.lines_above)
    got, want = groups["got"], groups["want"]
    hashes = f": its SHA-256 is {got[:12]}..., not {want[:12]}..." if got and want else ""
    empty = " That is the hash of an empty file: nothing was written." if got == _EMPTY_SHA256 else ""
    model = named[-1] if named else "MODEL"
    return {"hashes": hashes, "empty": empty, "pull": f"ollama pull {shlex.quote(model)}"}


GGUF = (
    Rule(
        id="gguf.truncated",
        keywords=("is not within the file bounds", "exceeds file size"),
        pattern=(
            r"tensor (?:'(?P<tensor>[^']{1,120})' data is not within the file bounds"
            r"|\\?\"(?P<tensor2>[\w.-]{1,120})\\?\" offset\+size \((?P<wanted>\d{1,18})\) exceeds file size "
            r"\((?P<found>\d{1,18})\))"
        ),
        cause="The GGUF file is truncated: the data of {tensor} would lie beyond its end{sizes}.",
        remedy=FETCH_AGAIN,
        command="{check}",
        compute=_truncated,
    ),
    Rule(
        id="ollama.digest",
        keywords=("digest mismatch, file must be downloaded again",),
        pattern=(
            r"digest mismatch, file must be downloaded again(?::\s+want sha256:(?P<want>[0-9a-f]{64}),?\s+"
            r"got sha256:(?P<got>[0-9a-f]{64}))?"
        ),
        cause="A file that Ollama downloaded is damaged{hashes}.{empty}",
        remedy=(
            "Ollama has deleted it: pull the model again. If that fails each time, a proxy or virus scanner "
            "changes what arrives, or disk or RAM do not keep it."
        ),
        command="{pull}",
        compute=_damaged_download,
    ),
    Rule(
        id="gguf.merges",
        keywords=("cannot find tokenizer merges in model file",),
        pattern=r"cannot find tokenizer merges in model file",
        cause=(
            "The GGUF file has no merges (tokenizer.ggml.merges), without which no text can be split into "
            "tokens: its conversion went wrong."
        ),
        remedy=(
            f"{OTHER_VOCABULARY} If it is your own, convert it again with a newer llama.cpp, whose converter "
            "knows the tokenizer.json that today's transformers writes."
        ),
        command="{check}",
        compute=_check,
    ),
    Rule(
        id="gguf.no_gguf",
        keywords=("invalid magic characters",),
        pattern=(
            r"gguf_init_from_(?:file|reader)(?:_impl|_ptr)?: invalid magic characters:? ?"
            r"(?P<start>[^\s,]{0,12})"
        ),
        cause="The file is no GGUF file: it begins with {start}. {what}",
        remedy=FETCH_AGAIN,
        command="{check}",
        compute=_not_gguf,
    ),
    Rule(
        id="gguf.split",
        keywords=("failed to load GGUF split from", "invalid split file", "illegal split file"),
        pattern=(
            r"(?:failed to load GGUF split from (?P<part>\S{1,300})|invalid split file: (?P<file>\S{1,300})"
            r"|illegal split file(?: idx)?: \S{1,20} ?(?:\(file: \S{1,300}\))?, "
            r"model must be loaded with the first split)"
        ),
        cause=(
            "A part of a split GGUF model is missing, or is not in its place: the files were renamed, put "
            "together with cat, or a later part was named."
        ),
        remedy=f"{KEEP_NAMES} Name the first.",
        command="{check}",
        compute=_check,
    ),
    Rule(
        id="gguf.other_mmproj",
        keywords=("mismatch between text model", "mmproj embedding mismatch"),
        pattern=(
            r"(?:mismatch between text model \(n_embd = (?P<text>\d{1,9})\) and mmproj \(n_embd = "
            r"(?P<tower>\d{1,9})\)|mmproj embedding mismatch \((?P<tower2>\d{1,9}) and (?P<text2>\d{1,9})\))"
        ),
        cause="The mmproj file is the vision tower of another model: {numbers}.",
        remedy=f"{NAME_MMPROJ}{{wrongly}}",
        command="{check}",
        compute=_other_model,
    ),
    Rule(
        id="gguf.old_conversion",
        keywords=("key not found in model", "has wrong array length", "unable to find tensor"),
        pattern=(
            r"(?:key not found in model: (?P<key>[\w.-]{1,120})"
            r"|key (?P<key2>[\w.-]{1,120}) has wrong array length; expected \d+, got \d+"
            r"|failed to load model '[^']{1,400}': operator\(\): unable to find tensor "
            r"(?P<tensor>[\w.-]{1,120}))"
        ),
        cause=(
            "The GGUF file and this program are of different times: {what} is missing, or is not what the "
            "program expects. Ollama's own files differ from llama.cpp's in the same way."
        ),
        remedy=f"{OTHER_CONVERSION} Or the program is the older one: then update it.",
        command="{check}",
        compute=lambda finding: {
            "what": next(filter(None, (finding.match.groups[name] for name in ("key", "key2", "tensor")))),
            **_check(finding),
        },
    ),
    Rule(
        id="gguf.projector",
        keywords=("unknown projector type",),
        pattern=r"unknown projector type:(?: (?P<kind>[\w.-]{1,60}))?",
        cause="This llama.cpp does not know the mmproj file's kind of vision tower{kind_named}.",
        remedy=(
            "Update llama.cpp if the model is newer than it. If the file names no kind, it was converted by "
            "an old llama.cpp: get another mmproj file."
        ),
        command="llama-server --version",
        compute=lambda finding: {
            "kind_named": f", {finding.match.groups['kind']}" if finding.match.groups["kind"] else ""
        },
    ),
)
