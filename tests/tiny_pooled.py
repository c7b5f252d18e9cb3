"""Tiny embedding models and rerankers: tiny checkpoints with the files of sentence-transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

YES, NO = 301, 302  # any two tokens: the models are random
INSTRUCTION = "Find what is alike."


def make_reranker(source: Path, folder: Path) -> Path:
    """Copy the checkpoint ``source`` to ``folder`` as one that scores by the tokens ``YES`` and ``NO``."""
    shutil.copytree(source, folder)
    _write(folder / "modules.json", _modules("LogitScore"))
    _write(folder / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": NO})
    return folder


def make_embedding_model(source: Path, folder: Path) -> Path:
    """Copy the checkpoint ``source`` to ``folder`` as one that pools its last token."""
    shutil.copytree(source, folder)
    _write(folder / "modules.json", _modules("Pooling", "Normalize"))
    _write(folder / "1_Pooling" / "config.json", {"pooling_mode": "lasttoken", "embedding_dimension": 64})
    prompts = {"prompts": {"default": INSTRUCTION}, "default_prompt_name": "default"}
    _write(folder / "config_sentence_transformers.json", prompts)
    return folder


def _modules(*names: str) -> list[dict[str, Any]]:
    kinds = [("", "Transformer"), *((f"{index}_{name}", name) for index, name in enumerate(names, 1))]
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.modules.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
