"""Stream an answer in this process, without a server, and print its tokens and times.

python examples/inference_direct.py [PICTURE] [MODEL]
"""

import sys
from pathlib import Path

from vlfit import VLM, VlfitError

HERE = Path(__file__).parent
picture = sys.argv[1] if len(sys.argv) > 1 else min(HERE.glob("pictures/*.png"))
model = sys.argv[2] if len(sys.argv) > 2 else "auto"

try:
    with VLM(model) as vlm:
        stream = vlm.stream("Describe this picture in one sentence.", picture)
        for piece in stream:
            print(piece, end="", flush=True)
        answer = stream.answer()
except VlfitError as error:
    sys.exit(f"error: {error}")
print()
print(f"{answer.model}: {answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
if answer.timings is not None:
    print(f"first token after {answer.timings.first_token_s:.2f} s")
    print(f"then {answer.timings.decode_tokens_per_s:.0f} tokens/s")
