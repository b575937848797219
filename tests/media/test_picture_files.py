"""Pictures are decoded in a sandboxed process; a broken or hostile one fails only its own request."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from other_processes import run_python

from edgeinfer.errors import InvalidRequestError
from edgeinfer.media import pictures
from edgeinfer.media.pictures import check_file, decode, from_base64

Image = pytest.importorskip("PIL.Image")

PIXELS = np.random.default_rng(28).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def encode(pixels=PIXELS, kind="PNG", mode=None, **options):
    image = Image.fromarray(pixels)
    out = io.BytesIO()
    (image.convert(mode) if mode else image).save(out, kind, **options)
    return out.getvalue()


def pixels_of(picture):
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_a_lossless_picture_keeps_its_pixels(kind, options):
    assert np.array_equal(pixels_of(decode(encode(kind=kind, **options))), PIXELS)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_every_format_is_decoded(kind):
    smooth = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (40, 1, 3))
    pixels = pixels_of(decode(encode(smooth, kind)))
    assert pixels.shape == smooth.shape
    assert np.abs(pixels.astype(int) - smooth).max() < 16


def test_gif_and_webp_give_their_first_frame():
    frames = {"save_all": True, "append_images": [Image.fromarray(255 - PIXELS)]}
    first = decode(encode(kind="WEBP", lossless=True, **frames))
    assert np.array_equal(pixels_of(first), PIXELS)
    assert pixels_of(decode(encode(kind="GIF", **frames))).shape == PIXELS.shape


def test_transparent_pixels_become_white():
    clear = np.zeros((4, 6, 4), np.uint8)
    clear[0] = (10, 20, 30, 255)
    for data in (encode(clear), encode(clear, "WEBP", lossless=True)):
        pixels = pixels_of(decode(data))
        assert (pixels[0] == (10, 20, 30)).all()
        assert (pixels[1:] == 255).all()


def test_16_bits_are_scaled_to_8():
    wide = (np.arange(24, dtype=np.uint16) * 2700).reshape(4, 6)
    assert (pixels_of(decode(encode(wide)))[:, :, 0] == wide // 256).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_photo_is_turned_upright(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = decode(encode(kind=kind, exif=exif))
    assert (picture.width, picture.height) == (40, 60)


@pytest.mark.parametrize(
    "head", ["", "data:image/png;base64,", "data:;base64,", "DATA:text/plain;a=b;BASE64,"]
)
def test_picture_is_base64_or_a_data_uri_of_any_declared_type(head):
    data = encode(kind="JPEG")
    assert from_base64(head + base64.b64encode(data).decode()) == data
    assert decode(data).width == 60


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("https://example.org/cat.png", "https: URLs are not fetched"),
        ("HTTP://example.org/cat.png", "http: URLs are not fetched"),
        ("file:///etc/passwd", "file: URLs are not fetched"),
        ("data:image/svg+xml,<svg/>", "data: URLs are not fetched"),
        ("not base64!", "not valid base64"),
        ("", "not a JPEG, PNG, WebP or GIF"),
        (base64.b64encode(b"BM" + bytes(60)).decode(), "not a JPEG, PNG, WebP or GIF"),
    ],
)
def test_other_files_than_pictures_are_refused(text, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        from_base64(text, "messages[0].content[1].image_url")
    assert caught.value.param == "messages[0].content[1].image_url"


def test_a_broken_file_is_refused_with_a_reason():
    with pytest.raises(InvalidRequestError, match="the picture cannot be read"):
        decode(encode()[:200])


def test_a_header_that_promises_too_many_pixels_is_refused_before_decoding():
    with pytest.raises(InvalidRequestError, match=r"8000 x 8000 pixels; at most 32,000,000"):
        decode(encode(np.zeros((8000, 8000), bool)))


def test_the_largest_picture_fits_into_the_memory():
    picture = decode(encode(np.full((4000, 8000, 4), 90, np.uint8), compress_level=1))
    assert (picture.width, picture.height) == (2828, 1414)  # scaled down to 4 million pixels
    assert set(picture.rgb) == {197}  # gray 90 with opacity 90/255 on white


def test_a_file_that_is_too_large_is_refused():
    with pytest.raises(InvalidRequestError, match="more than 32 MB"):
        check_file(bytes(33 << 20))


def test_picture_with_extreme_side_ratio_is_refused():
    assert decode(encode(np.zeros((2, 400), bool))).width == 400
    with pytest.raises(InvalidRequestError, match="401 x 2 pixels: one side is more than 200 times"):
        decode(encode(np.zeros((2, 401), bool)))


def test_a_decoder_that_dies_is_a_refusal(monkeypatch):
    monkeypatch.setattr(pictures, "_HELPER", "no.such.module")
    with pytest.raises(InvalidRequestError, match="the decoder process failed with status 1"):
        decode(encode())


_LIMITED = """
import os, socket, subprocess, threading
from edgeinfer.platform.confinement import allow_only_computation

reached = []
attempts = {
    "open": lambda: open("/etc/passwd"),
    "socket": lambda: socket.socket(),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill": lambda: os.kill(os.getppid(), 0),
    "unlink": lambda: os.unlink("/tmp/nothing-of-this-name"),
}
allow_only_computation()
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        reached.append(name)
thread = threading.Thread(target=reached.append, args=["thread"])
thread.start()
thread.join()
print(*reached)
"""


def test_modules_of_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    for name in ("PIL.py", "resource.py", "edgeinfer.py", "contextlib.py"):
        (tmp_path / name).write_text("open('ran', 'w')")
    monkeypatch.setenv("PYTHONPATH", str(Path(pictures.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert decode(encode()).width == 60
    assert not (tmp_path / "ran").exists()


def test_a_computation_reaches_no_file_socket_or_process():
    reached = run_python(_LIMITED).split()
    assert reached == ["open", "socket", "fork", "exec", "kill", "unlink", "thread"]
