"""The mcp.json files of other programs."""

import json
import re

import pytest

from edgeinfer.config.config_file import ToolsConfig, ToolServerConfig
from edgeinfer.errors import ToolServerError
from edgeinfer.tools.mcp_servers import ServerSpec, load_servers, path_outside, plan_start_apart


def read_all(tmp_path, text):
    file = tmp_path / "mcp.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return load_servers(ToolsConfig(mcp_files=(str(file),)), tmp_path)


def read(tmp_path, text):
    specs, left_out = read_all(tmp_path, text)
    assert not left_out
    return specs


SERVER = {"command": "npx", "args": ["-y", "server"], "env": {"A": "1"}}


@pytest.mark.parametrize(
    "document",
    [
        {"mcpServers": {"one": SERVER}},
        {"servers": {"one": {"type": "stdio", **SERVER}}, "inputs": []},
        {"mcp": {"servers": {"one": SERVER}}},
    ],
    ids=["Claude Desktop, Cursor, LM Studio", "VS Code", "VS Code's settings"],
)
def test_files_of_each_program_are_read(tmp_path, document):
    (spec,) = read(tmp_path, document)
    assert (spec.name, spec.command, spec.env) == ("one", ("npx", "-y", "server"), {"A": "1"})


def test_comments_and_last_commas_of_vs_code(tmp_path):
    text = '{ // mine\n"servers": {"one": {"url": "https://example.com/a//b", /* x */ },},}'
    assert read(tmp_path, text)[0].url == "https://example.com/a//b"


def test_variables_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "t0")
    entry = {"url": "http://localhost/${env:TOKEN}", "headers": {"Authorization": "Bearer ${TOKEN}"}}
    (spec,) = read(tmp_path, {"mcpServers": {"one": entry}})
    assert spec.url == "http://localhost/t0"
    assert spec.headers == {"Authorization": "Bearer t0"}
    (spec,) = read(tmp_path, {"servers": {"one": {"command": "x", "args": ["${workspaceFolder}"]}}})
    assert spec.command == ("x", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("${NOT_SET:-a b}", "a b"),
        ("${env:NOT_SET:-}", ""),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY}", ""),
        ("${TOKEN:-x}", "t0"),
        ("a${TOKEN}b${NOT_SET:-c:-d}", "at0bc:-d"),
    ],
)
def test_defaults_stand_for_unset_variables(tmp_path, monkeypatch, text, filled):
    monkeypatch.setenv("TOKEN", "t0")
    monkeypatch.setenv("EMPTY", "")
    (spec,) = read(tmp_path, {"mcpServers": {"one": {"command": "x", "args": [text]}}})
    assert spec.command == ("x", filled)


BAD_ENTRIES = [
    ({"command": "x", "args": ["${input:key}"]}, "is not supported"),
    ({"command": "x", "env": {"A": "${env:NOT_SET}"}}, "NOT_SET is not set (export NOT_SET=…)"),
    ({"url": "https://x", "headers": {"A": "${NOT_SET}"}}, "NOT_SET is not set"),
    ({}, "neither `command` nor `url`"),
    ({"command": "x", "url": "https://x"}, "`command` and `url` are both set"),
    ({"url": "ftp://x"}, "is not an http or https URL"),
    ({"command": 5}, "`command` is 5"),
    ({"command": "x", "args": "y"}, "`args` is "),
    ({"command": "x", "env": []}, "`env` must be a table"),
    ({"url": ["https://x"]}, "`url` is a list"),
    ({"command": "a\0b"}, "a NUL character"),
    ({"command": "x", "env": {"PATH": "/a\0b"}}, "a NUL character"),
    ("npx", "must be a table"),
    (None, "must be a table"),
]


@pytest.mark.parametrize(("entry", "said"), BAD_ENTRIES)
def test_a_bad_entry_leaves_only_itself_out(tmp_path, entry, said):
    specs, left_out = read_all(tmp_path, {"mcpServers": {"bad": entry, "one": SERVER}})
    assert [spec.name for spec in specs] == ["one"]
    (text,) = left_out
    assert said in text
    assert "mcp.json: tool server bad: " in text
    assert text.endswith(": left out")


@pytest.mark.parametrize(
    ("name", "valid"),
    [("Figma Dev Mode", "Figma-Dev-Mode"), ("a__b", "a_b"), ("@org/x", "org-x"), ("x" * 60, "x" * 48)],
)
def test_names_become_valid(tmp_path, name, valid):
    assert [spec.name for spec in read(tmp_path, {"mcpServers": {name: SERVER}})] == [valid]


