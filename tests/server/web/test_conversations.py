"""The page's requests: conversations of the chat, and answers that continue without the page."""

import base64
import json
import random
import re

import pytest
from chats_here import consume
from fake_engine import FakeEngine, StepGate, split_script
from fake_hub import Fault
from other_processes import wait_until

from edgeinfer.errors import DecodeError
from edgeinfer.models.store import list_pulled
from edgeinfer.runtime.events import ReasoningDelta
from edgeinfer.server.web import conversations, render

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SAMPLE = (
    "# A\n\n1. one\n2. two\n\n```py\nx = 1\n```\n\n| a | b |\n|--|-:|\n| 1 | 2 |\n\n> q\nlazy\n\nend"
)


def words(turn):
    return turn["text"] or re.sub("<[^>]*>", "", "".join(turn["blocks"])).strip()


def test_ask_search_and_go_on_in_the_terminal(serve_page, terminal):
    engine = FakeEngine([["Green ", "tea"], ["More"]])
    page = serve_page(engine)
    number = page.ask("What shall I drink?", system_prompt="Be brief.", sampling={"temperature": 0.5})
    question, answer = page.finished_turns(number)
    assert question["text"] == "What shall I drink?"
    assert (words(answer), answer["status"]) == ("Green tea", "complete")
    assert answer["stats"]["completion_tokens"] == 2
    assert [conversation["id"] for conversation in page.get("/conversations?q=green")] == [number]
    assert page.get("/conversations?q=coffee") == []

    chat = terminal(engine)
    assert not chat.open_last()
    chat.ask("And then?")
    consume(chat.begin_answer())
    assert [words(turn) for turn in page.finished_turns(number)][-1] == "More"
    sent = engine.requests[-1].messages
    assert [m.content for m in sent] == ["Be brief.", "What shall I drink?", "Green tea", "And then?"]
    assert engine.requests[-1].sampling.temperature == 0.5
    assert engine.requests[-1].conversation == f"chat-{number}"


def test_edit_regenerate_branches_and_fork(serve_page):
    page = serve_page(FakeEngine([["one"], ["two"], ["three"]]))
    number = page.ask("first")
    question, _ = page.finished_turns(number)
    page.post(f"/conversations/{number}", action="regenerate")
    _, again = page.finished_turns(number)
    assert (words(again), again["page"]) == ("two", [2, 2])
    page.ask("first, edited", number, editing=question["id"])
    edited, third = page.finished_turns(number)
    assert (edited["text"], edited["page"], words(third)) == ("first, edited", [2, 2], "three")
    page.post(f"/conversations/{number}", action="show", turn=edited["id"], step=-1)
    assert words(page.finished_turns(number)[-1]) == "two"
    page.post(f"/conversations/{number}", action="show", turn=third["id"])
    assert words(page.finished_turns(number)[-1]) == "three"
    fork = page.post(f"/conversations/{number}", action="fork", turn=third["id"])["id"]
    assert [words(t) for t in page.finished_turns(fork)] == ["first, edited", "three"]
    titles = [conversation["title"] for conversation in page.get("/conversations")]
    assert titles == ["first (fork)", "first"]


def test_delete_undo_rename_and_settings(serve_page):
    page = serve_page()
    number = page.ask("hello")
    page.finished_turns(number)
    page.post(f"/conversations/{number}", action="rename", title="Greeting")
    page.post(f"/conversations/{number}", action="set", system_prompt="S", sampling={"top_p": 0.5})
    branch, _ = page.follow(number, lambda *_: True)
    conversation = branch["conversation"]
    assert (conversation["title"], conversation["system_prompt"]) == ("Greeting", "S")
    assert conversation["sampling"] == {"top_p": 0.5}
    page.post(f"/conversations/{number}", action="delete")
    assert page.get("/conversations") == []
    page.post(f"/conversations/{number}", action="undelete")
    assert len(page.get("/conversations")) == 1
    for bad in ({"sampling": {"top_p": 7}}, {"sampling": {"nonsense": 1}}, {"model": "nothing"}):
        answer = page.client.post(f"/conversations/{number}", json={"action": "set", **bad})
        assert 400 <= answer.status_code < 500


