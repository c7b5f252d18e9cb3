"""Caption pictures in this process, without a server; the model is loaded once.

python examples/caption_image_direct.py [PICTURE...]
"""

import sys
from pathlib import Path

from vlfit import VLM, VlfitError

HERE = Path(__file__).parent
pictures = sys.argv[1:] or [str(min(HERE.glob("pictures/*.png")))]

try:
    with VLM() as vlm:
        for picture in pictures:
            print(f"{picture}: {vlm.caption(picture).text}")
except VlfitError as error:
    sys.exit(f"error: {error}")
