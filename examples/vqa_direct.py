"""Answer questions about a picture in this process, without a server.

python examples/vqa_direct.py [PICTURE] [QUESTION...]
"""

import sys
from pathlib import Path

from vlfit import VLM, VlfitError

HERE = Path(__file__).parent
picture = sys.argv[1] if len(sys.argv) > 1 else min(HERE.glob("pictures/*.png"))
questions = sys.argv[2:] or ["What is in this picture?", "What colour is the background?"]

try:
    with VLM() as vlm:
        for question in questions:
            print(f"{question}\n  {vlm.ask(question, picture).text}")
except VlfitError as error:
    sys.exit(f"error: {error}")
