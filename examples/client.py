"""Ask a running server about a picture with the openai package; any OpenAI client works.

python examples/client.py [PICTURE] [QUESTION]   needs examples/start_server.py running; pip install openai
"""

import base64
import os
import sys
from pathlib import Path

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionContentPartImageParam

picture = Path(sys.argv[1] if len(sys.argv) > 1 else min(Path(__file__).parent.glob("pictures/*.png")))
question = sys.argv[2] if len(sys.argv) > 2 else "What is in this picture?"
server = os.environ.get("VLFIT_SERVER", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{server}/v1", api_key=os.environ.get("VLFIT_API_KEY", "none"))
try:
    url = "data:image;base64," + base64.b64encode(picture.read_bytes()).decode()
    image: ChatCompletionContentPartImageParam = {"type": "image_url", "image_url": {"url": url}}
    for chunk in client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": [image, {"type": "text", "text": question}]}],
        stream=True,
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
except (OpenAIError, OSError) as error:
    sys.exit(f"error: {error} (server: {server})")
