"""Checks of what the engine and the reference share: files, tokenizer, chat template, end tokens.

A fault in these would be in both, so each is held against something else: a file against the hash that the
hub gave for it, the tokenizer against its own decoding, the chat template against a rendering by Jinja as
transformers sets it up, end tokens against every file that names one.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from vlfit.api.conversation import Message, TextPart
from vlfit.checkpoint.gguf.gguf_folder import is_gguf_folder, read_sources
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import MissingFile, VlfitError
from vlfit.parity.findings import WAYS_AROUND, CheckReport, Component, Finding, Likely, Measured, SkippedCheck
from vlfit.parity.reference.reference_template import render_reference
from vlfit.prompt.builder import PromptBuilder
from vlfit.prompt.template_process import TemplateFailure
from vlfit.prompt.tokenizer import read_special_tokens

_SHA256 = 64  # digits; of git's SHA-1 40
_IS_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_NOTES = Path(".cache", "huggingface", "download")
_MOST_OF_A_NOTE = 1000
_PIECE = 2**24
_SCALES = ("_scale_inv", "weight_scale", ".scales", "_scale")
ROUND_TRIPS = (
    "the quick brown fox",
    " leading and trailing ",
    "tabs\tand\nlines\n\n",
    "ça va très bien",
    "图片里有什么？",
    "🙂🙂 0123456789",
    '{"bbox_2d": [1, 2, 3, 4]}',
)


def check_files(checkpoint: Checkpoint, report: CheckReport, *, hashes: bool) -> None:
    """Check the files of ``checkpoint``: their hashes, and that no scale of its weights is NaN or infinite.

    ``hashes``: compare every file with the hash that the hub gave for it, which reads it in full; False: that
    check is reported as skipped.
    """
    if hashes:
        _check_hashes(checkpoint, report)
    else:
        report.skipped.append(SkippedCheck("hashes of files", "only in a full check"))
    for info in checkpoint.tensors.values():
        if info.name.endswith(_SCALES) and info.dtype in _FLOATS and info.blocks is None:
            _check_scale(info, report)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _check_scale(info: TensorInfo, report: CheckReport) -> None:
    """Scales are finite; one of NaN or infinity would be so in the reference, too."""
    with info.file.open("rb") as file:
        file.seek(info.start)
        data = bytearray(file.read(info.bytes))
    values = torch.frombuffer(data, dtype=_FLOATS[info.dtype]).float()
    bad = int((~values.isfinite()).sum())
    if bad:
        _file_finding(
            report, "scale_not_finite", info.file.name, f"{info.name}: {bad} of {len(values)} scales"
        )


def _file_finding(report: CheckReport, code: str, stage: str, note: str) -> None:
    way = WAYS_AROUND[Component.FILE]
    report.findings.append(
        Finding(code, Component.FILE, stage, "as stored", Likely.FILE, note, way_around=way)
    )


def _check_hashes(checkpoint: Checkpoint, report: CheckReport) -> None:
    """Compare files with the hash that was kept when they were fetched, or that a list beside them has."""
    folder = checkpoint.folder
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if is_gguf_folder(folder):  # it has small files made by vlfit; the model's own are elsewhere
        files = list(read_sources(folder).files)
    hashes = {path: _stored_hash(path) for path in files}
    known = {path: digest for path, digest in hashes.items() if digest} | dict(_listed_hashes(folder))
    if not known:
        report.skipped.append(SkippedCheck("hashes of files", "these files come with no hash"))
        return
    weights = {info.file for info in checkpoint.tensors.values()}
    if unknown := sorted(path.name for path in weights - known.keys()):
        why = "they come with no hash, others do"
        report.skipped.append(SkippedCheck(f"hashes of {', '.join(unknown)}", why))
    for path, expected in known.items():
        found = _digest(path, expected)
        report.measured.append(Measured(path.name, "hash", float(found != expected), 0.0, "differ"))
        if found != expected:
            note = f"its hash is {found[:12]}..., not {expected[:12]}...: it has changed since it was fetched"
            _file_finding(report, "hash_differs", path.name, note)


def _stored_hash(path: Path) -> str | None:
    """The hash that the program which fetched ``path`` kept: in the file's name, or in a note beside it.

    The hub's cache has links to blobs that are named by their hash, Ollama has files ``sha256-...``, and
    ``hf download --local-dir`` keeps notes.
    """
    name = path.resolve().name.removeprefix("sha256-")
    return name if _IS_HASH.fullmatch(name) else _noted_hash(path)


def _noted_hash(path: Path) -> str | None:
    """The hash of a file in a folder that ``hf download --local-dir`` made: in the second line of its note.

    The notes are in the uppermost folder of the download. (huggingface_hub's own reader is not public,
    and writes to the folder.)
    """
    path = path.absolute()
    for folder in path.parents:
        note = folder / _NOTES / f"{path.relative_to(folder)}.metadata"
        try:
            with note.open(encoding="utf-8") as file:
                lines = file.read(_MOST_OF_A_NOTE).split("\n")
        except (OSError, ValueError):
            continue
        digest = lines[1].strip() if len(lines) > 1 else ""
        return digest if _IS_HASH.fullmatch(digest) else None
    return None


def _listed_hashes(folder: Path) -> Iterator[tuple[Path, str]]:
    """Hashes in the checkpoint's own list ``SHA256SUMS`` (as sha256sum writes it), if there is one."""
    listed = folder / "SHA256SUMS"
    if not listed.is_file() or listed.stat().st_size > 2**20:
        return
    for line in listed.read_text("utf-8", errors="replace").splitlines():
        digest, _, name = line.partition(" ")
        path = folder / name.strip().removeprefix("*")
        if len(digest) == _SHA256 and path.parent == folder and path.is_file():
            yield path, digest.lower()