def test_files_are_attached_and_pictures_shown(serve_page):
    page = serve_page()
    contents = {"notes.txt": b"milk", "dot.png": PNG}
    files = [{"name": n, "data": base64.b64encode(raw).decode()} for n, raw in contents.items()]
    number = page.ask("what is this?", files=files[:1])
    question, _ = page.finished_turns(number)
    assert [(f["name"], f["is_picture"]) for f in question["files"]] == [("notes.txt", False)]
    number = page.ask("and this?", files=files[1:])
    branch, _turns = page.follow(number, lambda b, t: bool(t))
    picture = f"/conversations/{number}/export?form=file&turn={branch['path'][0]}&file=0"
    answer = page.client.get(picture)
    assert (answer.headers["content-type"], answer.content) == ("image/png", PNG)
    binary = [{"name": "x.bin", "data": base64.b64encode(b"\xff\0\xfe").decode()}]
    refused = page.client.post("/conversations/0/questions", json={"text": "x", "files": binary})
    assert refused.status_code == 400
    assert "x.bin is a binary file" in refused.text


def test_exports(serve_page):
    page = serve_page(FakeEngine([["It's `tea`"]]))
    number = page.ask('What\'s "it"?', sampling={"temperature": 0.25})
    *_, answer = page.finished_turns(number)

    def export(form, turn=0):
        return page.client.get(f"/conversations/{number}/export?form={form}&turn={turn}")

    assert "It's `tea`" in export("markdown").text
    assert export("markdown").headers["content-disposition"].startswith("attachment; ")
    assert json.loads(export("json").text)["conversation"]["id"] == number
    assert export("text", answer["id"]).text == "It's `tea`"
    messages = [{"role": "user", "content": 'What\'s "it"?'}]
    assert repr(messages) in export("python", answer["id"]).text
    compile(export("python").text, "export", "exec")
    assert f'fetch("{page.live_server.url}/v1/chat/completions"' in export("javascript").text
    assert "curl http://127.0.0.1" in export("curl").text
    assert '"temperature": 0.25' in export("curl").text
    assert export("text", 10_000).status_code == 400
    assert page.client.get("/conversations/999/export").status_code >= 400
    assert page.client.get("/conversations/x/export").status_code == 404


def test_failed_answer_shows_its_error_and_is_regenerated(serve_page):
    page = serve_page(FakeEngine([["Half ", DecodeError("the engine broke")], ["whole"]]))
    number = page.ask()
    *_, failed = page.finished_turns(number)
    assert (failed["status"], words(failed), failed["note"]) == ("failed", "Half", "the engine broke")
    page.post(f"/conversations/{number}", action="regenerate")
    assert words(page.finished_turns(number)[-1]) == "whole"
    page.post("/conversations/0/questions", 400, text="  ")


def test_a_model_that_does_not_load_leaves_the_question(serve_page):
    def load(name, progress):
        raise DecodeError("no such file")

    page = serve_page(load=load, wait_ready=False)
    number = page.ask("still here?")

    def has_notice(branch, _turns):
        return bool(branch["notice"]) and not branch["notice"].startswith("Loading")

    branch, turns = page.follow(number, has_notice)
    assert "no such file" in branch["notice"]
    assert [turn["text"] for turn in turns.values()] == ["still here?"]


def test_reasoning_and_a_long_history(serve_page):
    page = serve_page(FakeEngine([[ReasoningDelta("hmm "), ReasoningDelta("so"), "yes"]]))
    number = page.ask()
    *_, answer = page.finished_turns(number)
    assert (answer["reasoning"], words(answer)) == ("hmm so", "yes")
    for _ in range(3):
        page.ask("more", number)
        page.finished_turns(number)
    with page.client.stream("GET", f"/conversations/{number}/events?latest=2") as stream:
        data = next(json.loads(line[6:]) for line in stream.iter_lines() if '"path"' in line)
    assert (len(data["path"]), data["earlier"]) == (2, 6)


