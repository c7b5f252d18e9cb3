"""Answer questions about a picture with a running server.

python examples/vqa.py [PICTURE] [QUESTION...]     needs examples/start_server.py running
"""

import os
import sys
from pathlib import Path

from vlfit import Client, VlfitError

HERE = Path(__file__).parent
picture = sys.argv[1] if len(sys.argv) > 1 else min(HERE.glob("pictures/*.png"))
questions = sys.argv[2:] or ["What is in this picture?", "What colour is the background?"]

try:
    with Client(os.environ.get("VLFIT_SERVER", "http://127.0.0.1:8000")) as client:
        for question in questions:
            print(f"{question}\n  {client.ask(question, picture).text}")
except VlfitError as error:
    sys.exit(f"error: {error}")
