"""Read one document under limits: `python -m` this, `text`, `html` or `pages`; its bytes come on stdin.

The answer to `text` and `html` is a line "ok" and the text, a form feed between pages; to `pages` "ok"
and each picture of a page (PNG) behind its length (u32); a refusal is `error MESSAGE`. The limits are
those of `picture_decoder_process`, with more processor time.
"""

from __future__ import annotations

import codecs
import html
import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from xml.etree import ElementTree

import pypdfium2
from PIL import Image, PngImagePlugin  # noqa: F401  the writer of PNG

from edgeinfer.platform.process import die_with_parent
from edgeinfer.runtime.picture_decoder_process import limit, refuse

CPU_S = 20
#: Most pages of a document as text, and as pictures: a request has at most 64 of those.
MAX_PAGES = {"text": 1000, "pages": 64}
#: The longer side of a page's picture (pixels): A4 in 130 dots an inch.
PAGE_PIXELS = 1536
#: The largest document part of a DOCX file, unpacked (bytes).
_MOST_XML = 64 << 20
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_CHARSET = re.compile(rb"""charset=["']?([\w.:-]+)""", re.IGNORECASE)
_ANY = re.IGNORECASE | re.DOTALL
_HIDDEN = re.compile(r"<(script|style|template|noscript|svg)\b.*?</\1\s*>|<!--.*?-->", _ANY)
_PRE = re.compile(r"(<pre\b.*?</pre\s*>)", _ANY)
_LINES = (
    "address|article|aside|blockquote|br|dd|div|dl|dt|figcaption|figure|footer|form|h[1-6]|header|hr|li|"
    "main|nav|ol|p|pre|section|table|title|tr|ul"
)
_TAGS = [
    (re.compile(tags, _ANY), instead)
    for tags, instead in (
        (r" ?<li\b[^>]*> ?", "\n- "),
        (r" ?<t[dh]\b[^>]*> ?", "\t"),
        (rf" ?</?({_LINES})\b[^>]*> ?", "\n"),
        (r"""</?[a-z!?]([^>"']|"[^"]*"|'[^']*')*>""", ""),
    )
]
_BREAKS = {f"{_WORD}tab": "\t", f"{_WORD}br": "\n", f"{_WORD}cr": "\n"}


def main() -> int:
    """Read the document of stdin; return 0 if there was an answer."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    wanted = sys.argv[1]
    Image.preinit()
    charset = _CHARSET.search(data[:4096])
    codec = charset[1].decode("latin-1") if charset else "cp1252"
    for late in ("utf-16-le", "cp437", "utf-8-sig", codec):  # imported late, when nothing can be opened
        with suppress(LookupError):
            codecs.lookup(late)
    limit(CPU_S)
    try:
        if wanted == "html":
            parts = [_html(data, codec)]
        else:
            parts = list(_docx(data) if data.startswith(b"PK") else _pdf(data, wanted))
    except MemoryError:
        refuse("reading it takes too much memory")
    except Exception as error:  # noqa: BLE001  a parser raises what it likes for a broken file
        refuse(str(error) or type(error).__name__)
    else:
        sys.stdout.buffer.write(b"ok\n" + (b"" if wanted == "pages" else b"\f").join(parts))
        sys.stdout.buffer.flush()
    return 0


def _pdf(data: bytes, wanted: str) -> Iterator[bytes]:
    document = pypdfium2.PdfDocument(data)
    if len(document) > MAX_PAGES[wanted]:
        raise ValueError(f"it has {len(document)} pages, and {MAX_PAGES[wanted]} are read at most")
    for page in document:
        if wanted == "text":
            text = page.get_textpage().get_text_range()
            yield text.replace("\r\n", "\n").replace("\f", "\n").encode("utf-8", "replace")
        else:
            yield _picture(page)
        page.close()


def _picture(page: pypdfium2.PdfPage) -> bytes:
    scale = PAGE_PIXELS / max(1.0, *page.get_size())
    out = BytesIO()
    picture = page.render(scale=scale, rev_byteorder=True).to_pil()
    picture.convert("RGB").save(out, "PNG", compress_level=1)
    return struct.pack("<I", out.tell()) + out.getvalue()


def _docx(data: bytes) -> Iterator[bytes]:
    """Yield the text of a Word document as one page: it has none of its own."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        part = archive.getinfo("word/document.xml")
        if part.file_size > _MOST_XML:
            raise ValueError(f"its text takes more than {_MOST_XML >> 20} MB")
        with archive.open(part) as file:
            root = ElementTree.fromstring(file.read(_MOST_XML))
    lines = (_paragraph(one) for one in root.iter(f"{_WORD}p"))
    yield "\n".join(lines).encode("utf-8", "replace")


def _paragraph(paragraph: ElementTree.Element) -> str:
    runs = paragraph.iter()
    return "".join(
        (one.text or "") if one.tag == f"{_WORD}t" else _BREAKS.get(one.tag, "") for one in runs
    )


def _html(data: bytes, codec: str) -> bytes:
    """Return the text of an HTML page, a line for each block."""
    try:
        page = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        page = data.decode(codec, "replace")
    parts = _PRE.split(_HIDDEN.sub("", page))
    text = "".join(part if i % 2 else re.sub(r"\s+", " ", part) for i, part in enumerate(parts))
    for tags, instead in _TAGS:
        text = tags.sub(instead, text)
    return re.sub(r"\n{3,}", "\n\n", html.unescape(text)).strip().encode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main())
