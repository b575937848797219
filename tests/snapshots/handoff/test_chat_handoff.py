"""A chat that started cold goes on in a resumed process, and who types there does not notice. Real
snapshots on a real pseudo-terminal; an ordinary user and root.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from types import SimpleNamespace

import pytest
from other_processes import has_ended, private_bytes, wait_until
from terminal import Terminal, shell_environment

from edgeinfer.launcher import handoff, supervise
from edgeinfer.launcher.apps import App
from edgeinfer.launcher.launch import Launcher

from ..test_by_itself import MODEL
from .test_endpoint_handoff import IDLE_BYTES, cold  # noqa: F401  a fixture

pytestmark = pytest.mark.criu

QUESTION, SECOND = "Name three colours.", "Which word is in the file?"


class Chat:
    """A person's chat at a terminal."""

    def __init__(self, person, folder, program=""):
        self.person = person
        become: tuple[str, ...] = ()
        if os.getuid() == 0 and person.uid:
            become = ("setpriv", f"--reuid={person.uid}", f"--regid={person.gid}", "--clear-groups")
        environment = shell_environment(person.home) | person.environment
        self.terminal = Terminal(folder, environment, become)
        script = program or person.place.script
        options = "--temp 0 --max-tokens 12; echo left with $?"
        self.terminal.run(f"{person.place.python} {script} chat {MODEL} {options}")
        self.terminal.until_shown("context")

    def ask(self, text):
        """Ask, and wait for the answer's end."""
        self.terminal.type(text)
        self.terminal.until_shown(text)
        self.terminal.press("Enter")
        self.terminal.until(lambda: text in self.said() and self.answer())
        self.terminal.until(lambda: "writing" not in self.terminal.screen())

    def said(self):
        """Return the conversation from the last question on."""
        return self.terminal.screen().partition("╭")[0].rpartition("❯")[2]

    def answer(self):
        """The words below the last question and its file."""
        _, _, below = self.said().partition("\n\n")
        return re.findall(r"\w+", below.partition("◌")[0])

    def apps(self):
        children = self.terminal.children()
        return [pid for pid, name, _ in children if name == "edgeinfer" and _threads(pid) > 1]

    def private(self):
        """Private memory of the launch."""
        return sum(private_bytes(pid) for pid, _, _ in self.terminal.children())

    def leave(self):
        self.terminal.press("C-q")
        self.terminal.until(lambda: self.terminal.screen().rstrip().endswith("ready$"))


@contextlib.contextmanager
def chatting(person, folder, program=""):
    chat = Chat(person, folder, program)
    try:
        yield chat
    finally:
        chat.terminal.close()


