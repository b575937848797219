"""Draft tokens from the text itself, and the rule that drafts only where rows cost less than they gain."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import JsonSchema
from edgeinfer.runtime.sampling import speculative
from edgeinfer.runtime.sampling.past_answers import PastAnswers
from edgeinfer.runtime.sampling.speculative import (
    Acceptance,
    DraftBudget,
    Drafting,
    Run,
    StepCurve,
    SuffixDrafter,
)

from ..conftest import answer, ask


def curve(costs: Callable[[int], float]) -> StepCurve:
    """A measured curve: seconds by rows, and steps of up to 32 sequences."""
    step_curve = StepCurve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "_MEASURE_S", 0.0)  # these costs do not vary
        step_curve.measure(costs)
    for n in range(2, 33):
        step_curve.record(n, n, costs(n))
    return step_curve


FREE = curve(lambda rows: 0.010)
CHEAP = curve(lambda rows: 0.008 + 0.002 * rows)
FULL = curve(lambda rows: 0.010 * rows)


class Always(SuffixDrafter):
    """Drafts up to `n_tokens` times the same token."""

    def __init__(self, n_tokens: int = 15) -> None:
        super().__init__(n_vocab=2)
        self._n_tokens, self._rate = n_tokens, Acceptance(0.5)

    def acceptance(self, position: int) -> Acceptance:
        return self._rate

    def draft(self, tokens: Sequence[int], limit: int, least_chance: float = 0.0) -> list[int]:
        return [1] * min(limit, self._n_tokens)


def parser(runs: Callable[[list[int]], list[list[int]]]) -> Any:
    """A constraint's parser that splits draft tokens by `runs`."""
    return SimpleNamespace(runs=runs)


def make_runs(chances: Sequence[float], n_forced: int = 0) -> list[Run]:
    return [Run([1] * (1 + n_forced), Acceptance(chance)) for chance in chances]


def take(budget: DraftBudget, chances: Sequence[float]) -> int:
    """Take drafts of single tokens; how many."""
    return len(budget.take(make_runs(chances)))


def decode(drafting: Drafting, answer: Sequence[int], costs: StepCurve) -> list[int]:
    """Decode `answer` step by step, as the scheduler does; the number of draft tokens of each step."""
    tokens, drafted = [0], []
    while len(tokens) <= len(answer):
        drafts = drafting.propose(tokens, len(answer) - len(tokens), DraftBudget(costs, 1, 1))
        continuation = answer[len(tokens) - 1 :]
        right = 0
        while right < len(drafts) and drafts[right] == continuation[right]:
            right += 1
        tokens += continuation[: right + 1]
        drafting.record(continuation[: right + 1], n_drafted=len(drafts), n_accepted=right)
        drafted.append(len(drafts))
    return drafted


