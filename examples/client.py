"""Ask a running server about a picture with the openai package: any OpenAI client works alike.

python examples/client.py [PICTURE] [QUESTION]     needs examples/start_server.py running
"""

import base64
import os
import sys
from pathlib import Path

from openai import OpenAI

picture = Path(sys.argv[1] if len(sys.argv) > 1 else min(Path(__file__).parent.glob("pictures/*.png")))
question = sys.argv[2] if len(sys.argv) > 2 else "What is in this picture?"
client = OpenAI(base_url=os.environ.get("VLFIT_SERVER", "http://127.0.0.1:8000") + "/v1", api_key="none")
url = "data:image;base64," + base64.b64encode(picture.read_bytes()).decode()
chunks = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}],
        }
    ],
    stream=True,
)
for chunk in chunks:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
