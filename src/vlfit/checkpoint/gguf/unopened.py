"""GGUF models from their headers alone: on the hub, or in a list, where nothing is opened to run.

Nothing is written, no vocabulary is read (``skim.py``): 16 ms for a file here, 0.4 MB for one on the hub and
0.14 MB for each further quantization of the same model.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from vlfit.checkpoint.gguf.file_names import split_parts
from vlfit.checkpoint.gguf.gguf_checkpoint import blames, find_tower, join_headers, none_fits
from vlfit.checkpoint.gguf.gguf_config import GGUFConfig, read_gguf_config
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader
from vlfit.checkpoint.gguf.gguf_names import parse_gguf_config
from vlfit.checkpoint.gguf.gguf_tensors import GGUFFile, check_gguf_tensors, kind_of, normalize_gguf
from vlfit.checkpoint.gguf.gguf_vocabulary import chat_template_of, check_tokenizer, no_vocabulary
from vlfit.checkpoint.gguf.repository import GgufRepository, Quantization
from vlfit.checkpoint.gguf.skim import ReadRanges, Skimmed, read_file_ranges, skim_file, skim_header
from vlfit.checkpoint.gguf.stored_blocks import PLAIN_TYPES, BlockPart
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.processor_files import no_gguf_template
from vlfit.checkpoint.remote_headers import RemoteFiles, remote_files
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import CheckpointError, VlfitError

TOKENS_KEY = "tokenizer.ggml.tokens"
# Tokens of Qwen3-VL that a config names by id. A skimmed header has no vocabulary, and a plan needs no ids.
_VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_MAX_READ_ELEMENTS = 2**16  # of a tensor that a config is read from
_PARALLEL_FILES = 4
Lengths = Mapping[tuple[str, int], int]
_Opened = tuple[Skimmed, ReadRanges]


def read_unopened(name: str, model: Path, mmproj: Path | None, *, named: bool = True) -> Checkpoint:
    """Config and tensors of a GGUF model, from headers alone: for planning and lists.

    The config's token ids are made up, as the vocabulary is not read. ``model``: its file, or any part of a
    split one. ``mmproj``, ``named``: as for ``prepare_gguf``. Raises ``CheckpointError``.
    """
    parts = [_opened(path) for path in split_parts(model)]
    if named and mmproj is not None:
        return _checkpoint(name, model.parent, parts, [_opened(mmproj)])
    text = join_headers([opened[0].header for _, opened in parts])
    choice = find_tower(text, model.parent, mmproj)
    tower = [] if choice.path is None else [_opened(choice.path)]
    return _checkpoint(name, model.parent, parts, tower, may_leave_out=True, left_out=choice.left_out)


def _opened(path: Path) -> tuple[Path, _Opened]:
    return path, (skim_file(path), partial(read_file_ranges, path))


def read_quantization(repository: GgufRepository, quantization: Quantization) -> Checkpoint:
    """Config and tensors of one quantization on the hub. As ``read_quantizations``, but raises the error."""
    (found,) = read_quantizations(repository, [quantization])
    if isinstance(found, VlfitError):
        raise found
    return found


def read_quantizations(
    repository: GgufRepository, wanted: Sequence[Quantization]
) -> list[Checkpoint | VlfitError]:
    """Config and tensors of quantizations on the hub, or why one cannot be read (``CheckpointError``).

    The smallest is read first, the others by what its header was like. Raises ``HubError`` or a subclass if
    the hub does not answer.
    """
    found: dict[str, Checkpoint | VlfitError] = {}
    with remote_files(repository.name) as files:
        towers: dict[str, list[tuple[PurePosixPath, _Opened]]] = {"": []}
        for name in {repository.mmproj_for(each) or "" for each in wanted} - {""}:
            opened = _skim_remote(files, name, repository.mmprojs[name], {})
            towers[name] = [(PurePosixPath(name), opened)]

        def read(each: Quantization, lengths: Lengths) -> Lengths:
            try:
                parts = [
                    (PurePosixPath(file), _skim_remote(files, file, size, lengths))
                    for file, size in zip(each.files, each.sizes, strict=True)
                ]
                tower = towers[repository.mmproj_for(each) or ""]
                found[each.type] = _checkpoint(repository.name_of(each), Path(), parts, tower)
            except CheckpointError as error:
                found[each.type] = error
                return {}
            return parts[0][1][0].lengths

        first, *others = sorted(wanted, key=lambda each: each.bytes)
        lengths = read(first, {})
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(lambda each: read(each, lengths), others))
    return [found[each.type] for each in wanted]


def widened_types(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """The block types that are held in 16 bits, as no form holds them exactly: IQ2_S, say. Sorted."""
    return tuple(
        sorted(
            {
                info.blocks.type
                for info in tensors.values()
                if info.blocks is not None
                and info.blocks.part is BlockPart.WEIGHTS
                and info.blocks.type not in PLAIN_TYPES
            }
        )
    )


def _checkpoint(
    name: str,
    folder: Path,
    parts: Sequence[tuple[Path | PurePosixPath, _Opened]],
    tower: Sequence[tuple[Path | PurePosixPath, _Opened]],
    *,
    may_leave_out: bool = False,
    left_out: str = "",
) -> Checkpoint:
    """``may_leave_out``: without its tower if that is damaged. ``left_out``: why it has none."""
    header = join_headers([opened[0].header for _, opened in parts])
    readers = {
        tensor: partial(_read_floats, opened[1], opened[0].header, tensor)
        for _, opened in parts
        for tensor in opened[0].header.tensors
    }
    mmproj = tower[0][1][0].header if tower else None
    files = [[GGUFFile(Path(path), opened[0].header) for path, opened in each] for each in (parts, tower)]
    skipped_tokens = parts[0][1][0].left_out.get(TOKENS_KEY, 0)
    try:
        found = config_of_headers(
            header, skipped_tokens, mmproj, lambda tensor: _read_by_name(readers, header, tensor)
        )
        config, tensors = normalize_gguf(parse_gguf_config(found.config, header, mmproj), *files)
        check_gguf_tensors(config, tensors, *files)
    except CheckpointError as error:
        if not (may_leave_out and mmproj is not None and blames(error, mmproj)):
            raise
        return _checkpoint(name, folder, parts, (), left_out=none_fits([error.message]))
    if config.vision is not None and chat_template_of(header) is None:
        raise no_gguf_template(header.name)  # as the prompts of one that is opened
    kind = replace(kind_of(*files), max_image_tokens=found.max_image_tokens, without_tower=left_out)
    return Checkpoint(name, folder, config, tensors, kind)


def config_of_headers(
    model: GGUFHeader,
    skipped_tokens: int,
    mmproj: GGUFHeader | None,
    read: Callable[[str], npt.NDArray[np.float32]],
) -> GGUFConfig:
    """Config of a model (``read_gguf_config``) whose header was read without ``skipped_tokens`` tokens."""
    metadata = dict(model.metadata)
    tokens = metadata.get(TOKENS_KEY, [])
    if not isinstance(tokens, list):
        raise no_vocabulary(model)
    check_tokenizer(model, skipped_tokens or len(tokens))
    metadata[TOKENS_KEY] = tokens or list(_VISION_TOKENS)
    return read_gguf_config(replace(model, metadata=metadata), mmproj, read)


def _read_by_name(
    readers: Mapping[str, Callable[[], npt.NDArray[np.float32]]], header: GGUFHeader, name: str
) -> npt.NDArray[np.float32]:
    if name not in readers:
        raise CheckpointError(
            f"{header.name} has no tensor {name}", "The file is incomplete, or of another kind of model."
        )
    return readers[name]()


def _read_floats(read: ReadRanges, header: GGUFHeader, name: str) -> npt.NDArray[np.float32]:
    tensor = header.tensors[name]
    if tensor.type != "F32" or prod(tensor.shape) > _MAX_READ_ELEMENTS:
        raise CheckpointError(
            f"{header.name}: {name} is {tensor.type} {list(tensor.shape)}; wanted a few numbers in F32",
            "The file is damaged, or of another kind of model.",
        )
    (data,) = read([(tensor.offset, tensor.nbytes)])
    return np.frombuffer(data, "<f4").reshape(tensor.shape)


def _skim_remote(files: RemoteFiles, file: str, size: int, lengths: Lengths) -> _Opened:
    read = partial(files.read_ranges, file)
    return skim_header(read, size, file.rpartition("/")[2], lengths), read
