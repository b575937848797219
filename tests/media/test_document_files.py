"""Documents are read in a sandboxed process: text with page numbers, pages as pictures, errors."""

import base64
import contextlib
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from made_documents import make_docx, make_pdf
from other_processes import wait_until

from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.media import document_files, document_reader_process, pictures
from edgeinfer.media.document_files import pages_of, parts_of, pictures_in, text_of

PDF = make_pdf(["The harbour has seven cranes.", "Page two."])


def test_text_of_a_pdf_has_the_numbers_of_its_pages():
    said = "[page 1]\nThe harbour has seven cranes.\n\n[page 2]\nPage two."
    assert document_files.is_document(PDF)
    assert text_of(PDF, "a.pdf") == said


def test_the_same_document_is_read_once(monkeypatch):
    text = text_of(PDF, "a.pdf")
    monkeypatch.setattr(pictures, "run_helper", lambda *_: pytest.fail("read again"))
    assert text_of(PDF, "b.pdf") == text


def test_pages_become_pictures(tmp_path):
    (tmp_path / "a.pdf").write_bytes(make_pdf(["", "words"]))
    first, second = map(pictures.decode, pictures_in(tmp_path / "a.pdf"))
    assert (first.width, first.height) == (1086, 1536)
    pixels = np.frombuffer(first.rgb, np.uint8).reshape(first.height, first.width, 3)
    assert (pixels[0] == 255).all()
    assert (pixels[-400, 400] == 0).all()  # a pixel inside the page's black square
    assert 0 < np.frombuffer(second.rgb, np.uint8).min() + 1 < 100


def test_text_of_a_docx_is_its_paragraphs():
    data = make_docx(["One &amp; two", "a\tb", "", "ünï"])
    assert document_files.is_document(data)
    assert text_of(data, "a.docx") == "One & two\na\tb\n\nünï"


PAGE = """<!-- saved --><!DOCTYPE html><html><head><title>Boats  &amp; cranes</title><style>p { }</style>
<script>let x = "<p>no</p>"</script></head><body><p>One <b>two</b>
three<ul><li>a<li>b</ul><pre>
if x:
    y</pre><table><tr><td>1<td>2</table><template><p>no</p></template>grün"""


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1", "windows-1252"])
def test_text_of_html_is_the_visible_text(charset):
    data = PAGE.replace("<head>", f'<head><meta charset="{charset}">').encode(charset)
    said = "Boats & cranes\n\nOne two three\n\n- a\n- b\n\nif x:\n    y\n\n\t1\t2\ngrün"
    assert parts_of(base64.b64encode(data).decode(), "a.html") == [f"File `a.html`:\n{said}\n\n"]
    assert not document_files.is_document(b"<p>a note</p>" + data)


def test_a_pdf_without_text_says_how_it_is_seen():
    with pytest.raises(InvalidRequestError, match=r"a\.pdf contains no text") as caught:
        text_of(make_pdf([""]), "a.pdf")
    assert "--image" in (caught.value.hint or "")
    (page,) = parts_of(base64.b64encode(make_pdf([""])).decode(), "a.pdf")
    assert pictures.is_picture(page)


@pytest.mark.parametrize("head", ["", "data:text/plain;base64,", "data:;charset=utf-8;base64,"])
def test_type_of_a_file_is_decided_by_its_bytes(head):
    text = head + base64.b64encode("grün".encode()).decode()
    assert parts_of(text, "n.txt") == ["File `n.txt`:\ngrün\n\n"]
    (page,) = pages_of(make_pdf([""]), "a.pdf")
    assert parts_of(head + base64.b64encode(page).decode(), "p") == [page]


