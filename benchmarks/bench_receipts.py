"""`make bench-receipts`: how long a receipt's check takes compared with the generation, and whether every
receipt verifies and no changed one does.

An endpoint generates answers without drafts and without cached prompts, each to another prompt, and
checks the receipt of each right after it. Then `--receipts` answers of every kind (sampled, schemas,
tools, drafts, `n`, …) are generated, 8 requests at a time. Each receipt is checked, and once more with
one change: another token, seed or option with all digests computed again, as a forger would, or another
digest.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
from bench_invariance import prompts  # type: ignore[import-not-found]  # not checked by mypy
from common import (
    call,
    free_port,
    make_parser,
    model_path,
    new_home,
    process,
    spread,
    wait_healthy,
    write_figure,
)
from peer_server import EDGEINFER

from edgeinfer.bench import markdown
from edgeinfer.receipts import receipt as receipts

_CLIENTS = 8
#: A question's length. A check also prefills the prompt, so long prompts raise its share.
_PROMPT_WORDS = 15
_PATH = "/v1/chat/completions"
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
_SAMPLED: dict[str, Any] = {"temperature": 0.8, "max_tokens": 60, "ignore_eos": True}
_PENALTIES = {"repeat_penalty": 1.2, "presence_penalty": 0.3, "dry_multiplier": 0.8, "min_p": 0.02}
#: Timed answers of more tokens are generated once, sampled.
_LONG = 200
#: Fields of the timed requests.
TIMED = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "sampled, with penalties": {"temperature": 0.8, **_PENALTIES},
}
#: Kind of an answer → fields of its request.
KINDS: dict[str, dict[str, Any]] = {
    "sampled": _SAMPLED,
    "cut by length": _SAMPLED | {"max_tokens": 30},
    "penalties": _SAMPLED | _PENALTIES,
    "streamed": _SAMPLED | {"stream": True},
    "n = 4": _SAMPLED | {"n": 4},
    "from the cache": _SAMPLED,
    "greedy": {"temperature": 0, "max_tokens": 60},
    "drafts": {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "speculative": "ngram"},
    "stop strings": {"temperature": 0.8, "max_tokens": 60, "stop": [" the", "2"]},
    "schema": {
        "temperature": 0.8,
        "max_tokens": 80,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": _PERSON},
        },
    },
    "tools": {
        "temperature": 0.8,
        "max_tokens": 80,
        "tools": [{"type": "function", "function": _WEATHER}],
        "tool_choice": "required",
    },
}
#: Changes of a receipt. Answers of _FREE kinds are long and sampled freely, so another seed or temperature
#: gives other tokens, unless the model is very sure of each.
_CHANGES = ("token", "digest", "seed", "option")
_FREE = ("sampled", "cut by length", "penalties", "streamed", "n = 4", "from the cache")


@contextmanager
def endpoint(model: Path) -> Iterator[int]:
    """Serve a model file in an empty home until the block ends; yield the port."""
    with new_home() as home:
        settings: dict[str, Any] = {"env": os.environ | {"EDGEINFER_HOME": str(home)}}
        pull = [*EDGEINFER, "pull", str(model), "--name", "m", "--in-place", "--quiet"]
        subprocess.run(pull, check=True, **settings)
        port = free_port()
        limits = ["--ctx", "4096", "--parallel", str(_CLIENTS), "--log", "off"]
        with process([*EDGEINFER, "serve", "m", "--port", str(port), *limits], **settings) as started:
            wait_healthy(port, started, 300)
            yield port


def generate(port: int, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the receipts of the answers to a prompt."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "receipt": True, **fields}
    if not fields.get("stream"):
        reply = call(port, _PATH, body)
        return reply.get("receipts") or [reply["receipt"]]
    link = HTTPConnection("127.0.0.1", port, timeout=900)
    link.request("POST", _PATH, json.dumps(body), {"Content-Type": "application/json"})
    events = [line[6:] for line in link.getresponse() if line.startswith(b"data: {")]
    return [json.loads(events[-1])["receipt"]]


def check(port: int, receipt: dict[str, Any]) -> dict[str, Any]:
    return call(port, "/v1/verify", {"receipt": receipt, "model": "m"})


def change(receipt: dict[str, Any], kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return the receipt with one change, and what was changed."""
    original = receipts.to_receipt(receipt)
    assert original.content is not None
    content, sampling = original.content, original.sampling
    field = random.Random(number).choice(_CHANGES if kind in _FREE else _CHANGES[:2])
    if field == "digest":
        key = ("model_sha256", "content_sha256", "sha256")[number % 3]
        digest = receipt[key]
        return field, receipt | {key: ("1" if digest[0] == "0" else "0") + digest[1:]}
    if field == "token":
        answer, i = list(content.answer), number % len(content.answer)
        answer[i] += -1 if answer[i] else 1
        content = msgspec.structs.replace(content, answer=tuple(answer))
    elif field == "seed":
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed or 0) + 1)
    else:
        sampling = msgspec.structs.replace(sampling, temperature=1.4)
    digest = receipts._sha256(content)
    forged = msgspec.structs.replace(
        original, content=content, sampling=sampling, content_sha256=digest
    )
    forged = msgspec.structs.replace(forged, sha256=forged.digest())
    return field, json.loads(msgspec.json.encode(forged))


