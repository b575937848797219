"""Decode one picture under limits: `python -m` this module, FORMAT.

It reads the file from stdin and writes size and pixels to stdout: `WIDTH HEIGHT\\n` and 8-bit RGB, row
by row; a refusal is `error MESSAGE`. The file may come from anyone, and decoders have had bugs. So
before the first byte is decoded, the process gives up opening files and sockets, starting programs, and
reaching other processes.
"""

from __future__ import annotations

import contextlib
import copy  # noqa: F401  decoders import it late, when nothing can be opened any more
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
    TiffImagePlugin,  # noqa: F401  likewise: it reads the orientation of a photo
    WebPImagePlugin,
)

from edgeinfer.platform.confinement import allow_only_computation
from edgeinfer.platform.process import die_with_parent

#: Limits of the process: address space and CPU time. A picture of `MAX_PIXELS` takes about 400 MB.
MEMORY_BYTES = 512 << 20
CPU_S = 5
MAX_PIXELS = 32_000_000
#: Largest ratio of the sides: Qwen's own limit, and no model was trained on longer strips.
MAX_RATIO = 200
#: Most pixels of the result. Larger pictures are scaled down: no projector uses more, and a request may
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
    """Decode the picture from stdin; return 0 if a result was written."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    warnings.simplefilter("ignore")
    limit(CPU_S)
    try:
        _write(_decode(data, argv[0]))
    except MemoryError:
        refuse(f"decoding it takes more than {MEMORY_BYTES >> 20} MB of memory")
    except Exception as error:  # noqa: BLE001  a decoder raises what it likes for a broken file
        refuse(str(error) or type(error).__name__)
    return 0


def limit(cpu_s: int) -> None:
    """Limit memory and CPU time (s) of this process, and its system calls to those of a computation."""
    for limited, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limited, (most, most))
    allow_only_computation()


def _decode(data: bytes, kind: str) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # the next lines are stricter, before any pixel is decoded
    picture: Image.Image = _FORMATS[kind](BytesIO(data))
    size = f"{picture.width} x {picture.height}"
    if max(picture.size) > MAX_RATIO * min(picture.size):
        raise ValueError(f"it has {size} pixels: one side is more than {MAX_RATIO} times the other")
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"it has {size} pixels; at most {MAX_PIXELS:,} are read")
    picture.load()
    with contextlib.suppress(KeyError, ValueError, SyntaxError):  # broken metadata: do not rotate
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
    """Convert to RGB; transparent parts become white."""
    if picture.mode.startswith("I"):  # 16 bits per channel, which `convert` would clip at 255
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
    for top in range(0, picture.height, _ROWS):  # in blocks, which take little memory
        rows = picture.crop((0, top, picture.width, min(top + _ROWS, picture.height)))
        out.write(rows.tobytes())
    out.flush()


def refuse(reason: str) -> None:
    """Report that the file cannot be read."""
    sys.stdout.buffer.write(b"error " + reason.encode("utf-8", "replace")[:500])
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
