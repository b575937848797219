"""Documents in three APIs: the model gets their text in its place, or pictures of the pages."""

import base64

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from made_documents import make_docx, make_pdf
from msgspec.structs import replace

from edgeinfer.media.pictures import PICTURE_MARK

pytest.importorskip("pypdfium2")

PDF = base64.b64encode(make_pdf(["Seven cranes."])).decode()
SCAN = base64.b64encode(make_pdf([""])).decode()
DOCX = base64.b64encode(make_docx(["One", "two"])).decode()


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(info=replace(DEFAULT_INFO, can_see=True, can_shift=True))


def openai(data: str, **fields) -> dict:
    file = {"file_data": f"data:application/pdf;base64,{data}", "filename": "a.pdf"} | fields
    parts = [{"type": "file", "file": file}, {"type": "text", "text": "How many?"}]
    return {"messages": [{"role": "user", "content": parts}]}


def responses(data: str, **fields) -> dict:
    file = {"type": "input_file", "file_data": data, "filename": "a.pdf"} | fields
    return {"input": [{"role": "user", "content": [file, {"type": "input_text", "text": "How many?"}]}]}


def anthropic(data: str, **fields) -> dict:
    source = {"type": "base64", "media_type": "application/pdf", "data": data} | fields
    document = {"type": "document", "title": "a.pdf", "source": source}
    parts = [document, {"type": "text", "text": "How many?"}]
    return {"max_tokens": 8, "messages": [{"role": "user", "content": parts}]}


PATHS = {"/v1/chat/completions": openai, "/v1/responses": responses, "/v1/messages": anthropic}


@pytest.mark.parametrize("path", PATHS)
def test_text_of_a_document_stands_before_the_question(live_server, engine, path):
    for data, said in ((PDF, "[page 1]\nSeven cranes."), (DOCX, "One\ntwo")):
        live_server.post(path, PATHS[path](data) | {"model": "fake"}, status=200)
        (turn,) = engine.requests[-1].messages
        assert turn.content.startswith(f"File `a.pdf`:\n{said}\n\n")
        assert turn.content.endswith("How many?")


@pytest.mark.parametrize("path", PATHS)
def test_pages_without_text_are_pictures(live_server, engine, path):
    live_server.post(path, PATHS[path](SCAN) | {"model": "fake"}, status=200)
    (turn,) = engine.requests[-1].messages
    assert turn.content.startswith(PICTURE_MARK)
    assert len(turn.pictures) == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_broken_document_is_the_clients_error(live_server, path):
    answer = live_server.post(path, PATHS[path](PDF[:80]) | {"model": "fake"}, status=400)
    assert "cannot be read" in answer.text


def test_stored_and_distant_files_are_refused(live_server):
    for path, body in (
        ("/v1/chat/completions", openai(PDF, file_id="file-1")),
        ("/v1/responses", responses(PDF, file_url="https://a.example/a.pdf")),
    ):
        assert "file_data" in live_server.post(path, body | {"model": "fake"}, status=400).text
