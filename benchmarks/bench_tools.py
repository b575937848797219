"""The first token of a new session whose tool list is at rest: `make bench-tools`.

Each side is asked once with 41 tools (25 KB of JSON), ends, and is started again for each further
session, which has another question; once at once, and once with the list read ahead, as the chat reads
it while a person types. llama-server is asked a second question without a start too.
Writes bench-out/tools.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_memory import work_folder
from common import add_out, model_path, spread, write_figure
from memory_restart import model_of
from memory_sides import WORDS, Answer, Side, ours, theirs, wait_written

from edgeinfer.bench import markdown

N_TOOLS, N_CTX = 41, 16_384

#: llama-server leaves tools out where the model's template knows none; edgeinfer describes them itself.
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tool(number: int) -> dict[str, Any]:
    """A tool as an issue tracker's server has them: 600 bytes of JSON."""

    def about(at: int) -> str:
        return " ".join(WORDS[(number * 5 + at + i * i) % len(WORDS)] for i in range(9))

    properties = {
        f"{WORDS[(number + i) % len(WORDS)]}_{i}": {
            "type": "string",
            "description": about(i).capitalize(),
        }
        for i in range(4)
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    name = f"tracker__{WORDS[number % len(WORDS)]}_{number}"
    return {
        "type": "function",
        "function": {"name": name, "description": about(7), "parameters": schema},
    }


TOOLS = [tool(number) for number in range(N_TOOLS)]


def ask(side: Side, words: str, n: int = 4) -> Answer:
    answer = side.ask([{"role": "user", "content": words}], n=n, tools=TOOLS)
    print(side.name, words, f"{answer.first_s:.2f} s", answer.usage, file=sys.stderr, flush=True)
    return answer


def row(where: str, answers: list[Answer]) -> list[str]:
    firsts = [answer.first_s * 1000 for answer in answers]
    last = answers[-1]
    prompt = f"{last.usage['prompt_tokens']:,} tokens"
    return [where, prompt, f"{last.computed:,} tokens", spread(firsts, "ms")]


def measure(options: argparse.Namespace, work: Path) -> list[list[str]]:
    model = model_of(options.shape, model_path("smollm2"), work)
    rows = []
    side = ours(work / f"home-{options.shape}", model, N_CTX, parallel=1)
    noted = work / f"first-{options.shape}.json"
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(side.stop)
        if not noted.exists():
            side.start()
            first = ask(side, "Which tools are there?", n=1)
            wait_written(work / f"home-{options.shape}", first.usage["prompt_tokens"])
            noted.write_text("{}")
            rows.append(row("edgeinfer, the first session", [first]))
            side.stop()
        at_once, later = [], []
        for number in range(options.runs):
            side.start()
            at_once.append(ask(side, f"Who opened issue {number}?"))
            side.stop()
            side.start()
            ask(side, "W", n=0)
            later.append(ask(side, f"Who opened issue {number + 100}?"))
            side.stop()
        rows.append(row("edgeinfer, a new session after a start", at_once))
        rows.append(row("edgeinfer, the same, its list read ahead", later))
    template = work / "template.jinja"
    template.write_text(TEMPLATE)
    peer = (
        None
        if options.ours
        else theirs(model, N_CTX, slots=1, flags=("--jinja", "--chat-template-file", str(template)))
    )
    if peer is not None:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(peer.stop)
            peer.start()
            rows.append(
                row("llama-server, a new session after a start", [ask(peer, "Who opened issue 1?")])
            )
            rows.append(row("llama-server, the next one", [ask(peer, "Who opened issue 2?")]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="4b", help="small: SmolLM2; 4b: random weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ours", action="store_true", help="without llama-server")
    parser.add_argument("--work", default="", help="a folder for home and model; 5 GB")
    parser.add_argument(
        "--keep", type=Path, help="keep them there: the next run prefills nothing again"
    )
    add_out(parser)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(TOOLS)} tools, {len(json.dumps(TOOLS)):,} bytes", file=sys.stderr)
    kept = contextlib.nullcontext(options.keep) if options.keep else work_folder(options.work)
    with kept as work:
        table = markdown(["", "prompt", "computed", "first token"], measure(options, work))
    print(write_figure(options.out, "tools", table))


if __name__ == "__main__":
    main()
