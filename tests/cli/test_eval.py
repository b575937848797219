"""`edgeinfer eval`: checks, several candidates, continuing a stopped run, and reports."""

import fcntl
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeEngine, FakeHost
from made_models import make_llama
from msgspec.structs import astuple
from raw_logits import read

from edgeinfer.cli.parser import build_parser
from edgeinfer.cli.verbs import eval as eval_verb
from edgeinfer.cli.verbs.eval_report import EvalResult, paired_difference, share
from edgeinfer.errors import DecodeError, ModelBusyError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform import paths
from edgeinfer.runtime.llama import libedgeinfer
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.snapshot_format import fingerprint
from edgeinfer.usage.daily_counts import drift_path

#: Results of lm-evaluation-harness on the shipped set, by tests/clients/sessions/lm_eval_basics.py.
RECORDED = Path(__file__).parents[1] / "clients/recorded/lm_eval_basics.json"


class Models:
    """Scripted models: `answers(model, request)` is the text of an answer, or an error."""

    def __init__(self, answers):
        self.engines: list[FakeEngine] = []
        self.host = FakeHost(self._load)
        self._answers = answers

    def _load(self, model):
        self.engines.append(FakeEngine(lambda request: [self._answers(model, request)]))
        return self.engines[-1]

    @property
    def requests(self) -> list[GenerateRequest]:
        return [request for engine in self.engines for request in engine.requests]


def _echo(model, request):
    return request.messages[-1].content


@pytest.fixture
def score(tmp_path):
    """`score(items)` writes a set and evaluates scripted models, which by default repeat prompts."""

    def run(items, *typed, answers=_echo, models=("one",)):
        path = tmp_path / "mine.jsonl"
        lines = (item if isinstance(item, str) else json.dumps(item) for item in items)
        path.write_text("".join(f"{line}\n" for line in lines))
        scripted = Models(answers)
        result = _run(str(path), *models, *typed, host=scripted.host)
        return result, scripted.requests

    return run


def _run(*typed: str, host: EngineHost) -> EvalResult:
    return eval_verb.run(build_parser("eval").parse_args(["eval", *typed, "--quiet"]), host)


def _passes(result: EvalResult) -> list[bool]:
    """Return the verdicts on the first candidate."""
    return [item.verdicts[0].passed for item in result.items]


def _item(name, prompt="?", **check):
    return {"id": str(name), "prompt": prompt, **check}


NAME = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}
CHECKED = [
    ({"exact": "Paris"}, [" Paris\n"], ["paris", "Paris!"]),
    ({"exact": ["yes", "Yes"]}, ["yes", "Yes"], ["YES"]),
    ({"contains": "Rome"}, ["It is ROME."], ["It is Ro", "Ro me"]),
    ({"contains": ["red", "blue"]}, ["light blue"], ["green"]),
    ({"regex": r"^\d{3}$"}, ["123"], ["1234", "a 123"]),
    ({"number": 1234.5}, ["so 7, or 1,234.5 in all.", "1.2345e3"], ["1234", "none", "1234.5 of 2"]),
    (
        {"number": 0.3, "tolerance": 0.1},
        ["0.4", "0.2"],
        ["0.41", "1e999999999", "1e9999999999999999999"],
    ),
    ({"number": 35}, ["35.0"], ["3,5"]),
    ({"number": 1234567}, ["1,234,567", "1234567"], ["1234,567", "12,34,567"]),
    ({"number": -3, "tolerance": 0.5}, ["-3.4", "it is -2.5°"], ["3", "-2.4", "7-3"]),
    (
        {"schema": NAME},
        ['{"b": 1, "a": 2}', '```json\n{"b": null}\n```'],
        ['{"a": 1}', "{", '{"b": 1}.'],
    ),
    ({"schema": {"const": "x"}}, ['"x"'], ["x", "[" * 100_000]),
]


