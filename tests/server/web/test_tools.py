"""Tools on the page, in Chromium with real tool servers: approval, a closed page, a stop, a drain."""

import json
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from other_processes import wait_until
from served_endpoint import with_page
from tools_here import calling, command, configure

from edgeinfer.config.config_file import config_path, load_config
from edgeinfer.server.web import conversations

from .test_browser import IDLE, MESSAGE, WIDTH, say, violations

pytestmark = pytest.mark.slow  # it starts tool servers and Chromium

CARD = "document.querySelector('.card')"
WEATHER = {"city": "Rome"}
SUM = {"a": 17, "b": 25}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder in which the endpoint runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask_with_tools(page, text):
    page.click("button[aria-pressed=false]", "Tools")
    page.wait("document.querySelector('[aria-pressed=true]')")
    say(page, text)


def told_results(engine):
    """Return the results of the last tool calls, as the model got them."""
    return [m.content for m in engine.requests[-1].messages if m.role == "tool"]


def test_a_task_of_two_tools(serve, tab):
    configure("plain")
    engine = FakeEngine([calling(plain__weather=WEATHER), calling(plain__add=SUM), ["Rain, and 42."]])
    page = tab(with_page(serve(engine)))
    ask_with_tools(page, "Weather in Rome, and 17 + 25?")
    page.see("plain · weather wants to run")
    page.wait("document.querySelector('.card dd').textContent === 'Rome'")
    page.wait("document.querySelector('#live').textContent.includes('waits for you')")
    assert violations(page) == []
    page.click(".card button", "Allow once")
    page.see("plain · add wants to run")
    page.click(".card button", "Allow once")
    page.see("Rain, and 42.")
    page.wait(IDLE)
    page.wait(f"!{CARD} && document.activeElement === {MESSAGE}")
    assert [text.splitlines()[-1] for text in told_results(engine)] == ["It rains in Rome.", "42"]
    names = [tool.name for tool in engine.requests[0].tools]
    assert names == ["plain__add", "plain__weather", "plain__fail"]
    page.click(".call summary", "weather: done")
    page.see("It rains in Rome.")
    assert violations(page) == []
    page.js("location.reload()")
    page.wait("document.querySelector('[aria-pressed=true]') && document.querySelector('.call')")


def test_by_keyboard_a_no_has_a_reason_and_typing_decides_nothing(serve, tab):
    configure(builtin=["write"])
    engine = FakeEngine([calling(files__write={"path": "a", "content": "x\n"}), ["As you like."]])
    page = tab(with_page(serve(engine)), width=320)
    ask_with_tools(page, "Write a.")
    page.wait(f"{CARD} && document.activeElement === {CARD}")
    page.see("+x")
    assert page.js(WIDTH) <= 320
    page.key("Enter")
    page.key(" ")
    for _ in range(6):
        page.key("Tab")
    page.type("not there")
    page.key("Enter")
    page.see("As you like.")
    assert told_results(engine) == ["The call was not allowed: the user said no: not there"]


@pytest.mark.parametrize("content", ["x\n" * 300, "a " * 9000])
def test_a_long_call_is_allowed_after_its_end_was_shown(serve, tab, folder, content):
    configure(builtin=["write"])
    engine = FakeEngine([calling(files__write={"path": "a", "content": content}), ["Written."]])
    page = tab(with_page(serve(engine)))
    ask_with_tools(page, "Write a.")
    page.see("Scroll to the end of the call to allow it.")
    is_off = f"{CARD}.querySelector('button.primary').disabled"
    page.wait(f"{is_off} === true")
    page.js(f"{CARD}.querySelector('button.primary').click()")
    pre = f"{CARD}.querySelector('pre')"
    page.js(f"{pre}.scrollTop = {pre}.scrollHeight / 2")
    page.wait(f"{is_off} === true")
    page.js(f"{pre}.scrollTop = {pre}.scrollHeight")
    page.wait(f"{is_off} === false")
    page.js(f"{pre}.scrollTop = 0")
    page.click(".card button", "Allow once")
    page.see("Written.")
    assert (folder / "a").read_text() == content


def test_hidden_characters_of_a_call_are_shown(serve, tab):
    configure("plain")
    call = calling(plain__weather={"city": "Rome #\x1b]\u202e\u200b\U000e0041\nrm -r notes"})
    page = tab(with_page(serve(FakeEngine([call, ["Well."]]))))
    ask_with_tools(page, "Weather?")
    page.wait(CARD)
    shown = page.js(f"{CARD}.querySelector('dd').textContent")
    assert shown == "Rome #\\x1b]\\u202e\\u200b\\U000e0041\nrm -r notes"


def test_a_reload_shows_the_card_again_and_a_second_tab_answers_it(serve, tab, folder):
    configure("plain")
    add = calling(plain__add=SUM)
    engine = FakeEngine([add, calling(plain__weather=WEATHER, plain__add=SUM), ["Done."]])
    page = tab(with_page(serve(engine)))
    ask_with_tools(page, "17 + 25?")
    page.wait(CARD)
    page.js("location.reload()")
    page.see("plain · add wants to run")
    page.see(f"in {folder}")
    other = tab(SimpleNamespace(url=page.js("location.origin")), fragment=page.js("location.hash"))
    other.click(".card button", "Always in this conversation")
    for window in (page, other):
        window.see("plain · weather wants to run")
    page.click(".card button", "plain.weather(city=Rome)")
    for window in (page, other):
        window.see("Done.")
        window.wait(IDLE)
    assert load_config().tools.allow == ("plain.weather(city=Rome)",)


