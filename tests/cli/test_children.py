"""Processes that a verb has started end with it, whether it gets SIGTERM or SIGKILL."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_processes import descendants, has_ended, run_python, wait_until

SIGNALS = [signal.SIGTERM, signal.SIGKILL]


def words_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def end_and_wait(process, number, children):
    """Send the signal; wait for the process and its `children`. Fail if one is left."""
    process.send_signal(number)
    process.wait(60)
    try:
        wait_until(lambda: all(map(has_ended, children)), "the children to end")
    finally:
        for child in children:
            if not has_ended(child):
                os.kill(child, signal.SIGKILL)


#: A child of each verb: a word in its command line.
VERBS = {
    "bench": (["bench", "{model}", "-r", "1", "-p", "2048", "-n", "2048"], "serve"),
    "quantize": (["quantize", "{model}", "Q8_0", "--name", "made"], "edgeinfer.runtime.llama.helpers"),
}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", VERBS)
def test_no_child_outlives_its_verb(smollm2, tmp_path, verb, number):
    arguments, child = VERBS[verb]
    command = [sys.executable, "-m", "edgeinfer", *(word.format(model=smollm2) for word in arguments)]
    said, folder = tmp_path / "said", tmp_path / "tmp"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}

    def children():
        assert process.poll() is None, said.read_text()
        pids = descendants(process.pid)
        return pids if any(child in word for pid in pids for word in words_of(pid)) else []

    with said.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        end_and_wait(process, number, wait_until(children, f"a child of {verb}"))
    finally:
        process.kill()
    if number == signal.SIGTERM:
        assert process.returncode == 130, said.read_text()
        assert not list(folder.iterdir()), "it cleans up"


DYING = """
import subprocess, sys, time
from edgeinfer.platform.process import die_with_parent_hook
child = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent_hook({number}))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [9, 15])
@pytest.mark.parametrize("ends_by", SIGNALS)
def test_a_child_dies_with_its_parent(number, ends_by):
    command = [sys.executable, "-c", DYING.format(number=number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        end_and_wait(parent, ends_by, [int(parent.stdout.readline())])


INTERRUPTED = """
import os, signal
from edgeinfer.platform.process import start_child
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    start_child(["true"])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_in_the_midst_of_a_fork_is_not_lost():
    assert run_python(INTERRUPTED) == "interrupted\n"


ORPHAN = """
import os, subprocess, sys, time
from edgeinfer.platform import process
prepare, parent = process.die_with_parent_hook(), os.getpid()
if os.fork() == 0:  # the parent that the child was to follow ends before the child is prepared
    while os.getppid() == parent:
        time.sleep(0.01)
    prepare()
    print("it goes on", flush=True)
"""


@pytest.mark.slow
def test_a_child_whose_parent_has_ended_before_does_not_run():
    assert run_python(ORPHAN) == ""