def _threads(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def answered_cold(person, tmp_path):
    """The words of the second answer, of a process that never was handed over."""
    lines = tmp_path / "lines"
    lines.write_text(f"{QUESTION}\n/file notes.txt\n{SECOND}\n")
    words = ("--plain", "--temp", "0", "--max-tokens", "12", "--resume=never")
    with lines.open() as source:
        said = person.run("chat", MODEL, *words, stdin=source).check().out
    return re.findall(r"\w+", said.rpartition("Answer: ")[2].partition("(cut")[0])


def test_chat_handoff_keeps_screen_and_conversation(cold, tmp_path):  # noqa: F811
    (cold.home / "notes.txt").write_text("The word is swordfish.")
    with chatting(cold, tmp_path) as chat:
        before_all = chat.terminal.modes()
        chat.ask(QUESTION)
        for line, shown in (("/file notes.txt", "+ notes.txt"), ("/temp 0", "Sampling: ")):
            chat.terminal.type(line)
            chat.terminal.until_shown(line)
            chat.terminal.press("Enter")
            chat.terminal.until_shown(shown)
        chat.terminal.type(SECOND[:8])
        chat.terminal.until_shown(SECOND[:8])
        (first,) = chat.apps()
        screen = chat.terminal.screen().splitlines()
        before = chat.private()
        cold.logged("built in")
        typed = SECOND[:8]

        def handed_over():
            nonlocal typed
            found = chat.apps()
            if len(found) > 1 and typed == SECOND[:8]:  # it begins: this key may meet either process
                typed = SECOND[:9]
                chat.terminal.type(SECOND[8])
            return found and first not in found

        chat.terminal.until(handed_over)
        wait_until(lambda: has_ended(first), "the first process never ended")
        chat.terminal.until_shown("resumed in")
        chat.terminal.until_shown(typed)
        now = chat.terminal.screen().replace(typed, typed[:8].ljust(len(typed))).splitlines()
        assert now[:-1] == screen[:-1]  # the last line says how this process started
        assert chat.terminal.modes() == before_all
        wait_until(lambda: chat.private() <= IDLE_BYTES, f"{chat.private()} bytes of its own")
        print(f"private memory: {before / 1e6:.0f} MB, then {chat.private() / 1e6:.0f} MB")
        chat.ask(SECOND[len(typed) :])
        assert chat.answer() == answered_cold(cold, tmp_path)
        chat.leave()


LAUNCHER = """
import os, sys
from edgeinfer.launcher import supervise

SUCCESSOR = '''
import os, socket, sys
from edgeinfer.launcher import messages
_, fds = messages.receive(socket.socket(fileno=int(sys.argv[1])))
channel = socket.socket(fileno=fds[-1])
size = int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "little")
channel.recv(size, socket.MSG_WAITALL)
channel.sendall(b"r")
word = channel.recv(1)
with open("took", "wb") as file:
    file.write(word)
open("die", "rb").read()
sys.exit(1)
'''

def resume(manifest, folder, link_fd):
    return supervise.start([sys.executable, "-c", SUCCESSOR, str(link_fd)], link_fd, dict(os.environ))

supervise.resume = resume
from edgeinfer.launcher import main
sys.exit(main())
"""


def test_chat_handoff_aborts_if_target_dies_with_the_terminal(user, tmp_path):
    """The stand-in for a resumed process does all that one does, but for drawing and reading keys."""
    user.settings("[snapshots]\nidle-release-s = 1.0\n")
    program = user.place.folder / f"{user.home.name}.py"
    program.write_text(LAUNCHER)
    program.chmod(0o644)
    os.mkfifo(user.home / "die")
    os.chown(user.home / "die", user.uid, user.gid)
    with chatting(user, tmp_path, program) as chat:
        chat.terminal.type("Name")
        apps = chat.apps()
        wait_until(lambda: (user.home / "took").exists(), "no successor was asked")
        wait_until(lambda: (user.home / "took").read_bytes() == b"t", "it was not given the terminal")
        chat.terminal.type(" three colours.")  # neither process reads the terminal now
        open(user.home / "die", "wb").close()  # its end is what the other reads
        chat.terminal.until_shown("Name three colours.")
        assert "no handoff to the snapshot" in user.logged("no handoff")
        assert chat.apps() == apps
        chat.terminal.press("Enter")
        chat.terminal.until(chat.answer)
        chat.leave()


def test_withdrawn_handoff_is_proposed_again(monkeypatch, capfd):
    launcher = Launcher(["chat"], 0, 0)
    read_fd, write_fd = os.pipe()
    found = SimpleNamespace(resume="auto", find=lambda: None)
    monkeypatch.setattr(launcher, "_main", SimpleNamespace(handoff_fd=write_fd))
    monkeypatch.setattr(launcher._verb, "choice", found)
    monkeypatch.setattr(launcher._verb, "select_again", lambda: None)
    for why, said in (("exit 0", handoff.START), ("exit 1", b"")):
        launcher._abort_handoff(why)
        os.write(write_fd, b".")
        assert os.read(read_fd, 9) == said + b"."
    for fd in (read_fd, write_fd):
        os.close(fd)
    assert capfd.readouterr().err == ""


def test_hanging_handoff_target_is_killed(monkeypatch, capfd):
    launcher = Launcher(["serve"], 0, 0)
    ours, theirs = os.pipe()
    child = supervise.start(["/bin/sleep", "600"], theirs, {})

    class NoLink:
        def fileno(self):
            return ours

        def close(self):
            os.close(ours)

    app = launcher._apps._adopt(App(child, NoLink(), launcher._verb.request(), []))
    launcher._handoff.target = app
    monkeypatch.setattr(handoff, "LIMIT_S", 0.0)
    while launcher._handoff.target is not None:
        launcher._turn()
    os.close(theirs)
    assert "the resumed process was not ready within 0 s" in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, signal.SIG_DFL)
