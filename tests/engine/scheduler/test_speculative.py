"""Draft tokens from the text itself, and the rule that drafts only where rows cost less than they gain."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from edgeinfer.runtime.sampling.speculative import Acceptance, Drafting, NgramDrafter, Price, StepCosts

FREE = Price(token_s=0.010, row_s=0.0)
CHEAP = Price(token_s=0.010, row_s=0.002)
FULL = Price(token_s=0.005, row_s=0.005)


class Always:
    """Drafts the same tokens."""

    def __init__(self, s_per_token: float = 0.0) -> None:
        self.acceptance = Acceptance(0.8 if s_per_token else 0.5)
        self.s_per_token = s_per_token
        self.calls = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.calls += 1
        return [1] * limit

    def close(self) -> None:
        self.calls = -1


def decode(drafting: Drafting, answer: Sequence[int], price: Price | None) -> list[int]:
    """Decode `answer` step by step, as the scheduler does; the number of draft tokens of each step."""
    tokens, drafted = [0], []
    while len(tokens) <= len(answer):
        drafts = drafting.propose(tokens, len(answer) - len(tokens), price)
        rest = answer[len(tokens) - 1 :]
        right = 0
        while right < len(drafts) and drafts[right] == rest[right]:
            right += 1
        tokens += rest[: right + 1]
        drafting.record_acceptance(tokens, len(drafts), right)
        drafted.append(len(drafts))
    return drafted


@pytest.mark.parametrize(
    ("text", "limit", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 3, [4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 3, []),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # the latest occurrence counts
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
    ],
)
def test_ngram_drafter_repeats_the_latest_continuation(
    text: list[int], limit: int, drafts: list[int]
) -> None:
    assert NgramDrafter().draft(text, limit) == drafts


def test_shifted_text_is_indexed_again() -> None:
    drafter = NgramDrafter()
    drafter.draft([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    assert drafter.draft([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]


def test_a_full_batch_never_drafts() -> None:
    drafting = Drafting(Always(), limit=7)
    assert set(decode(drafting, [1] * 200, FULL)) == {0}


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert Drafting(Always(), limit=7).propose([0], 8, None) == []
    assert StepCosts().price(1, 0.001) is None


def test_right_predictions_lengthen_the_drafts() -> None:
    drafting = Drafting(Always(), limit=7)
    drafted = decode(drafting, [1] * 200, CHEAP)
    assert drafted[0] <= 2
    assert max(drafted) == 7
    assert drafting.accepted == drafting.drafted


def test_wrong_predictions_cost_next_to_nothing() -> None:
    drafting = Drafting(Always(), limit=7)
    decode(drafting, [2] * 500, CHEAP)
    assert drafting.drafted <= 8
    assert drafting.accepted == 0


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    drafting = Drafting(Always(), limit=7)
    drafted = decode(drafting, [2] * 100 + [1] * 100, CHEAP)
    assert drafted[90] == 0
    assert 7 in drafted[100:]


def test_a_rejected_draft_model_is_tried_now_and_then() -> None:
    drafting = Drafting(Always(s_per_token=0.001), limit=7)
    drafted = decode(drafting, [2] * 1000, CHEAP)
    assert any(drafted[500:])
    assert sum(map(bool, drafted)) < 50


def test_drafter_costlier_than_a_token_never_drafts() -> None:
    drafter = Always(s_per_token=0.011)
    decode(Drafting(drafter, limit=7), [1] * 50, FREE)
    assert drafter.calls == 0


def test_a_named_drafter_drafts_at_any_price() -> None:
    drafting = Drafting(Always(), limit=4, is_forced=True)
    assert decode(drafting, [2] * 20, FULL)[:10] == [4] * 10


def test_row_cost_follows_steps_with_drafts() -> None:
    costs = StepCosts()
    costs.note(1, 0, 0.010)
    assumed = costs.price(1, 0.001)
    assert assumed is not None
    assert assumed == Price(0.010, 0.001)
    for _ in range(50):
        costs.note(1, 4, 0.034)
    measured = costs.price(1, 0.001)
    assert measured is not None
    assert abs(measured.row_s - 0.006) < 0.0005
    for _ in range(500):
        costs.note(1, 0, 0.010)
    faded = costs.price(1, 0.001)
    assert faded is not None
    assert faded.row_s < 0.003


def test_row_of_a_full_batch_costs_as_a_sequence() -> None:
    costs = StepCosts()
    costs.note(1, 0, 0.008)
    costs.note(32, 0, 0.163)
    price = costs.price(32, 0.001)
    assert price is not None
    assert abs(price.row_s - 0.005) < 1e-9


def test_room_and_no_drafter() -> None:
    assert Drafting(None, limit=4).propose([0], 8, FREE) == []
    assert Drafting(Always(), limit=4).propose([0], 2, FREE) == [1, 1]
    assert Drafting(Always(), limit=4).propose([0], 0, FREE) == []


def test_close_reaches_the_drafter() -> None:
    drafter = Always()
    Drafting(drafter, limit=1).close()
    assert drafter.calls == -1
    Drafting(None, limit=1).close()


class Text:
    """Drafts from a text in which the next token is as predicted in `share` of all places."""

    s_per_token = 0.0

    def __init__(self, share: float, seed: int) -> None:
        self.acceptance = Acceptance(0.5)
        self._random = random.Random(seed)
        self.answer = [int(self._random.random() >= share) for _ in range(96 + 8)]  # 0: as predicted

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        return [0] * limit

    def close(self) -> None:
        pass


def rate(n_clients: int, share: float, step_s: Callable[[int], float], *, drafts: bool) -> float:
    """Tokens/s of `n_clients` whose steps of so many rows take `step_s`, give or take 15 %."""
    noise, costs = random.Random(7), StepCosts()
    took_s, n_tokens = 0.0, 0
    for turn in range(4):
        texts = [Text(share, 100 * turn + i) for i in range(n_clients)]
        running = [(text, Drafting(text if drafts else None, limit=7), [0]) for text in texts]
        while running:
            price = costs.price(len(running), step_s(512) / 512)
            proposed = [d.propose(tokens, 96 - len(tokens), price) for _, d, tokens in running]
            n_drafts = sum(map(len, proposed))
            seconds = step_s(len(running) + n_drafts) * noise.uniform(0.85, 1.15)
            costs.note(len(running), n_drafts, seconds)
            took_s += seconds
            for (text, drafting, tokens), ours in zip(running, proposed, strict=True):
                rest, right = text.answer[len(tokens) :], 0
                while right < len(ours) and rest[right] == 0:
                    right += 1
                tokens += rest[: right + 1]
                n_tokens += right + 1
                drafting.record_acceptance(tokens, len(ours), right)
            running = [one for one in running if len(one[2]) < 96]
    return n_tokens / took_s


#: Seconds of a step by its rows: SmolLM2-135M on two cores, a 7B whose weights are the cost, and a
#: kernel that computes 2 to 7 rows in pieces.
MACHINES = {
    "small": lambda rows: 0.0035 + 0.0040 * rows,
    "large": lambda rows: max(0.150, 0.030 * rows),
    "pieces": lambda rows: 0.0080 * rows if rows < 8 else 0.04 + 0.003 * rows,
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95])
@pytest.mark.parametrize("n_clients", [1, 2, 4, 8, 16, 32])
def test_drafting_is_never_slower_than_not(n_clients: int, share: float, machine: str) -> None:
    on, off = (rate(n_clients, share, MACHINES[machine], drafts=drafts) for drafts in (True, False))
    assert on > 0.97 * off
    if machine == "large" and n_clients == 1 and share > 0.9:
        assert on > 2 * off
