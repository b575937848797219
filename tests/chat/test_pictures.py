"""Pictures of a question: read, stored, sent before the text, and shown by name."""

import json

import pytest
from chats_here import consume
from fake_engine import DEFAULT_INFO, FakeEngine
from made_documents import make_docx, make_pdf
from msgspec.structs import replace

from edgeinfer.chat import formats
from edgeinfer.chat.attachments import describe, dropped_picture, mentioned_paths, read
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import UsageError
from edgeinfer.media.pictures import PICTURE_MARK


@pytest.fixture
def red(tmp_path):
    path = tmp_path / "a red one.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nred")
    return path


def test_file_that_begins_as_a_picture_is_attached_as_one(red, tmp_path):
    attached = read(red)
    assert (attached.is_picture, attached.data) == (True, red.read_bytes())
    assert describe(attached) == "a red one.png, a picture"
    (tmp_path / "b.png").write_text("text")
    assert read(tmp_path / "b.png").text == "text"
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(33 << 20))
    with pytest.raises(UsageError, match="larger than 32 MiB"):
        read(tmp_path / "c.png")


def test_question_sends_pictures_first_and_stores_them(store, red):
    engine = FakeEngine(info=replace(DEFAULT_INFO, can_see=True))
    session = ChatSession(lambda: store, "fake", engine)
    session.ask("What is it?", [Attachment(name="n.txt", text="notes"), read(red)])
    consume(session.begin_answer())
    turn = engine.requests[0].messages[0]
    assert turn.content == f"{PICTURE_MARK}File `n.txt`:\n```\nnotes\n```\n\nWhat is it?"
    assert turn.pictures == (red.read_bytes(),)
    other = ChatSession(lambda: store)
    other.open(session.conversation.id)
    assert other.path[0].attachments[1].data == red.read_bytes()
    assert "*(picture: a red one.png)*" in formats.to_markdown(other.conversation, other.path)
    assert json.loads(formats.to_json(other.conversation, other.path))


def test_documents_are_attached_as_their_text(tmp_path):
    pytest.importorskip("pypdfium2")
    (tmp_path / "a.pdf").write_bytes(make_pdf(["Seven cranes."]))
    (tmp_path / "b.docx").write_bytes(make_docx(["One", "two"]))
    (tmp_path / "c.pdf").write_bytes(make_pdf([""]))
    assert read(tmp_path / "a.pdf").text == "[page 1]\nSeven cranes."
    assert read(tmp_path / "b.docx").text == "One\ntwo"
    assert dropped_picture(str(tmp_path / "a.pdf")) == f'@"{tmp_path / "a.pdf"}" '
    with pytest.raises(UsageError, match="contains no text"):
        read(tmp_path / "c.pdf")


@pytest.mark.parametrize("form", ["{}", "'{}'", '"{}"', "escaped", "file://'{}'"])
def test_dropped_path_becomes_a_mention(red, form):
    pasted = str(red).replace(" ", "\\ ") if form == "escaped" else form.format(red)
    if form == "{}":
        # a terminal quotes a path with a blank, so this is not a dropped file
        assert dropped_picture(pasted) == ""
        return
    assert mentioned_paths(f"look {dropped_picture(pasted)}") == [red]


@pytest.mark.parametrize("pasted", ["a red one.png", "/nosuch.png", "two words", "'open", "", "/"])
def test_other_pastes_stay_text(pasted):
    assert dropped_picture(pasted) == ""


def test_text_file_that_is_dropped_stays_a_path(tmp_path):
    (tmp_path / "n.txt").write_text("x")
    assert dropped_picture(str(tmp_path / "n.txt")) == ""