def _digest(path: Path, expected: str) -> str:
    """SHA-256 of a file or, for small files of the hub, git's SHA-1 of a blob."""
    if len(expected) == _SHA256:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def check_tokenizer_and_template(checkpoint: Checkpoint, prompts: PromptBuilder, report: CheckReport) -> None:
    """Check tokenizer and chat template, as the engine's ``prompts`` use them, against the files."""
    _check_round_trips(prompts.tokenizer, report)
    _check_control_tokens(prompts, report)
    _check_template(checkpoint, prompts, report)


def _check_round_trips(tokenizer: Tokenizer, report: CheckReport) -> None:
    for text in ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
        expected = unicodedata.normalize("NFC", text)
        # SentencePiece's decoders drop a leading space that encoding had added.
        same = back == expected or back.strip() == expected.strip()
        report.measured.append(Measured("tokenizer", "round trip", float(not same), 0.0, "differ"))
        if not same:
            report.findings.append(
                Finding(
                    "round_trip_differs", Component.TOKENIZER, "tokenizer", "round trip", Likely.TOKENIZER,
                    f"{text!r} comes back as {back!r}", way_around=WAYS_AROUND[Component.FILE],
                )
            )  # fmt: skip
            return


def _check_control_tokens(prompts: PromptBuilder, report: CheckReport) -> None:
    """A control token's name is one token to the template, and plain text in what a user writes."""
    added = prompts.tokenizer.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    for number, name in special.items():
        if prompts.tokenizer.encode(name, add_special_tokens=False).ids != [number]:
            report.findings.append(
                Finding(
                    "control_token_differs", Component.TOKENIZER, "tokenizer", "control tokens",
                    Likely.TOKENIZER, f"{name} is not the one token {number}",
                )
            )  # fmt: skip
            return
    if not special:
        return
    plain = prompts.build((Message("user", (TextPart("say so"),)),)).token_ids
    expected = [special[token] for token in plain if token in special]
    try:
        ask = Message("user", (TextPart(f"say {' '.join(special.values())} so"),))
        extra = [special[token] for token in prompts.build((ask,)).token_ids if token in special]
    except VlfitError:  # a picture's placeholder without a picture
        extra = [*expected, *special.values()]
    report.measured.append(Measured("tokenizer", "control tokens", float(extra != expected), 0.0, "differ"))
    if extra != expected:
        report.findings.append(
            Finding(
                "control_token_forged", Component.TOKENIZER, "tokenizer", "control tokens", Likely.ENGINE,
                f"text of a user became {len(extra) - len(expected)} control tokens",
            )
        )  # fmt: skip


_TURNS = (("user", "hello there"), ("assistant", "good day\n"), ("user", "what is one and one?"))


