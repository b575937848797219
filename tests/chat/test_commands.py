"""Commands, completions, `@paths`, options, and exports."""

import os

import pytest

from edgeinfer.chat import attachments, commands, formats, presets
from edgeinfer.chat.commands import CommandCompletion, complete
from edgeinfer.chat.formats import code_blocks
from edgeinfer.chat.history.values import Attachment, Conversation, Turn
from edgeinfer.config import config_file
from edgeinfer.config.config_file import load_config
from edgeinfer.errors import ConfigError, StoreError, UsageError


class TestSlash:
    @pytest.mark.parametrize(
        ("lines", "is_command"),
        [
            (["/help", "/model x", "/q", "/temp 0.5", "/x"], True),
            (["", "/", "/ x", "//", "/usr/bin", "/etc/hosts is wrong", "hello /help", "/a\nb"], False),
            (["/receipt/summarise", "/Receipt/stats x"], True),
            (["/export/home", "/new/", "//help"], False),
        ],
    )
    def test_command_is_told_from_text(self, lines, is_command):
        assert {commands.is_command(line) for line in lines} == {is_command}

    def test_parse(self):
        assert commands.parse("/Model  smollm2 ") == commands.TypedCommand("model", "smollm2")
        assert commands.parse("/regenerate").name == "regen"
        assert commands.parse("/?").name == "help"

    @pytest.mark.parametrize(
        ("line", "hint"),
        [
            ("/modle x", "/model"),
            ("/fork now", "/fork"),
            ("/file", "PATH"),
            ("/zzz", "/help"),
            ("/quit/stats", "/stats"),
        ],
    )
    def test_mistakes_name_the_way_out(self, line, hint):
        with pytest.raises(UsageError) as caught:
            commands.parse(line)
        assert hint in caught.value.hint

    def test_names_are_unique_and_every_one_has_a_handler(self):
        from edgeinfer.chat.commander import _FRONT_END_METHODS, Commander

        names = [n for c in commands.COMMANDS for n in (c.name, *c.aliases)]
        assert len(names) == len(set(names)) == len(commands.BY_NAME)
        handlers = {name.removeprefix("_").replace("_", "-") for name in vars(Commander)} | {
            *_FRONT_END_METHODS
        }
        assert {c.name for c in commands.COMMANDS} <= handlers


class TestComplete:
    def labels(self, before, names=None, cwd=None):
        return [c.label for c in complete(before, names or {}, cwd)]

    def test_commands_by_name_alias_and_middle(self):
        assert len(complete("/", {})) == len(commands.COMMANDS)
        assert self.labels("/mo") == ["/model [NAME]"]
        assert self.labels("/clea") == ["/new"]
        assert self.labels("/retr") == ["/regen"]
        assert "/save-system NAME" in self.labels("/sys")
        assert self.labels("/nothing") == []

    def test_complete_command_that_takes_nothing_offers_nothing(self):
        assert complete("/fork", {}) == []

    def test_arguments(self):
        names = {"model": lambda: [("smollm2", "135M"), ("qwen3", "8B")]}
        completion = CommandCompletion("smollm2", 2, "smollm2", "135M", whole=True)
        assert complete("/model sm", names) == [completion]
        assert complete("/model smollm2", names) == []
        assert self.labels("/set temp") == ["temperature "]
        assert self.labels("/copy ") == ["code", "all"]

    def test_paths(self, tmp_path):
        (tmp_path / "notes.txt").write_text("x")
        (tmp_path / "nodes").mkdir()
        (tmp_path / ".hidden").write_text("x")
        assert self.labels("look at @no", cwd=tmp_path) == ["nodes/", "notes.txt"]
        assert self.labels("@.h", cwd=tmp_path) == [".hidden"]
        assert self.labels("/file not", cwd=tmp_path) == ["notes.txt"]
        assert self.labels("me@no", cwd=tmp_path) == []
        assert self.labels(f"@{tmp_path}/no") == [f"{tmp_path}/nodes/", f"{tmp_path}/notes.txt"]
        assert self.labels("@missing/x", cwd=tmp_path) == []


