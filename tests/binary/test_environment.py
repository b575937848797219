"""The shipped file's process environment: what its children inherit, the user's home, every mode on a terminal."""

import shutil
import subprocess

import pexpect
import pytest

from .conftest import MODEL

#: The shell's, two that this program adds for itself, and one that ggml sets.
ADDED = {"PWD", "OLDPWD", "SHLVL", "_", "EDGEINFER_FILE", "SSL_CERT_FILE", "KMP_BLOCKTIME"}


@pytest.mark.parametrize("user_environment", [{}, {"LD_LIBRARY_PATH": "/opt/theirs"}])
def test_child_has_the_environment_that_the_shipped_file_was_given(binary, tmp_path, user_environment):
    child = tmp_path / "criu"
    child.write_text('#!/bin/sh\nenv -0 > "$0.environment"\n')
    child.chmod(0o755)
    required = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "EDGEINFER_CRIU": str(child)}
    environment = required | user_environment
    subprocess.run([binary, "doctor"], env=environment, capture_output=True, check=False, timeout=300)
    lines = (tmp_path / "criu.environment").read_text().split("\0")[:-1]
    inherited = dict(line.split("=", 1) for line in lines)
    assert {name: value for name, value in inherited.items() if name not in ADDED} == environment


@pytest.mark.parametrize("unset", [{"HOME": None}, {"HOME": None, "EDGEINFER_HOME": "tmp/relative"}])
def test_home_that_no_variable_names_is_found_again_after_unpacking(machine, unset):
    assert machine.run("--version", **unset).stdout.startswith("edgeinfer ")
    folder = machine.root / unset["EDGEINFER_HOME"] if "EDGEINFER_HOME" in unset else machine.home
    assert next(folder.rglob("payload.json"))


def test_user_without_a_home_is_told_so_before_anything_is_unpacked(machine):
    (machine.root / "etc/passwd").write_text("")
    done = machine.run("--version", check=False, HOME=None)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no home directory is known for this user")
    assert machine.apps == []


def wait_for_exit(terminal):
    """Wait for the end; return the exit status and the whole output."""
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus, terminal.before


def test_plain_chat_answers_on_a_terminal(used):
    chat = used.on_a_terminal("chat", MODEL, "--plain", "--max-tokens", "4")
    chat.expect("\n> ")
    chat.sendline("Name three colours.")
    chat.expect("\n> ")
    chat.sendline("/quit")
    status, shown = wait_for_exit(chat)
    assert status == 0
    assert "error" not in shown


def test_run_and_pull_show_no_error_on_a_terminal(used):
    for command in (
        ("run", MODEL, "Hi", "--max-tokens", "4"),
        ("pull", "/tmp/small.gguf", "--name", "again"),
        ("rm", "again", "--yes"),
    ):
        status, shown = wait_for_exit(used.on_a_terminal(*command))
        assert (status, "error" in shown) == (0, False), shown


def test_endpoint_starts_on_a_terminal_and_ends_by_ctrl_c(used):
    serving = used.on_a_terminal("serve", MODEL, "--port", "0")
    serving.expect(r"http://127\.0\.0\.1:\d+")
    serving.sendintr()
    status, _ = wait_for_exit(serving)
    assert status == 0 or serving.signalstatus == 2


def test_question_typed_while_the_shipped_file_unpacks_is_asked(used):
    shutil.rmtree(used.home / ".local/share/edgeinfer/app" / used.apps[0])
    chat = used.on_a_terminal("chat", MODEL)
    chat.expect("unpacking")
    chat.send("Name three colours.\r")
    chat.expect("tok/s")
    chat.sendcontrol("q")
    status, _ = wait_for_exit(chat)
    assert status == 0
