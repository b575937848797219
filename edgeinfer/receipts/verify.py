"""Check a receipt: prefill prompt and answer once, and run the sampler at each token of the answer.

If the receipt is of another kernel revision (`runtime/revision.py`), rounding may differ. Then only
each token's log-probability is compared with the receipt's, with a tolerance, as the verdict says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.platform.ed25519 import fingerprint
from edgeinfer.receipts.receipt import Content, Receipt, constraint_digest
from edgeinfer.receipts.replies import Quote
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Finished, FinishReason, TokenRecord
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.requests import GenerateRequest, Replay
from edgeinfer.runtime.revision import KERNEL_REVISION, is_newer

#: Tolerances for other kernel revisions: mean and largest difference of the log-probabilities. With
#: llama.cpp's kernels and ours, those of an answer's tokens differ by 0.04 to 0.09 on average and by at
#: most 0.3 (SmolLM2 and Gemma 3, four answers of 150 tokens each).
MEAN_TOLERANCE, MOST_TOLERANCE = 0.15, 1.0
#: Allowed difference of log-probabilities if receipt and program have the same kernel revision, since
#: receipts round to three decimal places.
_ROUNDING = 0.001

Verdict = Literal["verified", "within tolerance", "not checked", "differs"]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A token, with its log-probability (base e, temperature 1); None if a constraint forced it."""

    id: int
    text: str
    logprob: float | None

    def __str__(self) -> str:
        logprob = "forced" if self.logprob is None else f"log-probability {self.logprob:.3f}"
        return f"{self.text!r} (token {self.id}, {logprob})"


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check. If the receipt was not checked, only `verdict` and `reason` are set.

    `position` is the index, from 0, of the first different token, or the answer's length. There the
    receipt has `expected`, and this engine generates `chosen`; None means that the answer ends there.
    `mean_difference` and `most_difference` are set if only log-probabilities were compared. `text` is
    the answer, None if no tokens were generated. `signer` is "" without a signature: then anyone may
    have written the fields that the check cannot recompute. `seconds` is the duration of the check.
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