class TestAttachments:
    def test_a_mention_that_looks_like_a_path_of_nothing_is_named(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "here.txt").write_text("x")
        text = "@here.txt @nosuch.txt, @docs/gone and @ann, 5 @ 3.5, server:@x, @notes:file:///a.txt"
        assert attachments.missing_files(text) == ["nosuch.txt", "docs/gone"]
        assert "nosuch.txt, docs/gone" in attachments.missing_note(text)
        assert attachments.missing_note("@here.txt") == ""

    @pytest.mark.parametrize("name", ["~nobody-of-that-name/a.txt", f"{'a' * 300}.txt", "a\0.txt"])
    def test_a_mention_that_no_file_can_have_is_missing(self, name):
        assert attachments.mentioned_paths(f"@{name}") == []
        assert attachments.missing_files(f"@{name}") == [name]
        assert attachments.complete(name) == []

    def test_mentions_are_the_files_that_are_there(self, tmp_path):
        (tmp_path / "a.txt").write_text("x")
        (tmp_path / "b c.txt").write_text("x")
        (tmp_path / "home").mkdir()
        text = 'see @a.txt and @"b c.txt", (or @a.txt), not me@a.txt nor @home but @home/'
        names = ("a.txt", "b c.txt", "home")
        assert attachments.mentioned_paths(text, tmp_path) == [tmp_path / name for name in names]

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("Is @a.txt? Or (@b) @c.d).", ["a.txt", "c.d"]),
            (
                '@"w:page://Foo_(bar)" and @w:page://foo, me@here @, @"',
                ["w:page://Foo_(bar)", "w:page://foo"],
            ),
        ],
    )
    def test_a_sentence_s_marks_do_not_belong_to_a_name_without_quotes(self, text, names):
        assert attachments.mentions(text) == names

    def test_text_is_read_whatever_its_mark(self, tmp_path):
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbfGr\xc3\xbc\xc3\x9fe")
        assert attachments.read(tmp_path / "a") == Attachment(name="a", text="Grüße")

    @pytest.mark.parametrize(("data", "word"), [(b"\xff\xfe", "UTF-8"), (b"a\0b", "binary")])
    def test_binary_file_is_refused(self, tmp_path, data, word):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(UsageError, match=word):
            attachments.read(tmp_path / "a")

    def test_damaged_document_is_refused_in_words_of_the_chat(self, tmp_path):
        (tmp_path / "fake.pdf").write_bytes(b"%PDF-1.4 no")
        with pytest.raises(
            UsageError, match=r"^fake\.pdf cannot be read: the file is not a valid PDF$"
        ) as caught:
            attachments.read(tmp_path / "fake.pdf")
        assert caught.value.hint == "attach a whole PDF or DOCX file, or its text"

    def test_too_large_or_missing_file_is_refused(self, tmp_path):
        with open(tmp_path / "big", "wb") as file:
            file.truncate(attachments.MAX_BYTES + 1)
        with pytest.raises(UsageError, match="larger"):
            attachments.read(tmp_path / "big")
        with pytest.raises(UsageError, match="No such file"):
            attachments.read(tmp_path / "missing")

    def test_folder_is_its_text_files_in_order(self, tmp_path):
        files = {"b.txt": b"B", "a/z.html": b"<html>Z", "a/pic": b"\x89PNG\0", "latin": b"\xff"}
        for name in (*files, ".git/x", ".env", "a/node_modules/x.js"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(files.get(name, b"left out"))
        (tmp_path / "link").symlink_to("/etc/passwd")
        os.mkfifo(tmp_path / "fifo")
        read = attachments.read(tmp_path)
        assert read.name == f"{tmp_path.name}/, without fifo, latin, link, a/pic"
        assert read.text == "File `b.txt`:\n```\nB\n```\n\nFile `a/z.html`:\n```\n<html>Z\n```"

    @pytest.mark.parametrize(
        ("sizes", "word"),
        [([3 << 20, 3 << 20], "4 MiB of text$"), ([1] * 1001, "1,000 files$"), ([], "UTF-8 text file")],
    )
    def test_folder_has_limits(self, tmp_path, sizes, word):
        for number, size in enumerate(sizes):
            (tmp_path / str(number)).write_bytes(b"x" * size)
        with pytest.raises(UsageError, match=word):
            attachments.read(tmp_path)


def test_every_preset_is_within_range_and_known_again():
    for name, values in presets.PRESETS.items():
        assert all(presets.value(k, str(v)) == v for k, v in values.items())
        assert presets.matching(values, presets.PRESETS) == name


CONVERSATION = Conversation(
    id=1, title="Sorting: a/b", model="m", system_prompt="Be brief.", created_ms=0
)
TURNS = [
    Turn(id=1, content="How?", attachments=(Attachment(name="a.py", text="```x```"),)),
    Turn(
        id=2, parent_id=1, role="assistant", model="m", content="So.", reasoning="Hm.", status="stopped"
    ),
]


class TestExport:
    def test_markdown(self):
        text = formats.to_markdown(CONVERSATION, TURNS)
        assert text.startswith("# Sorting: a/b\n")
        assert "## System\n\nBe brief." in text
        assert "## You\n\nHow?\n\n````py\n```x```\n````" in text
        assert "<summary>Reasoning</summary>\n\nHm." in text
        assert "## m\n" in text
        assert text.endswith("*(stopped)*\n")

    def test_nothing_is_overwritten(self, tmp_path):
        path = formats.write(tmp_path / "x.md", "one")
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(StoreError, match="already exists"):
            formats.write(tmp_path / "x.md", "two")
        assert path.read_text() == "one"
        with pytest.raises(StoreError, match="No such file"):
            formats.write(tmp_path / "no" / "x.md", "two")

    def test_file_names_are_safe(self):
        assert formats.file_name(CONVERSATION, ".md") == "sorting-a-b.md"
        assert formats.file_name(Conversation(title="../../etc"), ".md") == "etc.md"
        assert formats.file_name(Conversation(title="Grüße 你好"), ".md") == "grüße-你好.md"
        assert formats.file_name(Conversation(), ".json") == "conversation.json"


class TestSettings:
    def test_comments_and_order_survive(self, tmp_path):
        file = tmp_path / "config.toml"
        file.write_text('# mine\ndefault-model = "x"  # yes\n\n[chat]\ntheme = "nord"\n')
        config_file.save(("chat", "theme"), "dracula", file)
        config_file.save(("chat", "keys", "stop"), "ctrl+x", file)
        config_file.save(("chat", "system-prompts", "pirate"), "Arr.\nYou.", file)
        text = file.read_text()
        assert text.startswith('# mine\ndefault-model = "x"  # yes\n')
        config = load_config(file)
        assert (config.chat.theme, config.chat.keys) == ("dracula", {"stop": "ctrl+x"})
        assert config.chat.system_prompts == {"pirate": "Arr.\nYou."}

    def test_file_that_would_not_load_is_not_written(self, tmp_path):
        file = tmp_path / "new" / "config.toml"
        with pytest.raises(ConfigError):
            config_file.save(("chat", "theme"), 3, file)
        assert not file.exists()


def test_code_blocks_at_any_depth():
    blocks = code_blocks(
        "```python\na\n```\n- x\n\n  ```\n  b\n  ```\n\n    indented\n\n```sh title\nc"
    )
    assert (blocks[0].language, blocks[0].text) == ("python", "a")
    assert ("sh", "c") in [(b.language, b.text) for b in blocks]
    assert len(blocks) >= 3
