"""Small documents: a PDF of a line a page, and a DOCX file of paragraphs."""

import io
import zipfile
from collections.abc import Sequence

_NAMESPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def make_pdf(lines: Sequence[str]) -> bytes:
    """Make a PDF with a page for each line; an empty line gives a page with a black square and no text."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    pages = []
    for line in lines:
        drawn = f"BT /F1 24 Tf 72 700 Td ({line}) Tj ET" if line else "100 100 300 300 re f"
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn.encode()))
        about = b"/Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >>"
        objects.append(b"<< /Type /Page %s /Contents %d 0 R >>" % (about, len(objects)))
        pages.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(pages), len(pages))
    out, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size, start = len(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return out + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, start)


def make_docx(paragraphs: Sequence[str], *, head: str = "") -> bytes:
    """Make a DOCX file of paragraphs, with their tabs; `head` comes before its XML."""
    tab = "</w:t><w:tab/><w:t>"
    texts = [paragraph.replace("\t", tab) for paragraph in paragraphs]
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in texts)
    xml = f'{head}<w:document xmlns:w="{_NAMESPACE}"><w:body>{body}</w:body></w:document>'
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        # without the current time: two processes that collect a test must give it one name
        entry = zipfile.ZipInfo("word/document.xml")
        archive.writestr(entry, xml, zipfile.ZIP_DEFLATED)
    return out.getvalue()
