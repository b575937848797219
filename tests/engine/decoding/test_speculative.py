"""Guesses from the text itself, and the account that stops them where they lose."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.decoding.drafting.speculative import Drafting, NgramDrafter, StepCosts


class Always:
    """Guesses the same tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.calls += 1
        return [1] * limit

    def close(self) -> None:
        self.calls = -1


def costs(plain: float, longer: float, extra: int) -> StepCosts:
    made = StepCosts()
    made.note(1, plain)
    made.note(1 + extra, longer)
    return made


def test_what_followed_before_is_guessed_again() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert drafter.draft(text, 3) == [4, 5, 6]
    assert drafter.draft(text, 2) == [4, 5]
    assert drafter.draft([*text, 9], 3) == []


def test_the_latest_occurrence_counts() -> None:
    assert NgramDrafter().draft([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == [8]


def test_short_and_new_texts_give_no_guess() -> None:
    assert NgramDrafter().draft([1, 2, 3], 4) == []
    assert NgramDrafter().draft([1, 2, 3, 4, 5], 4) == []
    assert NgramDrafter().draft([1, 2, 3, 4, 1, 2, 3], 0) == []


def test_a_shifted_text_is_indexed_anew() -> None:
    drafter = NgramDrafter()
    drafter.draft([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)
    assert drafter.draft([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]


def test_a_losing_drafter_rests_and_tries_again() -> None:
    drafter = Always()
    drafting = Drafting(drafter, limit=4)
    dear = costs(0.010, 0.030, 4)
    for _ in range(8):
        assert len(drafting.propose([0], 8)) == 4
        drafting.settle(4, 0, dear, 1)
    assert drafting.propose([0], 8) == []
    rested = 1
    while not drafting.propose([0], 8):
        rested += 1
    assert 50 < rested < 200
    assert (drafting.drafted, drafting.accepted) == (32, 0)


def test_a_winning_drafter_goes_on() -> None:
    drafting = Drafting(Always(), limit=4)
    cheap = costs(0.010, 0.014, 4)
    for _ in range(40):
        assert len(drafting.propose([0], 8)) == 4
        drafting.settle(4, 3, cheap, 1)


def test_room_and_no_drafter() -> None:
    assert Drafting(None, limit=4).propose([0], 8) == []
    assert Drafting(Always(), limit=4).propose([0], 2) == [1, 1]
    assert Drafting(Always(), limit=4).propose([0], 0) == []


def test_close_reaches_the_drafter() -> None:
    drafter = Always()
    Drafting(drafter, limit=1).close()
    assert drafter.calls == -1
    Drafting(None, limit=1).close()
