"""`edgeinfer tools` with a configuration in a file."""

import json
import os
import stat
import subprocess
import sys

import pytest
from tools_here import command

from edgeinfer.cli.main import main
from edgeinfer.config.config_file import ToolsConfig, ToolServerConfig, config_path
from edgeinfer.host import EngineHost
from edgeinfer.tools.loop import HOW_TO_ADD
from edgeinfer.tools.tool_use import shown_name
from edgeinfer.tools.toolbox import Toolbox, records_path

pytestmark = pytest.mark.slow  # starts programs


@pytest.fixture
def configure():
    def configure(text):
        config_path().parent.mkdir(parents=True, exist_ok=True)
        config_path().write_text(f"[tools]\n{text}")

    return configure


def test_servers_and_tools_are_listed(configure, capsys):
    configure(
        'builtin = ["read", "write"]\nallow = ["plain.weather"]\n'
        f"[tools.servers.plain]\ncommand = {json.dumps(command('plain'))}\n"
        f"[tools.servers.old]\ncommand = {json.dumps(command('old'))}\n"
    )
    assert main(["tools", "--check"], EngineHost()) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()[:2]) for line in out.splitlines() if line.startswith("  ")]
    assert rows == ["allowed read", "asks write", "asks add", "allowed weather", "asks fail"]
    assert "tool server old: it uses protocol version" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('builtin = ["rm"]', '"rm", but must be'),
        ('[tools.servers.x]\ncomand = ["x"]', "comand"),
        ('builtin = ["read"]\nallow = ["("]', "is not a pattern"),
    ],
)
def test_mistakes_in_the_configuration_are_named(configure, capsys, text, said):
    configure(text)
    assert main(["tools"], EngineHost()) == 2
    assert said in capsys.readouterr().err


def test_no_tools_are_no_mistake(configure, capsys):
    configure("")
    assert main(["tools"], EngineHost()) == 0
    assert capsys.readouterr().out == f"no tools are configured: {HOW_TO_ADD}\n"


def test_bad_servers_are_named_and_the_others_stay(configure, tmp_path, capsys):
    tools = [
        {"name": "x" * 200, "inputSchema": {}},
        {"name": "x" * 201, "inputSchema": {}},
        {"name": "broken", "inputSchema": {"type": "array"}},
        {
            "name": "loose",
            "inputSchema": {"properties": {"n": {"pattern": "^a(?!b).*$", "type": "string"}}},
        },
        {"name": "nulls", "inputSchema": {"properties": None}},
        {"name": "", "inputSchema": {}},
        {"name": "fine\nline"},
        {"name": ["no name"]},
    ]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    foreign = {"Figma Dev Mode": {"command": command("plain")[0], "args": command("plain")[1:]}}
    servers = {"unset": {"url": "${NOT_SET}"}} | foreign
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    configure(
        f'builtin = ["read"]\nmcp-files = [{json.dumps(str(tmp_path / "mcp.json"))}, "/nowhere.json"]\n'
        f'[tools.servers.files]\ncommand = ["x"]\n[tools.servers.empty]\n'
        f'[tools.servers.gone]\ncommand = ["/no/such/program"]\n'
        f"[tools.servers.listing]\ncommand = {json.dumps(command('listing', str(tmp_path / 'tools.json')))}\n"
    )
    assert main(["tools", "--check"], EngineHost()) == 0
    out = capsys.readouterr().out
    for said in (
        "config.toml: tool server empty: neither `command` nor `url` is set (set `command` to",
        "tool server unset: ${NOT_SET} is not an http or https URL",
        "/nowhere.json",
        "files is left out: a built-in server has the same name",
        "/no/such/program cannot be started: No such file or directory (install the program, or ",
        "tools of listing without a name or a valid schema: broken, (no name), fine\nline, ['no name']",
        "listing__loose: the model may write other arguments: "
        "the schema cannot be enforced at #/properties/n: ",
        "Figma-Dev-Mode",
        "weather",
    ):
        assert said in out


def test_long_names_have_short_stable_ones():
    names = [shown_name("server", name) for name in ("add", "x" * 200, "x" * 201)]
    assert names[0] == "server__add"
    assert len(set(names)) == len(names)
    assert all(len(name) <= 120 for name in names)
    assert names[1] == shown_name("server", "x" * 200)


def test_no_more_tools_are_offered_than_a_request_may_have(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": f"t{i}"} for i in range(130)]))
    servers = {"listing": ToolServerConfig(command=command("listing", str(tmp_path / "tools.json")))}
    with Toolbox(ToolsConfig(servers=servers), tmp_path) as toolbox:
        toolbox.prepare()
        assert len(toolbox.tools()) == 128
        assert toolbox.notices == ["more than 128 tools: left out: listing__t128, listing__t129"]
    assert stat.S_IMODE(records_path().stat().st_mode) == 0o600


WITHOUT = {
    "user namespaces: No space left on device": """
pid = linux.clone(linux.CLONE_NEWUSER)
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
linux.map_this_user(user, group)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
linux.drop_privileges()
""",
    "user namespaces: as root they need the capability CAP_SETFCAP": "linux.drop_privileges()",
    "Landlock: Function not implemented": """
linux.refuse_new_privileges()
machine = os.uname().machine
confinement._HIDDEN[machine] = "444"
refusing = confinement._refusal_filter(machine)
confinement._install(refusing)
""",
}


@pytest.mark.parametrize("reason", WITHOUT)
def test_without_a_sandbox_its_tools_are_not_offered(configure, tmp_path, reason):
    if "as root" in reason and os.getuid() != 0:
        pytest.skip("not root")
    configure('builtin = ["read", "shell"]')
    code = f"""
import os, sys
from edgeinfer.platform import linux, confinement
user, group = os.getuid(), os.getgid()
{WITHOUT[reason]}
from edgeinfer.cli.main import main
from edgeinfer.host import EngineHost
status = main(["tools", "--check"], EngineHost())
sys.stdout.flush()
os._exit(status)
"""
    command = [sys.executable, "-Pc", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"shell: not available: no sandbox: {reason}" in done.stdout, done.stderr
    assert "allowed  read" in done.stdout
    assert "asks" not in done.stdout
