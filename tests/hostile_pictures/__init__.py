"""Hostile picture files: each costs its decoder far more time or memory than its size suggests, or lies.

``KINDS`` has them by name; ``file()`` makes the bytes: at most ``LARGEST``, in well under a second, and the
same in every run. Those that are not ``default_format`` are of formats that a server decodes only with
``--image-formats all``, or never.
"""

from tests.hostile_pictures import gif_webp_bmp_files as gif_webp_bmp_files
from tests.hostile_pictures import heif_files as heif_files
from tests.hostile_pictures import jpeg_files as jpeg_files
from tests.hostile_pictures import media_files as media_files
from tests.hostile_pictures import other_files as other_files
from tests.hostile_pictures import png_files as png_files
from tests.hostile_pictures import tiff_jp2_files as tiff_jp2_files
from tests.hostile_pictures.kinds import KINDS, LARGEST, HostileKind

__all__ = ["KINDS", "LARGEST", "HostileKind"]
