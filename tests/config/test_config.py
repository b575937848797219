"""config.toml: types, defaults, unknown keys, and changes of single keys."""

import random
import subprocess
import sys
import threading

import msgspec
import pytest

from edgeinfer.cli.main import main
from edgeinfer.config import config_file
from edgeinfer.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text, "utf-8", "surrogateescape")
    return path


def test_no_file_means_defaults(tmp_path):
    assert config_file.load_config(tmp_path / "absent.toml") == config_file.Config()


def test_values_are_read(tmp_path):
    text = 'default-model = "x"\n[load]\nctx = 4096\n[serve]\nport = 0\n'
    got = config_file.load_config(write(tmp_path, text))
    assert (got.default_model, got.load.ctx, got.serve.port) == ("x", 4096, 0)
    assert got.snapshots == config_file.SnapshotsConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[load]\nctxx = 1\n", "unknown key `load.ctxx`; did you mean `ctx`?"),
        ("nonsense = 1\n", "unknown key `nonsense`"),
        ("[load]\nctx = -1\n", "ctx"),
        ('[load]\nctx = "many"\n', "ctx"),
        ("[load\n", "not valid TOML"),
        ("# \udcff", "not valid TOML: line 1 is not UTF-8"),
        ("x = " + "[" * 5000, "not valid TOML: nested too deeply"),
        ("x = " + "1" * 5000, "not valid TOML"),
        ("[serve]\nport = 70000\n", "port"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config_file.load_config(path)
    assert str(path) in caught.value.message
    assert expected in caught.value.message


def test_removed_keys_are_ignored_and_each_is_named_once(tmp_path):
    tables: dict[str, list[str]] = {}
    for key in config_file.REMOVED_KEYS:
        section, _, name = key.partition(".")
        tables.setdefault(section, []).append(f"{name} = 1\n")
    text = "".join(f"[{section}]\n{''.join(lines)}" for section, lines in tables.items())
    path, messages = write(tmp_path, text), list[str]()
    assert config_file.load_config(path, messages.append) == config_file.Config()
    assert [message.split("`")[1] for message in messages] == list(config_file.REMOVED_KEYS)
    config_file.save(("offline",), True, path)
    assert "[load]\nflash-attention = 1\n" in path.read_text()


def test_a_removed_key_is_warned_of_and_the_verb_runs(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, '[serve]\nreplicas = "2"\n')
    monkeypatch.setenv("EDGEINFER_CONFIG", str(path))
    assert main(["config"]) == 0
    assert capsys.readouterr().err.count("`serve.replicas` is no longer a key") == 1


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("0", False), ("", False), ("true", True)]
)
def test_offline_by_environment(monkeypatch, value, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert bool(config_file.way_out_of_offline(config_file.Config())) is expected


def test_file_that_cannot_be_read_is_no_mistake_in_it(tmp_path):
    with pytest.raises(ConfigError) as refused:
        config_file.load_config(tmp_path)  # a folder cannot be read, even by root
    assert "set EDGEINFER_HOME to a folder of your own" in refused.value.hint


def test_every_key_has_a_sentence():
    sections = msgspec.json.schema(config_file.Config)["$defs"].values()
    keys = {name: key for section in sections for name, key in section["properties"].items()}
    missing = [name for name, key in keys.items() if not {"description", "$ref"} & key.keys()]
    assert len(keys) > 30
    assert missing == []


#: Saves keys and adds patterns in another process; its exit status says whether that succeeded.
_WRITER = """
import sys
from pathlib import Path
from edgeinfer.config import config_file
path, name = Path(sys.argv[1]), sys.argv[2]
for i in range(6):
    config_file.save(("chat", "system-prompts", f"{name}{i}"), str(i), path)
    config_file.change(("tools", "allow"), lambda old: [*(old or ()), f"{name}.t{i}"], path)
"""


def test_processes_that_change_the_file_at_once_lose_nothing(tmp_path):
    path = write(tmp_path, "# mine\n[chat]\nmouse = false  # no\n")
    names = ("a", "b", "c")
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name]) for name in names]
    assert [writer.wait(120) for writer in writers] == [0] * 3
    config = config_file.load_config(path)
    assert config.chat.system_prompts == {f"{n}{i}": str(i) for n in names for i in range(6)}
    assert sorted(config.tools.allow) == sorted(f"{n}.t{i}" for n in names for i in range(6))
    assert path.read_text().startswith("# mine\n[chat]\nmouse = false  # no\n")


def test_a_change_starts_from_what_the_file_says_now(tmp_path):
    path = write(tmp_path, '[tools]\nallow = ["a.b", "c.d"]\n')
    config_file.load_config(path)
    write(tmp_path, "[tools]\nallow = []\n")  # the user removed both patterns
    config = config_file.change(("tools", "allow"), lambda old: [*(old or ()), "e.f"], path)
    assert config.tools.allow == config_file.load_config(path).tools.allow == ("e.f",)


def test_a_change_of_a_linked_file_keeps_the_link(tmp_path):
    target = write(tmp_path, "")
    link = tmp_path / "link.toml"
    link.symlink_to(target)
    config_file.save(("offline",), True, link)
    assert link.is_symlink()
    assert config_file.load_config(target).offline


@pytest.mark.parametrize("before", [b"chat = 3\n", b"# \xff", b"[chat", b"nonsense = 1\n"])
def test_a_file_with_a_mistake_is_not_changed(tmp_path, before):
    path = tmp_path / "config.toml"
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        config_file.save(("chat", "theme"), "x", path)
    assert path.read_bytes() == before


def test_a_killed_writer_leaves_a_whole_file_and_no_lock(tmp_path):
    path = write(tmp_path, "")
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path), "k"])
        threading.Event().wait(random.uniform(0.1, 0.5))
        writer.kill()
        writer.wait(60)
        config_file.load_config(path)
    config_file.save(("offline",), True, path)
    assert config_file.load_config(path).offline
