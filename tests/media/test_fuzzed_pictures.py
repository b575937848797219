"""Files of pictures and projectors, mutated: each ends in a result or a reason, in its own process.

`make fuzz-pictures` tries 10,000 of each.
"""

import io
import os
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from made_decoders import make_lfm2, make_qwen2vl
from made_projectors import IDEFICS3_TOKENS, copy_model, make_projector

from edgeinfer.models.gguf import read_header

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.slow, pytest.mark.needs("encoder")]

N_PICTURES = int(os.environ.get("EDGEINFER_FUZZ_FILES", "300"))
N_PROJECTORS = int(os.environ.get("EDGEINFER_FUZZ_FILES", "60"))
SEED = int(os.environ.get("EDGEINFER_FUZZ_SEED", "28"))
PIXELS = np.random.default_rng(28).integers(0, 256, (40, 60, 3), dtype=np.uint8)

#: Forks for each path that is read, and prints what the child said, how it ended, and its seconds.
_FORKING = """
import os, resource, sys
def child(work):
    there, here = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        os.write(here, (work() or "ok").encode()[:200])
        os._exit(0)
    os.close(here)
    with open(there, "rb") as file:
        said = file.read().decode("utf-8", "replace").replace("\\n", " ")
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, said
"""

_DECODING = f"""{_FORKING}
from edgeinfer.media import picture_decoder_process as decoder
from edgeinfer.media.pictures import format_of
def decoded(data):
    decoder.limit(decoder.CPU_S)
    try:
        picture = decoder._decode(data, format_of(data))
        return f"ok {{len(picture.tobytes()) == 3 * picture.width * picture.height}}"
    except Exception as error:
        return "refused: " + (str(error) or type(error).__name__)
for line in sys.stdin:
    with open(line.rstrip("\\n"), "rb") as file:
        data = file.read()
    print(*child(lambda: decoded(data)), flush=True)
"""

#: As the engine does: read the header, try the projector, and then encode pictures.
_ENCODING = f"""{_FORKING}
from edgeinfer.errors import EngineError, InvalidGgufError
from edgeinfer.models import projectors
from edgeinfer.runtime.llama.helpers.projector_trial import try_projector
from edgeinfer.runtime.llama.mtmd import Projector
from edgeinfer.runtime.llama.weights import open_model
from edgeinfer.media.pictures import Picture
models = {{}}
def used(path, model):
    projector = Projector(path, model, 1)
    for width, height in ((300, 200), (1, 1), (5, 600)):
        try:
            n_rows = [one.n_rows for one in projector.chunks(width, height) if one.n_rows]
            rows = projector.encode(Picture(width, height, os.urandom(3 * width * height)))
            assert [len(one) for one in rows] == n_rows
        except EngineError:
            pass
for line in sys.stdin:
    path, text = line.rstrip("\\n").split("\\t")
    if text not in models:
        models[text] = open_model((text,))
    try:
        projectors.check(path)
    except InvalidGgufError:
        print(0, 0, "header", flush=True)
        continue
    code, seconds, said = child(lambda: try_projector(path, models[text], 1))
    if code == 0 and said == "ok":
        code, seconds, said = child(lambda: used(path, models[text]))
        print(code, seconds, "engine", said, flush=True)
    else:
        print(0, seconds, "trial", code or said, flush=True)
"""


@contextmanager
def answering(program: str) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], *fields: str | Path) -> tuple[int, float, str]:
    """Return the exit status of the child for these fields, its CPU time (s), and its output."""
    process.stdin.write("\t".join(map(str, fields)) + "\n")
    process.stdin.flush()
    code, seconds, said = process.stdout.readline().rstrip("\n").split(" ", 2)
    return int(code), float(seconds), said