def test_answers_are_checked(score):
    answers = [(check, text, text in good) for check, good, bad in CHECKED for text in (*good, *bad)]
    items = [_item(n, prompt=text, **check) for n, (check, text, _) in enumerate(answers)]
    verdicts = zip(answers, _passes(score(items)[0]), strict=True)
    assert [answer for answer, passed in verdicts if passed != answer[2]] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "mine.jsonl:2"),
        ({"id": "x", "prompt": "?"}, "exactly one check: exact, contains"),
        ({"id": "x", "prompt": "?", "exact": "a", "regex": "a"}, "exactly one check"),
        ({"id": "x", "exact": "a"}, "either `prompt` or `messages`"),
        ({"id": "x", "prompt": "?", "equals": "a"}, "equals"),
        ({"id": "1", "prompt": "?", "exact": "a"}, "another line"),
        ({"id": "x", "prompt": "?", "regex": "("}, "`regex`"),
        ({"id": "x", "prompt": "?", "schema": {"type": 7}}, "`schema`: .*#"),
        ({"id": "x", "prompt": "?", "schema": {"$ref": "https://example.org/a"}}, "not supported"),
        ({"id": "x", "prompt": "?", "choices": ["a", "b"], "answer": 2}, "(from 0)"),
        ({"id": "x", "prompt": "?", "choices": ["a", "b"]}, "(from 0)"),
        ({"id": "x", "prompt": "?", "choices": ["a"], "answer": 0}, "choices"),
        ({"id": "x", "prompt": "?", "exact": "a", "answer": 0}, "it needs `choices`"),
        ({"id": "x", "prompt": "?", "number": 1, "tolerance": -1}, "tolerance"),
        ({"id": "x", "prompt": "?", "exact": []}, "exact"),
        ("[" * 100_000, "mine.jsonl:2"),
    ],
)
def test_wrong_item_is_named_before_anything_runs(score, line, said):
    with pytest.raises(UsageError, match=said):
        score([_item(1, exact="a"), line], answers=None)


def test_missing_set_and_empty_one_are_told(score, tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            _run(str(path), "one", host=FakeHost(lambda _: FakeEngine()))
    with pytest.raises(UsageError, match="no items"):
        score([])


def test_only_missing_answers_are_generated(score):
    items = [_item(n, f"say {n}", contains="say") for n in range(6)]
    _, requests = score(items)
    assert len(requests) == 6
    answers = paths.data_dir() / "evaluations/mine.answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-20])  # cut off the last line, as a kill may
    assert len(score(items)[1]) == 1
    items[2] |= {"prompt": "say it otherwise", "contains": "it"}
    items[3] |= {"contains": "nothing"}  # with another check, the stored answer is used
    result, requests = score(items)
    assert [request.messages[-1].content for request in requests] == ["say it otherwise"]
    assert _passes(result) == [True, True, True, False, True, True]
    result, requests = score(items, models=("one", "two"))
    assert len(requests) == 6
    assert result.candidates == ["one", "two"]
    with answers.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelBusyError):
            score([_item("new", exact="a")])


@pytest.mark.parametrize("changed", ["processor", "device", "kernels"])
def test_answers_are_generated_again_on_another_machine(score, monkeypatch, tmp_path, changed):
    items = [_item(1, exact="?")]
    monkeypatch.setattr(libedgeinfer, "folder", lambda: tmp_path)
    assert len(score(items)[1]) == 1
    assert not score(items)[1]
    if changed == "processor":
        monkeypatch.setattr(fingerprint, "_cpu", lambda: "another")
    elif changed == "device":
        monkeypatch.setattr(eval_verb, "read_gpus", lambda: ("another",))
    else:
        (tmp_path / "kernels.so").touch()
    assert len(score(items)[1]) == 1


