"""What drafts gain, of the text and of a model: simulated streams, by costs of steps and draft tokens."""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.runtime.kv_cache import CachedSequence
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling import draft_model, speculative
from edgeinfer.runtime.sampling.draft_model import DraftModel, ModelDrafting
from edgeinfer.runtime.sampling.speculative import (
    MAX_DRAFT,
    Acceptance,
    DraftBudget,
    Drafting,
    StepCurve,
    SuffixDrafter,
)

#: Seconds of a step by its rows: a 4B and a 0.5B on two cores, a 135M, a 7B whose weights are the cost,
#: and kernels that compute 2 to 7 rows in pieces.
STEPS: dict[str, Callable[[int], float]] = {
    "4b": lambda rows: 0.060 + 0.005 * rows,
    "0.5b": lambda rows: 0.012 + 0.003 * rows,
    "135m": lambda rows: 0.0035 + 0.0040 * rows,
    "7b": lambda rows: max(0.150, 0.030 * rows),
    "pieces": lambda rows: 0.0080 * rows if rows < 8 else 0.04 + 0.003 * rows,
}
#: Seconds of a draft token of the model.
TOKEN_S = 0.003
#: Tokens of a prompt and of an answer, and the number of turns.
TALKS = ((20, 200, 8), (1000, 400, 8), (2000, 30, 40))


class Kv:
    def allocate(self, *args: object, **options: object) -> CachedSequence:
        return CachedSequence(0, ())

    def truncate(self, cached_seq: CachedSequence, n: int) -> None:
        del cached_seq.tokens[n:]


class Draft(DraftModel):
    """A draft model whose tokens take TOKEN_S, those of a prefill a quarter of it."""

    def __init__(self, row_s: float, clock: list[float]) -> None:
        super().__init__(ModelFiles(name="large", paths=()), LoadOptions())
        self.large_vocab: Any = SimpleNamespace(n_vocab=9, is_eos=lambda token: False)
        self.n_vocab, self.kv = 9, Kv()  # type: ignore[assignment]
        self.cost = self.least_cost = TOKEN_S / row_s
        self.clock = clock

    def compute(self, cached_seq: CachedSequence, tokens: Sequence[int], budget: DraftBudget) -> bool:
        self.clock[0] += TOKEN_S * max(1.0, len(tokens) / 4)
        cached_seq.tokens.extend(tokens)
        budget.cost += self.price(len(tokens))
        return True


class Drafter(ModelDrafting):
    def _pick(self, *args: object) -> tuple[int, float]:
        return 0, 0.9


