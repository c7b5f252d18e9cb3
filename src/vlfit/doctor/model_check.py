"""Checks of a model's files, GGUF ones above all: what opening it would find, and the checksum of each."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from vlfit.checkpoint.gguf.advice import FETCH_AGAIN
from vlfit.checkpoint.gguf.file_names import split_parts
from vlfit.checkpoint.gguf.gguf_checkpoint import gguf_sources, mmproj_files
from vlfit.checkpoint.gguf.gguf_header import read_gguf_header
from vlfit.checkpoint.gguf.gguf_names import errors_name_gguf
from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.checkpoint.source import (
    Checkpoint,
    ResolvedModel,
    locate_or_download,
    read_checkpoint,
    resolve_name,
)
from vlfit.doctor.checks import Check
from vlfit.errors import CheckpointError, InvalidRequest, MissingFile, NotDownloaded, VlfitError
from vlfit.units import format_bytes

_DIGEST = re.compile(r"(?:sha256-)?([0-9a-f]{64})")  # names of blobs of Ollama and of the hub's cache
_CHUNK = 2**22


def check_model(name: str) -> list[Check]:
    """Check the files of the model that ``name`` means, and whether they belong together. Uses no network.

    The checks: ``model.file`` for each GGUF file, ``model.checksum`` where the file's name has one (reads all
    of it), ``model`` (config, tensors, vocabulary and vision tower together), ``model.tokenizer`` and
    ``model.template`` (what only a request would find), ``model.note`` for what is missing and was taken from
    elsewhere. Raises the errors of ``resolve_name``, and ``NotDownloaded``.
    """
    found = resolve_name(name)
    here = [one for one in found if one.local_folder() is not None]
    if not here:
        first = found[0].name
        raise NotDownloaded(f"{first} is not on this computer", f"Get it first: vlfit pull {first}")
    checks: list[Check] = []
    for one in here:  # several types of a repository, or formats of a model
        checks += _check_one(one, name if len(found) == 1 else one.name)
    return list(dict.fromkeys(checks))  # they may share an mmproj


def _check_one(one: ResolvedModel, name: str) -> list[Check]:
    checks: list[Check] = []
    folder = one.local_folder()
    assert folder is not None
    if one.is_gguf:
        checks = [*_files(folder), *(_files(one.mmproj) if one.mmproj is not None else ())]
        if any(check.level == "red" for check in checks):
            return checks
    return [*checks, *_whole(name)]


def _files(path: Path) -> Iterator[Check]:
    try:
        parts = split_parts(path)
    except VlfitError as error:
        yield Check("model.file", "red", error.message, error.hint)
        return
    for number, part in enumerate(parts):
        try:
            header = read_gguf_header(part)
        except VlfitError as error:
            yield Check("model.file", "red", error.message, error.hint)
            continue
        size = format_bytes(part.stat().st_size)
        # Of a split file only the first part says more.
        unsaid = f"part {number + 1} of {len(parts)}" if number else "no architecture"
        kind = header.metadata.get("general.architecture", unsaid)
        yield Check("model.file", "green", f"{part.name}: {kind}, {len(header.tensors)} tensors, {size}")
        digest = _DIGEST.fullmatch(part.resolve().name)
        if digest:
            yield _checksum(part, digest[1])


def _checksum(path: Path, expected: str) -> Check:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            found.update(data)
    if found.hexdigest() == expected:
        return Check("model.checksum", "green", f"{path.name}: its SHA-256 is right")
    said = f"SHA-256 {found.hexdigest()[:12]}..., expected {expected[:12]}..."
    return Check("model.checksum", "red", f"{path.name} is damaged: {said}", FETCH_AGAIN)


def _whole(name: str) -> Iterator[Check]:
    try:
        called, folder = locate_or_download(name)
        checkpoint = read_checkpoint(called, folder)
        sources = gguf_sources(folder)
    except VlfitError as error:
        yield Check("model", "red", error.message, error.hint)
        return
    sees = "takes pictures" if checkpoint.config.vision is not None else "reads text only"
    tower = f", vision tower in {sources.mmproj[0].name}" if sources is not None and sources.mmproj else ""
    yield Check(
        "model",
        "green",
        f"{called}: {checkpoint.parameter_count / 1e6:,.0f} million parameters, {sees}{tower}",
    )
    yield from _prompts(checkpoint)
    if sources is None:
        return
    if sources.no_tower:  # those beside it were left out: perhaps as they are damaged
        for path in mmproj_files(sources.model[0].parent):
            yield from (check for check in _files(path) if check.level == "red")
    for note in sources.notes:
        yield Check("model.note", "yellow", note)


def _prompts(checkpoint: Checkpoint) -> Iterator[Check]:
    """What else would fail only with a request: tokenizer and chat template."""
    for name, check in _PROMPT_CHECKS:
        try:
            with errors_name_gguf(checkpoint.folder):
                check(checkpoint)
        except _Doubt as doubt:
            yield Check(name, "yellow", doubt.message, doubt.hint)
        except VlfitError as error:
            yield Check(name, "red", error.message, error.hint)


class _Doubt(VlfitError):
    """What may be as it should be."""


def _read_tokenizer(checkpoint: Checkpoint) -> None:
    from vlfit.prompt.tokenizer import read_tokenizer  # imports tokenizers

    read_tokenizer(checkpoint.folder, checkpoint.model_type)


def _render_template(checkpoint: Checkpoint) -> None:
    """Render one message, with a picture if the model takes some."""
    from vlfit.prompt.chat_template import ChatTemplate
    from vlfit.prompt.tokenizer import read_special_tokens

    folder, vision = checkpoint.folder, checkpoint.config.vision
    try:
        source = read_chat_template(folder)
    except MissingFile as error:
        if vision is not None:
            raise
        raise _Doubt(
            f"{error.message}: it continues the text that it is sent, and may not answer", error.hint
        ) from None
    template = ChatTemplate(source, read_special_tokens(folder))
    text = {"type": "text", "text": "Hello"}
    content = "Hello" if vision is None else [{"type": "image"}, text]
    try:
        rendered = template.render([{"role": "user", "content": content}])
    except InvalidRequest as error:
        raise CheckpointError(error.message, "Fetch the checkpoint again.") from None
    if vision is not None and rendered == template.render([{"role": "user", "content": [text]}]):
        raise CheckpointError(
            "the chat template leaves pictures out", "It is a text model's. Fetch the whole checkpoint again."
        )


_PROMPT_CHECKS: tuple[tuple[str, Callable[[Checkpoint], None]], ...] = (
    ("model.tokenizer", _read_tokenizer),
    ("model.template", _render_template),
)
