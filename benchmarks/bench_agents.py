"""`make bench-agents`: time to the first token of a new agent session whose preamble is on disk.

Recorded sessions (tests/clients/recorded) are replayed over HTTP with the agents' requests. Two
sessions in different folders are prefilled. Each measurement follows a new start of `serve`:
immediately, and after the agent's preamble is back in memory, as `edgeinfer launch` does while the
agent starts:

another folder a session with other words, in a new folder same folder a session in the folder of the
second prefilled session the next day a session in that folder on another day

Writes bench-out/agents.md and agents.json.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import lzma
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/clients"))
from bench_memory import work_folder
from common import ROOT, add_out, model_of, model_path, write_figure
from peer_server import Side, ours, wait_written
from record import scrub
from run import FIRST

RECORDED = ROOT / "tests/clients/recorded"
N_CTX = 16_384
_LIMITS = {"/v1/responses": "max_output_tokens"}
_ANSWER_TOKENS = 8
#: Folders in which the recorded sessions ran.
_HOME = re.compile(r"(?:/\w+)+/edgeinfer-agent-\w+/home")
_WORK = re.compile(r"(?:/\w+)+/edgeinfer-agent-\w+/work")
_SLUG = re.compile(r"(?:-\w+)+-edgeinfer-agent-[\w-]+?-work")
_DAY = re.compile(r"20\d\d-\d\d-\d\d|[A-Z][a-z][a-z] [A-Z][a-z][a-z] \d\d 20\d\d")
CASES = ("another folder", "same folder", "the next day")
#: An event of each dialect that contains a piece of an answer.
_PIECE = re.compile(rb'"(?:text_delta|response\.output_text\.delta|thinking_delta)"|"content":"[^"]')


class Session(NamedTuple):
    """Folder and day of a session, and its user's first message."""

    folder: str
    question: str
    day: str = datetime.date.today().isoformat()


def first_request(agent: str) -> dict[str, Any]:
    """Return the first request of the recorded session: `path`, `user_agent`, `body`."""
    recorded = json.loads(lzma.decompress((RECORDED / f"{agent}.json.xz").read_bytes()))["requests"]
    most = max(len(request["body"].get("tools") or ()) for request in recorded)
    return next(request for request in recorded if len(request["body"].get("tools") or ()) == most)


def body_for(body: dict[str, Any], session: Session) -> dict[str, Any]:
    """Return the body that the agent would have sent for another session."""
    raw = json.dumps(body)
    if scrub(FIRST) not in raw:
        raise SystemExit("the recorded session does not begin with its question")
    raw = _HOME.sub("/home/ada", raw)
    raw = _WORK.sub(f"/home/ada/{session.folder}", raw)
    raw = _SLUG.sub(f"-home-ada-{session.folder}", raw)
    other: dict[str, Any] = json.loads(
        _DAY.sub(session.day, raw).replace(scrub(FIRST), session.question)
    )
    return other


def ask(
    side: Side, recorded: dict[str, Any], session: Session, *, n: int
) -> tuple[float, dict[str, Any]]:
    """Return the seconds from the request to the first piece of an answer of `n` tokens, and the answer
    of /slots.
    """
    limit = _LIMITS.get(recorded["path"], "max_tokens")
    body = body_for(recorded["body"], session) | {"model": side.model, "stream": n > 0, limit: n}
    for name in ("stream_options", "max_completion_tokens"):
        body.pop(name, None)
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=3000)
    headers = {"content-type": "application/json", "user-agent": recorded["user_agent"]}
    began, first_s = time.perf_counter(), 0.0
    connection.request("POST", recorded["path"], json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:400]!r}")
    for line in response:
        if not first_s and _PIECE.search(line):
            first_s = time.perf_counter() - began
    response.read()
    connection.request("GET", "/slots")
    slot: dict[str, Any] = json.loads(connection.getresponse().read())["slots"][0]
    connection.close()
    return first_s, slot


def recall(side: Side, agent: str, session: Session) -> float:
    """Load the agent's preamble into memory, as `launch` does; return the seconds."""
    body = {"agent": agent, "folder": f"/home/ada/{session.folder}"}
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=3000)
    headers = {"content-type": "application/json"}
    path = f"/v1/models/{side.model}/recall"
    connection.request("POST", path, json.dumps(body), headers)
    if not json.loads(connection.getresponse().read())["n_tokens"]:
        raise SystemExit(f"no preamble of {agent} is on disk")
    connection.close()
    return time.perf_counter() - began