class Text(SuffixDrafter):
    """Drafts `tokens` from the text."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(9)
        self._tokens, self._rate = list(tokens), Acceptance(0.5)

    def draft(self, tokens: Sequence[int], limit: int, least_chance: float = 0.0) -> list[int]:
        return self._tokens[:limit]

    def acceptance(self, position: int) -> Acceptance:
        return self._rate


SAMPLER: Any = SimpleNamespace(copy=lambda: SAMPLER, accept=lambda tokens: None)


def draft_from_text() -> Drafting:
    return Drafting(Text(*[0] * MAX_DRAFT))


def draft_with(draft: Draft) -> Drafting:
    request = GenerateRequest(prompt="x")
    return Drafter(Text(), None, model=draft, request=request, sampler=SAMPLER)


def spent_s(
    make_drafting: Callable[[], Drafting],
    costs: StepCurve,
    clock: list[float],
    step_s: Callable[[int], float],
    n_clients: int,
    texts: list[list[int]],
    n_prompt: int = 1,
) -> float:
    """Return the seconds in which `n_clients` at a time say `texts`; a 1 is a token drafted wrong."""
    noise = random.Random(7)
    began, waiting = clock[0], [[1] * n_prompt + text for text in texts]
    running: list[tuple[list[int], Drafting, PromptTokens]] = []
    while waiting or running:
        while waiting and len(running) < n_clients:
            text = waiting.pop()
            running.append((text, make_drafting(), PromptTokens(text[: n_prompt + 1])))
        budget = DraftBudget(costs, len(running), len(running))
        proposed = [d.propose(t, len(text) - len(t) - 1, budget) for text, d, t in running]
        n_rows = len(running) + sum(map(len, proposed))
        clock[0] += step_s(n_rows)
        costs.record(len(running), n_rows, step_s(n_rows) * noise.uniform(0.9, 1.1))
        for (text, drafting, tokens), drafts in zip(running, proposed, strict=True):
            following, n_right = text[len(tokens) :], 0
            while n_right < len(drafts) and following[n_right] == 0:
                n_right += 1
            tokens.extend(following[: n_right + 1])
            drafting.record(following[: n_right + 1], n_drafted=len(drafts), n_accepted=n_right)
        running = [stream for stream in running if len(stream[2]) < len(stream[0])]
    return clock[0] - began


def random_texts(share: float, n_texts: int, n_tokens: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[int(rng.random() >= share) for _ in range(n_tokens)] for _ in range(n_texts)]


def simulate_time(
    monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float]
) -> tuple[list[float], StepCurve]:
    """Replace the clock by a list of one time (s). Return this list, and the measured step costs."""
    clock, costs = [0.0], StepCurve()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speculative, "_MEASURE_S", 0.001)
    costs.measure(step_s)
    return clock, costs


@pytest.mark.parametrize("machine", ["4b", "0.5b"])
@pytest.mark.parametrize("n_clients", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.35, 0.6, 0.95])
def test_a_draft_model_costs_two_percent_and_its_first_trials_at_most(
    monkeypatch: pytest.MonkeyPatch, share: float, n_clients: int, machine: str
) -> None:
    """Whatever `share` of its tokens is right, and for short answers to long prompts, too."""
    step_s = STEPS[machine]
    clock, costs = simulate_time(monkeypatch, step_s)
    for n_prompt, n_answer, n_turns in TALKS:
        make_drafting = partial(draft_with, Draft(step_s(1), clock))
        texts = random_texts(share, n_turns * n_clients, n_answer)
        off_s = n_turns * (n_answer - 1) * step_s(n_clients)
        on_s = spent_s(make_drafting, costs, clock, step_s, n_clients, texts, n_prompt)
        assert on_s <= 1.02 * off_s + draft_model._FIRST_LOSS * step_s(1)
        if machine == "4b" and share > 0.9 and n_prompt == 20:
            assert off_s > 1.5 * on_s


@pytest.mark.parametrize("machine", ["4b", "0.5b"])
@pytest.mark.parametrize("n_answer", [30, 250])
def test_a_draft_model_that_was_wrong_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, n_answer: int, machine: str
) -> None:
    """Also if each answer is too short for its own expected rate to recover."""
    step_s = STEPS[machine]
    clock, costs = simulate_time(monkeypatch, step_s)
    make_drafting = partial(draft_with, Draft(step_s(1), clock))
    spent_s(make_drafting, costs, clock, step_s, 1, random_texts(0.0, 100, n_answer))
    on_s = spent_s(make_drafting, costs, clock, step_s, 1, random_texts(0.95, 100, n_answer))
    assert 100 * (n_answer - 1) * step_s(1) > 1.4 * on_s


@pytest.mark.parametrize("text_drafts", [0, 1])
def test_only_verified_tokens_of_the_draft_model_pay_for_drafts(
    monkeypatch: pytest.MonkeyPatch, text_drafts: int
) -> None:
    """Doubtful tokens that are not verified earn nothing, nor do verified tokens of text drafts."""
    clock, costs = simulate_time(monkeypatch, STEPS["4b"])
    draft = Draft(STEPS["4b"](1), clock)
    draft.rates = [Acceptance(0.01)] * len(draft.rates)
    request = GenerateRequest(prompt="x")
    text = Text(*[0] * text_drafts)
    drafting = Drafter(text, None, model=draft, request=request, sampler=SAMPLER)
    tokens = drafting.propose(PromptTokens([1]), 8, DraftBudget(costs, 1, 1))
    assert tokens == [0] * text_drafts
    drafting.record([0, 0], n_drafted=text_drafts, n_accepted=text_drafts)
    paid = draft_model._LOSS_SHARE - draft.cost
    assert draft.balance == pytest.approx(draft_model._FIRST_LOSS + paid)


@pytest.mark.parametrize("machine", ["135m", "7b", "pieces"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.95])
@pytest.mark.parametrize("n_clients", [1, 2, 4, 8, 16, 32])
def test_drafting_from_the_text_is_never_slower_than_not(
    n_clients: int, share: float, machine: str
) -> None:
    texts, step_s = random_texts(share, 4 * n_clients, 96), STEPS[machine]
    on_s = spent_s(draft_from_text, StepCurve(), [0.0], step_s, n_clients, texts)
    off_s = 4 * 95 * step_s(n_clients)
    assert off_s > 0.97 * on_s
    if machine == "7b" and n_clients == 1 and share > 0.9:
        assert off_s > 2 * on_s