BOMB = (
    '<!DOCTYPE a [<!ENTITY b "lololololololololol">'
    + "".join(f'<!ENTITY b{n} "{f"&b{n - 1 if n else str()};" * 20}">' for n in range(12))
    + "]>"
)
REFUSED = {
    r"a cannot be read: .*(PDF|format|Data)": lambda: PDF[:60],
    "the PDF has 1001 pages; at most 1000 are read": lambda: make_pdf(["x"] * 1001),
    "more than 32 MB": lambda: b"%PDF-" + bytes(33 << 20),
    "no item named|not a zip": lambda: b"PK\x03\x04word/" + bytes(100),
    "limit on|memory|CPU time|undefined entity": lambda: make_docx(["&b11;"], head=BOMB),
    "takes more than 64 MB": lambda: make_docx(["x" * (65 << 20)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_document_is_refused_with_a_reason(message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        text_of(REFUSED[message](), "a", "messages[0]")
    assert caught.value.param == "messages[0]"


UNFINISHED = '<script |<script>|</script|<a "|<a \'"|<pre |<pre>|<!--|<!--a>|<li |<'.split("|")


@pytest.mark.parametrize("ending", ["", ">"])
@pytest.mark.parametrize("text", UNFINISHED)
def test_parsing_html_takes_linear_time(text, ending):
    """Some texts kept the parser, one of three shared decoders, busy for a minute."""
    helper = document_reader_process

    def seconds(n: int) -> float:
        began = time.thread_time()
        helper._html(f"<html>{text * n}{ending}".encode(), "cp1252")
        return time.thread_time() - began

    small = min(seconds(10_000) for _ in range(3))
    assert seconds(160_000) < 16 * 8 * max(small, 0.001)  # quadratic time would be 256 times as long


def test_page_with_stray_brackets_and_quotes_keeps_its_text():
    page = b'<html><p title="a > b">One</p><!-- x -->two &lt;b&gt;<pre>a\n  b</pre>5 < 6 <i'
    assert text_of(page, "a") == "One\ntwo <b>\na\n  b\n5 < 6 <i"


def test_nested_paragraphs_are_read_once_or_refused():
    """Half a million nested paragraphs (9 KB zipped) once took the reader its whole 20 s time limit."""
    inner = "a</w:t></w:r><w:p><w:r><w:t>b</w:t></w:r></w:p><w:r><w:t>c"
    assert text_of(make_docx([inner]), "a").split() == ["ab", "c"]
    deep = "</w:t></w:r>" + "<w:p>" * 100_000 + "</w:p>" * 100_000 + "<w:r><w:t>"
    with pytest.raises(InvalidRequestError, match="deep"):
        text_of(make_docx([deep]), "a")


def test_cached_texts_are_not_shared_between_callers(monkeypatch):
    data = make_pdf(["Of one key alone."])
    read = []
    run_helper = pictures.run_helper

    def count(*arguments: object) -> tuple[bytes, bytes]:
        read.append(arguments)
        return run_helper(*arguments)

    monkeypatch.setattr(pictures, "run_helper", count)
    for caller, n in (("one", 1), ("one", 1), ("other", 2), ("one", 2)):
        pictures.current_caller.set(caller)
        assert "alone" in text_of(data, "a.pdf")
        assert len(read) == n
    pictures.current_caller.set("")


@pytest.mark.parametrize(
    ("text", "message"), [("file:///etc/passwd", "URLs are not fetched"), ("/wD+", "UTF-8 text")]
)
def test_other_input_than_documents_is_refused(text, message):
    with pytest.raises(InvalidRequestError, match=message):
        parts_of(text, "a")


def test_as_many_pages_become_pictures_as_a_request_may_have(tmp_path):
    (tmp_path / "a.pdf").write_bytes(make_pdf([""] * 65))
    with pytest.raises(UsageError, match="the PDF has 65 pages; at most 64 are read"):
        pictures_in(tmp_path / "a.pdf")


@pytest.mark.parametrize(
    "original",
    [PDF, make_docx(["The harbour", "has cranes"]), PAGE.encode()],
    ids=["PDF", "DOCX", "HTML"],
)
def test_mutated_documents_are_text_or_a_refusal(original):
    rng = np.random.default_rng(28)
    for _ in range(20):
        data = bytearray(original)
        for offset in rng.integers(8, len(data), 12):
            data[offset] = rng.integers(256)
        with contextlib.suppress(InvalidRequestError):
            assert isinstance(text_of(bytes(data), "a"), str)


def test_caller_leaves_a_decoder_to_others(monkeypatch):
    opened, started = threading.Event(), []

    def run(*command, **options):
        started.append(pictures.current_caller.get())
        assert opened.wait(60)
        return subprocess.CompletedProcess(command, 0, b"1 1\n\0\0\0", b"")

    monkeypatch.setattr(subprocess, "run", run)

    def decode(caller: str) -> pictures.Picture:
        pictures.current_caller.set(caller)
        return pictures.decode(b"\x89PNG\r\n\x1a\n")

    with ThreadPoolExecutor(6) as pool:
        busy = [pool.submit(decode, "busy") for _ in range(4)]
        wait_until(lambda: started == ["busy"] * 2, "two decoders to work")
        other = pool.submit(decode, "other")
        wait_until(lambda: sorted(started) == ["busy", "busy", "other"], "the third to work")
        opened.set()
        assert all(future.result(60).width == 1 for future in [*busy, other])
