"""vLLM's own parser, asked whether it takes words after ``vllm serve``.

Needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

PYTHON = os.environ.get("VLFIT_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
# The parser moved house: vLLM 0.33, 0.29 to 0.32, and before. In 0.11 and 0.12 it is made otherwise.
_PARSER = """
import contextlib, importlib, io, json, sys
for home in ("common", "launchers", "openai"):
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(f"vllm.entrypoints.{home}.cli_args")
        break
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
"""
PROGRAM = (
    _PARSER
    + """
refused = {}
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            module.validate_parsed_serve_args(parser.parse_args(words))
    except SystemExit:
        refused[" ".join(words)] = said.getvalue()[-300:]
print("ANSWER " + json.dumps(refused))
"""
)
_OPTIONS = (
    _PARSER
    + """
print("ANSWER " + json.dumps([name for action in parser._actions for name in action.option_strings]))
"""
)
# What a start would make of the words, without loading anything: lengths, sizes and cards are checked here.
_CONFIGURE = (
    _PARSER
    + """
from vllm.engine.arg_utils import AsyncEngineArgs
made = []
for words in json.load(sys.stdin):
    try:
        args = parser.parse_args(words)
        args.model = args.model_tag or args.model
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        limits = config.model_config.multimodal_config
        made.append({
            "context": config.model_config.max_model_len,
            "pool": config.cache_config.kv_cache_memory_bytes,
            "sequences": config.scheduler_config.max_num_seqs,
            "chunk": config.scheduler_config.max_num_batched_tokens,
            "eager": config.model_config.enforce_eager,
            "tensor": config.parallel_config.tensor_parallel_size,
            "data": config.parallel_config.data_parallel_size,
            "pictures": limits.get_limit_per_prompt("image") if limits else None,
        })
    except Exception as error:
        made.append({"error": f"{type(error).__name__}: {error}"[:600]})
print("ANSWER " + json.dumps(made))
"""
)
# The checks with which vLLM's layers refuse a piece of a matrix: blocks of FP8 weights, Marlin's tiles.
_SHAPES = """
import json, sys
from types import SimpleNamespace
import vllm.distributed
vllm.distributed.get_tensor_model_parallel_world_size = lambda: 1  # asked, not used, where a layer says it
from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
from vllm.model_executor.layers.quantization.utils.marlin_utils import verify_marlin_supports_shape
answers = []
for weights, cards, shapes in json.load(sys.stdin):
    refused = False
    for rows, columns, own_rows, own_columns in shapes:
        try:
            if weights == "fp8":
                layer = SimpleNamespace(tp_size=cards)
                validate_fp8_block_shape(layer, columns, rows, own_columns, [own_rows], [128, 128])
            else:
                verify_marlin_supports_shape(own_rows, own_columns, columns, 32)
        except ValueError:
            refused = True
    answers.append(refused)
print("ANSWER " + json.dumps(answers))
"""
_NO_FLAG = ["a/b", "--no-such-flag"]


def refused_by_vllm(commands: list[list[str]], python: str = PYTHON) -> dict[str, str]:
    """Each command that its parser refuses, with its last words. One that it must refuse goes with them."""
    refused: dict[str, str] = _answer(PROGRAM, [*commands, _NO_FLAG], python)
    # The parser does refuse: else this would prove nothing.
    assert refused.pop(" ".join(_NO_FLAG), None)
    return refused


def options_of_vllm(python: str = PYTHON) -> set[str]:
    """Every flag that its parser knows."""
    return set(_answer(_OPTIONS, [], python))


def configured_by_vllm(commands: list[list[str]], python: str = PYTHON) -> list[dict[str, Any]]:
    """What vLLM makes of each command, the model's folder first: its own settings, or the ``error``."""
    made: list[dict[str, Any]] = _answer(_CONFIGURE, commands, python)
    return made


def shapes_refused_by_vllm(asked: list[Any], python: str = PYTHON) -> list[bool]:
    """Whether its layers refuse any of the pieces: each a format, a number of cards, and shapes (rows,
    columns, and those of one card).
    """
    answers: list[bool] = _answer(_SHAPES, asked, python)
    return answers


def _answer(program: str, given: list[Any], python: str) -> Any:
    """What ``program`` prints behind ANSWER, with ``given`` as its input."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    ended = subprocess.run(
        [python, "-c", program],
        input=json.dumps(given),
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    answers = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, ended.stderr[-2000:]
    return json.loads(answers[0].removeprefix("ANSWER "))


def vllm_version(python: str = PYTHON) -> str:
    """The version of that Python's vLLM, by its package's metadata."""
    program = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