def test_a_name_without_a_letter_is_left_out(tmp_path):
    specs, left_out = read_all(tmp_path, {"mcpServers": {"日本": SERVER, "one": SERVER}})
    assert [spec.name for spec in specs] == ["one"]
    assert "no letter from A to Z" in left_out[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 1}', b"\xff", None])
def test_a_bad_file_leaves_only_itself_out(tmp_path, text):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"mcpServers": {"one": SERVER}}))
    if text is not None:
        bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    files = (str(bad), "~nobodyx/mcp.json", str(good))
    specs, left_out = load_servers(ToolsConfig(mcp_files=files), tmp_path)
    assert [spec.name for spec in specs] == ["one"]
    assert len(left_out) == 2
    assert re.search(r"bad\.json .*\(.*\): left out$", left_out[0]), "the hint is shown"
    assert left_out[1] == "~nobodyx/mcp.json: this user has no home folder: left out"


def test_disabled_servers_stay_out_and_config_toml_goes_first(tmp_path):
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"one": SERVER, "off": {**SERVER, "disabled": True}}}))
    configured = ToolServerConfig(command=("own",))
    specs, _ = load_servers(ToolsConfig(mcp_files=(str(file),), servers={"one": configured}), tmp_path)
    assert [(spec.name, spec.command) for spec in specs] == [("one", ("own",))]


def test_named_variables_are_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "t0")
    server = ToolServerConfig(command=("x",), pass_env=("TOKEN",))
    specs, _ = load_servers(ToolsConfig(servers={"one": server}), tmp_path)
    assert specs[0].env == {"TOKEN": "t0"}


# servers start outside of the folder, where `shell` and `python` could change programs


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def apart(folder, *command, **env):
    return plan_start_apart(ServerSpec(name="x", command=command, env=env), folder)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a project folder. `tool` is also on the PATH outside of it, `only-here` is not."""
    monkeypatch.setenv(
        "PATH", f"{tmp_path}/project/bin::bin:{tmp_path}/project/../project/b:{tmp_path}/out"
    )
    program(tmp_path / "out/tool")
    program(tmp_path / "project/bin/tool")
    program(tmp_path / "project/bin/only-here")
    return tmp_path / "project"


def test_programs_and_modules_come_from_outside_the_folder(folder, tmp_path):
    command, variables, cwd = apart(folder, "tool", "-y", PYTHONPATH=f"{folder}:{tmp_path}/lib")
    assert command == (str(tmp_path / "out/tool"), "-y")
    assert cwd is None
    assert variables["PATH"] == str(tmp_path / "out")
    assert variables["PYTHONPATH"] == str(tmp_path / "lib")
    assert variables["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    "command",
    [
        ("only-here",),
        ("./bin/tool",),
        ("{folder}/bin/tool",),
        ("{folder}/../project/bin/tool",),
        ("{folder}/../alias/bin/tool",),
        ("{folder}/../out/inward",),
        ("{folder}/outward",),
        ("{folder}/link/tool",),
        ("tool", "server.py"),
        ("tool", "{folder}/server.py"),
    ],
)
def test_a_program_of_the_folder_is_refused(folder, tmp_path, command):
    (tmp_path / "alias").symlink_to(folder)
    (tmp_path / "out/inward").symlink_to(folder / "bin/tool")
    (folder / "outward").symlink_to(tmp_path / "out/tool")
    (folder / "server.py").touch()
    (folder / "link").symlink_to(tmp_path / "out")  # a command could change where it leads
    assert path_outside(f"{folder}/link:/usr/bin", folder) == "/usr/bin"
    with pytest.raises(ToolServerError, match=r"can change|there is no program"):
        apart(folder, *(word.format(folder=folder) for word in command))


def test_folders_and_data_as_arguments_stay(folder):
    (folder / "a.db").touch()
    arguments = (str(folder), str(folder / "a.db"))
    assert apart(folder, "tool", *arguments)[0][1:] == arguments


@pytest.mark.parametrize("path", ["mcp.json", "sub/mcp.json", "../link.json"])
@pytest.mark.parametrize("builtin", [("shell",), ("python", "read"), ("read",)])
def test_a_file_that_commands_can_change_is_left_out(tmp_path, path, builtin):
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    for name in "mcp.json", "sub/mcp.json":
        (folder / name).write_text('{"mcpServers": {"a": {"command": "x"}}}')
    (tmp_path / "link.json").symlink_to("project/mcp.json")
    config = ToolsConfig(mcp_files=(str(folder / path),), builtin=builtin)
    specs, left_out = load_servers(config, folder)
    is_read = builtin == ("read",)
    assert [spec.name for spec in specs] == (["a"] if is_read else [])
    assert is_read or "can change this file (move the file out of" in left_out[0]
