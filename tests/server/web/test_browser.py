"""The page in a real Chromium: common tasks, a phone, the keyboard, and failures."""

import json
import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_engine import Delay, FakeEngine, StepGate
from fake_hub import Fault
from served_endpoint import with_page

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.cli.endpoint_setup import pulled_models
from edgeinfer.errors import InvalidRequestError
from edgeinfer.platform import paths
from edgeinfer.platform.paths import private_dir
from edgeinfer.runtime.events import Logprob, ReasoningDelta, TextDelta, TokenLogprobs
from tests.conftest import BUILD_CACHE

pytestmark = pytest.mark.slow

KEYS = ["first-key-of-this-endpoint"]
MESSAGE = "document.querySelector('#message')"
WIDTH = "document.documentElement.scrollWidth"
IDLE = "!document.querySelector('.streaming') && !document.querySelector('.stop')"


def say(page, text):
    page.fill("#message", text)
    page.key("Enter")


def speak(text):
    return [item for word in text.split(" ") for item in (word + " ", Delay(0.005))]


def test_chat_stream_edit_branch_and_search(serve, tab):
    engine = FakeEngine([speak("**Green** tea, of course."), ["Coffee."], ["Water."]])
    page = tab(with_page(serve(engine)))
    say(page, "What shall I drink?")
    page.see("Green tea, of course.")
    page.wait(IDLE)
    assert page.js("document.querySelector('.answer strong').textContent") == "Green"
    page.see("cached")
    assert page.js("document.title") == "What shall I drink? · edgeinfer"
    page.click("button", "Regenerate")
    page.see("Coffee.")
    page.click("button[aria-label='Earlier alternative']")
    page.see("Green tea")
    page.click("button", "Edit")
    page.wait("document.activeElement.getAttribute('aria-label') === 'Edit the question'")
    assert page.js("document.activeElement.selectionStart") == len("What shall I drink?")
    page.js("document.activeElement.value = ''")
    page.type("And without caffeine?")
    page.key("Enter")
    page.see("Water.")
    page.see("2/2")
    page.click("button", "New")
    page.see("What can I help with?")
    page.wait(f"document.activeElement === {MESSAGE}")
    page.fill("[type=search]", "coffee")
    page.wait("document.querySelector('mark')?.textContent === 'Coffee'")
    page.type(" nonsense")
    page.see("Nothing found")


def test_stop_continue_reload_and_a_second_tab_in_mid_answer(serve, tab):
    gate, second = StepGate(), StepGate()
    page = tab(with_page(serve(FakeEngine([["One ", "two ", gate], ["three ", second, "four"]]))))
    say(page, "count")
    page.see("One two")
    page.js("location.reload()")
    page.see("One two")
    other = tab(SimpleNamespace(url=page.js("location.origin")), fragment=page.js("location.hash"))
    other.see("One two")
    other.click("button.stop")
    for window in (page, other):
        window.see("stopped")
    page.click("button", "Continue")
    for window in (page, other):
        window.see("One two three")
    second.opened.set()
    for window in (page, other):
        window.see("One two three four")
        window.wait(IDLE)


def test_reasoning_streams_folds_and_survives_a_reload(serve, tab):
    first, second = StepGate(), StepGate()
    third, pause = StepGate(), Delay(0.12)
    thoughts = [item for word in ("Let ", "me ", "see.") for item in (ReasoningDelta(word), pause)]
    script = [*thoughts, first, "\n", pause, "\n", second, "The **answer**", third, " is here."]
    page = tab(with_page(serve(FakeEngine([script]))))
    say(page, "why?")
    thought = "document.querySelector('.answer details')"
    page.wait(f"{thought}?.open && {thought}.querySelector('p').textContent === 'Let me see.'")
    page.js("location.reload()")
    page.wait(f"{thought}?.open && {thought}.querySelector('p').textContent === 'Let me see.'")
    first.opened.set()
    second.opened.set()
    page.wait("document.querySelector('.answer strong')?.textContent === 'answer'")
    page.wait(f"!{thought}.open")
    page.js("location.reload()")
    page.wait(f"{thought} && !{thought}.open && document.querySelector('.answer strong')")
    third.opened.set()
    page.see("The answer is here.")
    page.wait(IDLE)
    page.click(".answer summary", "Reasoning")
    page.wait(f"{thought}.open && {thought}.querySelector('p').offsetHeight > 0")
    assert "does not answer" not in page.text()


