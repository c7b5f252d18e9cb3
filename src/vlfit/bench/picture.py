"""Pictures made up for measuring: areas, edges and grain, the same at every call. Knows Pillow."""

from io import BytesIO

QUESTION = "Describe this picture in detail."
_GRAIN = 16  # of 256 shades: as much as makes a JPEG about as large as a photo's


def made_up_picture(width: int, height: int, number: int = 0) -> bytes:
    """A JPEG; another one for each ``number``, so that nothing can be remembered from one to the next."""
    import numpy as np
    from PIL import Image, ImageDraw

    grain = np.random.default_rng(number).integers(0, _GRAIN, (height, width, 3), dtype=np.uint8)
    shades = np.linspace(60, 200, width, dtype=np.uint8)[None, :, None]
    picture = Image.fromarray(shades + grain)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((width // 8, height // 8, width // 2, height // 2), fill=(200, 40, 40))
    if width > 40 and height > 40:
        draw.rectangle((width // 2, height // 2, width - 20, height - 20), fill=(40, 60, 200))
    file = BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()
