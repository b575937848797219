"""Read one document in a sandbox: `python -m edgeinfer.media.document_reader_process MODE < FILE`.

MODE `text` (PDF, DOCX) and `html` write a line "ok" and the text, with a form feed between pages. MODE
`pages` writes "ok" and, for each page of a PDF, the length (u32, little endian) and bytes of a PNG
file. An error is written as `error MESSAGE`. The limits are those of `picture_decoder_process`, with
more CPU time.
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
from PIL import Image, PngImagePlugin  # noqa: F401  needed to write PNG, and no file can be opened later

from edgeinfer.media.picture_decoder_process import limit, refuse
from edgeinfer.platform.process import die_with_parent

CPU_S = 20
#: Maximum number of pages of a PDF that are read: as text, or as pictures (as many as a request may
#: have).
MAX_PAGES = {"text": 1000, "pages": 64}
#: Length (pixels) of the longer side of a page's picture: A4 at 130 dots per inch.
PAGE_PIXELS = 1536
#: Maximum size (bytes, uncompressed) of the file word/document.xml in a DOCX file.
_MAX_XML = 64 << 20
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_CHARSET = re.compile(rb"""charset=["']?([\w.:-]+)""", re.IGNORECASE)
#: Name of an HTML element that contains no text of the page, e.g. "script" → pattern of its end tag.
_ENDS = {
    name: re.compile(rf"</{name}\s*>", re.IGNORECASE)
    for name in ("script", "style", "template", "noscript", "svg")
}
_SPACES = re.compile(r"\s+")
_TAG_START = re.compile(r"<(?:(!--)|(/?)([a-z][a-z0-9]*)|[!?/])", re.IGNORECASE)
_TAG_DELIMITER = re.compile("""[>"']""")
_LINES = frozenset(
    "address article aside blockquote br dd div dl dt figcaption figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr li main nav ol p pre section table title tr ul".split()
)
_BREAKS = {f"{_WORD}{tag}": "\t" if tag == "tab" else "\n" for tag in ("tab", "br", "cr", "p")}
#: Maximum nesting of the XML elements of a DOCX file. Word processors write a few dozen levels.
_MAX_DEPTH = 512


def main() -> int:
    """Read the document from stdin; write the text, the pages or an error to stdout; return 0."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    mode = sys.argv[1]
    Image.preinit()
    charset = _CHARSET.search(data[:4096])
    codec = charset[1].decode("latin-1") if charset else "cp1252"
    # look up each codec now: that imports a module, and after `limit` no file can be opened
    for name in ("utf-16-le", "cp437", "utf-8-sig", codec):
        with suppress(LookupError):
            codecs.lookup(name)
    limit(CPU_S)
    try:
        if mode == "html":
            parts = [_html(data, codec)]
        else:
            parts = list(_docx(data) if data.startswith(b"PK") else _pdf(data, mode))
    except MemoryError:
        refuse("reading the file takes too much memory")
    except Exception as error:  # noqa: BLE001  parsers raise exceptions of any class for broken files
        refuse(str(error) or type(error).__name__)
    else:
        sys.stdout.buffer.write(b"ok\n" + (b"" if mode == "pages" else b"\f").join(parts))
        sys.stdout.buffer.flush()
    return 0


def _pdf(data: bytes, mode: str) -> Iterator[bytes]:
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        reason = "needs a password" if "password" in str(error) else "is not a valid PDF"
        raise ValueError(f"the file {reason}") from error
    if len(document) > MAX_PAGES[mode]:
        raise ValueError(f"the PDF has {len(document)} pages; at most {MAX_PAGES[mode]} are read")
    for page in document:
        if mode == "text":
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
    """Yield the text of a DOCX file as one page, because the file does not say where pages end."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        member = archive.getinfo("word/document.xml")
        if member.file_size > _MAX_XML:
            raise ValueError(f"the document's text takes more than {_MAX_XML >> 20} MB")
        with archive.open(member) as file:
            text = "".join(_docx_texts(BytesIO(file.read(_MAX_XML))))
            yield text.rstrip("\n").encode("utf-8", "replace")


def _docx_texts(xml: BytesIO) -> Iterator[str]:
    """Yield the texts, tabs and line breaks of a DOCX file (its `xml`) in order, in a single pass.

    Paragraphs may be nested (text boxes): iterating over each paragraph would repeat their text.
    """
    depth = 0
    for event, element in ElementTree.iterparse(xml, ("start", "end")):
        depth += 1 if event == "start" else -1
        if depth > _MAX_DEPTH:
            raise ValueError(f"the document's XML elements are nested more than {_MAX_DEPTH} deep")
        if event == "start":
            continue
        if element.tag == f"{_WORD}t":
            yield element.text or ""
        yield _BREAKS.get(element.tag, "")
        element.clear()


def _html(data: bytes, codec: str) -> bytes:
    """Return the text of an HTML page (UTF-8, or else `codec`), with a line for each block element."""
    try:
        page = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        page = data.decode(codec, "replace")
    text = html.unescape("".join(_html_texts(page)))
    return re.sub(r"\n{3,}", "\n\n", text).strip().encode("utf-8", "replace")


def _html_texts(page: str) -> Iterator[str]:
    """Yield the text between tags, and line breaks for tags of block elements, in linear time."""
    position = start = 0
    is_pre, is_after_break = False, True
    absent: set[str] = set()
    while ">" not in absent and (tag := _TAG_START.search(page, position)) is not None:
        position = _end_of(page, tag, absent)
        if ">" in absent:
            break
        name = (tag[3] or "").lower()
        line_break = _break_of(name, is_end=bool(tag[2]))
        text = page[start : tag.start()]
        if not is_pre:
            text = _SPACES.sub(" ", text)
            text = text.lstrip() if is_after_break else text
            text = text.rstrip() if line_break else text
        yield text
        yield line_break
        start, is_after_break = position, bool(line_break) or (is_after_break and not text)
        if name == "pre":
            is_pre = not tag[2]
    yield _SPACES.sub(" ", page[start:])


def _break_of(name: str, *, is_end: bool) -> str:
    if name == "li" and not is_end:
        return "\n- "
    if name in ("td", "th"):
        return "" if is_end else "\t"
    return "\n" if name in _LINES else ""


def _end_of(page: str, tag: re.Match[str], absent: set[str]) -> int:
    """Return the position after a tag or comment; for a `<script>` or similar, after its end tag.

    As in browsers, a `>` between quotes does not end a tag. `absent` collects delimiters that do not
    occur in the rest of the page, so that each is searched for only once (linear time).
    """
    if tag[1] and "-->" not in absent:
        comment_end = page.find("-->", tag.start() + 2)
        if comment_end >= 0:
            return comment_end + 3
        absent.add("-->")
    position = tag.end()
    while (mark := _TAG_DELIMITER.search(page, position)) is not None and mark[0] != ">":
        close = -1 if mark[0] in absent else page.find(mark[0], mark.end())
        if close < 0:
            absent.add(mark[0])
        position = max(close + 1, mark.end())
    if mark is None:
        absent.add(">")
        return len(page)
    name = tag[3].lower() if tag[3] and not tag[2] else ""
    if name in _ENDS and name not in absent:
        end_tag = _ENDS[name].search(page, mark.end())
        if end_tag is not None:
            return end_tag.end()
        absent.add(name)
    return mark.end()


if __name__ == "__main__":
    sys.exit(main())