def _check_template(checkpoint: Checkpoint, prompts: PromptBuilder, report: CheckReport) -> None:
    """Three turns of plain text as the engine builds them, and as Jinja alone renders the file's template."""
    try:
        source = read_chat_template(checkpoint.folder)
    except MissingFile as error:
        report.skipped.append(SkippedCheck("chat template", str(error)))
        return
    conversation = tuple(Message(role, (TextPart(text),)) for role, text in _TURNS)  # type: ignore[arg-type]
    try:
        ours = list(prompts.build(conversation).token_ids)
        special = read_special_tokens(checkpoint.folder)
        rendered = [_render(source, special, parts=parts) for parts in (False, True)]
    except VlfitError as error:
        report.skipped.append(SkippedCheck("chat template", str(error)))
        return
    both = [prompts.tokenizer.encode(each, add_special_tokens=False).ids for each in rendered]
    theirs = ours if ours in both else both[0]
    report.measured.append(Measured("template", "three turns", float(ours != theirs), 0.0, "differ"))
    if ours != theirs:
        code, component, likely = explain_prompt_difference(prompts.tokenizer, ours, theirs)
        at = first_difference(ours, theirs)
        note = f"token {at} of {len(theirs)} differs from the checkpoint's own template"
        report.findings.append(
            Finding(code, component, "template", "three turns", likely, note, float(at), None, "token")
        )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs, or that only one of the two has."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (mine, right) in pairs if mine != right), min(len(ours), len(theirs)))


def explain_prompt_difference(
    tokenizer: Tokenizer, ours: Sequence[int], theirs: Sequence[int]
) -> tuple[str, Component, Likely]:
    """Code, component and likely cause of the finding that a prompt has other token ids.

    ``ours``, ``theirs``: the engine's and the reference's ids. If both decode to one text it is the
    tokenizer, else the chat template.
    """
    mine, right = (tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (ours, theirs))
    if mine == right:
        return "tokens_differ", Component.TOKENIZER, Likely.TOKENIZER
    return "template_differs", Component.TEMPLATE, Likely.TEMPLATE


def _render(source: str, special: dict[str, str], *, parts: bool) -> str:
    """The chat template with what transformers gives it, by ``render_reference``.

    ``parts``: messages are lists of parts, as templates for pictures take them, or texts. "" if it fails.
    """
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
        for role, text in _TURNS
    ]
    try:
        return render_reference(
            source,
            {
                **special,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            },
        )
    except TemplateFailure:
        return ""


def end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[int, str]:
    """Every token that ends a turn, by each file that names one: id to the file's name."""
    folder, ids = checkpoint.folder, dict[int, str]()

    def read(name: str, where: Callable[[dict[str, Any]], Any]) -> None:
        path = folder / name
        if not path.is_file():
            return
        try:
            value = where(json.loads(path.read_text("utf-8")))
        except (ValueError, OSError):
            return
        if isinstance(value, dict):
            value = value.get("content")
        for each in value if isinstance(value, list) else [value]:
            number = tokenizer.token_to_id(each) if isinstance(each, str) else each
            if isinstance(number, int):
                ids.setdefault(number, name)

    read("generation_config.json", lambda values: values.get("eos_token_id"))
    read("tokenizer_config.json", lambda values: values.get("eos_token"))
    end = _end_of_turn(folder, tokenizer)
    if end is not None:
        ids.setdefault(end, "chat template")
    return ids


def _end_of_turn(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The control token that the chat template writes after an assistant's turn; None without one."""
    try:
        rendered = _render(read_chat_template(folder), read_special_tokens(folder), parts=False)
    except (MissingFile, VlfitError):
        return None
    _, found, rest = rendered.partition(_TURNS[1][1].strip())
    rest = rest.lstrip()
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    names = [name for name in special if found and rest.startswith(name)]
    return special[max(names, key=len)] if names else None


def check_end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, report: CheckReport) -> dict[int, str]:
    """End tokens exist in the vocabulary and are control tokens; returns them by file."""
    ids = end_token_ids(checkpoint, tokenizer)
    if is_gguf_folder(checkpoint.folder):
        return ids
    special = tokenizer.get_added_tokens_decoder()
    for number, file in ids.items():
        if number not in special:
            name = tokenizer.id_to_token(number)
            note = f"{file} ends an answer at token {number} ({name!r}), which is a word and no control token"
            report.findings.append(
                Finding(
                    "eos_is_a_word", Component.STOP, file, "as stored", Likely.FILE, note,
                    way_around=WAYS_AROUND[Component.FILE],
                )
            )  # fmt: skip
    return ids
