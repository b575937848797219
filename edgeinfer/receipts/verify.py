"""Check a receipt: prefill prompt and answer once, and run the sampler at each token of the answer.

If the receipt is of another kernel revision (`runtime/revision.py`), rounding may differ. Then only
each token's log-probability is compared with the receipt's, with a tolerance, as the verdict says.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import Content, Receipt, constraint_digest
from edgeinfer.receipts.replies import Quote
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Finished, FinishReason, TokenRecord
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest, Replay
from edgeinfer.runtime.revision import KERNEL_REVISION

#: Between llama.cpp's kernels and ours, log-probabilities of an answer's tokens differ by 0.04 to 0.09
#: on average and by at most 0.3 (SmolLM2 and Gemma 3, four answers of 150 tokens each).
MEAN_TOLERANCE, MOST_TOLERANCE = 0.15, 1.0
#: Tolerance for equal revisions: a receipt's log-probabilities are rounded to three decimal places.
_ROUNDING = 0.001
#: Revisions on arm64 are larger by this number than those on x86-64 (`revision.py`).
_REVISIONS = 1000

Verdict = Literal["verified", "within tolerance", "not checked", "differs"]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A token. `logprob` is the log (base e) of its probability at temperature 1, None if forced."""

    id: int
    text: str
    logprob: float | None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check. If the receipt was not checked, only `verdict` and `reason` are set.

    `position` is the index, from 0, of the first different token, or the answer's length. There the
    receipt has `expected`, and this engine generates `chosen`; None means that the answer ends there.
    `mean_difference` and `most_difference` are set if only log-probabilities were compared. `text` is
    the answer, None if no tokens were generated. `signer` is "" without a signature: then anyone may
    have written the fields that the check cannot recompute. `seconds` is the duration of the check,
    `generation_seconds` that of the original generation.
    """

    verdict: Verdict
    reason: str = ""
    model: str = ""
    signer: str = ""
    kernel_revision: int = KERNEL_REVISION
    own_revision: int = KERNEL_REVISION
    n_prompt: int = 0
    n_answer: int = 0
    finish_reason: FinishReason | None = None
    text: str | None = None
    position: int | None = None
    expected: TokenChoice | None = None
    chosen: TokenChoice | None = None
    mean_difference: float | None = None
    most_difference: float | None = None
    seconds: float = 0.0
    generation_seconds: float = 0.0


def with_content(receipt: Receipt, whole: Receipt) -> Receipt:
    """Return a private receipt with the content of the complete form. Raises ReceiptError."""
    if whole.content is None or whole.content_sha256 != receipt.content_sha256:
        hint = "name the RECEIPT.content that was written with this receipt: `--content FILE`"
        raise ReceiptError("this content does not belong to the receipt", hint=hint)
    return msgspec.structs.replace(receipt, content=whole.content)


class ReceiptCheck:
    """Checks a receipt, and `quotes`: what clients show or execute of the reply with the receipt."""

    def __init__(self, receipt: Receipt, engine: Engine, quotes: Sequence[Quote] | None = None) -> None:
        self._receipt, self._engine = receipt, engine
        self._quotes = quotes
        #: Whether the check found no difference, but did not compare the reply's whole text.
        self.lacks_text = quotes is not None
        self._is_exact = receipt.kernel_revision == KERNEL_REVISION
        self._ended_by_itself = receipt.finish_reason in ("stop", "tool_calls")
        self._findings: dict[str, Any] = {}
        self._generation: Generation | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Have `run` end soon with ReceiptError. Thread-safe; idempotent."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    def run(self) -> Verification:
        """Run the check. Raises ReceiptError if this engine cannot, and what `Engine.submit` raises."""
        receipt, began_s = self._receipt, time.perf_counter()
        alteration = receipt.alteration()
        reason = alteration or self._other_model() or self._difference()
        self.lacks_text &= not reason
        verdict: Verdict = "verified" if self._is_exact else "within tolerance"
        return Verification(
            verdict="differs" if reason else verdict,
            reason=reason,
            model=self._engine.info.model,
            signer="" if alteration else receipt.signer,
            kernel_revision=receipt.kernel_revision,
            n_prompt=receipt.n_prompt,
            n_answer=receipt.n_answer,
            finish_reason=receipt.finish_reason,
            seconds=round(time.perf_counter() - began_s, 4),
            generation_seconds=receipt.seconds,
            **self._findings,
        )

    def _difference(self) -> str:
        """Return how the receipt differs from a new answer; "" if it does not. Raises ReceiptError."""
        content = self._receipt.content
        if content is None:
            command = "`edgeinfer verify RECEIPT --content FILE`"
            hint = f"give the content, too: {command}; over HTTP, send the receipt with its content"
            raise ReceiptError("the receipt is private: it has no prompt and answer", hint=hint)
        request = self._request(content)
        if contradiction := self._contradiction(content, request):
            return contradiction
        # one more token shows whether the answer ends here; if revisions differ, only check the prompt
        n = len(content.answer) + self._ended_by_itself if self._is_exact else 1
        replay = Replay(answer=content.answer[:n], time=self._receipt.time)
        generated = self._generate(msgspec.structs.replace(request, replay=replay, max_tokens=n))
        record = generated.finish.record
        assert record is not None
        if record.irreproducible:
            problem = f"this engine cannot check receipts: {record.irreproducible}"
            raise ReceiptError(problem, hint="check the receipt on the CPU, or on another machine")
        if (position := _first_difference(record.prompt, content.prompt)) is not None:
            return f"the prompt of the request differs from token {position + 1} on"
        if not self._is_exact:
            return self._compare_logprobs(content, request.lora)
        difference = self._compare_tokens(content, record, generated.finish)
        return difference or self._compare_text(generated, request.prompt)

    def _other_model(self) -> str:
        """Return how the loaded model differs from the receipt's; "" if it is the same.

        Raises ReceiptError if this engine cannot check the receipt.
        """
        receipt, info = self._receipt, self._engine.info
        is_newer = receipt.kernel_revision % _REVISIONS > KERNEL_REVISION % _REVISIONS
        if is_newer or receipt.kernel_revision >= 2 * _REVISIONS:
            problem = f"the receipt is of kernel revision {receipt.kernel_revision}, which is newer"
            maker = f"edgeinfer {receipt.program!r}, kernel revision {receipt.kernel_revision}"
            hint = f"update edgeinfer, or check it with the program that made it ({maker})"
            raise ReceiptError(f"{problem} than this program's, {KERNEL_REVISION}", hint=hint)
        if not info.sha256:
            hint = "pull the file, which records its SHA-256: `edgeinfer pull FILE`"
            raise ReceiptError(f"the SHA-256 of {info.model} is unknown", hint=hint)
        if info.sha256 != receipt.model_sha256:
            return f"{info.model} is not the receipt's model: its file has another digest"
        kv_type = str(info.choices["kv_type"].value)
        if kv_type != receipt.kv_type:
            problem = f"the receipt needs a {receipt.kv_type} KV cache, but the engine has {kv_type}"
            raise ReceiptError(problem, hint=f"load the model with `--kv-type {receipt.kv_type}`")
        return ""

    def _request(self, content: Content) -> GenerateRequest:
        """Return the receipt's request. Raises ReceiptError if this engine cannot compute it."""
        request = msgspec.convert(content.request, GenerateRequest)
        if request.n_pictures:
            raise ReceiptError("the receipt has pictures, which cannot be checked")
        adapters = self._receipt.adapters
        loaded = {adapter.sha256: adapter.name for adapter in self._engine.info.lora}
        if missing := [adapter.name for adapter in adapters if adapter.sha256 not in loaded]:
            hint = "load the model with the adapter: `--lora FILE`"
            raise ReceiptError(f"the adapter {missing[0]!r} is not loaded", hint=hint)
        lora = tuple((loaded[adapter.sha256], adapter.scale) for adapter in adapters)
        logprobs = None if request.logprobs is None else 0
        fields = {"sampling": self._receipt.sampling, "logprobs": logprobs, "lora": lora}
        return msgspec.structs.replace(request, cache_prompt=False, **fields)

    def _contradiction(self, content: Content, request: GenerateRequest) -> str:
        """Return an error text if values of the receipt contradict each other; "" otherwise.

        Raises ReceiptError if the receipt does not fit this engine's vocabulary or context.
        """
        receipt, info = self._receipt, self._engine.info
        n_prompt, n_answer, n_logprobs = map(len, (content.prompt, content.answer, content.logprobs))
        if max(*content.prompt, *content.answer) >= info.n_vocab:
            problem = f"the receipt has a token beyond the vocabulary of {info.n_vocab}"
            raise ReceiptError(problem, hint="check it with the model that the receipt names")
        # to compare log-probabilities, prompt and answer form one prompt, with room for one more token
        n_tokens = n_prompt + n_answer + (not self._is_exact)
        if n_tokens > info.n_ctx:
            problem = f"the check needs {n_tokens} tokens, but the context has {info.n_ctx}"
            hint = f"load the model with `--ctx {max(receipt.n_ctx, n_tokens)}`"
            raise ReceiptError(problem, hint=hint)
        is_forced = request.constraint or request.tools or request.reasoning_budget is not None
        if None in content.logprobs and not is_forced:
            return "the receipt lacks log-probabilities, although no constraint forced a token"
        if constraint_digest(request, content.salt) != receipt.constraint_sha256:
            return "the digest of schema, grammar and tools does not match"
        if (n_prompt, n_answer, n_logprobs) != (receipt.n_prompt, receipt.n_answer, n_answer):
            return "the numbers of tokens and log-probabilities contradict each other"
        limit = receipt.n_ctx if request.max_tokens is None else request.max_tokens
        most = min(receipt.n_ctx - n_prompt, limit)
        if n_answer > most:
            return f"the answer has {n_answer} tokens, but its limit was {most}"
        if receipt.finish_reason == "length" and n_answer < most:
            return f"the answer was not cut off by length: it has {n_answer} of {most} tokens"
        return ""

    def _compare_tokens(self, content: Content, record: TokenRecord, finished: Finished) -> str:
        """Return how tokens, log-probabilities or the reason for the end differ; "" if they do not."""
        if (position := _first_difference(record.answer, content.answer)) is not None:
            return self._token_difference(record, content.answer, position)
        reason = self._receipt.finish_reason
        ending = (finished.reason, finished.stop_sequence)
        if self._ended_by_itself and ending != (reason, content.stop_sequence):
            return f"the answer ends with {finished.reason!r}, but the receipt says {reason!r}"
        for i, (computed, value) in enumerate(zip(record.logprobs, content.logprobs, strict=True), 1):
            # JSON cannot express minus infinity: a receipt has null for it, as for a forced token
            pair = [-math.inf if logprob is None else logprob for logprob in (computed, value)]
            if not math.isclose(*pair, abs_tol=_ROUNDING):
                return f"the log-probability of token {i} is {computed}, but the receipt says {value}"
        return ""

    def _compare_text(self, generated: CollectedAnswer, prompt: str | tuple[int, ...] | None) -> str:
        """Return how the answer in the reply differs from the tokens; "" if it does not."""
        self._findings["text"] = generated.text
        if isinstance(prompt, tuple):
            prompt = self._engine.detokenize(prompt).decode("utf-8", "replace")
        is_cut = self._receipt.finish_reason in ("cancelled", "deadline")
        self.lacks_text &= not self._quotes
        for quote in self._quotes or ():
            # only a completion with `echo` begins with the prompt
            fields = [quote.difference(generated, prompt=p, is_cut=is_cut) for p in ("", prompt or "")]
            if all(fields):
                return f"the response differs from the receipt's tokens in its {fields[0]}"
            self.lacks_text |= bool(fields[0]) or quote.has_unknown_text
        return ""

    def _generate(self, request: GenerateRequest) -> CollectedAnswer:
        generation = self._generation = self._engine.submit(request)
        if self._is_cancelled:
            generation.cancel()
        answer = CollectedAnswer()
        for event in generation:
            answer.add(event)
        if answer.finish.reason in ("cancelled", "deadline"):
            raise ReceiptError("the check was cancelled", hint="run it again")
        return answer

    def _token_difference(self, record: TokenRecord, answer: tuple[int, ...], position: int) -> str:
        self._findings["position"] = position
        if position < len(answer):
            self._findings["expected"] = self._choice(answer[position], record.replayed_logprob)
        if position == len(record.answer):
            return f"this engine's answer ends after {position} tokens"
        self._findings["chosen"] = self._choice(record.answer[position], record.logprobs[-1])
        longer = "this engine's answer continues after the receipt's last token"
        differs = f"token {position + 1} of {len(answer)} differs"
        return differs if position < len(answer) else longer

    def _choice(self, token: int, logprob: float | None) -> TokenChoice:
        text = self._engine.detokenize([token]).decode("utf-8", "replace")
        return TokenChoice(id=token, text=text, logprob=logprob)

    def _compare_logprobs(self, content: Content, lora: tuple[tuple[str, float], ...] | None) -> str:
        """Return how far the log-probabilities exceed the tolerance; "" if they do not."""
        tokens = content.prompt + content.answer
        prefill = GenerateRequest(
            prompt=tokens, prompt_logprobs=0, max_tokens=0, cache_prompt=False, lora=lora
        )
        logprobs = self._generate(prefill).prompt
        assert logprobs is not None
        computed = [token.chosen.logprob for token in logprobs.tokens[len(content.prompt) - 1 :]]
        pairs = zip(computed, content.logprobs, strict=True)
        differences = [abs(a - b) for a, b in pairs if b is not None]
        if not differences:
            return "the receipt has no log-probabilities to compare"
        mean, most = sum(differences) / len(differences), max(differences)
        self._findings |= {"mean_difference": round(mean, 4), "most_difference": round(most, 4)}
        if mean <= MEAN_TOLERANCE and most <= MOST_TOLERANCE:
            return ""
        differ = f"differ by {mean:.2f} on average and by at most {most:.2f}"
        return f"log-probabilities {differ}; allowed are {MEAN_TOLERANCE} and {MOST_TOLERANCE}"


def _first_difference(tokens: tuple[int, ...], expected: tuple[int, ...]) -> int | None:
    pairs = enumerate(itertools.zip_longest(tokens, expected))
    return next((i for i, (a, b) in pairs if a != b), None)