def test_page_shows_the_whole_answer_for_any_split(serve_page):
    answers, scripts = [], []
    for seed in range(40):
        dice, gate = random.Random(seed), StepGate()
        text = dice.choice(["", " ", "\n", "\n\n"]) + dice.choice([SAMPLE, "a\n---\nb", "> q\n- x"])
        reasoning = "hm \n\n hm" if seed % 3 else ""
        pause_s = 2 * conversations._POLL_S if seed % 8 == 0 else 0.0
        script = split_script([ReasoningDelta(reasoning), text], dice, pause_s=pause_s)
        scripts.append([*script, gate])
        answers.append((text, reasoning, gate))
    page = serve_page(FakeEngine(scripts))
    for text, reasoning, gate in answers:
        whole = (list(render.blocks(text)), reasoning)

        def is_whole(_branch, turns, whole=whole):
            return whole in [(turn["blocks"], turn["reasoning"]) for turn in turns.values()]

        number = page.ask()
        page.follow(number, is_whole)  # the answer is whole while the engine still waits
        gate.opened.set()
        *_, answer = page.finished_turns(number)
        assert (answer["blocks"], answer["reasoning"]) == whole
    assert '"level":"error"' not in page.live_server.log.getvalue()


@pytest.mark.parametrize("text", ["", " ", "\n", "[1]: https://example.com/x", "\\"])
def test_a_conversation_with_any_text_can_be_opened(serve_page, terminal, text):
    page, chat = serve_page(), terminal(FakeEngine([[text]]))
    chat.ask("[1]: https://example.com/x")
    consume(chat.begin_answer())
    question, answer = page.finished_turns(chat.conversation.id)
    assert (question["text"], words(answer)) == ("[1]: https://example.com/x", text.strip())


def test_turn_whose_rendering_fails_is_shown_without_formatting(serve_page, monkeypatch):
    drawn = render.GrowingHtml._render

    def breaking(growing, document, text):
        if "bad" in growing._source:
            raise ZeroDivisionError
        return drawn(growing, document, text)

    monkeypatch.setattr(render.GrowingHtml, "_render", breaking)
    page = serve_page(FakeEngine([["*good*"], ["*ba", "d*"]]))
    number = page.ask()
    page.finished_turns(number)
    page.ask("more", number)
    *_, good, _question, bad = page.finished_turns(number)
    assert good["blocks"] == ["<p><em>good</em></p>\n"]
    assert bad["blocks"] == ['<p class="plain">*bad*</p>']
    assert "ZeroDivisionError" in page.live_server.log.getvalue()


def test_a_drained_endpoint_ends_the_streams(serve_page):
    page = serve_page()
    with page.client.stream("GET", "/conversations/0/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: list"
        page.live_server.drain()
        list(lines)
    page.live_server.wait_ended()


@pytest.mark.parametrize("number", ["-1", "7", "x", "999999999999999999999999", "²"])
def test_unknown_conversation_is_a_404(serve_page, number):
    page = serve_page()
    for path, body in (("", {"action": "rename"}), ("/questions", {"text": "hi"})):
        assert page.client.post(f"/conversations/{number}{path}", json=body).status_code == 404
    assert page.client.get(f"/conversations/{number}/export").status_code == 404


def test_only_the_catalogue_and_hugging_face_are_pulled_from(serve_page):
    page = serve_page()
    for name in (
        "/etc/passwd",
        "https://evil.example/x.gguf",
        "s3://bucket/x.gguf",
        "oci://evil.example/x",
    ):
        assert "catalogue" in page.post("/pulls", status=400, name=name)["error"]["message"]
    assert page.get("/pulls") == []
    assert "smollm2-135m-instruct" in [model["name"] for model in page.get("/models")]


def test_a_stopped_pull_is_listed_until_it_has_ended_and_can_be_begun_again(serve_page, hub):
    page, pull = serve_page(), {"name": "hf.co/someone/Tiny-GGUF:Q8_0"}
    hub.faults.append(Fault(silent=True, cut_after=100))
    page.post("/pulls", **pull)
    wait_until(lambda: page.get("/pulls")[0]["done"], "bytes")
    assert page.live_server.endpoint.in_flight == 1  # so the endpoint does not count as idle
    assert [event["text"] for event in page.post("/pulls", **pull, stop=True)] == ["stopping"]
    wait_until(lambda: not page.get("/pulls"), "its end")
    assert page.live_server.endpoint.in_flight == 0
    page.post("/pulls", **pull)
    wait_until(lambda: not page.get("/pulls"), "the second")
    assert [model.name for model in list_pulled()] == ["someone.tiny-gguf-q8_0"]
