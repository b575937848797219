"""Every `/` command on a session, with a front end that only records what it was asked to do."""

import json
import re
from contextlib import closing
from unittest.mock import Mock

import pytest
from chats_here import consume
from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace

from edgeinfer.chat.commander import Commander, sessions_text
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import ChatConfig, PresetConfig, load_config
from edgeinfer.errors import EdgeInferError, StoreError, UsageError
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.verify import ReceiptCheck
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles


class Remembering:
    """Records each call as (method, arguments); reads answers to their end."""

    def __init__(self):
        self.asked = []
        self.session = None

    def __getattr__(self, name):
        return lambda *arguments, **named: self.asked.append((name, *arguments, *named.values()))

    def show_answer(self, answer):
        self.asked.append(("show_answer", consume(answer).content))

    def answer_edited(self, turn):
        self.show_answer(self.session.begin_answer())

    @property
    def said(self):
        return next(a[1] for a in reversed(self.asked) if a[0] == "show_text")


@pytest.fixture
def front():
    return Remembering()


@pytest.fixture
def commander(store, front):
    scripts = [["one\n```py\ncode\n```"], ["two"], ["three"]]
    engine = FakeEngine(scripts, info=replace(DEFAULT_INFO, n_ctx=600))
    front.session = ChatSession(lambda: store, "fake", engine)
    config = ChatConfig(system_prompts={"pirate": "Arr."}, presets={"mine": PresetConfig(top_k=1)})
    return Commander(front.session, front, config)


def ask(commander, text="q"):
    commander.session.ask(text)
    commander.front.show_answer(commander.session.begin_answer())


def test_system_prompts(commander, front):
    commander.run("/system pirate")
    assert commander.session.conversation.system_prompt == "Arr."
    commander.run("/system You are kind.")
    commander.run("/save-system kind")
    assert load_config().chat.system_prompts == {"kind": "You are kind."}
    commander.run("/system none")
    assert commander.session.conversation.system_prompt == ""
    with pytest.raises(UsageError):
        commander.run("/save-system x")
    commander.run("/system kind")
    assert front.said == "System prompt: You are kind.\nSaved: pirate, kind"


def test_sampling(commander, front):
    commander.run("/temp 0")
    commander.run("/set TOP_P 0.9")
    commander.run("/set seed=7")
    assert commander.session.conversation.sampling == {"temperature": 0.0, "top_p": 0.9, "seed": 7}
    commander.run("/set top-p default")
    assert front.said == "Sampling: temperature 0, seed 7"
    commander.run("/temp")
    assert re.fullmatch(r"Sampling: temperature 0, seed 7\ntemperature +0 .*", front.said)
    commander.run("/set dry-multiplier")
    assert re.search(r"^dry-multiplier +0 ", front.said, re.M)
    commander.run("/set dry-multiplier 0.5")
    assert commander.session.prompt.sampling().dry_multiplier == 0.5
    commander.run("/preset mine")
    assert commander.session.conversation.sampling == {"top_k": 1}
    commander.run("/preset")
    assert "● mine" in front.said
    commander.run("/set")
    assert re.search(r"^min-p +0\.05 ", front.said, re.M), "the value in use, also the model's own"
    assert re.search(r"^top-k +1 ", front.said, re.M)
    assert re.search(r"^max-tokens +- ", front.said, re.M)
    commander.run("/set = top-k=1")
    assert front.said == "Sampling: top-k 1"
    for wrong, hint in (
        ("/set =5", "temperature"),
        ("/temp hot", "default"),
        ("/set tempreature 1", "temperature"),
        ("/preset loud", "mine"),
        ("/preset creativ", "did you mean creative?"),
        ("/theme nrod", "did you mean nord?"),
        ("/theme xyz", "edgeinfer-light"),
    ):
        with pytest.raises(UsageError) as caught:
            commander.run(wrong)
        assert hint in caught.value.hint
    assert commander.session.conversation.sampling == {"top_k": 1}


def test_new_conversation_names_the_options_that_stay_set(commander, front):
    commander.run("/new")
    assert front.asked == [("show_changed",)]
    commander.run("/temp 9")
    commander.run("/new")
    assert front.said == "Still set: temperature 9 (`/preset model` resets)."
    commander.run("/system pirate")
    commander.run("/new")
    assert front.said.endswith("resets) and the system prompt (`/system none` removes it).")
    commander.run("/preset model")
    commander.run("/new")
    assert front.said == "Still set: the system prompt (`/system none` removes it)."


def test_models_and_context(commander, front):
    commander.run("/model other")
    commander.run("/model")
    commander.run("/ctx 2048")
    commander.run("/ctx")
    with pytest.raises(UsageError):
        commander.run("/ctx many")
    with pytest.raises(UsageError, match="up to 16,777,216"):
        commander.run("/ctx 99999999")
    assert front.asked == [
        ("use_model", "other"),
        ("pick_model",),
        ("use_model", "", 2048),
        ("show_text", "Context: 600 tokens"),
    ]