class ReceiptCheck:
    """Checks a receipt by computing the answer's tokens or log-probabilities again with an engine.

    `quotes` are the answer as the receipt's reply shows it, and are compared, too; None without a
    reply.
    """

    def __init__(self, receipt: Receipt, engine: Engine, quotes: Sequence[Quote] | None = None) -> None:
        self._receipt, self._engine = receipt, engine
        self._quotes = quotes
        #: Whether a reply was given whose whole text was not compared; False if a difference was found.
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
        """Run the check. Raises ReceiptError if it is impossible, and what `Engine.submit` raises."""
        receipt, began_s = self._receipt, time.perf_counter()
        alteration = receipt.alteration()
        signature = None if alteration else receipt.signature
        reason = alteration or next(self._differences(), "")
        self.lacks_text &= not reason
        verdict: Verdict = "verified" if self._is_exact else "within tolerance"
        return Verification(
            verdict="differs" if reason else verdict,
            reason=reason,
            model=self._engine.info.model,
            signer=fingerprint(bytes.fromhex(signature.public_key)) if signature else "",
            kernel_revision=receipt.kernel_revision,
            n_prompt=receipt.n_prompt,
            n_answer=receipt.n_answer,
            finish_reason=receipt.finish_reason,
            seconds=round(time.perf_counter() - began_s, 4),
            generation_seconds=receipt.seconds,
            **self._findings,
        )

    def _differences(self) -> Iterator[str]:
        """Yield how the receipt differs from a new answer; only the first difference is computed."""
        yield from self._compare_model()
        content = self._receipt.content
        if content is None:
            command = "`edgeinfer verify RECEIPT --content FILE`"
            hint = f"give the content, too: {command}; over HTTP, send the receipt with its content"
            raise ReceiptError("the receipt is private: it has no prompt and answer", hint=hint)
        request = self._request(content)
        yield from self._contradictions(content, request)
        # generate one more token, to see whether the answer ends there. If kernel revisions differ,
        # only the prompt is compared here, and one token is enough
        n = len(content.answer) + self._ended_by_itself if self._is_exact else 1
        replay = Replay(answer=content.answer[:n], time=self._receipt.time)
        generated = self._generate(msgspec.structs.replace(request, replay=replay, max_tokens=n))
        record = generated.finish.record
        assert record is not None
        if record.irreproducible:
            problem = f"this engine cannot check receipts: {record.irreproducible}"
            raise ReceiptError(problem, hint="check the receipt on the CPU, or on another machine")
        if record.prompt != content.prompt:
            position = common_prefix(record.prompt, content.prompt)
            yield f"the prompt of the request differs from token {position + 1} on"
        if self._is_exact:
            yield from self._compare_tokens(content, record, generated.finish)
            yield from self._compare_text(generated, request)
        else:
            yield from self._compare_logprobs(content, request)

    def _compare_model(self) -> Iterator[str]:
        receipt, info = self._receipt, self._engine.info
        if is_newer(receipt.kernel_revision):
            revision = f"kernel revision {receipt.kernel_revision}"
            problem = f"the receipt is of {revision}, which is newer than this program"
            maker = f"edgeinfer {receipt.program!r}, {revision}"
            hint = f"update edgeinfer, or check it with the program that made it ({maker})"
            raise ReceiptError(problem, hint=hint)
        if not info.sha256:
            hint = "pull the file, which records its SHA-256: `edgeinfer pull FILE`"
            raise ReceiptError(f"the SHA-256 of {info.model} is unknown", hint=hint)
        if info.sha256 != receipt.model_sha256:
            yield f"{info.model} is not the receipt's model: its file has another digest"
        kv_type = str(info.choices["kv_type"].value)
        if kv_type != receipt.kv_type:
            problem = f"the receipt needs a {receipt.kv_type} KV cache, but the engine has {kv_type}"
            raise ReceiptError(problem, hint=f"load the model with `--kv-type {receipt.kv_type}`")

    def _request(self, content: Content) -> GenerateRequest:
        """Return the receipt's request. Raises ReceiptError if this engine cannot compute it."""
        request = msgspec.convert(content.request, GenerateRequest)
        if request.n_pictures:
            hint = "ask for a receipt of an answer to a request without pictures"
            raise ReceiptError("the receipt has pictures, which cannot be checked", hint=hint)
        adapters = self._receipt.adapters
        loaded = {adapter.sha256: adapter.name for adapter in self._engine.info.lora}
        if missing := [adapter.name for adapter in adapters if adapter.sha256 not in loaded]:
            hint = "load the model with the adapter: `--lora FILE`"
            raise ReceiptError(f"the adapter {missing[0]!r} is not loaded", hint=hint)
        lora = tuple((loaded[adapter.sha256], adapter.scale) for adapter in adapters)
        fields = {"sampling": self._receipt.sampling, "logprobs": request.logprobs and 0, "lora": lora}
        return msgspec.structs.replace(request, cache_prompt=False, **fields)

    def _contradictions(self, content: Content, request: GenerateRequest) -> Iterator[str]:
        """Yield which values contradict each other. Raises ReceiptError if the engine is too small."""
        receipt, info = self._receipt, self._engine.info
        n_prompt, n_answer, n_logprobs = map(len, (content.prompt, content.answer, content.logprobs))
        if max(*content.prompt, *content.answer) >= info.n_vocab:
            problem = f"the receipt has a token beyond the vocabulary of {info.n_vocab}"
            raise ReceiptError(problem, hint="check it with the model that the receipt names")
        # if revisions differ, prompt and answer form one prompt, which needs room for one more token
        n_tokens = n_prompt + n_answer + (not self._is_exact)
        if n_tokens > info.n_ctx:
            problem = f"the check needs {n_tokens} tokens, but the context has {info.n_ctx}"
            hint = f"load the model with `--ctx {max(receipt.n_ctx, n_tokens)}`"
            raise ReceiptError(problem, hint=hint)
        is_forced = request.constraint or request.tools or request.reasoning_budget is not None
        if None in content.logprobs and not is_forced:
            yield "the receipt lacks log-probabilities, although no constraint forced a token"
        if constraint_digest(request, content.salt) != receipt.constraint_sha256:
            yield "the digest of schema, grammar and tools does not match"
        if (n_prompt, n_answer, n_logprobs) != (receipt.n_prompt, receipt.n_answer, n_answer):
            yield "the numbers of tokens and log-probabilities contradict each other"
        limit = receipt.n_ctx if request.max_tokens is None else request.max_tokens
        most = min(receipt.n_ctx - n_prompt, limit)
        if n_answer > most:
            yield f"the answer has {n_answer} tokens, but its limit was {most}"
        if receipt.finish_reason == "length" and n_answer < most:
            yield f"the answer was not cut off by length: it has {n_answer} of {most} tokens"

    def _compare_tokens(self, content: Content, record: TokenRecord, finish: Finished) -> Iterator[str]:
        """Yield how the tokens, the reason for the end and the log-probabilities differ."""
        if record.answer != content.answer:
            yield self._other_token(record, content.answer)
        reason = self._receipt.finish_reason
        pairs = ((finish.reason, finish.stop_sequence), (reason, content.stop_sequence))
        ending, expected = (" by ".join(filter(None, pair)) for pair in pairs)
        if self._ended_by_itself and ending != expected:
            yield f"the answer ends with {ending!r}, but the receipt says {expected!r}"
        for i, (computed, value) in enumerate(zip(record.logprobs, content.logprobs, strict=True), 1):
            # null in a receipt means minus infinity, which JSON cannot express, or a forced token
            pair = [-math.inf if logprob is None else logprob for logprob in (computed, value)]
            if not math.isclose(*pair, abs_tol=_ROUNDING):
                yield f"the log-probability of token {i} is {computed}, but the receipt says {value}"

    def _other_token(self, record: TokenRecord, answer: tuple[int, ...]) -> str:
        position = self._findings["position"] = common_prefix(record.answer, answer)
        difference = "this engine's answer continues after the receipt's last token"
        if position < len(answer):
            self._findings["expected"] = self._choice(answer[position], record.replayed_logprob)
            difference = f"token {position + 1} of {len(answer)} differs"
        if position == len(record.answer):
            return f"this engine's answer ends after {position} tokens"
        self._findings["chosen"] = self._choice(record.answer[position], record.logprobs[-1])
        return difference

    def _choice(self, token: int, logprob: float | None) -> TokenChoice:
        text = self._engine.detokenize([token]).decode("utf-8", "replace")
        return TokenChoice(id=token, text=text, logprob=logprob)

    def _compare_text(self, generated: CollectedAnswer, request: GenerateRequest) -> Iterator[str]:
        """Yield how the answer in the reply differs from the tokens."""
        self._findings["text"] = generated.text
        prompt = request.prompt or ""
        if isinstance(prompt, tuple):
            prompt = self._engine.detokenize(prompt).decode("utf-8", "replace")
        is_cut = self._receipt.finish_reason in ("cancelled", "deadline")
        self.lacks_text &= not self._quotes
        for quote in self._quotes or ():
            if fault := quote.difference(generated, prompt=prompt, is_cut=is_cut):
                yield f"the response differs from the receipt's tokens in its {fault}"
            self.lacks_text |= is_cut and bool(quote.difference(generated, prompt=prompt))

    def _compare_logprobs(self, content: Content, request: GenerateRequest) -> Iterator[str]:
        """Yield how far the log-probabilities exceed the tolerance."""
        tokens = content.prompt + content.answer
        prefill = GenerateRequest(
            prompt=tokens, prompt_logprobs=0, max_tokens=0, cache_prompt=False, lora=request.lora
        )
        logprobs = self._generate(prefill).prompt
        assert logprobs is not None
        pairs = zip(logprobs.tokens[len(content.prompt) - 1 :], content.logprobs, strict=True)
        differences = [abs(token.chosen.logprob - value) for token, value in pairs if value is not None]
        if not differences:
            yield "the receipt has no log-probabilities to compare"
        mean, most = sum(differences) / len(differences), max(differences)
        self._findings |= {"mean_difference": round(mean, 4), "most_difference": round(most, 4)}
        if mean > MEAN_TOLERANCE or most > MOST_TOLERANCE:
            differ = f"differ by {mean:.2f} on average and by at most {most:.2f}"
            yield f"log-probabilities {differ}; allowed are {MEAN_TOLERANCE} and {MOST_TOLERANCE}"

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
