"""Record what agents send, without anybody's text: `python tests/clients/record.py [AGENT...]`.

Drives each through its two turns, as `make clients` does, and keeps its requests in recorded/NAME.json.xz.
What is kept is what decides how much of a prompt is found again: structure, names of tools and fields, sizes,
and which words are the same. The words themselves are replaced, each by one of its length.
"""

import hashlib
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import run  # noqa: E402  it lies here
from install import table  # noqa: E402

_WORDS = """
    can not you the for and any one two add put set red map key log run end has was bed cup sun top
    that with this from have file text line must when each read made name call list time good kind seen
    tools other which write there about under given where never every value small plain words first house
    should before return result string number folder always either simple second change follow letter
    because without another through nothing command program example current context usually measure
    question complete whatever anything original language contains describe possible together
    different following important something directory arguments operation necessary sometimes
    understand everything conditions background connection collection particular parameters
    information instruction temperature development performance application description
    instructions organization consequences intermediate successfully introduction distribution
""".split()
_BY_LENGTH = {n: [word for word in _WORDS if len(word) == n] for n in range(3, 13)}
_WORD = re.compile(r"[A-Za-z]{3,}")
#: What the endpoint looks for, or takes apart.
_KEPT_TEXT = re.compile(
    r"(^x-anthropic-billing-header:.*$"
    r"|^.*(?:[Ww]orking directory|Is a git repository|Is directory a git repo|Workspace root folder): .*$"
    r"|^(?: *Today's date|Current date:).*$"
    r"|^You have a persistent file-based memory at `[^`\n]+`\.|^- PROJECT memory .*$|^## /\S*MEMORY\.md$"
    r"|^It is currently .*$|<current_date>.*?</current_date>|<cwd>.*?</cwd>|<root>.*?</root>"
    r"|</?(?:env|info-msg|system-reminder|environment_context|filesystem|workspace_roots|permission_profile)\b[^>]*>)",
    re.MULTILINE,
)
#: Fields whose values are not prose, at any depth.
_KEPT_FIELDS = frozenset(
    "role type name model id call_id tool_call_id tool_use_id status required enum const format $schema effort "
    "tool_choice include anthropic_beta default".split()
)
#: Fields that name the client.
_DROPPED_FIELDS = {"metadata", "client_metadata", "user", "prompt_cache_key", "session_id"}


def scrub(value: Any, field: str = "") -> Any:
    """Return a JSON value with each word replaced by another one."""
    if isinstance(value, dict):
        fields = {key: inner for key, inner in value.items() if key not in _DROPPED_FIELDS}
        if field == "properties":  # names of fields, whatever they are
            fields = value
        return {
            key: scrub(inner, "" if field == "properties" else key) for key, inner in fields.items()
        }
    if isinstance(value, list):
        return [scrub(inner, field) for inner in value]
    if not isinstance(value, str) or field in _KEPT_FIELDS:
        return value
    if field == "arguments":
        return json.dumps(scrub(json.loads(value)))
    parts = _KEPT_TEXT.split(value)
    return "".join(piece if i % 2 else _WORD.sub(_other, piece) for i, piece in enumerate(parts))


def _other(match: re.Match[str]) -> str:
    """Return a word of the same length, always the same for the same word."""
    word = match[0]
    digest = int.from_bytes(hashlib.blake2b(word.lower().encode(), digest_size=4).digest(), "little")
    n_missing = len(word)
    chosen = ""
    while n_missing:
        length = n_missing if n_missing <= 12 else min(12, n_missing - 3)
        candidates = _BY_LENGTH[length]
        chosen += candidates[digest % len(candidates)]
        n_missing -= length
    return chosen.capitalize() if word[0].isupper() else chosen


def main() -> int:
    """Record the agents that were named, or all."""
    agents = [name for name, client in table().items() if "agent" in client]
    with run.servers() as url_of:
        for name in sys.argv[1:] or agents:
            server = url_of("scripted")
            before = server.bodies()
            session = run.drive(name, server, "reader")
            assert not session.failure, session.failure
            paths = [path for path in server.bodies() if path not in before]
            new = [json.loads(path.read_text("utf-8")) for path in paths]
            scrubbed = [{**request, "body": scrub(request["body"])} for request in new]
            raw = json.dumps({"version": session.version, "requests": scrubbed}).encode()
            (HERE / "recorded").mkdir(exist_ok=True)
            packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
            (HERE / "recorded" / f"{name}.json.xz").write_bytes(packed)
            sizes = f"{len(raw):,} bytes, {len(packed):,} packed"
            print(f"{name}: {len(scrubbed)} requests, {sizes}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