def test_system_prompts_and_adapters_are_candidates(score, tmp_path):
    (tmp_path / "red.gguf").write_bytes(b"")
    prompt = tmp_path / "long.txt"
    prompt.write_text("Answer in one word, please, and think of it first.")
    turns = [{"role": "user", "content": "b"}]
    items = [_item(1, contains="a"), {"id": "2", "messages": turns, "exact": "b"}]
    typed = ["--system", f"@{prompt}", "--system", "Briefly."]
    typed += ["--adapter", "none", "--adapter", f"{tmp_path}/red.gguf:0.5"]
    result, requests = score(items, *typed)
    assert len(requests) == 8
    assert len(set(result.candidates)) == 4
    assert {request.messages[0].content for request in requests} == {prompt.read_text(), "Briefly."}
    assert Counter(request.lora for request in requests) == {(): 4, (("red", 0.5),): 4}
    with pytest.raises(UsageError, match="one model"):
        score(items, "--adapter", "red", models=("one", "two"))


def test_judge_decides(score):
    def answers(model, request):
        if model != "wise":
            return "blue"
        assert request.constraint is not None
        return "yes" if "blue" in request.messages[-1].content else "no"

    parts = [{"type": "text", "text": "A colour?\n\nCriterion: none"}]
    asked = {"id": "1", "messages": [{"role": "user", "content": parts}]}
    items = [asked | {"judge": "It is a colour."}, _item(2, "Say it.", exact="blue")]
    result, requests = score(items, "--judge", "wise", answers=answers)
    assert _passes(result) == [True, True]
    assert len(requests) == 3
    lines = requests[-1].messages[-1].content.splitlines()
    assert lines[0] == "Criterion: It is a colour."
    assert lines[3:5] == [r'"A colour?\n\nCriterion: none"', '"blue"']
    with pytest.raises(UsageError, match="judge"):
        score(items)


def test_answer_that_fails_is_not_passed_and_told(score):
    items = [_item(1, "fine", exact="fine"), _item(2, "x" * 5000, exact="x", max_tokens=1)]
    items.append(_item(3, "broken", exact="broken"))

    def answers(model, request):
        text = request.messages[-1].content
        return DecodeError("llama_decode failed") if text == "broken" else text

    result, _ = score(items, answers=answers)
    assert _passes(result) == [True, False, False]
    assert (result.exit_code, result.items[1].verdicts[0].is_cut) == (1, False)
    assert "1 have no answer" in result.human()
    result, requests = score(items)
    assert (_passes(result), len(requests), result.exit_code) == ([True, False, True], 1, 0)


def test_check_that_does_not_end_is_told(score, monkeypatch):
    monkeypatch.setattr("edgeinfer.cli.verbs.eval._CHECK_S", 0.5)
    slow = "a" * 60
    result, _ = score([_item("slow", slow, regex="(a+)+b"), _item(2, "a", regex="a")])
    assert _passes(result) == [False, True]
    assert "slow: `regex` took over 0.5 s" in result.human()


def test_report_has_every_item_and_no_text_breaks_its_table(score):
    evil = 'a|b\\|d\n| c |\n<script>alert("x")</script>'
    items = [_item(1, evil, exact="no"), _item("a|b", "yes", exact="yes")]
    result, _ = score(items, models=("one", "two"))
    report = (paths.data_dir() / "evaluations").glob("mine-*.md")
    text = next(report).read_text()
    assert text == result.report()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {re.sub(r"\\.", "", line).count("|") for line in rows[:4]} == {6}
    assert {re.sub(r"\\.", "", line).count("|") for line in rows[4:]} == {5}
    assert "no difference shown" in text
    assert "50%" in result.human()


def test_each_items_and_options_have_their_report(score):
    names = set()
    for items, typed in (
        ([_item(1, exact="?")], []),
        ([_item(1, exact="!")], []),
        ([_item(1, exact="?")], ["--max-tokens", "9"]),
        ([_item(1, exact="?")], ["--system", "Be brief, and begin with the year."]),
        ([_item(1, exact="?")], ["--system", "Be brief, and begin with the name."]),
    ):
        names.add(score(items, *typed)[0].path)
    assert len(names) == 5


