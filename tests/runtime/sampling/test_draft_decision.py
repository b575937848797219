"""Whether a draft model drafts at all: simulated streams, by costs of steps and of draft tokens."""

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.runtime.kv_cache import CachedSequence
from edgeinfer.runtime.memory_plan import MAX_DRAFT
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling import draft_model, speculative
from edgeinfer.runtime.sampling.draft_model import DraftModel, RequestDrafter
from edgeinfer.runtime.sampling.speculative import (
    Acceptance,
    DraftBudget,
    Drafting,
    StepCurve,
    SuffixDrafter,
)

#: Seconds of a draft token, and of a step by its rows: a 4B and a 0.5B on two cores.
MACHINES: dict[str, tuple[float, Callable[[int], float]]] = {
    "large": (0.003, lambda rows: 0.060 + 0.005 * rows),
    "small": (0.003, lambda rows: 0.012 + 0.003 * rows),
}
#: Tokens of a prompt and of an answer, and the number of turns.
TALKS = ((20, 200, 8), (1000, 40, 40))


class Kv:
    def allocate(self, *args: object, **options: object) -> CachedSequence:
        return CachedSequence(0, ())

    def truncate(self, cached_seq: CachedSequence, n: int) -> None:
        del cached_seq.tokens[n:]


class Draft(DraftModel):
    """A draft model whose tokens take `token_s`, those of a prefill a quarter of it."""

    def __init__(self, token_s: float, row_s: float, clock: list[float]) -> None:
        self.rates = [Acceptance(rate) for rate in draft_model._START]
        self.mean = Acceptance(draft_model._MEAN_START)
        self.likely = Acceptance(draft_model._LIKELY_START)
        self.balance = 32.0
        self.vocab: Any = SimpleNamespace(n_vocab=9, is_eos=lambda token: False)
        self.n_vocab, self.kv = 9, Kv()  # type: ignore[assignment]
        self.cost = self.least_cost = token_s / row_s
        self.token_s, self.clock = token_s, clock

    def compute(self, cached_seq: CachedSequence, tokens: Sequence[int], *, outputs: int) -> bool:
        self.clock[0] += self.token_s * max(1.0, len(tokens) / 4)
        cached_seq.tokens.extend(tokens)
        return True


class Drafter(RequestDrafter):
    def _pick(self, *args: object) -> tuple[int, float]:
        return 0, 0.9


class NoText(SuffixDrafter):
    def draft(self, *args: object, **options: object) -> list[int]:
        return []


SAMPLER: Any = SimpleNamespace(copy=lambda: SAMPLER, accept=lambda tokens: None)


def drafting_with(draft: Draft) -> Drafting:
    drafting, request = Drafting(NoText(9), limit=MAX_DRAFT), GenerateRequest(prompt="x")
    drafting.model = Drafter(draft, request, SAMPLER, matcher=None, banned=None)
    return drafting


def spent_s(
    draft: Draft, step_s: Callable[[int], float], n_clients: int, n_prompt: int, texts: list[list[int]]
) -> float:
    """Return the seconds in which `n_clients` at a time say `texts`; a 1 is a token drafted wrong."""
    noise, costs = random.Random(7), StepCurve()
    costs.measure(step_s)
    clock = draft.clock
    began, waiting = clock[0], [[1] * n_prompt + text for text in texts]
    running: list[tuple[list[int], Drafting, PromptTokens]] = []
    while waiting or running:
        while waiting and len(running) < n_clients:
            text = waiting.pop()
            running.append((text, drafting_with(draft), PromptTokens(text[: n_prompt + 1])))
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
            drafting.record_acceptance(tokens, len(drafts), n_right)
        running = [stream for stream in running if len(stream[2]) < len(stream[0])]
    return clock[0] - began


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("n_clients", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.35, 0.6, 0.95])
def test_a_draft_model_costs_two_percent_and_its_first_trials_at_most(
    monkeypatch: pytest.MonkeyPatch, share: float, n_clients: int, machine: str
) -> None:
    """Whatever `share` of its tokens is right, and after long prompts with short answers, too."""
    clock, (token_s, step_s) = [0.0], MACHINES[machine]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(speculative, "_MEASURE_S", 0.001)
    rng = random.Random(1)
    for n_prompt, n_answer, n_turns in TALKS:
        n_texts = n_turns * n_clients
        texts = [[int(rng.random() >= share) for _ in range(n_answer)] for _ in range(n_texts)]
        off_s = n_turns * (n_answer - 1) * step_s(n_clients)
        on_s = spent_s(Draft(token_s, step_s(1), clock), step_s, n_clients, n_prompt, texts)
        assert on_s <= 1.02 * off_s + draft_model._FIRST_LOSS * step_s(1)
        if machine == "large" and share > 0.9 and n_prompt == 20:
            pass
