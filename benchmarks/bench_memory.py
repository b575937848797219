"""What is read once and remembered, beside llama-server in the same run: `make bench-memory`.

turns      N conversations of some 1,000 tokens asked in turn over HTTP: total time, first token, memory
restart    `kill -9` of the server, then the same conversation: exec to first token, tokens computed again
edits      edit in the middle, regenerate, another model in between: tokens computed beyond the new ones
newcomer   short chats while a long prompt of somebody else is read
cost       decode rate with writing on and off; a neighbour's longest gap while a long prefix is restored

Sides take turns; medians. Each section runs in homes of its own below --work, which are removed.
Without llama-server that side is left out. Writes bench-out/memory.md and memory.json.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_serve import free_port, wait_healthy
from bench_serve_models import percentile
from common import ROOT, model_path, peer_program, tree_of, write_figure

EDGEINFER = [sys.executable, "-m", "edgeinfer"]
WORDS = "river bread clock wool bridge owl glass map tide salt bell ink stone lamp rope seed".split()
Messages = list[dict[str, str]]


@dataclass
class Answer:
    """One streamed answer: seconds from the request's first byte, and the usage block."""

    text: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def computed(self) -> int:
        return int(self.usage["prompt_tokens"]) - self.cached


def ask(port: int, messages: Messages, *, n: int = 16, model: str = "", **more: Any) -> Answer:
    """Stream one greedy chat completion."""
    body = {"model": model, "messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    answer, begun = Answer(), time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:400]!r}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or ():
            if text := choice["delta"].get("content"):
                answer.stamps.append(time.perf_counter() - begun)
                answer.text += text
    connection.close()
    answer.total_s = time.perf_counter() - begun
    answer.first_s = answer.stamps[0] if answer.stamps else answer.total_s
    return answer


def text_of(number: int, n_words: int) -> str:
    """Words that differ from the first one on, so that no two conversations share a prefix."""
    return f"Story {number}. " + " ".join(
        f"{WORDS[(number * 7 + i * i) % len(WORDS)]} {WORDS[(number + i) % len(WORDS)]}"
        for i in range(n_words // 2)
    )


def conversation(number: int, n_words: int) -> Messages:
    return [{"role": "user", "content": text_of(number, n_words) + ". Go on."}]


# --- the sides


class Side:
    """One server that can be started again over the same home."""

    def __init__(self, name: str, command: list[str], model: str, environment: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self.model = model
        self._environment = {**os.environ, **environment}
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; seconds from exec to healthy."""
        self.port = free_port()
        begun = time.perf_counter()
        command = [word.replace("PORT", str(self.port)) for word in self._command]
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_healthy(self.port, self._process, 600)
        return time.perf_counter() - begun

    def kill(self) -> None:
        """`kill -9` of all of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.kill()

    def ask(self, messages: Messages, **more: Any) -> Answer:
        return ask(self.port, messages, model=self.model, **more)

    def private_mb(self) -> float:
        """Memory nobody else has, of all its processes."""
        assert self._process is not None
        return sum(_private_kb(pid) for pid in tree_of(self._process.pid)) / 1024


def _private_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))
    )


def ours(home: Path, model: Path, n_ctx: int, *, blocks: bool = True, parallel: int = 4) -> Side:
    """`edgeinfer serve` through its launcher, in a home of its own; warm, so that a start is a resume."""
    settings = home / "config/config.toml"
    name = model.stem.lower()
    environment = {"EDGEINFER_HOME": str(home)}
    if not settings.exists():
        settings.parent.mkdir(parents=True)
        settings.write_text(
            f"[snapshots]\nauto-warm = false\n\n[blocks]\nenabled = {str(blocks).lower()}\n"
        )
        for words in (
            ["pull", str(model), "--name", name, "--in-place", "--quiet"],
            ["warm", name, "--ctx", str(n_ctx), "--parallel", str(parallel), "--quiet"],
        ):
            subprocess.run(
                [*EDGEINFER, *words], env={**os.environ, **environment}, cwd=ROOT, check=True
            )
    command = [*EDGEINFER, "serve", name, "--port", "PORT", "--log", "off", "--ctx", str(n_ctx)]
    return Side("edgeinfer", [*command, "--parallel", str(parallel)], name, environment)


def theirs(model: Path, n_ctx: int, *, slots: int = 4) -> Side | None:
    """`llama-server` with its defaults: a prompt cache in RAM of at most 8 GiB. None without one."""
    program = peer_program("llama-server")
    if program is None:
        return None
    command = [
        program,
        "-m",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        "PORT",
        "-t",
        "2",
        "--no-webui",
    ]
    return Side("llama-server", [*command, "-np", str(slots), "-c", str(n_ctx * slots)], model.stem, {})


# --- sections