def measure_times(model: str, sizes: list[int], rounds: int) -> list[list[str]]:
    """Return the rows of a model's times: generations and checks in turn."""
    rows = []
    with endpoint(model_path(model)) as port:
        texts = itertools.cycle(" ".join(text.split()[:_PROMPT_WORDS]) for text in prompts(256))
        fixed: dict[str, Any] = {"ignore_eos": True, "speculative": "off", "cache_prompt": False}
        generate(port, next(texts), max_tokens=8, **fixed)
        for size, name in itertools.product(sizes, TIMED):
            if size > _LONG and name != "sampled":
                continue  # a long answer of the 4B shape takes five minutes
            fields, pairs = TIMED[name], []
            for _ in range(1 if size > _LONG else rounds):
                (receipt,) = generate(port, next(texts), max_tokens=size, **fixed, **fields)
                result = check(port, receipt)
                assert (result["verdict"], result["n_answer"]) == ("verified", size), result
                pairs.append((receipt["seconds"], result["seconds"]))
                print(model, size, name, *pairs[-1], file=sys.stderr)
            times = (spread(seconds, "s", 2) for seconds in zip(*pairs, strict=True))
            shares = spread([check_s / generation_s for generation_s, check_s in pairs], "", 3)
            rows.append([model, str(size), name, *times, shares])
    return rows


def measure_verdicts(model: str, n: int) -> list[list[str]]:
    """Return the rows of a model's verdicts: `n` receipts, shared evenly by the kinds."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    with endpoint(model_path(model)) as port, ThreadPoolExecutor(_CLIENTS) as pool:

        def ask(number: int) -> list[tuple[str, dict[str, Any]]]:
            kind = list(KINDS)[number % len(KINDS)]
            text = asked[0] if kind == "from the cache" else asked[number % len(asked)]
            return [(kind, receipt) for receipt in generate(port, text, **KINDS[kind])]

        def judge(number: int, kind: str, receipt: dict[str, Any]) -> tuple[str, str, str, str]:
            field, changed = change(receipt, kind, number)
            verdicts = [check(port, entry)["verdict"] for entry in (receipt, changed)]
            return kind, field, *verdicts

        asked = prompts(256)
        n_requests = -(-n * len(KINDS) // (len(KINDS) + 3))  # `n = 4` gives three more than the others
        answers = list(itertools.chain.from_iterable(pool.map(ask, range(n_requests))))[:n]
        results = pool.map(judge, itertools.count(), *zip(*answers, strict=True))
        for kind, field, verdict, other_verdict in results:
            counts[kind] += Counter(["receipts", f"as made: {verdict}", f"{field}: {other_verdict}"])
    rows = []
    for kind, count in counts.items():
        cells = [f"{count[f'{field}: differs']} of {_total(count, field)}" for field in _CHANGES]
        rows.append([model, kind, f"{count['as made: verified']} of {count['receipts']}", *cells])
    return rows


def _total(count: Counter[str], field: str) -> int:
    return sum(n for key, n in count.items() if key.startswith(f"{field}:"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--timed", nargs="*", default=["smollm2", "4b-q4_k_m"], metavar="MODEL")
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 2000], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help=f"of answers up to {_LONG} tokens")
    parser.add_argument(
        "--receipts", type=int, default=1000, metavar="N", help="of both models together"
    )
    options = parser.parse_args()
    rows = [
        row for model in options.timed for row in measure_times(model, options.tokens, options.rounds)
    ]
    tables = (
        [markdown(["model", "tokens", "request", "generate", "verify", "share"], rows)] if rows else []
    )
    if options.receipts:
        models = ("smollm2", "gemma3")
        rows = [row for model in models for row in measure_verdicts(model, options.receipts // 2)]
        head = ["model", "answer", "verified", *(f"another {field}: differs" for field in _CHANGES)]
        tables.append(markdown(head, rows))
    print(write_figure(options.out, "receipts", "\n\n".join(tables)))


if __name__ == "__main__":
    main()
