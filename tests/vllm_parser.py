"""vLLM's own parser, asked whether it takes words after ``vllm serve``.

Needs a Python that has vLLM: this one, or the one that VLFIT_VLLM_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys

PYTHON = os.environ.get("VLFIT_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
# The parser moved house: vLLM 0.33, 0.29 to 0.32, and before. In 0.11 and 0.12 it is made otherwise.
PROGRAM = """
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
refused = {}
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            module.validate_parsed_serve_args(parser.parse_args(words))
    except SystemExit:
        refused[" ".join(words)] = said.getvalue()[-300:]
print("REFUSED " + json.dumps(refused))
"""
_NO_FLAG = ["a/b", "--no-such-flag"]


def refused_by_vllm(commands: list[list[str]], python: str = PYTHON) -> dict[str, str]:
    """Each command that its parser refuses, with its last words. One that it must refuse goes with them."""
    ended = subprocess.run(
        [python, "-c", PROGRAM],
        input=json.dumps([*commands, _NO_FLAG]),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    answers = [line for line in ended.stdout.splitlines() if line.startswith("REFUSED ")]
    assert answers, ended.stderr[-2000:]
    refused: dict[str, str] = json.loads(answers[0].removeprefix("REFUSED "))
    # The parser does refuse: else this would prove nothing.
    assert refused.pop(" ".join(_NO_FLAG), None)
    return refused


def vllm_version(python: str = PYTHON) -> str:
    """The version of that Python's vLLM, by its package's metadata."""
    program = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
