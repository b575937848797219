"""How much of the latest prompt was cached: its words, and finding it in another process's memory."""

import subprocess
import sys

import msgspec
import pytest

from edgeinfer.cache_report import CacheReport
from edgeinfer.cli.verbs.ps import PsResult
from edgeinfer.platform.process_metadata import CACHE_REPORT, left_by
from edgeinfer.runtime.events import Divergence, Usage
from edgeinfer.snapshots.running import Running


def last(cause="text", **fields):
    usage = Usage(prompt_tokens=1204, cached_tokens=1100, cached_disk_tokens=fields.pop("disk", 0))
    return CacheReport(model="m", usage=usage, divergence=Divergence(cause=cause, **fields))


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        (last("none"), "prompt cache: 1,100 of 1,204 tokens"),
        (last("none", disk=900), "1,100 of 1,204 tokens, 900 from disk"),
        (last("end", n_tokens=1100), "tokens; new from token 1,101 on"),
        (last("nothing"), "tokens; no cached prefix"),
        (
            last("text", n_tokens=3, before="a\nb ", here="\x1b[2Jred", there="blue"),
            "matches the cache for 3 tokens, then differs: after “a b” “[2Jred” instead of “blue”",
        ),
    ],
)
def test_cache_report_names_cached_tokens_and_the_divergence(report, summary):
    assert report.summary.endswith(summary)


#: Writes what a line of its input says, until its input ends; answers each line.
WRITER = """
import sys
import msgspec
from edgeinfer.cache_report import CacheReport
from edgeinfer.platform.process_metadata import CACHE_REPORT, Note
shared = Note(CACHE_REPORT)
print(flush=True)
for line in sys.stdin:
    shared.write(msgspec.json.decode(line, type=CacheReport))
    print(flush=True)
"""


def test_cache_report_is_read_by_pid_and_gone_with_the_process():
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        assert left_by(writer.pid, CACHE_REPORT, CacheReport) is None
        for said in (last("text", before="a long text " * 9), last("end", n_tokens=7)):
            writer.stdin.write(msgspec.json.encode(said) + b"\n")
            writer.stdin.flush()
            writer.stdout.readline()
            assert left_by(writer.pid, CACHE_REPORT, CacheReport) == said
    assert left_by(writer.pid, CACHE_REPORT, CacheReport) is None


def test_ps_says_it_below_the_table():
    running = Running(
        pid=12,
        verb="serve",
        arguments=("a\nb",),
        age_s=1.0,
        apps=1,
        private_bytes=1,
        shared_bytes=1,
        last_prompts=(last("end", n_tokens=1100),),
    )
    table, _, remembered = PsResult(running=(running,)).human().rpartition("\n\n")
    assert "serve" in table
    assert remembered == "12 m: prompt cache: 1,100 of 1,204 tokens; new from token 1,101 on"
