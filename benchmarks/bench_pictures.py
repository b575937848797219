"""Measure questions about a picture, compared with llama-server with the same projector: `make
bench-pictures`.

The projector is a vision transformer of SigLIP-base's size with random weights, in front of
gemma-3-270m: a picture of any size is resized to 512x512 and becomes 256 rows. Each run has its own
picture and texts; the sides take turns. Both servers stream answers over HTTP:

first, second   a question about a picture after some text, and the next one in that conversation
new             the picture after another text
restarted       after `kill -9`: the next question, `new` again, and the picture after a third text
text            the same questions in a conversation of only text, as long in tokens
gap             the longest gap of eight streams of text, without a picture and while one arrives
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
import numpy as np
from bench_memory import next_turn, work_folder
from common import make_parser, model_path, spread, write_figure
from made_projectors import Encoder, copy_model, make_projector
from peer_server import Answer, Messages, Side, conversation, ours, text_of, theirs
from PIL import Image

from edgeinfer.bench import markdown

_SIGLIP_BASE = Encoder(width=768, layers=12, heads=12, feed_forward=3072)
#: Gemma's turns; the model is a base model without a template, and the servers' defaults would differ.
_TEMPLATE = """{% for message in messages %}<start_of_turn>
{{- 'model' if message.role == 'assistant' else 'user' }}
{{ message.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
_N_CTX = 2048
_STREAMS = 8
#: Words before the picture, and those that replace it in a conversation of only text.
_WORDS = 100
_INSTEAD = 256
#: How long (s) eight streams run before a picture arrives.
_AHEAD_S = 1.5
#: How long (s) a server runs before it is killed; the prefix cache writes when idle.
_SETTLE_S = 3

CASES = {
    "first": "first question about a picture",
    "second": "second question, same conversation",
    "new": "the picture in a new conversation",
    "restarted": "after `kill -9`: the next question",
    "restarted new": "after `kill -9`: the new conversation again",
    "restarted other": "after `kill -9`: the picture in a third conversation",
    "text first": "text alone, as many tokens: first question",
    "text second": "text alone: second question",
    "text restarted": "text alone, after `kill -9`: the next question",
}
Found = dict[str, dict[str, list[Answer]]]


def picture(number: int) -> str:
    """Return the data URI of a JPEG of 1024x768 pixels, a different one for each number."""
    coarse = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((1024, 768), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def about_picture(text: int, number: int) -> Messages:
    parts = [
        {"type": "text", "text": text_of(text, _WORDS)},
        {"type": "image_url", "image_url": {"url": picture(number)}},
        {"type": "text", "text": "What is in it?"},
    ]
    return [{"role": "user", "content": parts}]


def about_text(number: int) -> Messages:
    return [{"role": "user", "content": f"{text_of(number, _WORDS + _INSTEAD)} What is in it?"}]


def one_run(side: Side, number: int, *, brief: bool) -> dict[str, Answer]:
    """Measure all cases of one picture, with `brief` only those of one conversation about it. The
    server is started before, and restarted here.
    """
    answers = {}
    new, third = about_picture(number + 200, number), about_picture(number + 300, number)
    chats = {} if brief else {"text ": about_text(number + 400)}
    chats[""] = about_picture(number + 100, number)
    for kind, chat in chats.items():
        for turn, question in (("first", "Where was it taken?"), ("second", "And when was it taken?")):
            answers[kind + turn] = side.ask(chat)
            chat += next_turn(answers[kind + turn].text or "Nothing.", question)
    if not brief:
        answers["new"] = side.ask(new)
    time.sleep(_SETTLE_S)
    for kind, chat in chats.items():
        side.kill()
        side.start()
        answers[f"{kind}restarted"] = side.ask(chat)
    if not brief:
        answers["restarted new"] = side.ask(new)
        answers["restarted other"] = side.ask(third)
    return answers


def gap_beside(side: Side, number: int, *, sees: bool) -> tuple[float, float, float]:
    """Return the longest and the median gap (s) of eight streams after a picture arrives, and the time
    of the picture's first token, 0 without a picture.
    """
    stamps: list[list[float]] = [[] for _ in range(_STREAMS)]

    def stream(i: int) -> None:
        began = time.perf_counter()
        answer = side.ask(conversation(number + i, 12), n=200, ignore_eos=True, speculative="off")
        stamps[i] = [began + stamp for stamp in answer.stamps]

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(_STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(_AHEAD_S)
    arrived = time.perf_counter()
    first_s = side.ask(about_picture(number + 50, number)).first_s if sees else 0.0
    for thread in threads:
        thread.join()
    first_end = min(times[-1] for times in stamps)
    assert arrived + first_s < first_end, "the streams end before the picture's first token"
    gaps = [
        b - a for times in stamps for a, b in itertools.pairwise(times) if arrived < b and a < first_end
    ]
    return max(gaps), sorted(gaps)[len(gaps) // 2], first_s


def table(answers_by_side: Found, gaps: dict[str, dict[str, list[float]]]) -> str:
    rows = []
    measured = next(iter(answers_by_side.values()))
    for case in [case for case in CASES if case in measured]:
        rows.append([CASES[case]])
        for answers in answers_by_side.values():
            first = spread([1000 * answer.first_s for answer in answers[case]], "ms")
            n_computed = max(answer.n_computed for answer in answers[case])
            rows[-1] += [first, f"{n_computed} of {answers[case][0].usage['prompt_tokens']}"]
    for kind in next(iter(gaps.values())):
        rows.append([kind])
        for sides in gaps.values():
            rows[-1] += [spread([1000 * s for s in sides[kind]], "ms"), "–"]
    head = ["time to first token"]
    for name in answers_by_side:
        head += [name, "computed tokens"]
    return markdown(head, rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gap-runs", type=int, default=3)
    parser.add_argument("--brief", action="store_true", help="only one conversation about each picture")
    options = parser.parse_args()
    with work_folder("") as work:
        model = copy_model(work / "gemma-3-270m.gguf", model_path("gemma3"), {}, _TEMPLATE)
        mmproj = work / "mmproj-random.gguf"
        projector = make_projector(mmproj, "gemma3", 640, image=512, encoder=_SIGLIP_BASE)
        slots = _STREAMS + 1
        peer = theirs(model, _N_CTX, slots=slots, flags=["--mmproj", str(projector)])
        both = [side for side in (ours(work / "home", model, _N_CTX, parallel=slots), peer) if side]
        answers_by_side: Found = {side.name: {} for side in both}
        gaps: dict[str, dict[str, list[float]]] = {side.name: {} for side in both}
        for number in range(options.runs):
            for side in both:
                side.start()
                side.ask(conversation(900 + number, 12))
                for case, answer in one_run(side, number, brief=options.brief).items():
                    answers_by_side[side.name].setdefault(case, []).append(answer)
                    print(json.dumps([side.name, case, answer.first_s, answer.usage]), file=sys.stderr)
                side.stop()
        for number, side in itertools.product(range(options.gap_runs), both):
            side.start()
            for sees in (False, True):
                long = gap_beside(side, 1000 + 100 * number, sees=sees)
                print(json.dumps([side.name, sees, *long]), file=sys.stderr)
                whats = ("longest gap", "median gap", *["its first token"] * sees)
                for label, s in zip(whats, long, strict=False):
                    kind = f"eight streams, {'a picture arriving' if sees else 'alone'}: {label}"
                    gaps[side.name].setdefault(kind, []).append(s)
            side.stop()
        print(write_figure(options.out, "pictures", table(answers_by_side, gaps)))
        firsts_s = {
            name: {case: [answer.first_s for answer in same] for case, same in cases.items()}
            for name, cases in answers_by_side.items()
        }
        (options.out / "pictures.json").write_text(json.dumps(firsts_s, indent=1))


if __name__ == "__main__":
    main()
