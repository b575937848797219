"""Pictures in every API: their place in the text, and errors."""

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace

from edgeinfer.media.pictures import PICTURE_MARK as HERE
from edgeinfer.media.pictures import split_at_pictures

Image = pytest.importorskip("PIL.Image")

SEES = replace(DEFAULT_INFO, can_see=True, can_shift=True)


def png(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 2, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def file(seed: int) -> bytes:
    return base64.b64decode(png(seed))


RED, BLUE = png(1), png(2)


def uri(data: str) -> str:
    return f"data:image/png;base64,{data}"


def openai_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def anthropic_block(data: str) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(info=SEES)


@pytest.fixture(scope="module")
def blind(serve_module):
    return serve_module(FakeEngine())


def last_turns(engine) -> list[tuple]:
    """Return role, text and picture files of each turn of the last request."""
    turns = engine.requests[-1].messages
    return [(turn.role, turn.content, list(turn.pictures)) for turn in turns]


BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [text("a"), openai_part(uri(RED)), text("b"), openai_part(uri(BLUE))]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [openai_part(uri(BLUE)), text("d")]},
        ]
    },
    "/v1/messages": {
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": [text("a"), anthropic_block(RED), text("b"), anthropic_block(BLUE)]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [anthropic_block(BLUE), text("d")]}]},
        ],
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": uri(RED), "detail": "auto"},
                    {"type": "input_text", "text": "b"},
                    {"type": "input_image", "image_url": uri(BLUE)},
                ],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": uri(BLUE)}, {"type": "input_text", "text": "d"}],
            },
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_pictures_stand_where_the_message_has_them(live_server, engine, path, stream):
    live_server.post(path, BODIES[path] | {"model": "fake", "stream": stream}, status=200)
    question = ("user", f"a{HERE}b{HERE}", [file(1), file(2)])
    assert last_turns(engine) == [question, ("assistant", "", []), ("tool", f"{HERE}d", [file(2)])]


def test_ollama_has_pictures_before_the_text(live_server, engine):
    turns = [{"role": "user", "content": "what?", "images": [RED, BLUE]}]
    live_server.post("/api/chat", {"model": "fake", "messages": turns, "stream": False}, status=200)
    assert last_turns(engine) == [("user", f"{HERE}{HERE}what?", [file(1), file(2)])]
    assert engine.requests[-1].overflow == "refuse"  # the engine cannot drop tokens of pictures
    body = {"model": "fake", "prompt": "what?", "images": [BLUE], "stream": False}
    assert live_server.post("/api/generate", body).status_code == 200
    assert last_turns(engine) == [("user", f"{HERE}what?", [file(2)])]
    assert live_server.post("/api/generate", body | {"raw": True}).status_code == 200
    assert engine.requests[-1].prompt == f"{HERE}what?"
    assert engine.requests[-1].pictures == (file(2),)


def test_a_result_that_is_an_error_keeps_its_picture(live_server, engine):
    result = {"type": "tool_result", "tool_use_id": "c", "content": [anthropic_block(RED)]}
    turns = [{"role": "user", "content": [result | {"is_error": True}]}]
    assert live_server.post("/v1/messages", {"max_tokens": 8, "messages": turns}).status_code == 200
    assert last_turns(engine) == [("tool", f"Error: {HERE}", [file(1)])]


def test_mark_in_the_text_stays_text(live_server, engine):
    said = f"x{HERE}y{HERE[0]}"
    turns = [{"role": "user", "content": [text(said), openai_part(uri(RED)), text(said)]}]
    assert live_server.post("/v1/chat/completions", {"messages": turns}).status_code == 200
    ((_, content, files),) = last_turns(engine)
    assert split_at_pictures(content, files) == [said, said]


@pytest.mark.parametrize("path", [*BODIES, "/api/chat"])
def test_text_without_pictures_arrives_whole(live_server, engine, path):
    said = "".join(map(chr, range(0xFDD0, 0xFDD5)))
    content = said if path == "/api/chat" else [text(said)]
    turns = [{"role": "user", "content": content}]
    if path == "/v1/responses":
        turns[0]["content"][0]["type"] = "input_text"
    body = {"input": turns} if path == "/v1/responses" else {"messages": turns, "max_tokens": 8}
    answer = live_server.post(path, body | {"model": "fake", "stream": False})
    assert answer.status_code == 200, answer.text
    assert last_turns(engine) == [("user", said, [])]


def test_counting_tokens_takes_pictures(live_server, blind):
    path = "/v1/messages/count_tokens"
    body = {"model": "fake", "messages": [{"role": "user", "content": [anthropic_block(RED)]}]}
    assert live_server.post(path, body).status_code == 200
    assert "fake does not accept pictures" in blind.post(path, body, status=400).text


@pytest.mark.parametrize("path", BODIES)
def test_text_model_refuses_pictures_for_the_engines_reason(serve, path):
    engine = FakeEngine()
    engine.vision_error = ": its projector is damaged"
    answer = serve(engine).post(path, BODIES[path] | {"model": "fake"}, status=400)
    assert "fake does not accept pictures: its projector is damaged" in answer.text


def test_pictures_that_are_decoded_delay_no_text(serve_module):
    decoded, waiting = threading.Event(), threading.Semaphore(0)

    class Decoding(FakeEngine):
        def submit(self, request):
            if request.n_pictures:
                waiting.release()
                decoded.wait()
            return super().submit(request)

    endpoint = serve_module(Decoding(info=SEES))

    def ask(content):
        turns = [{"role": "user", "content": content}]
        return endpoint.post("/v1/chat/completions", {"messages": turns}).status_code

    with ThreadPoolExecutor() as threads:
        seen = [threads.submit(ask, [openai_part(uri(RED))]) for _ in range(4)]
        try:
            for _ in seen:
                assert waiting.acquire(timeout=60)
            assert ask("x" * 100_000) == 200
        finally:
            decoded.set()
        assert [future.result() for future in seen] == [200] * 4


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/v1/chat/completions", openai_part("https://example.org/a.png"), "https: URLs are not fetched"),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "https://x.org/a"}}, "the endpoint fetches nothing"),
        ("/v1/messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "the endpoint stores no files"),
        ("/v1/responses", {"type": "input_image", "image_url": "http://x.org/a"}, "http: URLs are not fetched"),
        ("/v1/responses", {"type": "input_image", "image_url": uri(RED), "file_id": "f"}, "the endpoint stores no files"),
    ],
)  # fmt: skip
def test_picture_that_is_not_base64_is_refused(live_server, path, content, reason):
    turns = [{"role": "user", "content": [content]}]
    body = {"input": turns} if path.endswith("responses") else {"messages": turns, "max_tokens": 8}
    assert reason in live_server.post(path, body | {"model": "fake"}, status=400).text


def test_a_model_tells_whether_it_sees(live_server, blind):
    for server, sees in ((live_server, True), (blind, False)):
        assert server.get("/props").json()["modalities"] == {"vision": sees, "audio": False}
        kinds = server.get("/v1/models/fake").json()["architecture"]
        assert kinds == {"input_modalities": ["text", *["image"] * sees], "output_modalities": ["text"]}
        (listed,) = server.get("/models").json()["models"]
        assert ("multimodal" in listed["capabilities"]) is sees
        shown = server.post("/api/show", {"model": "fake"}).json()
        assert ("vision" in shown["capabilities"]) is sees
