"""llama.cpp's own reading of a GGUF, in an environment of its own: ``with_llama_cpp.py FILE OUT < JSON``.

The JSON has ``sequences`` of token ids, whose logits are written to OUT as an array for each (``arr_0``),
and ``texts``, whose tokens are printed.
"""

import json
import sys

import llama_cpp
import numpy as np
from llama_cpp import Llama

_DEFAULTS = llama_cpp.llama_model_default_params


def plain_layouts() -> object:
    """Parameters of a model without layouts for a processor's own units: AMX crashes in sandboxes."""
    parameters = _DEFAULTS()
    parameters.use_extra_bufts = False
    return parameters


def main() -> None:
    llama_cpp.llama_cpp.llama_model_default_params = plain_layouts
    wanted = json.load(sys.stdin)
    model = Llama(sys.argv[1], n_ctx=1024, n_threads=2, n_gpu_layers=0, logits_all=True, verbose=False)
    logits = []
    for ids in wanted["sequences"]:
        model.reset()
        model.eval(ids)
        logits.append(np.array(model.scores[: len(ids)], dtype=np.float32))
    np.savez(sys.argv[2], *logits)
    tokens = [model.tokenize(text.encode(), add_bos=False, special=True) for text in wanted["texts"]]
    json.dump(tokens, sys.stdout)


if __name__ == "__main__":
    main()