def test_a_growing_block_of_code_is_appended_to(serve, tab):
    gate = StepGate()
    code = [item for n in range(30) for item in (f"if a < {n} and b > {n}:\n", Delay(0.01))]
    page = tab(with_page(serve(FakeEngine([["```py\n", "x = 1\n", gate, *code, "```\nDone."]]))))
    say(page, "code")
    page.wait("document.querySelector('.code code')?.textContent === 'x = 1\\n'")
    page.js("window.block = document.querySelector('.code code')")
    gate.opened.set()
    page.wait(IDLE)
    page.see("Done.")
    whole = "x = 1\n" + "".join(item for item in code if isinstance(item, str))
    assert page.js("document.querySelector('.code code').textContent") == whole
    assert page.js("window.block === document.querySelector('.code code')")


BOTTOM_GAP = "(() => { const log = document.querySelector('.log'); return log.scrollHeight - log.scrollTop - log.clientHeight; })()"


def vary(n_words, seed):
    """Return `n_words` varied words, because a text that repeats itself is stopped."""
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(n_words))


@pytest.mark.parametrize("height", [500, 900])
def test_the_page_follows_a_long_first_answer(serve, tab, height):
    gate, pause = StepGate(), Delay(0.02)
    lines = [piece for n in range(40) for piece in (f"## Part {n}\n\n{vary(60, n)}\n\n- a\n\n", pause)]
    page = tab(with_page(serve(FakeEngine([[*lines, gate, "The end."]]))), height=height)
    say(page, "Write a long report.")
    page.see("Part 39")
    page.wait(f"{BOTTOM_GAP} < 2")
    gate.opened.set()
    page.see("The end.")
    page.wait(IDLE)
    page.wait(f"{BOTTOM_GAP} < 2")


def test_the_page_follows_late_layout_until_the_reader_scrolls_up(serve, tab):
    gate, second = StepGate(), StepGate()
    third = StepGate()
    lines = vary(80, 0).replace(" ", "\n\n") + "\n\n"
    answer = [lines, gate, "More.\n\n", second, "Last.", third]
    page = tab(with_page(serve(FakeEngine([answer]))))
    say(page, "hi")
    page.wait(f"document.querySelectorAll('.answer p').length > 70 && {BOTTOM_GAP} < 2")
    page.js(
        "{ const log = document.querySelector('.log'), style = document.querySelector('.answer').style;"
        "style.paddingBottom = '60px'; log.scrollTop = log.scrollHeight; style.paddingBottom = '400px'; }"
    )
    page.wait(f"{BOTTOM_GAP} < 2")
    gate.opened.set()
    page.see("More.")
    page.wait(f"{BOTTOM_GAP} < 2")
    page.js("document.querySelector('.log').scrollTop -= 40")
    page.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    second.opened.set()
    page.see("Last.")
    assert page.js(BOTTOM_GAP) >= 38
    third.opened.set()


def test_search_shows_the_match_inside_its_snippet(serve, tab):
    page = tab(with_page(serve(FakeEngine([["considerable " * 12 + "oolong " + "afterwards " * 12]]))))
    say(page, "hi")
    page.see("oolong")
    page.wait(IDLE)
    page.fill("[type=search]", "oolong")
    page.wait("document.querySelector('mark')?.textContent === 'oolong'")
    inside = "(() => { const box = (name) => document.querySelector(name).getBoundingClientRect();"
    inside += "const [mark, small] = [box('mark'), box('.side small')];"
    assert page.js(inside + "return mark.right <= small.right && mark.bottom <= small.bottom; })()")


def test_theme_is_switched_and_stays(serve, tab):
    page = tab(with_page(serve(FakeEngine())))
    color = "getComputedStyle(document.body).backgroundColor"
    assert page.js(color) == "rgb(251, 250, 248)"
    page.click("[aria-label='Theme: system']")
    page.click("[aria-label='Theme: light']")
    page.wait(f"{color} === 'rgb(25, 26, 27)'")
    page.js("location.reload()")
    page.wait("document.querySelector(\"[aria-label='Theme: dark']\")")
    page.wait(f"{color} === 'rgb(25, 26, 27)'")
    page.click("[aria-label='Theme: dark']")
    page.wait(f"{color} === 'rgb(251, 250, 248)'")