def test_props_name_tools_whose_arguments_are_not_held_to_a_schema(serve_page, tmp_path):
    schema = {"properties": {"n": {"type": "array", "uniqueItems": True}}}
    tools = [{"name": "loose", "inputSchema": schema}, {"name": "fine", "inputSchema": {}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    configure()
    with config_path().open("a") as config:
        listing = command("listing", str(tmp_path / "tools.json"))
        config.write(f"\n[tools.servers.listing]\ncommand = {json.dumps(listing)}\n")
    page = serve_page(FakeEngine([["Hi."]]))
    before = page.live_server.client.get("/props").json()
    assert before["loose_tools"] == []
    page.finished_turns(page.ask("hi", tools=True))
    (loose,) = page.live_server.client.get("/props").json()["loose_tools"]
    assert loose.startswith("listing__loose: the model may write other arguments: ")
    assert "#/properties/n/uniqueItems" in loose


@pytest.fixture
def waiting(serve_page):
    """Return `waiting(script)`, which starts an answer whose tool call waits for permission."""

    def start(script):
        configure("plain", "slow")
        page = serve_page(FakeEngine([script, ["Without."]]))
        page.number = page.ask("go", tools=True)
        return page

    return start


def card_of(page):
    for name, data in page.events(page.number):
        if name == "calls" and data["card"]:
            return data["card"]
    raise AssertionError("the stream ended")


def test_a_call_that_no_page_shows_is_refused_in_the_end(waiting, monkeypatch):
    monkeypatch.setattr(conversations, "UNSEEN_S", 0.2)
    page = waiting(calling(plain__add=SUM))
    wait_until(lambda: not page.live_server.endpoint.in_flight, "the answer")
    _question, called, answer = page.finished_turns(page.number)
    (call,) = called["calls"]
    assert call["status"] == "refused"
    assert call["result"] == "the user said no: no page was open to allow the call"
    assert "Without." in answer["blocks"][0]


def test_calls_that_wait_hold_up_no_answer(serve_page, monkeypatch):
    monkeypatch.setattr(conversations, "_MAX_ANSWERS", 1)
    configure("plain")
    page = serve_page(FakeEngine([calling(plain__add=SUM), ["Meanwhile."]]))
    page.number = page.ask("go", tools=True)
    card_of(page)
    assert "Meanwhile." in page.finished_turns(page.ask("hi"))[1]["blocks"][0]


def test_only_the_card_on_show_can_be_decided(waiting):
    page = waiting(calling(plain__add=SUM, plain__weather=WEATHER))
    path, card = f"/conversations/{page.number}", card_of(page)
    stale = {"action": "decide", "card": card["number"] - 1, "choice": "once"}
    assert page.post(path, 409, **stale)["error"]["code"] == "not_waiting"
    page.post(path, 400, action="decide", card=card["number"], choice="maybe")
    assert page.post("/conversations/999", 409, **stale)["error"]["code"] == "not_waiting"
    page.post(f"{path}/questions", 409, text="meanwhile")
    page.post(path, action="decide", card=card["number"], choice="once")
    page.post(path, 409, action="decide", card=card["number"], choice="no")
    later = card_of(page)
    assert later["tool"] == "weather"
    page.post(path, action="decide", card=later["number"], choice="no", reason="not now")
    calls = page.finished_turns(page.number)[1]["calls"]
    assert [call["status"] for call in calls] == ["done", "refused"]


@pytest.mark.parametrize("runs", [False, True])
def test_stop_ends_a_call_that_waits_or_runs(waiting, runs):
    page = waiting(calling(slow__go={}))
    card = card_of(page)
    if runs:
        page.post(f"/conversations/{page.number}", action="decide", card=card["number"], choice="once")
        calls = (told for name, told in page.events(page.number) if name == "calls")
        next(told for told in calls if told["words"] and not told["card"])
    page.post(f"/conversations/{page.number}", action="stop")
    *_, called = page.finished_turns(page.number)
    assert called["calls"][0]["status"] == "stopped"
    page.post(f"/conversations/{page.number}", 409, action="stop")


def test_an_endpoint_ends_while_a_call_waits(waiting):
    page = waiting(calling(plain__add=SUM))
    card_of(page)
    page.live_server.drain()
    page.live_server.wait_ended()


def test_tools_without_configuration_are_refused_with_the_next_step(serve_page):
    page = serve_page()
    assert page.get("/setup")["has_tools"] is False
    refused = page.post("/conversations/0/questions", 400, text="hi", tools=True)
    assert "no tools are configured (add some to config.toml" in refused["error"]["message"]
    assert page.get("/conversations") == []


def test_the_switch_says_what_there_is_and_where(serve_page, folder):
    configure("plain", "old")
    page = serve_page()
    number = page.ask("hi")
    page.finished_turns(number)
    note = page.post(f"/conversations/{number}", action="set", tools=True)["note"]
    assert "plain: add, weather, fail" in note
    assert f"Tools work in the folder {folder}." in note
    assert "version '1999-01-01'" in note
