"""An endpoint with its page, and Chromium."""

import json
import shutil

import browser as chromium_module
import httpx2
import pytest
from fake_engine import FakeEngine
from served_endpoint import with_page

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.session import ChatSession
from edgeinfer.server.web.access import make_code
from tests.conftest import one_process_at_a_time


class Signed:
    """Sends the page's requests, signed in."""

    def __init__(self, live_server, keys=()):
        self.live_server = live_server
        self.client = httpx2.Client(base_url=f"{live_server.url}/web", timeout=60)
        secret = {"key": keys[0]} if keys else {"code": make_code()}
        assert self.client.post("/session", json=secret).status_code == 204

    def get(self, path):
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path, status=200, **body):
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def ask(self, text="hi", conversation=0, **body):
        """Ask a question; return the conversation's id."""
        return self.post(f"/conversations/{conversation}/questions", text=text, **body)["id"]

    def events(self, conversation):
        """Yield (name, data) of the events about a conversation."""
        with self.client.stream("GET", f"/conversations/{conversation}/events") as stream:
            name = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                if line.startswith("data: ") and name != "list":
                    yield name, json.loads(line[6:])

    def follow(self, conversation, until):
        """Read events until `until(branch, turns)` is true; return both, with joined pieces."""
        turns, branch = {}, None
        for name, data in self.events(conversation):
            if name == "branch":
                branch = data
                turns |= {turn["id"]: turn for turn in data["turns"]}
            if name == "piece":
                turn = turns[data["turn"]]
                turn["blocks"][data["from"] :] = data["blocks"]
                turn["reasoning"] += data["reasoning"]
            if name == "gone" or until(branch, turns):
                return branch, turns
        raise AssertionError("the stream ended")

    def finished_turns(self, conversation):
        """Wait for the end of an answer; return the turns of the conversation."""
        branch, turns = self.follow(
            conversation,
            lambda branch, turns: (
                not branch["answering"]
                and turns
                and (branch["notice"] or turns[branch["path"][-1]]["role"] == "assistant")
            ),
        )
        return [turns[turn] for turn in branch["path"]]


@pytest.fixture
def serve_page(serve):
    """Return `serve_page(engine, keys=…)`, which starts an endpoint and signs in."""

    opened = []

    def start(engine=None, keys=(), **setup):
        opened.append(Signed(with_page(serve(engine or FakeEngine(), keys=keys, **setup), keys), keys))
        return opened[-1]

    yield start
    for page in opened:
        page.client.close()


@pytest.fixture
def terminal():
    """Return `terminal(engine)`, a session of the terminal chat with the same conversations."""
    stores = []

    def open_store():
        stores.append(ConversationStore.open())
        return stores[-1]

    yield lambda engine=None: ChatSession(open_store, "fake", engine)
    for store in stores:
        store.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A Chromium that the tests of a file share."""
    # while scripts/test_parts.sh installs programs by apt, it holds this lock
    with one_process_at_a_time("test-programs"):
        if shutil.which(chromium_module.PROGRAM) is None:
            pytest.skip("Chromium is not installed: apt-get install chromium")
    with chromium_module.chromium(tmp_path_factory.mktemp("chromium") / "profile") as running:
        yield running


@pytest.fixture
def tab(chromium):
    """Return `tab(endpoint, hash)`, a signed-in tab, whose console must have no error at the end."""
    opened = []

    def at(live_server, fragment=None, **size):
        page = chromium.page(**size)
        opened.append(page)
        page.open(f"{live_server.url}/#code={make_code()}")
        page.wait("document.querySelector('#message')")
        if fragment:
            page.js(f"location.hash = {json.dumps(fragment)}")
        return page

    yield at
    for page in opened:
        expected = [problem for problem in page.problems() if "ERR_" not in problem]
        chromium.call("Target.closeTarget", targetId=page.target)
        assert expected == []