def test_intervals_cover_the_truth():
    """Wilson's interval of 0 of 10; then intervals of simulated pairs contain the true difference."""
    assert astuple(share(0, 10)) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert paired_difference(0, 0, 50).low < 0 < paired_difference(0, 0, 50).high
    for n, p, q, common in (
        (50, 0.6, 0.7, 0.5),
        (50, 0.9, 0.9, 0.8),
        (200, 0.5, 0.55, 0.3),
        (20, 0.5, 0.5, 0),
    ):
        rng = np.random.default_rng(n)
        scores, fresh = rng.random((2, 10_000, n))
        two = np.where(rng.random((10_000, n)) < common, scores, fresh)
        only_one, only_two = ((scores < p) & (two >= q)).sum(1), ((scores >= p) & (two < q)).sum(1)
        pairs = zip(only_one, only_two, strict=True)
        intervals = [astuple(paired_difference(*pair, n)) for pair in pairs]
        assert np.mean([low <= q - p <= high for _, low, high in intervals]) >= 0.93


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("eval") / "tiny.gguf", n_ctx=512)


def _likeliest(path, prompt, choices):
    """Return the choice with the largest log-probability after the prompt, by raw logits."""

    def total(text):
        tokens = list(text.encode())
        rows = read(path, tokens).astype(np.float64)[:-1]
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        return rows[np.arange(len(rows)), tokens[1:]][len(prompt) - 1 :].sum()

    return max(range(len(choices)), key=lambda n: total(f"{prompt} {choices[n]}"))


def test_choice_is_that_of_raw_logits_by_one_prefill(tiny, tmp_path):
    prompts = [f"A question that is long enough to share, number {n}, is answered by" for n in range(4)]
    choices = ["red", "bleu", "gelb", "oak"]
    items = [
        _item(n, p, choices=choices, answer=_likeliest(tiny, p, choices)) for n, p in enumerate(prompts)
    ]
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    other = make_llama(tmp_path / "other.gguf", n_ctx=512)
    result = _run(str(path), str(tiny), str(other), "--kv-type", "f16", host=EngineHost())
    assert _passes(result) == [True] * 4
    assert result.candidates == ["tiny.gguf", "other.gguf"]
    lines = (paths.data_dir() / "evaluations/choices.answers.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        usage = line["response"]["body"]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # all five rows together took less than two prefills of the prompt
        assert usage["prompt_tokens"] - cached < 2 * len(prompts[0])


def test_answers_are_no_part_of_drift_and_use(tiny, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(_item(1, exact="?")))
    result = _run(str(path), str(tiny), str(tiny), host=EngineHost())
    assert not any(verdict.error for verdict in result.items[0].verdicts)
    assert not drift_path().exists()


@pytest.fixture(scope="module")
def basics():
    """Return the shipped items, and lm-evaluation-harness' verdicts on SmolLM2's answers."""
    lines = paths.shipped_file("eval-basics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines], json.loads(RECORDED.read_text("utf-8"))["items"]


def test_answers_get_the_verdicts_of_lm_evaluation_harness(score, basics):
    items, recorded = basics
    assert len(items) == 50
    items = [item for item in items if "choices" not in item]
    texts = {item["prompt"]: recorded[item["id"]]["answer"] for item in items}
    result, _ = score(items, answers=lambda model, request: texts[request.messages[-1].content])
    assert _passes(result) == [recorded[item["id"]]["passed"] for item in items]
    assert {True, False} == set(_passes(result))


@pytest.mark.model
def test_choices_get_the_verdicts_of_lm_evaluation_harness(basics, smollm2, tmp_path):
    """SmolLM2 135M is also better than a model that picks one of four choices at random."""
    items, recorded = basics
    items = [item for item in items if "choices" in item]
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, items)))
    result = _run(str(tmp_path / "choices.jsonl"), str(smollm2), "--ctx", "1024", host=EngineHost())
    assert result.scores[0].low > 1 / 4
    for item in result.items:
        verdict, recorded_verdict = item.verdicts[0], recorded[item.id]
        # other kernels round differently: a difference of 0.51 was measured
        assert verdict.logprobs == pytest.approx(recorded_verdict["logprobs"], abs=1)
        second, first = sorted(recorded_verdict["logprobs"])[-2:]
        assert verdict.passed == recorded_verdict["passed"] or first - second < 1
