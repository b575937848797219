"""`make bench-typing`: what typing costs.

Words are typed at 60 a minute into the chat at a pseudo-terminal: Enter → first token with speculative
prefill and without, keystroke → screen (needs the model pulled; it is resumed where it is warm). Writes
bench-out/typing.md and its .json.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench_tui import EDGEINFER, Screen
from common import add_out, write_figure

from edgeinfer.bench import markdown
from edgeinfer.platform.paths import DEFAULT_MODEL

#: Typed again and again: words that no model begins an answer with.
WORDS = "kestrel granite lantern meadow copper harbour violet thicket marble cedar".split()
WORDS_A_MINUTE = 60
#: What the chat says of an answer; a random model's first tokens may be no words.
_SAID = re.compile(r"context ([\d,]+)/[\d,]+ · ([\d.,]+) tok/s · first ([\d,]+) ms · cached ([\d,]+)")
ANSWER_TOKENS = 8
_CONTROL = re.compile(r"\x1b\[[0-9;?<>=$]*[a-zA-Z]|\x1b\][^\x07]*\x07")
#: What the chat itself writes below a question, the model's name apart.
OURS = (
    "Ask something writing tok/s reading of tokens context cached first F1 help Esc stops "
    "waiting for its turn more lines cut room left continue goes "
    f"resumed in ms cold start no snapshot yet with these options {DEFAULT_MODEL}"
)


class Typist:
    """A chat and the user who types into it; `settings` is its config.toml."""

    def __init__(self, folder: Path, settings: str, *arguments: str) -> None:
        config = folder / "config.toml"
        config.write_text(settings)
        self._known = " ".join([*WORDS, OURS, *arguments]).lower()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for fd in (0, 1, 2):
                os.dup2(slave, fd)
            os.environ |= {"TERM": "xterm-256color", "EDGEINFER_CONFIG": str(config)}
            os.execv(EDGEINFER, [str(EDGEINFER), "chat", *arguments])
        os.close(slave)
        self.screen = Screen(self._master)
        self.screen.until(lambda text: "Ask something" in text)
        self.screen.until(lambda text: "context" in text, 600.0)

    def press(self, character: str) -> float:
        """Milliseconds from a key to its character on the screen."""
        seen = len(self.screen.text)
        began = time.monotonic()
        os.write(self._master, character.encode())
        shown = self.screen.until(lambda text: character in plain(text[seen:]))
        return (shown - began) * 1000

    def type(self, text: str) -> None:
        """Type without waiting."""
        os.write(self._master, text.encode())

    def pause(self, until: float) -> None:
        """Read what comes until this moment."""
        while (left := until - time.monotonic()) > 0:
            if select.select([self._master], [], [], left)[0]:
                self.screen.text += os.read(self._master, 1 << 16).decode("utf-8", "replace")

    def ask(self) -> float:
        """Milliseconds from Enter to the first word of the answer on the screen."""
        seen = len(self.screen.text)
        began = time.monotonic()
        os.write(self._master, b"\r")
        shown = self.screen.until(lambda text: self._is_answered(text[seen:]), 600.0)
        return (shown - began) * 1000

    def _is_answered(self, text: str) -> bool:
        """Tell whether a word stands after the question that neither the typist nor the chat wrote."""
        _, mark, after = text.rpartition("\u276f")
        words = re.findall(r"[a-z]{2,}", plain(after).lower())
        return bool(mark) and any(word not in self._known for word in words)

    def said(self) -> dict[str, float]:
        """Read what the chat shows after an answer: its first token, decode step, and the
        tokens that were left to compute.
        """
        self.screen.until(lambda text: _SAID.search(plain(text)) is not None, 600.0)
        last = _SAID.findall(plain(self.screen.text))[-1]
        context, rate, first, cached = (float(number.replace(",", "")) for number in last)
        left = context - ANSWER_TOKENS - cached
        return {"said_ms": first, "step_ms": 1000 / rate, "left_tokens": left}

    def leave(self) -> None:
        os.write(self._master, b"\x1b")
        self.pause(time.monotonic() + 0.5)
        os.write(self._master, b"\x11")
        self.screen.drain()
        os.waitpid(self.pid, 0)
        os.close(self._master)


def plain(text: str) -> str:
    return _CONTROL.sub(" ", text)


@contextlib.contextmanager
def typist(settings: str, *arguments: str) -> Iterator[Typist]:
    with tempfile.TemporaryDirectory() as folder:
        one = Typist(Path(folder), settings, *arguments)
        try:
            yield one
        except BaseException:
            os.kill(one.pid, signal.SIGTERM)
            raise
        one.leave()


def bench_typing(model: list[str], n_words: int) -> dict[str, Any]:
    """Type as many words with speculative prefill and without; other words, as prefixes are cached."""
    found: dict[str, Any] = {}
    for name, is_on, words in (("on", "true", WORDS), ("off", "false", WORDS[::-1])):
        settings = f"[chat]\nread-ahead = {is_on}\n"
        with typist(settings, *model, "--temp", "0", "--max-tokens", str(ANSWER_TOKENS)) as one:
            keys = _type(one, itertools.islice(itertools.cycle(words), n_words))
            found[name] = {"first_word_ms": one.ask(), "keys_ms": keys} | one.said()
    return found


def _type(one: Typist, words: Iterable[str]) -> list[float]:
    """Milliseconds of each letter; every key has its share of the word's time."""
    took = []
    at = time.monotonic()
    for word in words:
        for character in f"{word} ":
            at += 60 / WORDS_A_MINUTE / (len(word) + 1)
            one.pause(at)
            if character == " ":
                one.type(character)
            else:
                took.append(one.press(character))
    return took


def typing_table(on: dict[str, Any], off: dict[str, Any], n_words: int) -> str:
    rows: list[tuple[str, ...]] = [
        (
            f"Enter → first token, {n_words} words at {WORDS_A_MINUTE} a minute",
            *_both("{:,.0f} ms", "said_ms", on, off),
            f"{1.5 * on['step_ms']:.0f} ms, 1.5 decode steps, and the last words",
        ),
        ("Enter → first word on the screen", *_both("{:,.0f} ms", "first_word_ms", on, off), ""),
        ("tokens left to compute at Enter", *_both("{:,.0f}", "left_tokens", on, off), ""),
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        both = [f"{_quantile(side['keys_ms'], share):.1f} ms" for side in (on, off)]
        rows.append((f"keystroke → screen, {name}", *both, "≤ 30 ms" if share > 0.9 else ""))
    return markdown(["what", "speculative prefill", "without", "wanted"], rows)


def _both(form: str, key: str, *sides: dict[str, Any]) -> list[str]:
    return [form.format(side[key]) for side in sides]


def _quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--model", default="", help="a name or a GGUF; left out: the default model")
    add_out(parser)
    options = parser.parse_args()
    model = [options.model] if options.model else []
    found = bench_typing(model, options.words)
    words = typing_table(found["on"], found["off"], options.words)
    print(write_figure(options.out, "typing", words))
    (options.out / "typing.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