def turns_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """N conversations in turn; every round adds a question to each."""
    rows = []
    for n in options.conversations:
        sides = [ours(work / f"turns{n}", options.model, 8192), theirs(options.model, 8192)]
        for side in [one for one in sides if one]:
            side.start()
            chats = [conversation(1000 * n + i, options.words) for i in range(n)]
            firsts: list[list[float]] = []
            begun = time.perf_counter()
            for round_number in range(options.rounds):
                firsts.append([])
                for chat in chats:
                    answer = side.ask(chat)
                    firsts[-1].append(answer.first_s)
                    chat += [
                        {"role": "assistant", "content": answer.text},
                        {"role": "user", "content": f"And then, part {round_number + 2}?"},
                    ]
            later = [s for seconds in firsts[1:] for s in seconds]
            rows.append(
                {
                    "n": n,
                    "side": side.name,
                    "total_s": time.perf_counter() - begun,
                    "first_round_p50_s": statistics.median(firsts[0]),
                    "later_p50_s": statistics.median(later),
                    "later_p95_s": percentile(later, 95),
                    "private_mb": side.private_mb(),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.stop()
    return rows


def restart_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """The same conversation after `kill -9`."""
    rows = []
    sides = [ours(work / "restart", options.model, 8192), theirs(options.model, 8192)]
    for side in [one for one in sides if one]:
        side.start()
        chat = conversation(7, options.long_words)
        answer = side.ask(chat)
        prefill_s = answer.first_s
        chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Why?"}]
        if side.name == "edgeinfer":
            _wait_written(work / "restart", int(answer.usage["prompt_tokens"]))
        runs = []
        for _ in range(options.runs if side.name == "edgeinfer" else 2):
            side.kill()
            begun = time.perf_counter()
            side.start()
            healthy = time.perf_counter() - begun
            again = side.ask(chat)
            runs.append((healthy + again.first_s, again.first_s, again.computed, again.text))
        rows.append(
            {
                "side": side.name,
                "prompt_tokens": answer.usage["prompt_tokens"],
                "prefill_s": prefill_s,
                "exec_to_first_s": statistics.median(r[0] for r in runs),
                "first_s": statistics.median(r[1] for r in runs),
                "computed_tokens": max(r[2] for r in runs),
                "same_text": len({r[3] for r in runs}) == 1,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def _wait_written(home: Path, n_tokens: int) -> None:
    """Wait until the blocks of so many tokens are on the disk and no file is being written."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = list((home / "cache").rglob("*.block"))
        if len(files) >= n_tokens // 256 and not list((home / "cache").rglob("*.new")):
            return
        time.sleep(0.1)


def edits_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Tokens computed again where a conversation is edited, regenerated, or left for another model."""
    rows = []
    side = ours(work / "edits", options.model, 8192)
    side.start()
    chat = conversation(11, options.words)
    for turn in range(3):
        answer = side.ask(chat)
        chat += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"More {turn}?"},
        ]
    straight = side.ask(chat)
    cases = {"next turn": straight}
    cases["regenerate"] = side.ask(chat)
    edited = [*chat[:2], {"role": "user", "content": "Something else?"}]
    cases["edit in the middle"] = side.ask(edited)
    cases["back to the first branch"] = side.ask(chat)
    side.stop()
    side.start()
    cases["after a restart"] = side.ask(chat)
    side.stop()
    for name, answer in cases.items():
        rows.append(
            {
                "case": name,
                "prompt_tokens": answer.usage["prompt_tokens"],
                "computed_tokens": answer.computed,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def newcomer_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Short chats, one after the other, while a long prompt is read."""
    rows = []
    sides = [ours(work / "newcomer", options.model, 8192), theirs(options.model, 8192)]
    for side in [one for one in sides if one]:
        side.start()
        side.ask(conversation(1, 20), n=2)
        alone = side.ask(conversation(21, options.long_words), n=2).first_s
        long: list[Answer] = []
        reading = threading.Thread(
            target=lambda s, found: found.append(s.ask(conversation(22, options.long_words), n=2)),
            args=(side, long),
        )
        reading.start()
        time.sleep(0.5)
        firsts = []
        for i in range(10):
            if not reading.is_alive():
                break
            firsts.append(side.ask(conversation(100 + i, 12), n=8).first_s)
        reading.join()
        rows.append(
            {
                "side": side.name,
                "long_alone_s": alone,
                "long_beside_s": long[0].first_s,
                "newcomers": len(firsts),
                "first_p50_s": statistics.median(firsts),
                "first_max_s": max(firsts),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
        side.stop()
    return rows


def cost_section(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """What writing costs a stream, and restoring its neighbour."""
    sides = {
        "on": ours(work / "cost-on", options.model, 8192),
        "off": ours(work / "cost-off", options.model, 8192, blocks=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.start()
    for number in range(options.runs):
        for name, side in sides.items():
            answer = side.ask(conversation(500 + number, options.words), n=256, ignore_eos=True)
            rates[name].append((len(answer.stamps) - 1) / (answer.stamps[-1] - answer.stamps[0]))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    rows: list[dict[str, Any]] = [
        {"case": "decode tokens/s, writing", **medians, "ratio": medians["on"] / medians["off"]}
    ]
    on = sides["on"]
    chat = conversation(31, options.long_words)
    answer = on.ask(chat, n=4)
    _wait_written(work / "cost-on", int(answer.usage["prompt_tokens"]))
    on.stop()
    on.start()
    on.ask(conversation(32, 12), n=2)
    neighbour: list[Answer] = []
    stream = threading.Thread(
        target=lambda: neighbour.append(on.ask(conversation(33, 12), n=400, ignore_eos=True))
    )
    stream.start()
    time.sleep(0.7)
    restored = on.ask(chat, n=2)
    stream.join()
    stamps = neighbour[0].stamps
    gaps = sorted(b - a for a, b in itertools.pairwise(stamps))
    rows.append(
        {
            "case": "neighbour while restoring",
            "restored_tokens": restored.cached,
            "first_s": restored.first_s,
            "longest_gap_ms": gaps[-1] * 1000,
            "median_gap_ms": statistics.median(gaps) * 1000,
        }
    )
    for side in sides.values():
        side.stop()
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    return rows


# --- the tables


def table(results: dict[str, Any]) -> str:
    """All sections as Markdown."""
    parts = []
    if rows := results.get("turns"):
        parts.append(
            "| conversations, in turn | | all rounds | first token, round 1 | later, p50 | later, p95 |"
            " private memory |\n|---|---|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['n']} | {r['side']} | {r['total_s']:.1f} s | {r['first_round_p50_s'] * 1000:.0f} ms"
                f" | {r['later_p50_s'] * 1000:.0f} ms | {r['later_p95_s'] * 1000:.0f} ms"
                f" | {r['private_mb']:.0f} MB |"
                for r in rows
            )
        )
    if rows := results.get("restart"):
        parts.append(
            "| after `kill -9` | prompt | read at first in | exec → first token | request → first token |"
            " computed again |\n|---|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['side']} | {r['prompt_tokens']} tokens | {r['prefill_s']:.2f} s"
                f" | {r['exec_to_first_s'] * 1000:.0f} ms | {r['first_s'] * 1000:.0f} ms"
                f" | {r['computed_tokens']} tokens |"
                for r in rows
            )
        )
    if rows := results.get("edits"):
        parts.append(
            "| what happens | prompt | computed |\n|---|---|---|\n"
            + "\n".join(
                f"| {r['case']} | {r['prompt_tokens']} tokens | {r['computed_tokens']} tokens |"
                for r in rows
            )
        )
    if rows := results.get("newcomer"):
        parts.append(
            "| short chats beside a long read | first token, p50 | worst | the long read alone | beside |"
            "\n|---|---|---|---|---|\n"
            + "\n".join(
                f"| {r['side']}, {r['newcomers']} of them | {r['first_p50_s'] * 1000:.0f} ms"
                f" | {r['first_max_s'] * 1000:.0f} ms | {r['long_alone_s']:.1f} s | {r['long_beside_s']:.1f} s |"
                for r in rows
            )
        )
    if rows := results.get("cost"):
        rate, gap = rows
        parts.append(
            "| what it costs | |\n|---|---|\n"
            f"| decode, writing on : off | {rate['on']:.1f} : {rate['off']:.1f} tokens/s, {rate['ratio']:.3f} |\n"
            f"| a neighbour's longest gap while {gap['restored_tokens']} tokens are restored"
            f" | {gap['longest_gap_ms']:.0f} ms (median {gap['median_gap_ms']:.1f}) |"
        )
    return "\n\n".join(parts) + "\n"


SECTIONS = {
    "turns": turns_section,
    "restart": restart_section,
    "edits": edits_section,
    "newcomer": newcomer_section,
    "cost": cost_section,
}


@contextlib.contextmanager
def work_folder(named: str) -> Iterator[Path]:
    """A folder for the homes, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="edgeinfer-memory-", dir=named or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--conversations", default="4,10,40", help="N of `turns`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--words", type=int, default=650, help="words of a conversation: some 1,000 tokens"
    )
    parser.add_argument("--long-words", type=int, default=4600, help="words of a long prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", type=Path, default=None, help="default: the small test model")
    parser.add_argument("--work", default="", help="where the homes are made")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-out")
    options = parser.parse_args()
    options.model = options.model or model_path("smollm2")
    options.conversations = [int(n) for n in options.conversations.split(",")]
    results: dict[str, Any] = {}
    with work_folder(options.work) as work:
        for name in options.sections.split(","):
            results[name] = SECTIONS[name](options, work)
    print(write_figure(options.out, "memory", table(results)))
    (options.out / "memory.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