def _read(side: Side, agent: str, recorded: dict[str, Any], home: Path) -> float:
    """Prefill the agent's preamble, unless an earlier run has; return the seconds."""
    noted = home / "read.json"
    if not noted.is_file():
        began = time.perf_counter()
        for folder in ("notes", "shop"):
            _, slot = ask(side, recorded, Session(folder, "hi"), n=0)
        noted.write_text(json.dumps(time.perf_counter() - began))
        wait_written(home, slot["n_prompt_tokens"])
    read_s: float = json.loads(noted.read_text())
    return read_s


def measure(agent: str, shape: str, model: Path, home: Path, runs: int) -> list[dict[str, Any]]:
    """Measure one agent on one model; return the rows."""
    recorded = first_request(agent)
    side = ours(home, model, N_CTX, parallel=1)
    try:
        return _measure_side(side, agent, shape, recorded, home, runs)
    finally:
        side.stop()  # stopping writes the prefilled blocks, also of an interrupted run


def _measure_side(
    side: Side, agent: str, shape: str, recorded: dict[str, Any], home: Path, runs: int
) -> list[dict[str, Any]]:
    side.start()
    read_s = _read(side, agent, recorded, home)
    rows = []
    runs_by_case: dict[str, list[tuple[float, float, float, int]]] = {}
    for number in range(runs):
        for case in CASES:
            side.stop()
            side.start()
            at_once_s, _ = ask(
                side, recorded, _session(case, 2 * number, is_new=True), n=_ANSWER_TOKENS
            )
            side.stop()
            side.start()
            session = _session(case, 2 * number + 1)
            recalled_s = recall(side, agent, session)
            first_s, slot = ask(side, recorded, session, n=_ANSWER_TOKENS)
            runs_by_case.setdefault(case, []).append((first_s, at_once_s, recalled_s, slot["prompt_n"]))
            print(
                agent,
                shape,
                case,
                runs_by_case[case][-1],
                json.dumps(slot),
                file=sys.stderr,
                flush=True,
            )
    for case, measurements in runs_by_case.items():  # a run that only prefills asks nothing
        firsts, at_once, recalled, computed = (
            sorted(column) for column in zip(*measurements, strict=True)
        )
        rows.append(
            {
                "agent": agent,
                "model": shape,
                "case": case,
                "prompt_tokens": slot["n_prompt_tokens"],
                "read_s": read_s,
                "recalled_s": statistics.median(recalled),
                "computed_tokens": statistics.median(computed),
                "first_s": statistics.median(firsts),
                "spread_s": [firsts[0], firsts[-1]],
                "at_once_s": statistics.median(at_once),
            }
        )
    return rows


def _session(case: str, number: int, *, is_new: bool = False) -> Session:
    """Make a new session of today, in a new folder in the first case.

    `is_new`: in the last case also on a new day, so that today differs from it.
    """
    question = f"Why does test {number} fail, {case}?"
    if case == "another folder":
        return Session(f"garden{number}", question)
    if case == "the next day" and is_new:
        return Session("shop", question, f"2037-12-{number + 10}")
    return Session("shop", question)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| agent | model | prompt | read at first in | back in memory in | new session | computed"
        " | first token | spread | asked at once |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        low, high = r["spread_s"]
        lines.append(
            f"| {r['agent']} | {r['model']} | {r['prompt_tokens']:,} tokens | {r['read_s']:.1f} s"
            f" | {r['recalled_s'] * 1000:.0f} ms | {r['case']} | {r['computed_tokens']:.0f} tokens"
            f" | {r['first_s'] * 1000:.0f} ms | {low * 1000:.0f}–{high * 1000:.0f}"
            f" | {r['at_once_s'] * 1000:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", default="claude,codex,opencode,pi")
    parser.add_argument(
        "--shapes", default="small,4b", help="small: SmolLM2; 4b: random weights, f16 cache"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", default="", help="folder for homes and generated models; 12 GB")
    parser.add_argument("--keep", type=Path, help="keep them: the next run prefills nothing again")
    add_out(parser)
    parser.add_argument("--add", action="store_true", help="append to the rows in OUT")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "agents.json"
    rows = json.loads(written.read_text()) if options.add else []
    folder = contextlib.nullcontext(options.keep) if options.keep else work_folder(options.work)
    with folder as work:
        for shape in options.shapes.split(","):
            model = model_of(shape, model_path("smollm2"), work)
            for agent in options.agents.split(","):
                rows = [row for row in rows if (row["agent"], row["model"]) != (agent, shape)]
                rows += measure(agent, shape, model, work / f"{agent}-{shape}", options.runs)
                written.write_text(json.dumps(rows, indent=1))
                write_figure(options.out, "agents", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
