"""Caption pictures with a running server, which keeps the model loaded.

python examples/caption_image.py [PICTURE...]     needs examples/start_server.py running
"""

import os
import sys
from pathlib import Path

from vlfit import Client, VlfitError

HERE = Path(__file__).parent
pictures = sys.argv[1:] or [str(min(HERE.glob("pictures/*.png")))]

try:
    with Client(os.environ.get("VLFIT_SERVER", "http://127.0.0.1:8000")) as client:
        for picture in pictures:
            print(f"{picture}: {client.caption(picture).text}")
except VlfitError as error:
    sys.exit(f"error: {error}")