def test_nothing_is_silent_what_is_typed_too_early_copied_or_refused(serve, tab):
    gate, broken = StepGate(), InvalidRequestError("too long: see `edgeinfer show`")
    script = ["```sh\nls\n```\n\nOne ", gate, "two."]
    page = tab(with_page(serve(FakeEngine([script, [broken]]))), width=375)
    say(page, "go")
    page.see("One")
    say(page, "too early")
    page.see("still being written")
    assert page.js(f"{MESSAGE}.value") == "too early"
    gate.opened.set()
    page.wait(IDLE)
    page.wait("!document.querySelector('.error')")
    page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for label, text in (("Copy", "ls\n"), ("Link", None)):
        page.click(".code .copy" if label == "Copy" else ".answer .foot button", label)
        page.wait("document.querySelector('button.copied')")
        assert text in (None, page.js("window.copied"))
        page.wait("!document.querySelector('button.copied')")
    page.js("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    page.click(".answer .foot button", "Copy")
    page.see("did not allow copying")
    page.click("button.send")
    page.see("too long")
    page.wait(IDLE)
    assert page.all(".note, .error", "one.textContent.trim()") == ["too long: see edgeinfer show"]
    feet = page.all(".foot", "one.textContent")
    assert not any("0" in foot.replace("tokens/s", "") for foot in feet[2:])


def test_settings_keep_what_was_typed_until_it_is_taken(serve, tab):
    page = tab(with_page(serve(FakeEngine([["Yes."]]))))
    say(page, "hi")
    page.see("Yes.")
    page.wait(IDLE)
    page.click("button", "Settings")
    page.see("0 to 10")
    page.wait("document.activeElement.closest('dialog')")  # the dialog takes the focus when it opens
    page.fill("#o-temperature", "99")
    page.click("dialog button", "Save")
    assert page.js("document.querySelector('#o-temperature').validity.rangeOverflow")
    page.js("document.querySelector('#o-temperature').value = '0.5'")
    page.js("document.querySelector('#title').value = 'x'.repeat(500)")
    page.click("dialog button", "Save")
    page.wait("document.querySelector('dialog[open] [role=alert]')")
    page.browser.events.clear()  # the refused request is an error on the console
    assert page.js("document.querySelector('#o-temperature').value") == "0.5"
    page.js("document.querySelector('#title').value = 'Greeting'")
    page.click("dialog button", "Save")
    page.wait("!document.querySelector('dialog[open]')")
    page.wait("document.querySelector('h1').textContent === 'Greeting'")


TABLE = "| item | cost |\n|---|---:|\n| Schraubendreher | 1,200.00 |\n| nail | 0.05 |"


@pytest.mark.parametrize("width", [375, 1280])
def test_names_and_numbers_are_whole_and_buttons_large_enough(serve, tab, tmp_path, width):
    name = "qwen3-30b-a3b-instruct-2507" if width > 400 else "smollm2-135m-instruct"
    answer = f"Dear Ann,\nthe heater is broken.\n\n{TABLE}\n\n- [x] call\n- [ ] write\n\n\\[ x_1 = \\frac{{-b}}{{2a}} \\]"
    live_server = with_page(serve(FakeEngine([[answer]]), names=[name]))
    page = tab(live_server, width=width, height=760)
    say(page, "A letter and a table, please")
    page.see("0.05")
    page.wait(IDLE)
    assert page.all("td", "getComputedStyle(one).textAlign") == ["start", "right"] * 2
    assert max(page.all("td", "one.getClientRects()[0].height")) < 45  # each cell has one line
    assert page.js("document.querySelectorAll('.block br').length") == 1
    room = page.js(
        "(() => { const box = document.querySelector('[aria-label=Model]'), text = document.createElement('canvas').getContext('2d');"
        " text.font = getComputedStyle(box).font;"
        " return box.clientWidth - text.measureText(box.selectedOptions[0].textContent).width; })()"
    )
    assert room > 30  # the arrow of the select box needs this space
    sizes = "(({width, height}) => [one.textContent, width, height])(one.getBoundingClientRect())"
    boxes = page.all("button, summary, select", sizes)
    assert [text for text, *size in boxes if 0 < min(size) < 24] == []
    assert page.js(WIDTH) <= width
    assert page.js("document.querySelector('h1').getClientRects()[0].width") > 60
    page.js("document.querySelector('.stats').open = true")
    page.shot(tmp_path / "page.png")


#: Serves the page in another process, and prints the port.
_ENDPOINT = """
import sys, threading
port = int(sys.argv.pop(1))
sys.path[:0] = sys.argv[1:]
from fake_engine import Delay, FakeEngine
from served_endpoint import serving
script = [piece for n in range(400) for piece in (f"w{n} ", Delay(0.02))]
with serving(FakeEngine([script]), port=port, has_page=True) as live_server:
    print(live_server.port, flush=True)
    threading.Event().wait()
"""


def test_kills_lose_nothing_that_was_shown(tab, repeats):
    running, port = None, "0"

    def start():
        nonlocal running, port
        command = [sys.executable, "-c", _ENDPOINT, port, *sys.path]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        port = running.stdout.readline().strip()

    start()
    try:
        page = tab(SimpleNamespace(url=f"http://127.0.0.1:{port}"))
        say(page, "go")
        for _ in range(repeats(20)):
            before = page.wait(
                "document.querySelectorAll('.streaming').length && document.querySelector('.streaming .body').textContent"
            )
            page.wait(f"document.querySelector('.answer .body').textContent.length > {len(before)} + 8")
            running.kill()
            running.communicate()
            shown = page.js("document.querySelector('.answer .body').textContent").strip()
            start()
            page.see("interrupted")
            saved = page.js("document.querySelector('.answer .body').textContent").strip()
            assert saved.startswith(shown)
            page.click("button", "Continue")
    finally:
        running.kill()
        running.communicate()


def test_terminal_and_page_follow_each_other(serve, tab, terminal):
    gate = StepGate()
    page = tab(with_page(serve(FakeEngine([["From the page."]]))))
    chat = terminal(FakeEngine([["From the ", gate, "terminal."]]))
    chat.ask("hello")
    answer = chat.begin_answer()
    events = iter(answer.generation)
    while not answer.text:
        answer.add(next(events))
    answer.flush()
    page.click(".side a", "hello")
    page.see("From the")
    say(page, "too early")
    gate.opened.set()
    for event in events:
        answer.add(event)
        answer.flush()
    page.see("From the terminal.")
    page.wait(IDLE)
    page.click("button.send")
    page.see("From the page.")
    chat.open(chat.conversation.id)
    assert [t.content for t in chat.path][-2:] == ["too early", "From the page."]


def test_by_keyboard_alone_and_with_an_input_method(serve, tab):
    gate = StepGate()
    page = tab(with_page(serve(FakeEngine([["Good ", gate, "never"]]))))
    page.js(f"{MESSAGE}.focus()")
    page.call("Input.imeSetComposition", text="こん", selectionStart=2, selectionEnd=2)
    for composing in ("isComposing: true", "keyCode: 229"):
        event = f"new KeyboardEvent('keydown', {{key: 'Enter', {composing}, bubbles: true}})"
        page.js(f"{MESSAGE}.dispatchEvent({event})")
    assert "What can I help with?" in page.text()
    page.type("こんにちは")
    page.key("Enter", modifiers=8)
    page.key("Enter")
    page.see("Good")
    page.key("Escape")
    page.see("stopped")
    page.key("k", modifiers=2)
    page.wait("document.activeElement.type === 'search'")
    page.key("n", modifiers=1)
    page.see("What can I help with?")
    reached, focus = set(), "document.activeElement"
    for _ in range(20):
        page.key("Tab")
        reached.add(page.js(f"{focus}.getAttribute('aria-label') ?? {focus}.textContent"))
    assert {"New", "Settings", "Model", "Search conversations", "Message"} <= reached


def violations(page):
    """Return the accessibility errors that axe finds; none without axe (`make test-all` fetches it)."""
    script = BUILD_CACHE / "axe/axe.min.js"
    if not script.exists():
        return []
    page.js(script.read_text())
    return page.js(
        "axe.run({resultTypes: ['violations']}).then((found) => found.violations.map((one) => [one.id, one.nodes.map((node) => node.html + node.failureSummary)]))"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.needs("axe")
@pytest.mark.parametrize("width", [320, 1100])
def test_accessible_at_every_size(serve, tab, width, dark):
    markdown = "# Plan\n\n1. one\n\n```sh\nls\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> [x](https://e.example)"
    live_server = with_page(serve(FakeEngine([[markdown]])))
    page = tab(live_server, width=width, height=700, dark=dark)
    say(page, "plan " * 40)
    page.see("Plan")
    page.wait(IDLE)
    page.click("button", "Regenerate")
    page.see("2/2")
    page.wait(IDLE)
    assert page.js(WIDTH) <= width
    assert violations(page) == []
    page.click("button", "Settings")
    page.wait("document.querySelector('dialog[open]')")
    assert violations(page) == []
    page.click("dialog button", "Cancel")
    if width == 320:
        page.click(".menu")
        page.wait("document.querySelector('.side.shown')")
        page.wait("document.getAnimations().length === 0")
        assert violations(page) == []
    page.wait("document.querySelector('#live').textContent.includes('Plan')")
    page.choose("[aria-label=Model]", "")
    page.see("To pull")
    assert violations(page) == []
    page.click("dialog button", "Close")
    page.js("location.hash = '#playground'")
    page.wait("document.querySelector('.playground')")
    page.type("plan")
    page.key("Enter")
    page.wait(
        "document.querySelectorAll('.sides .stats').length === 2 && document.querySelector('form button').textContent === 'Run'"
    )
    assert violations(page) == []


def test_reports_of_evaluations_are_listed_and_shown(serve, tab):
    live_server = with_page(serve())
    folder = private_dir(paths.data_dir() / "evaluations")
    page = tab(live_server, width=400)
    head, side = (f"document.querySelector('{name}')" for name in (".side-head", ".side"))
    assert page.js(f"{head}.scrollWidth <= {side}.clientWidth")
    page.js("location.hash = '#evaluations'")
    page.see("No reports yet")
    (folder / "mine 1-ab.md").write_text(
        "# mine\n\n| item | one |\n| --- | --- |\n| a | ✗ <img src=x onerror=alert(1)> |\n"
    )
    (folder / "older.md").write_text("# older")
    os.utime(folder / "older.md", (1e9, 1e9))
    page.js("location.hash = ''")
    page.wait("!document.querySelector('[aria-label=Report]')")
    page.js("location.hash = '#evaluations'")
    page.wait("document.querySelector('.block table td')")
    assert page.all("td", "one.textContent")[-1] == "✗ <img src=x onerror=alert(1)>"
    assert page.js("document.title") == "Evaluations · edgeinfer"
    assert violations(page) == []
    page.choose("select", "older")
    page.wait("document.querySelector('.block h1')?.textContent === 'older'")


HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) ![p](https://evil.example/p.png) <https://evil.example>

<svg onload="window.hacked=4"></svg> <form action=/web/session> \u202eright to left\u202c

```html" onmouseover="window.hacked=5
</code></pre><script>window.hacked=6</script>
```
"""


def test_a_hostile_answer_does_nothing(serve, tab):
    live_server = with_page(serve(FakeEngine([[HOSTILE], ["x" * 1_000_000 + " end"]])))
    page = tab(live_server, width=700)
    say(page, HOSTILE)
    page.wait("document.querySelector('.answer .code')")
    page.wait(IDLE)
    page.all(".answer a", "one.dispatchEvent(new MouseEvent('mouseover'))")
    assert page.js("window.hacked ?? 0") == 0
    assert page.all(".log :is(img, svg, script, iframe, form)", "one.outerHTML") == []
    assert all(url.startswith(live_server.url) for url in page.requests() if url.startswith("http"))
    say(page, "more")
    page.wait("document.querySelector('.log').textContent.length > 1000000")
    page.wait(IDLE)
    assert page.js(WIDTH) <= 700


def test_settings_export_link_files_and_delete(serve, tab):
    engine = FakeEngine([["Yes."]])
    page = tab(with_page(serve(engine)))
    page.click("button", "Settings")
    page.wait("document.querySelector('dialog[open]')")
    page.fill("#system", "Be kind.")
    page.choose("#preset", "greedy")
    page.click("dialog button", "Save")
    page.js(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['milk'], 'list.txt'));"
        f" {MESSAGE}.dispatchEvent(new ClipboardEvent('paste', {{clipboardData: data, bubbles: true, cancelable: true}})); }})()"
    )
    page.see("list.txt")
    say(page, "shall we?")
    page.see("Yes.")
    request = engine.requests[-1]
    assert request.messages[0].content == "Be kind."
    assert request.sampling.temperature == 0
    assert "milk" in request.messages[1].content
    page.wait(IDLE)
    page.click(".answer button", "Code")
    page.click("dialog button", "curl")
    page.see("/v1/chat/completions")
    page.click("dialog button", "Close")
    page.click(".answer button", "Link")
    page.wait("/#.[0-9]+.[0-9]+$/.test(location.href)")
    link = page.js("location.hash")
    page.click(".side button[aria-label^=Delete]")
    page.see("Deleted")
    page.click("button", "Undo")
    page.see("1 question")
    page.js(f"location.hash = {json.dumps(link)}")
    page.wait("document.querySelector('.answer.target')")


def test_a_model_is_pulled_with_its_progress_and_used(serve, tab, hub):
    hub.always = Fault(cut_after=4096, silent=True)
    live_server = with_page(serve(pulled=pulled_models(), names=["fake"]))
    page = tab(live_server, width=320)
    page.choose("[aria-label=Model]", "")
    page.see("To pull")
    page.see("Apache-2.0")
    page.fill("#other", "hf.co/someone/nothing:Q8_0")
    page.key("Enter")
    page.wait("document.querySelector('dialog [role=alert]')?.textContent.includes('nothing')")
    page.click("dialog button", "Dismiss")
    page.js("document.querySelector('#other').value = ''")
    page.fill("#other", "hf.co/someone/Tiny-GGUF:Q8_0")
    page.key("Enter")
    page.wait("document.querySelector('progress')?.max > 1")
    assert page.js(WIDTH) <= 320
    page.js("location.reload()")  # the pull continues
    page.wait(f"{MESSAGE} && !document.querySelector('dialog')")
    page.choose("[aria-label=Model]", "")
    page.wait("document.querySelector('progress')?.max > 1")
    page.click("dialog button", "Stop")
    page.wait("!document.querySelector('progress')")
    hub.always = Fault()
    page.fill("#other", "hf.co/someone/Tiny-GGUF:Q8_0")
    page.key("Enter")
    page.wait("document.querySelector('dialog').textContent.includes('someone.tiny-gguf-q8_0')")
    is_ours = "one.textContent.includes('someone.tiny-gguf')"
    page.all("dialog li", f"{is_ours} && one.querySelector('button').click()")
    page.wait("document.querySelector('[aria-label=Model]').value === 'someone.tiny-gguf-q8_0'")


def token(piece, share, *alternatives):
    top = tuple(Logprob(0, other, math.log(p)) for other, p in ((piece, share), *alternatives))
    return TokenLogprobs(Logprob(0, piece, math.log(share)), top)


def test_playground_compares_two_answers_token_by_token(serve, tab):
    gate = StepGate()
    first = [
        TextDelta("", (token(b"\xc3", 0.9),)),
        TextDelta("é", (token(b"\xa9", 0.4, (b"\xa8", 0.25)),)),
        TextDelta("<b>", (token(b"<b>", 0.0001),)),
    ]
    greedy = [TextDelta("tea", (token(b"tea", 1.0),)), gate, "never"]
    engine = FakeEngine(lambda request: greedy if request.sampling.temperature == 0 else first)
    live_server = with_page(serve(engine))
    page = tab(live_server, width=320)
    page.click(".menu")
    page.click("a", "Playground")
    page.wait("document.activeElement.name === 'prompt'")
    page.js("document.querySelector('#right-temperature').value = 0")
    page.type("What shall I drink?")
    page.key("Enter")
    sections = [f"section[aria-label={side}]" for side in ("left", "right")]
    left_side, right_side = (f"document.querySelector('{section}')" for section in sections)
    page.wait(f"{left_side}.querySelector('.tokens').textContent === 'é<b>'")
    page.wait(f"{right_side}.querySelector('.tokens').textContent === 'tea'")
    page.wait(f"{left_side}.querySelector('.stats').textContent.includes('tokens/s')")
    assert page.js(f"{left_side}.querySelectorAll('.tokens b').length") == 0
    page.js(f"{left_side}.querySelector('.tokens').focus()")
    for _ in range(2):
        page.key("ArrowRight")
    page.wait(f"{left_side}.querySelector('.said').textContent.includes('40.0 %; else')")
    page.key("ArrowRight")
    page.wait(f"{left_side}.querySelector('.said').textContent.includes('\"<b>\" < 0.1 %')")
    assert page.js(f"{left_side}.querySelector('.tokens span').title").endswith("90.0 %")
    assert page.js(WIDTH) <= 320
    page.click("button", "Stop")
    page.wait(f"{right_side}.textContent.includes('stopped')")
    page.wait("document.querySelector('form .primary').textContent === 'Run'")
    assert live_server.client.get("/health").json()["status"] == "ok"
    assert ConversationStore.open().listing() == []


def test_the_address_typed_by_hand_opens_the_page_or_asks_for_a_code(serve, chromium):
    live_server, with_key = with_page(serve()), with_page(serve(keys=KEYS), KEYS)
    chromium.call("Storage.clearCookies")
    page = chromium.page()
    page.open(live_server.url)
    page.see("What can I help with?")
    page.open(with_key.url)
    page.see("edgeinfer web")
    page.fill("#secret", "wrong")
    page.key("Enter")
    page.see("first API key")
    chromium.call("Target.closeTarget", targetId=page.target)
