"""The mcp.json files of other programs, read in place."""

import json

import pytest

from edgeinfer.config.config_file import ToolsConfig, ToolServerConfig
from edgeinfer.errors import ConfigError
from edgeinfer.tools.mcp_servers import configured


def read(tmp_path, text):
    file = tmp_path / "mcp.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return configured(ToolsConfig(mcp_files=(str(file),)), tmp_path)


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
def test_formats(tmp_path, document):
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
    ("entry", "said"),
    [
        ({"command": "x", "args": ["${input:key}"]}, "VS Code alone"),
        ({"command": "x", "env": {"A": "${env:NOT_SET}"}}, "NOT_SET is not set"),
        ({}, "either `command` or `url`"),
        ({"command": "x", "url": "https://x"}, "either `command` or `url`"),
        ({"url": "ftp://x"}, "no address"),
    ],
)
def test_mistakes_are_named(tmp_path, entry, said):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, {"mcpServers": {"one": entry}})


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 1}', "\xff"])
def test_files_without_servers_are_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"mcp\.json"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="none"):
        configured(ToolsConfig(mcp_files=(str(tmp_path / "none"),)), tmp_path)


def test_disabled_servers_stay_out_and_config_toml_goes_first(tmp_path):
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"one": SERVER, "off": {**SERVER, "disabled": True}}}))
    own = ToolServerConfig(command=("own",))
    specs = configured(ToolsConfig(mcp_files=(str(file),), servers={"one": own}), tmp_path)
    assert [(spec.name, spec.command) for spec in specs] == [("one", ("own",))]


def test_named_variables_are_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "t0")
    server = ToolServerConfig(command=("x",), pass_env=("TOKEN",))
    assert configured(ToolsConfig(servers={"one": server}), tmp_path)[0].env == {"TOKEN": "t0"}
