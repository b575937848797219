"""`edgeinfer tools` with a configuration in a file."""

import json
import os
import subprocess
import sys

import pytest
from tools_here import command

from edgeinfer.cli.main import main
from edgeinfer.config.config_file import config_path
from edgeinfer.host import Host

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
    assert main(["tools", "--check"], Host()) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:2] for line in out.splitlines() if line.startswith("  ")]
    assert rows == [
        ["allowed", "read"],
        ["asks", "write"],
        ["asks", "add"],
        ["allowed", "weather"],
        ["asks", "fail"],
    ]
    assert "tool server old: it speaks version" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no tools are configured"),
        ('builtin = ["rm"]', "Invalid enum value"),
        ("[tools.servers.x]\n", "either `command` or `url`"),
        ('[tools.servers.x]\ncomand = ["x"]', "comand"),
        ('builtin = ["read"]\n[tools.servers.files]\ncommand = ["x"]', "another name"),
        ('builtin = ["read"]\nallow = ["("]', "no pattern"),
    ],
)
def test_mistakes_in_the_configuration_are_named(configure, capsys, text, said):
    configure(text)
    assert main(["tools"], Host()) == 2
    assert said in capsys.readouterr().err


WITHOUT = {
    "user namespaces: No space left on device": """
pid = linux.clone(linux.CLONE_NEWUSER)
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
linux.map_this_user(user, group)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
linux.drop_privileges()
""",
    "user namespaces: root needs the capability setfcap for one": "linux.drop_privileges()",
    "Landlock: Function not implemented": """
linux.refuse_new_privileges()
machine = os.uname().machine
refusing = confinement._refusing(confinement._ARCHITECTURES[machine][0], "444", *confinement._SOCKETS[machine])
confinement._install(refusing)
""",
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces")
@pytest.mark.parametrize("why", WITHOUT)
def test_without_a_sandbox_its_tools_are_not_offered(configure, tmp_path, why):
    if "root" in why and os.getuid() != 0:
        pytest.skip("not root")
    configure('builtin = ["read", "shell"]')
    code = f"""
import os, sys
from edgeinfer.platform import linux, confinement
user, group = os.getuid(), os.getgid()
{WITHOUT[why]}
from edgeinfer.cli.main import main
from edgeinfer.host import Host
status = main(["tools", "--check"], Host())
sys.stdout.flush()
os._exit(status)
"""
    command = [sys.executable, "-Pc", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"shell: not offered: no sandbox: {why}" in done.stdout, done.stderr
    assert "allowed  read" in done.stdout
    assert "asks" not in done.stdout
