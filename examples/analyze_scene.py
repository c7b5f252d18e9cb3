"""List the objects in a picture with their boxes, and its text, with a running server.

python examples/analyze_scene.py [PICTURE]     needs examples/start_server.py running
"""

import os
import sys
from pathlib import Path

from vlfit import Client, VlfitError

HERE = Path(__file__).parent
picture = sys.argv[1] if len(sys.argv) > 1 else min(HERE.glob("pictures/*.png"))

try:
    with Client(os.environ.get("VLFIT_SERVER", "http://127.0.0.1:8000")) as client:
        scene = client.scene(picture)
except VlfitError as error:
    sys.exit(f"error: {error}")
print(scene.summary)
for item in scene.objects:
    left, top, right, bottom = item.box
    print(f"  {item.label}: from ({left}, {top}) to ({right}, {bottom}) pixels")
print("  text:", ", ".join(scene.text) or "none")
for warning in scene.warnings:
    print(f"  {warning}", file=sys.stderr)