def test_answers_and_alternatives(commander, front):
    ask(commander)
    commander.run("/regen")
    commander.run("/prev")
    assert commander.session.head.content.startswith("one")
    commander.run("/prev")
    assert front.said == "That is the first alternative."
    commander.run("/next")
    assert commander.session.head.content == "two"
    commander.run("/edit q, please")
    assert [t.content for t in commander.session.path] == ["q, please", "three"]
    assert [m.content for m in commander.session.engine.requests[-1].messages] == ["q, please"]
    commander.run("/edit")
    assert front.asked[-1] == ("put_back", "q, please", commander.session.path[0].id)


def test_copy(commander, front):
    for line, problem in (("/copy", "no answer"), ("/copy all", "no answer"), ("/copy cod", "'cod'")):
        with pytest.raises(UsageError, match=problem):
            commander.run(line)
    ask(commander)
    commander.run("/copy")
    commander.run("/copy code")
    commander.run("/copy code 1")
    commander.run("/copy all")
    copied = [a[1] for a in front.asked if a[0] == "copy"]
    assert copied[:3] == ["one\n```py\ncode\n```", "code", "code"]
    assert copied[3].startswith("# q\n")
    for wrong in ("/copy code 2", "/copy cod", "/copy code x"):
        with pytest.raises(UsageError):
            commander.run(wrong)


def test_conversations(commander, front, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="not stored yet"):
        commander.run("/save")
    commander.run("/save First title")
    assert front.said == "“First title” is stored when you ask a question."
    ask(commander)
    first = commander.session.conversation.id
    commander.run("/save My title")
    commander.run("/export")
    assert (tmp_path / "my-title.md").read_text().startswith("# My title\n")
    commander.run("/export all.json")
    exported = json.loads((tmp_path / "all.json").read_text())
    assert exported["schema"] == "edgeinfer-conversation/1"
    assert [turn["parent_id"] for turn in exported["turns"]] == [None, exported["turns"][0]["id"]]
    commander.run("/fork")
    assert commander.session.conversation.id != first
    assert commander.session.path[0].content == "q"
    commander.run("/delete")
    assert commander.session.conversation.id == 0
    commander.run("/undo")
    assert commander.session.conversation.title == "My title (fork)"
    commander.run(f"/open {first}")
    assert commander.session.conversation.title == "My title"
    commander.run("/clear")
    assert commander.session.path == []
    for wrong in "delete undo open_x export fork edit regen continue next".split():
        with pytest.raises(EdgeInferError):
            commander.run(f"/{wrong.replace('_', ' ')}")
    assert "My title" in sessions_text(commander.session, "title")
    assert "No conversation" in sessions_text(commander.session, "zebra")


def test_undo_can_be_repeated_after_an_error(commander, monkeypatch):
    ask(commander)
    commander.run("/delete")
    with monkeypatch.context() as patch:
        patch.setattr(commander.session.store, "undelete", Mock(side_effect=StoreError("locked")))
        with pytest.raises(StoreError, match="locked"):
            commander.run("/undo")
    commander.run("/undo")
    assert commander.session.path[0].content == "q"


@pytest.mark.model
def test_the_receipt_of_the_last_answer_verifies(smollm2, store, front, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ModelFiles(name="smollm2", paths=(str(smollm2),), sha256="ab" * 32)
    with closing(load_engine(files, LoadOptions(n_ctx=512, n_parallel=2))) as engine:
        front.session = ChatSession(lambda: store, "smollm2", engine)
        commander = Commander(front.session, front, ChatConfig())
        with pytest.raises(UsageError):
            commander.run("/receipt")
        front.session.set(sampling={"temperature": 0.9})
        ask(commander, "Name a ship.")
        with pytest.raises(UsageError, match="takes no option: --private"):
            commander.run("/receipt --private")
        commander.run("/receipt")
        commander.run("/regen")
        commander.run("/receipt my again.json")
        assert front.said.endswith("`edgeinfer verify 'my again.json'`")
        paths = (tmp_path / name for name in ("name-a-ship.receipt.json", "my again.json"))
        documents = (receipts.to_receipt(json.loads(path.read_bytes())) for path in paths)
        verdicts = [ReceiptCheck(receipt, engine).run() for receipt in documents]
    assert [result.verdict for result in verdicts] == ["verified"] * 2


def test_an_answer_without_receipt_says_why(commander):
    ask(commander)
    with pytest.raises(UsageError, match="recorded no tokens"):
        commander.run("/receipt")


def test_other_commands_are_run_by_the_front_end(commander, front, tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for line, asked in (
        ("/help", ("show_help",)),
        ("/sessions egg", ("pick_session", "egg")),
        ("/stats", ("show_stats",)),
        ("/theme nord", ("use_theme", "nord")),
        ("/editor", ("edit_outside",)),
        ("/reasoning", ("fold_reasoning",)),
        ("/quit", ("leave",)),
    ):
        commander.run(line)
        assert front.asked[-1] == asked
    commander.run(f'/file "{tmp_path}/a.txt"')
    assert front.asked[-1][1].text == "words"


def test_adapters_come_and_go(commander, front):
    commander.run("/lora red:0.5 /tmp/blue.gguf")
    assert front.said == "Adapters: red at 0.5, blue at 1"
    commander.run("/lora none")
    commander.run("/lora")
    assert front.said == "Adapters: none"
    with pytest.raises(UsageError, match="not"):
        commander.run("/lora red:much")
