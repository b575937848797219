"""Decode a picture in a sandbox: `python -m edgeinfer.media.picture_decoder_process FORMAT < FILE`.

The process writes `WIDTH HEIGHT\\n` and the pixels (8-bit RGB, row by row), or `error MESSAGE`, to
stdout. The file may come from an attacker, and decoders have had vulnerabilities. Therefore the process
first gives up its rights to open files and sockets, to start programs, and to reach other processes.
"""

from __future__ import annotations

import contextlib
import copy  # noqa: F401  Pillow needs it while it decodes, when no file can be opened any more
import math
import resource
import sys
import warnings
from io import BytesIO

from PIL import (
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,  # noqa: F401  Pillow needs it to read the orientation of a photo
    WebPImagePlugin,
)

from edgeinfer.platform.confinement import allow_only_computation
from edgeinfer.platform.process import die_with_parent

#: Limit (bytes) of the process's address space. Decoding `MAX_PIXELS` pixels takes about 400 MB.
MEMORY_BYTES = 512 << 20
CPU_S = 5
MAX_PIXELS = 32_000_000
#: Maximum ratio of a picture's longer side to its shorter one: Qwen's limit. No model was trained on
#: longer strips.
MAX_RATIO = 200
#: Larger pictures are scaled down to this number of pixels. No projector uses more, and a request may
#: have many pictures.
KEPT_PIXELS = 4_000_000
_FORMATS = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}
_ROWS = 256


def main(argv: list[str]) -> int:
    """Decode the picture on stdin. Its format is `argv[0]`: "JPEG", "PNG", "WEBP" or "GIF".

    Writes size and pixels, or `error MESSAGE`, to stdout. Returns 0.
    """
    die_with_parent()
    data = sys.stdin.buffer.read()
    warnings.simplefilter("ignore")
    limit(CPU_S)
    try:
        _write(_decode(data, argv[0]))
    except MemoryError:
        refuse(f"decoding the file takes more than {MEMORY_BYTES >> 20} MB of memory")
    except Exception as error:  # noqa: BLE001  decoders raise exceptions of any class for broken files
        refuse(str(error) or type(error).__name__)
    return 0


def limit(cpu_s: int) -> None:
    """Limit this process's memory and CPU time (s); forbid it to open files and to start programs."""
    for resource_kind, maximum in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(resource_kind, (maximum, maximum))
    allow_only_computation()


def _decode(data: bytes, kind: str) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # disable Pillow's check: the checks below are stricter
    picture: Image.Image = _FORMATS[kind](BytesIO(data))
    size = f"{picture.width} x {picture.height}"
    if max(picture.size) > MAX_RATIO * min(picture.size):
        ratio = f"one side is more than {MAX_RATIO} times the other"
        raise ValueError(f"the picture has {size} pixels: {ratio}")
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"the picture has {size} pixels; at most {MAX_PIXELS:,} are read")
    picture.load()
    with contextlib.suppress(KeyError, ValueError, SyntaxError):  # with broken EXIF data, do not rotate
        picture = ImageOps.exif_transpose(picture)
    return _shrink(_on_white(picture))


def _shrink(picture: Image.Image) -> Image.Image:
    n_pixels = picture.width * picture.height
    if n_pixels <= KEPT_PIXELS:
        return picture
    scale = math.sqrt(KEPT_PIXELS / n_pixels)
    size = (max(1, int(picture.width * scale)), max(1, int(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)


def _on_white(picture: Image.Image) -> Image.Image:
    """Convert a picture to RGB, with white in place of transparency."""
    if picture.mode.startswith("I"):  # 16-bit values: `convert("L")` would clip them at 255
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    opacity = picture.getchannel("A")
    picture = picture.convert("RGB")
    picture.paste((255, 255, 255), mask=opacity.point(lambda value: 255 - value))
    return picture


def _write(picture: Image.Image) -> None:
    out = sys.stdout.buffer
    out.write(b"%d %d\n" % picture.size)
    for top in range(0, picture.height, _ROWS):  # a few rows at a time, to need little memory
        rows = picture.crop((0, top, picture.width, min(top + _ROWS, picture.height)))
        out.write(rows.tobytes())
    out.flush()


def refuse(reason: str) -> None:
    """Write `error REASON` to stdout, for the parent process."""
    sys.stdout.buffer.write(b"error " + reason.encode("utf-8", "replace")[:500])
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