@pytest.mark.parametrize(
    ("text", "limit", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 3, [4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 3, []),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # of equal matches the latest counts
        ([5, 1, 2, 3, 7, 1, 2, 3, 8, 5, 1, 2, 3], 1, [7]),  # the longest match counts
        ([4, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a repetition goes on
        ([1, 2, 3], 4, []),
        ([1, 2], 4, []),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
    ],
)
def test_suffix_drafter_repeats_the_longest_match(
    text: list[int], limit: int, drafts: list[int]
) -> None:
    assert SuffixDrafter(10).draft(text, limit) == drafts


def test_suffix_drafter_follows_a_long_match_and_leaves_a_wrong_one() -> None:
    drafter = SuffixDrafter(100)
    text = [*range(20, 60), 1, *range(20, 30)]
    assert drafter.draft(text, 3) == [30, 31, 32]
    assert drafter.draft([*text, 30, 31, 32, 33], 2) == [34, 35]
    assert drafter.draft([*text, 30, 31, 32, 33, 7], 2) == []


def test_shifted_text_is_matched_anew() -> None:
    drafter = SuffixDrafter(10)
    drafter.draft([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    assert drafter.draft([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]


def test_long_matches_are_expected_to_be_right_more_often() -> None:
    drafter = SuffixDrafter(100)
    drafter.draft([*range(40), 50, *range(12)], 4)
    long = drafter.acceptance(0).rate
    drafter.draft([*range(40), 50, *range(12), 30, 31], 4)
    assert drafter.acceptance(0).rate < long


def test_past_answers_are_drafted_where_the_text_has_no_longer_match(tmp_path: Path) -> None:
    answers = PastAnswers(tmp_path, b"secret")
    answers.add("", "chat-1", [*range(10, 30), 99, 31])
    drafter = SuffixDrafter(n_vocab=90)
    drafter.answers = answers.of("")
    assert drafter.draft([5, 6, 12, 13, 14, 15], 3) == [16, 17, 18]
    assert drafter.draft([5, 6, 12, 13, 14, 15, 16, 17, 18, 19], 2) == [20, 21]
    assert drafter.draft([5, 26, 27, 28, 29], 3) == []  # 99 is no token of this vocabulary
    drafter = SuffixDrafter(n_vocab=90)
    drafter.answers = answers.of("")
    assert drafter.draft([12, 13, 14, 15, 8, 12, 13, 14, 15], 2) == [8, 12]
    answers.close()


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    budget = DraftBudget(StepCurve(), 1, 1)
    assert Drafting(Always(7)).propose([0], 8, budget) == []


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    drafting = Drafting(Always(7))
    drafted = decode(drafting, [2] * 100 + [1] * 100, CHEAP)
    assert drafted[90] == 0
    assert 7 in drafted[100:]


def test_a_named_drafter_drafts_at_any_price() -> None:
    drafting = Drafting(Always(4), is_forced=True)
    assert decode(drafting, [2] * 20, FULL)[:10] == [4] * 10


def test_curve_follows_steps_with_drafts_and_the_depth_of_the_cache() -> None:
    costs = StepCurve()
    costs.record(1, 1, 0.010)
    for _ in range(100):
        costs.record(1, 1, 0.010)
        costs.record(1, 4, 0.040)
    assert costs.seconds(1, 4) == pytest.approx(0.040, rel=0.05)
    for _ in range(200):  # every step drafts, and takes twice as long
        costs.record(1, 4, 0.080)
    assert costs.seconds(1, 4) == pytest.approx(0.080, rel=0.05)
    assert costs.seconds(1, 1) > 0.012  # type: ignore[operator]


def test_measured_steps_have_other_tokens_in_each_row(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, add = [], Batch.add

    def record(batch: Batch, tokens: list[int], *args: Any, **more: Any) -> Any:
        steps.append(tuple(tokens))
        return add(batch, tokens, *args, **more)

    monkeypatch.setattr(Batch, "add", record)
    with closing(load_engine(ModelFiles(name="s", paths=(str(smollm2),)), LoadOptions())) as engine:
        engine._loop.call(lambda: engine._core.profile_steps(1))
    measured = [tokens for tokens in steps if len(tokens) <= 16]
    assert len(measured) >= 5
    assert all(len({*tokens}) == len(tokens) for tokens in measured)
    assert len({*measured}) > len({len(tokens) for tokens in measured}) or len(measured) == 5


def test_drafts_are_cheap_from_the_first_step_on_if_weights_are_streamed() -> None:
    streamed, plain = StepCurve(shared_share=0.9), StepCurve()
    for rows in (2, 4, 8, 16, 32):
        assert streamed.cost(rows) - 1.0 == pytest.approx(0.1 * (plain.cost(rows) - 1.0))
    for _ in range(100):  # what steps take counts more than the assumption
        streamed.record(1, 1, 0.010)
        streamed.record(1, 4, 0.040)
    assert streamed.seconds(1, 4) == pytest.approx(0.040, rel=0.05)


def test_curve_is_linear_between_its_points_and_beyond_them() -> None:
    costs = curve(lambda rows: 0.010 + 0.002 * rows)
    for n, rows in ((1, 3), (1, 12), (4, 40), (32, 64)):
        assert costs.seconds(n, rows) == pytest.approx(0.010 + 0.002 * rows)


def test_one_disturbed_step_does_not_end_long_drafts() -> None:
    costs = curve(lambda rows: 0.010 + 0.002 * rows)
    costs.record(8, 32, 1.0)
    assert costs.seconds(8, 32) > 0.1  # type: ignore[operator]
    for _ in range(300):
        costs.record(8, 8, 0.026)
    assert costs.seconds(8, 32) == pytest.approx(0.074, rel=0.05)


def test_long_drafts_that_cost_more_than_a_line_stay_known() -> None:
    costs = curve(lambda rows: 0.010 + 0.002 * rows)
    for _ in range(100):
        costs.record(8, 32, 0.148)
        for _ in range(5):
            costs.record(8, 8, 0.026)
    assert costs.seconds(8, 32) == pytest.approx(0.148, rel=0.15)


def test_forced_tokens_cost_a_row_without_its_logits() -> None:
    costs = StepCurve(logits_share=0.75)
    costs.measure(lambda rows: 0.010 + 0.002 * rows)
    for _ in range(100):
        costs.record(1, 9, 0.010 + 0.002 * 3, n_forced=8)
    assert costs.seconds(1, 3) == pytest.approx(0.016)
    assert costs.seconds(1, 9) == pytest.approx(0.028)


def test_steps_say_how_many_of_their_rows_are_forced(
    smol: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, int, int]] = []

    def record(n: int, rows: int, seconds: float, n_forced: int) -> None:
        noted.append((n, rows, n_forced))

    monkeypatch.setattr(smol._core.executor.step_costs, "record", record)
    parts = {"why": {"type": "string", "maxLength": 30}, "answer": {"enum": ["yes, of course", "no"]}}
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    told = ask("Is it so?", constraint=JsonSchema(schema), speculative="off", max_tokens=40)
    answer(smol, replace(told, ignore_eos=False))
    assert {(n, rows - n_forced) for n, rows, n_forced in noted} == {(1, 1)}
    assert {bool(n_forced) for *_, n_forced in noted} == {False, True}


def test_all_sequences_of_a_step_share_its_rows() -> None:
    """Eight rows are as cheap as one, and more cost as much as they gain."""
    budget = DraftBudget(curve(lambda rows: 0.010 * max(1.0, rows / 8)), 2, 2)
    assert take(budget, [0.9] * 6) == 6
    assert take(budget, [0.9] * 6) == 0


def test_forced_tokens_are_no_reason_to_draft() -> None:
    """Eight sequences of which one has 24 more tokens to compute: those come without drafts too."""
    for rows in (8, 32):
        assert take(DraftBudget(CHEAP, 8, rows), [0.8] * 6) == 0
        assert take(DraftBudget(CHEAP, 8, rows), [1.0] * 6) == 6


@pytest.mark.parametrize("n_forced", [1, 5, 14])
@pytest.mark.parametrize("costs", [FREE, CHEAP, FULL])
def test_tokens_that_a_draft_forces_cost_only_where_it_is_wrong(
    costs: StepCurve, n_forced: int
) -> None:
    """They are computed with and without drafts, and a wrong draft computes them in vain."""
    budget = DraftBudget(costs, 1, 1)
    right, doubtful = make_runs([1.0] * 3, n_forced), make_runs([0.6] * 3, n_forced)
    assert budget.best(right) == budget.best(make_runs([1.0] * 3))
    assert budget.best(doubtful)[1] <= budget.best(make_runs([0.6] * 3))[1]
    assert len(DraftBudget(costs, 1, 1).take(right)) in (0, 3)


def test_forced_tokens_make_a_doubtful_draft_worse() -> None:
    assert take(DraftBudget(CHEAP, 1, 1), [0.4]) == 1
    assert DraftBudget(CHEAP, 1, 1).take(make_runs([0.4], n_forced=11)) == []


def test_chance_below_the_least_never_pays() -> None:
    budget = DraftBudget(CHEAP, 8, 8)
    least = budget.least_chance
    assert take(budget, [least - 0.01] + [1.0] * 14) == 0
    assert take(budget, [least + 0.01] + [1.0] * 14) == 15
    assert budget.least_chance != least


def test_short_matches_that_cannot_pay_are_not_looked_for() -> None:
    drafter = SuffixDrafter(100)
    text = [*range(20, 60), 1, 20, 21]
    assert drafter.draft(text[:-1], 4, least_chance=0.99) == []
    assert drafter.draft(text, 4, least_chance=0.99) == []
    text += range(22, 29)
    assert drafter.draft(text, 4, least_chance=0.99) == [29]  # too short too, but to learn from
    assert drafter.draft([*text, 29], 4, least_chance=0.1) == [30, 31, 32, 33]


def test_draft_ends_where_a_constraint_forbids_it() -> None:
    budget = DraftBudget(FREE, 1, 1)
    matcher = parser(lambda tokens: [[token] for token in tokens[:2]])
    assert Drafting(Always(4), matcher).propose([0], 8, budget) == [1, 1]


def test_forced_tokens_that_the_text_lacks_are_drafted_and_teach_it_nothing() -> None:
    drafter = Always()
    drafting = Drafting(drafter, parser(lambda tokens: [[1, 7, 8, 9, 10]]))
    drafts = drafting.propose([0], 4, DraftBudget(FREE, 1, 1))
    assert drafts == [1, 7, 8, 9]  # as many as there is room for
    drafting.record([1, 7, 8, 9, 10, 2], n_drafted=4, n_accepted=4)
    once = Acceptance(0.5)
    once.record(is_right=True)
    assert drafter.acceptance(0).rate == once.rate


def test_cost_of_more_rows_than_are_measured_goes_on_as_before_them() -> None:
    """The last measured steps have no logits in half of their rows."""
    costs = curve(lambda rows: 0.010 + 0.002 * min(rows, 16))
    assert costs.seconds(1, 32) == pytest.approx(0.010 + 0.002 * 32)


def test_room_and_no_drafter() -> None:
    assert Drafting(None).propose([0], 8, DraftBudget(FREE, 1, 1)) == []
    assert Drafting(Always()).propose([0], 2, DraftBudget(FREE, 1, 1)) == [1, 1]
    assert Drafting(Always()).propose([0], 0, DraftBudget(FREE, 1, 1)) == []