def picture_file(kind: str, mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(out, kind, **options)
    return out.getvalue()


def test_mutated_pictures_end_in_pixels_or_a_reason(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    frames = {"save_all": True, "append_images": [Image.fromarray(255 - PIXELS)]}
    exif = Image.Exif()
    exif[0x0112] = 6
    originals = [
        picture_file("JPEG", exif=exif),
        picture_file("JPEG", progressive=True, quality=40),
        picture_file("JPEG", "CMYK"),
        picture_file("PNG"),
        picture_file("PNG", "P"),
        picture_file("PNG", "LA"),
        picture_file("WEBP", exif=exif),
        picture_file("WEBP", lossless=True),
        picture_file("WEBP", **frames),
        picture_file("GIF", **frames),
    ]
    ends: Counter[str] = Counter()
    path = tmp_path / "picture"
    with answering(_DECODING) as decoder:
        for _ in range(N_PICTURES):
            data = bytearray(chance.choice(originals))
            for _ in range(chance.choice((1, 2, 8, 40))):
                data[chance.randrange(4, len(data))] = chance.randrange(256)
            if chance.random() < 0.2:
                del data[chance.randrange(12, len(data)) :]
            path.write_bytes(data)
            code, seconds, said = ask(decoder, path)
            assert (code, said[:7]) in ((0, "ok True"), (0, "refused")), data.hex()
            assert seconds < 5
            ends[said[:7]] += 1
    print(ends)
    assert len(ends) == 2


#: Maximum CPU time (s) of a child.
_MAX_S = 5
#: Values to which sizes, counts and types of a header are set.
_NASTY = (0, 1, 2, 3, 5, 7, 13, 16, 33, 255, 256, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_NASTY_FLOATS = tuple(
    struct.unpack("<4I", struct.pack("<4f", float("nan"), float("inf"), -1e30, 1e-40))
)


def mutate(data: bytes, header_end: int, chance: random.Random) -> bytearray:
    """Return a projector with changes in its header (up to `header_end`), or a NaN weight."""
    out = bytearray(data)
    keys = [offset for offset in range(24, header_end - 16) if data[offset : offset + 5] == b"clip."]
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 12))):
        kind, offset = chance.random(), chance.randrange(24, header_end - 64)
        if kind < 0.05:
            offset = chance.randrange(header_end, len(out) - 4)
            # these bytes are a NaN whether the weight is bfloat16, float16 or float32
            out[offset : offset + 4] = bytes.fromhex("00 7e c0 7f")
        elif kind < 0.4:
            out[offset] = chance.randrange(256)
        elif kind < 0.95:
            if kind < 0.8:  # change the value of a metadata key
                key = chance.choice(keys)
                offset = min(key + struct.unpack_from("<Q", data, key - 8)[0] + 4, header_end - 4)
            struct.pack_into("<I", out, offset, chance.choice(_NASTY + _NASTY_FLOATS))
        else:
            source, n_bytes = chance.randrange(24, header_end - 64), chance.randrange(4, 64)
            out[offset : offset + n_bytes] = out[source : source + n_bytes]
    if chance.random() < 0.05:
        del out[chance.randrange(24, len(out)) :]
    return out


@pytest.fixture(scope="module")
def pairs(
    smollm2: Path, gemma3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Sequence[tuple[Path, Path]]:
    """Projectors of four kinds, each with a model that it fits."""
    folder = tmp_path_factory.mktemp("fuzzed")
    return [
        (
            make_projector(folder / "idefics3.gguf", "idefics3", 576, patch=32, longest=512),
            copy_model(folder / "smol-vl.gguf", smollm2, IDEFICS3_TOKENS),
        ),
        (make_projector(folder / "gemma3.gguf", "gemma3", 640), gemma3),
        (
            make_projector(folder / "qwen2vl.gguf", "qwen2vl_merger", 64),
            make_qwen2vl(folder / "m-rope.gguf", smollm2),
        ),
        (make_projector(folder / "lfm2.gguf", "lfm2", 64), make_lfm2(folder / "hybrid.gguf", smollm2)),
    ]


def test_mutated_projectors_end_their_trial_alone(
    pairs: Sequence[tuple[Path, Path]], tmp_path: Path
) -> None:
    """A projector whose header and trial succeed encodes pictures without a crash."""
    chance = random.Random(SEED)
    files = [(path.read_bytes(), read_header(path).data_offset, text) for path, text in pairs]
    ends: Counter[str] = Counter()
    longest = 0.0
    path = tmp_path / "mmproj.gguf"
    with answering(_ENCODING) as encoder:
        for number in range(N_PROJECTORS):
            data, header_end, text = files[number % len(files)]
            path.write_bytes(mutate(data, header_end, chance))
            code, seconds, said = ask(encoder, path, text)
            assert (code, seconds < _MAX_S) == (0, True), (number, seconds, said)
            longest = max(longest, seconds)
            ends[said[:12]] += 1
    print(ends, longest)
    assert ends["engine ok"]
    assert ends["header"]
