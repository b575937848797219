"""Convert a request to a sequence: check it, render and tokenize its prompt, make its sampler."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edgeinfer.errors import ContextLengthError, InvalidRequestError
from edgeinfer.media.pictures import MAX_PICTURES, split_at_pictures
from edgeinfer.runtime.chat_format.chat_format import ChatFormat, ProcessedChat
from edgeinfer.runtime.chat_format.detokenizer import Detokenizer, ReasoningBudget
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.llama.vocab import FimTokens, Vocab
from edgeinfer.runtime.options import ModelFiles
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    Infill,
    InfillFile,
    Message,
    check_length,
    check_request,
    hint_beyond_training,
    limit_preparation,
    random_bytes,
)
from edgeinfer.runtime.sampling.draft_model import DraftModel, ModelDrafting
from edgeinfer.runtime.sampling.grammar import Constraints, Lark, TokenMatcher
from edgeinfer.runtime.sampling.speculative import Drafting, SuffixDrafter
from edgeinfer.runtime.scheduler.sequence import Sequence
from edgeinfer.runtime.vision import PromptPictures, Span, Vision


@dataclass(slots=True, eq=False, kw_only=True)
class InputProcessor:
    """Converts requests to sequences, on the callers' threads. The engine sets `Sequence.adapters`.

    `entropy` is mixed into random seeds. `vision_error` says why the model's projector is not used.
    """

    files: ModelFiles
    vocab: Vocab
    chat_format: ChatFormat
    constraints: Constraints
    n_ctx: int
    can_shift: bool
    n_ctx_train: int = 0
    entropy: bytes = b""
    vision: Vision | None = None
    vision_error: str = ""
    draft_model: DraftModel

    @limit_preparation()
    def make_sequence(self, request: GenerateRequest) -> Sequence:
        """Check a request, and make a sequence of it that can be queued.

        Raises InvalidRequestError, ContextLengthError, UnsupportedConstraintError.
        """
        param = "messages" if request.messages else "prompt"
        if request.n_pictures:
            self._checked_vision(request, param)
        check_request(request, self.vocab.n_vocab)
        if request.overflow == "shift" and not self.can_shift:
            raise InvalidRequestError(
                "overflow: this model's context cannot be shifted",
                param="overflow",
                hint='set overflow to "refuse", and shorten the conversation if it gets too long',
            )
        check_length(request.length, self.n_ctx, param, self.n_ctx_train)
        chat = self.chat_format.process(request) if request.messages else None
        spans: list[Span] = []
        tokens = self._fit_context(request, self._tokenize(request, chat, spans))
        matcher = self._matcher(request, chat)
        stops = (*request.stop, *self.files.stop, *(chat.stop if chat else ()))
        detokenizer = Detokenizer(self.vocab, stops, chat.parser if chat else None)
        sampling = request.sampling
        random_seed = int.from_bytes(random_bytes(4, self.entropy), "little")
        seed = random_seed if sampling.seed is None else sampling.seed
        sampler = Sampler(self.vocab, sampling, seed=seed, n_ctx=self.n_ctx)
        return Sequence(
            request=request,
            tokens=PromptTokens(tokens),
            sampler=sampler,
            detokenizer=detokenizer,
            drafting=self._drafting(request, sampler, matcher),
            max_tokens=self._max_tokens(request, len(tokens)),
            n_keep=self._n_keep(request, tokens) if request.overflow == "shift" else 0,
            matcher=matcher,
            reasoning_budget=self._reasoning_budget(request, chat, detokenizer),
            banned_tokens=np.array(self.vocab.eos_tokens, np.int64) if request.ignore_eos else None,
            pictures=PromptPictures(self.vision, spans),
            deadline=time.monotonic() + request.deadline_s if request.deadline_s is not None else None,
        )

    def _tokenize(
        self, request: GenerateRequest, chat: ProcessedChat | None, spans: list[Span]
    ) -> list[int]:
        if chat is not None:
            return self.tokenize_chat(request, chat.prompt, spans)
        if isinstance(request.prompt, str):
            return self._tokenize_text(request.prompt, request, spans)
        if request.infill is not None:
            return infill_tokens(request.infill, self.vocab, self._max_infill_tokens(request))
        return list(request.prompt or ())

    def tokenize_chat(self, request: GenerateRequest, prompt: str, spans: list[Span]) -> list[int]:
        """Tokenize the rendered prompt of a chat; append the places of its pictures to `spans`."""
        if not request.n_pictures:
            return self.chat_format.tokenize(prompt)
        vision = self._checked_vision(request, "messages")
        tokens: list[int] = []
        for text_or_file in self.chat_format.split(prompt, request):
            if isinstance(text_or_file, str):
                tokens += self.chat_format.tokenize(text_or_file) if text_or_file else []
            else:
                vision.append(tokens, spans, text_or_file, request)
        return tokens

    def _tokenize_text(self, prompt: str, request: GenerateRequest, spans: list[Span]) -> list[int]:
        texts = split_at_pictures(prompt, request.pictures)
        tokens = self.vocab.tokenize(texts[0], add_special=True, parse_special=True)
        for text, file in zip(texts[1:], request.pictures, strict=True):
            self._checked_vision(request, "prompt").append(tokens, spans, file, request)
            tokens += self.vocab.tokenize(text, parse_special=True)
        return tokens

    def _checked_vision(self, request: GenerateRequest, param: str) -> Vision:
        if self.vision is None:
            raise InvalidRequestError(
                f"{self.files.name} does not accept pictures{self.vision_error}",
                hint=f"remove the cause and run `edgeinfer warm {self.files.name}`, or use another "
                "model: `edgeinfer list pictures`"
                if self.files.projector
                else "`edgeinfer list pictures` shows models that do",
                param=param,
            )
        if request.n_pictures > MAX_PICTURES:
            problem = f"at most {MAX_PICTURES} pictures are allowed, not {request.n_pictures}"
            raise InvalidRequestError(problem, param=param, hint="send fewer pictures in one request")
        return self.vision

    def _max_infill_tokens(self, request: GenerateRequest) -> int:
        """Return how many tokens a fill-in-the-middle prompt may have, so that the answer fits."""
        answer_tokens = self.n_ctx // 4 if request.max_tokens is None else request.max_tokens
        return self.n_ctx - max(1, min(answer_tokens, self.n_ctx // 2))

    def _fit_context(self, request: GenerateRequest, tokens: list[int]) -> list[int]:
        """Return the prompt, shortened if the request allows it. Raises ContextLengthError."""
        if not tokens and self.vocab.bos >= 0:
            tokens = [self.vocab.bos]
        if not tokens:
            hint = "send at least one token: this model has no BOS token to begin with"
            raise InvalidRequestError("the prompt is empty", param="prompt", hint=hint)
        if len(tokens) < self.n_ctx:
            return tokens
        param = "messages" if request.messages else "prompt"
        if request.overflow != "shift":
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens, but the context of {self.n_ctx} tokens "
                "must also hold the answer",
                param=param,
                hint=hint_beyond_training(len(tokens), self.n_ctx_train),
                n_tokens=len(tokens),
                n_ctx=self.n_ctx,
            )
        n_keep = min(self._n_keep(request, tokens), self.n_ctx // 2)
        n_tail = self.n_ctx - n_keep - self.n_ctx // 4
        return tokens[:n_keep] + tokens[-n_tail:]

    def _n_keep(self, request: GenerateRequest, tokens: list[int]) -> int:
        """Return how many tokens at the start a context shift keeps: the system prompt, or BOS."""
        if request.messages and request.messages[0].role in ("system", "developer"):
            return common_prefix(self.system_prefix(request.messages[0].content), tokens)
        return int(tokens[:1] == [self.vocab.bos])

    def system_prefix(self, system: str) -> list[int]:
        """Return the tokens at the start of every conversation with the system prompt `system`."""

        def tokenize_with(user: str) -> list[int]:
            turns = ((Message(role="system", content=system),) if system else ()) + (
                Message(role="user", content=user),
            )
            return self.chat_format.tokenize(self.chat_format.render(GenerateRequest(messages=turns)))

        a, b = tokenize_with("A"), tokenize_with("7 B")
        return a[: common_prefix(a, b)]

    def _matcher(self, request: GenerateRequest, chat: ProcessedChat | None) -> TokenMatcher | None:
        constraint: Constraint | Lark | None = request.constraint
        if chat is not None and chat.constraint is not None:
            constraint = chat.constraint
        if constraint is None:
            return None
        return self.constraints.compile(constraint, self.vocab, request.cache_salt).copy()

    def _reasoning_budget(
        self, request: GenerateRequest, chat: ProcessedChat | None, detokenizer: Detokenizer
    ) -> ReasoningBudget | None:
        n_tokens = request.reasoning_budget
        if n_tokens is None or chat is None or chat.parser is None:
            return None
        close = self.vocab.tokenize(chat.reasoning_close, parse_special=True)
        return ReasoningBudget(n_tokens, close, opened=detokenizer.is_reasoning)

    def _drafting(
        self, request: GenerateRequest, sampler: Sampler, matcher: TokenMatcher | None
    ) -> Drafting:
        has_drafts = request.speculative != "off" and request.replay is None
        drafter = SuffixDrafter(self.vocab.n_vocab) if has_drafts else None
        model, is_forced = self.draft_model, request.speculative == "ngram"
        if drafter is None or model.shape is None or is_forced:
            return Drafting(drafter, matcher, is_forced=is_forced)
        return ModelDrafting(drafter, matcher, model=model, request=request, sampler=sampler)

    def _max_tokens(self, request: GenerateRequest, n_prompt: int) -> int:
        if request.max_tokens is not None:
            return request.max_tokens
        return self.n_ctx if request.overflow == "shift" else self.n_ctx - n_prompt


_REPO = "repository\n"
_FILE = "file\n"
#: Line before each file in fill-in-the-middle prompts, if the model has no token for files.
_RULE = "\n\n--- {name} ---\n\n"


def infill_tokens(infill: Infill, vocab: Vocab, max_tokens: int) -> list[int]:
    """Make a fill-in-the-middle prompt of at most `max_tokens` tokens.

    If the prompt is too long, `infill.files` are left out first, then text that is far from the gap.
    Raises InvalidRequestError if the model does not support fill-in-the-middle.
    """
    fim = vocab.fim
    if fim is None:
        problem = "this model does not support fill-in-the-middle: its vocabulary has no tokens for it"
        hint = "choose a model for code: `edgeinfer list`"
        raise InvalidRequestError(problem, param="infill", hint=hint)
    start = [vocab.bos] if vocab.adds_bos and vocab.bos >= 0 else []
    n_left = max(0, max_tokens - len(start) - 3)
    prefix, suffix = vocab.tokenize(infill.prefix), vocab.tokenize(infill.suffix)
    suffix = suffix[: max(n_left // 4, n_left - len(prefix))]
    prefix = prefix[max(0, len(prefix) - (n_left - len(suffix))) :]
    files = _file_tokens(infill.files, vocab, fim, n_left - len(prefix) - len(suffix))
    return [*start, *files, fim.prefix, *prefix, fim.suffix, *suffix, fim.middle]


def _file_tokens(
    files: tuple[InfillFile, ...], vocab: Vocab, fim: FimTokens, max_tokens: int
) -> list[int]:
    """Return the tokens of as many of the last files as fit completely."""
    head = [fim.repo, *vocab.tokenize(_REPO)] if fim.repo >= 0 else []
    tail = [fim.file, *vocab.tokenize(_FILE)] if fim.file >= 0 else []
    n_left = max_tokens - len(head) - len(tail)
    fitting: list[int] = []
    for file in reversed(files):
        if fim.file < 0:
            tokens = vocab.tokenize(_RULE.format(name=file.name) + file.text)
        else:
            tokens = [fim.file, *vocab.tokenize(f"{file.name}\n{file.text}")]
        if len(tokens) > n_left:
            break
        n_left -= len(tokens)
        fitting = tokens + fitting
    return [*head, *fitting, *tail] if fitting else []
