"""Convert a request's messages to a prompt, a constraint and a parser of the answer.

The engine calls `load_chat_format`. `templates` renders prompts, `answer_parser` parses answers, and
`sampling.grammar` constrains them. The request's `tool_choice` decides:

- none: the prompt does not show the tools, and the answer is text.
- auto: the answer is text or tool calls. After the model's marker of a call (`<tool_call>`), a grammar
  enforces the schema of the called tool. Without such a marker, or if no grammar can express the
  schema, a call counts if it is complete and valid.
- required, named: the whole answer consists of tool calls; for "named", of that tool. The request's own
  constraint is ignored, because it is meant for an answer in text.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.errors import InvalidRequestError, ModelLoadError, UnsupportedConstraintError
from edgeinfer.media.pictures import split_at_pictures
from edgeinfer.runtime.chat_format import tool_call_grammar
from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.control_tokens import ControlTokens
from edgeinfer.runtime.chat_format.message_shapes import read_arguments
from edgeinfer.runtime.chat_format.reasoning import ReasoningSpan, is_open
from edgeinfer.runtime.chat_format.reasoning import detect as detect_reasoning
from edgeinfer.runtime.chat_format.sandbox import render_time
from edgeinfer.runtime.chat_format.templates import (
    CHATML,
    TRANSCRIPT,
    TRANSCRIPT_STOP,
    ChatTemplate,
    choose,
    load_untrusted,
)
from edgeinfer.runtime.chat_format.tool_call_formats import ToolFormat
from edgeinfer.runtime.chat_format.tool_call_formats import detect as detect_format
from edgeinfer.runtime.chat_format.tool_call_grammar import example
from edgeinfer.runtime.options import Chosen
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    Message,
    Tool,
    ToolChoice,
    check_tools,
    limit_preparation,
)
from edgeinfer.runtime.sampling.grammar import Lark, lark_parts, quote

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab

#: Maximum number of grammars of tool calls that are cached.
_CACHED_GRAMMARS = 32
#: Maximum number of example calls in a prompt whose template cannot show tools.
_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedChat:
    """The prompt of a chat request, and how the answer is constrained and parsed.

    `prompt` is text for `ChatFormat.tokenize`. `constraint` replaces the constraint of the request,
    unless it is None. `stop` has stop strings in addition to the request's. `parser` is None if the
    whole answer is plain text. `reasoning_close` is the marker after the reasoning, such as `</think>`.
    """

    prompt: str
    parser: AnswerParser | None = None
    constraint: Constraint | Lark | None = None
    reasoning_close: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What a chat format is made from: texts in the model file, its vocabulary, and an option.

    `architecture` is general.architecture in the file, `name` the model's name. `template` is a jinja2
    template, `tool_template` that for conversations with tools (Command R, Hermes 2 Pro); "" if the
    file has none. If `add_bos` is true, the prompt must begin with BOS. `escape_content` is an option
    of the user: if true, the text of a control token in a message ("<|im_end|>") is tokenized as plain
    text; if false, as the control token.
    """

    template: str
    architecture: str
    name: str
    bos_text: str
    eos_text: str
    vocab: Vocab
    tool_template: str = ""
    add_bos: bool = False
    escape_content: bool = True


def load_chat_format(facts: TemplateFacts) -> ChatFormat:
    """Load a model's chat format. Raises ModelLoadError if the template does not parse."""
    tokenize, markers = facts.vocab.tokenize, ("<|im_start|>", "<|im_end|>")
    has_chatml = all(len(tokenize(marker, parse_special=True)) == 1 for marker in markers)
    try:
        template, reason = choose(facts.template, facts.bos_text, facts.eos_text, has_chatml=has_chatml)
    except ModelLoadError as error:
        hint = "set another template: `chat-template` in models.toml"
        raise ModelLoadError(error.message, hint=hint) from error
    for_tools = None
    if facts.tool_template:
        tool_template = load_untrusted(facts.tool_template, facts.bos_text, facts.eos_text)
        for_tools = ChatFormat(facts, tool_template, "the model's own, for tools")
    return ChatFormat(facts, template, reason, for_tools)


class ChatFormat:
    """Makes prompts, answer parsers and constraints for one model. Thread-safe."""

    def __init__(
        self,
        facts: TemplateFacts,
        template: ChatTemplate,
        reason: str,
        for_tools: ChatFormat | None = None,
    ) -> None:
        self._facts = facts
        self._for_tools = for_tools
        self._template = template
        self._is_transcript = template.source == TRANSCRIPT
        self._form, self._form_reason = detect_format(template.source, facts.architecture, facts.name)
        self._span, self.can_think = detect_reasoning(template.source)
        self._grammar = lru_cache(_CACHED_GRAMMARS)(self._make_grammar)
        self._control = ControlTokens(facts.vocab)
        self._pictures = PictureMarkers()
        self.reason = reason

    @property
    def tool_format(self) -> str:
        """Name of the format of the model's tool calls ("hermes"); "" without a chat template."""
        if self._for_tools is not None:
            return self._for_tools.tool_format
        return "" if self._is_transcript else self._form.name

    @property
    def choices(self) -> dict[str, Chosen]:
        """Chosen values by name: "chat_template", "tool_format", "reasoning" (its opening marker)."""
        span_reason = (
            "the chat template contains it"
            if self.can_think
            else "not in the chat template; recognized if an answer begins with it"
        )
        kind = {CHATML: "chatml", TRANSCRIPT: "transcript"}.get(self._template.source, "own")
        return {
            "chat_template": Chosen(kind, self.reason),
            "tool_format": Chosen(self.tool_format, self._form_reason),
            "reasoning": Chosen(self._span.open, span_reason),
        }

    def render(self, request: GenerateRequest) -> str:
        """Render the prompt of a request with messages, as text for `split` and `tokenize`.

        Control tokens in messages are escaped, and pictures become markers. If the reasoning budget is
        0 and the prompt ends with the opening marker of the reasoning, the closing marker is added.
        Raises InvalidRequestError if a tool is invalid or the template refuses the messages.
        """
        if self._for_tools is not None and self._tools(request):
            return self._for_tools.render(request)
        if any(message.pictures for message in request.messages):
            messages = self._pictures.insert(request.messages)
            request = msgspec.structs.replace(request, messages=messages)
        if self._facts.escape_content:
            request = self._control.escape_request(request, (self._span.open, self._span.close))
        tools = self._tools(request)
        messages = self._adapt(request.messages, tools)
        shown = tools if self._template.traits.tools else ()
        was_set = render_time.set(request.replay.time if request.replay else None)
        try:
            text = self._template.render(
                messages, shown, options=request.template_options, continue_final=request.continue_final
            )
        finally:
            render_time.reset(was_set)
        if request.reasoning_budget == 0 and is_open(text, self._span):
            text += self._span.close
        bos = self._facts.bos_text if self._facts.add_bos else ""
        return text if text.startswith(bos) else bos + text

    def tokenize(self, prompt: str) -> list[int]:
        """Tokenize a rendered prompt. Escaped control tokens become text."""
        if not self._facts.escape_content:
            return self._facts.vocab.tokenize(prompt, parse_special=True)
        return self._control.tokenize(prompt)

    def split(self, prompt: str, request: GenerateRequest) -> Iterator[str | bytes]:
        """Yield the texts (for `tokenize`) and pictures of a rendered prompt, in order.

        Raises InvalidRequestError if the template dropped or repeated a picture.
        """
        if self._for_tools is not None and self._tools(request):
            return self._for_tools.split(prompt, request)
        pictures = [picture for message in request.messages for picture in message.pictures]
        is_tight = self._template.traits.tight_pictures
        return self._pictures.split(prompt, pictures, is_tight=is_tight)

    def warm_up(self) -> None:
        """Read the vocabulary's control tokens, which takes 10 to 60 ms."""
        if self._facts.escape_content:
            self._control.load()

    def process(self, request: GenerateRequest) -> ProcessedChat:
        """Make the prompt, the constraint and the parser of the answer.

        Raises InvalidRequestError as `render` does, and UnsupportedConstraintError for a strict tool
        whose schema cannot be enforced.
        """
        tools = self._tools(request)
        if self._for_tools is not None and tools:
            return self._for_tools.process(request)
        prompt = self.render(request)
        span = self._span
        constraint, constrained = self._constraint(request, tools)
        opened = is_open(prompt, span)
        if self.can_think and constraint is not None:
            constraint = _after_reasoning(
                constraint,
                span,
                self._facts.vocab,
                opened=opened,
                # if thinking is off, the template has written the closing marker into the prompt
                optional=not prompt.rstrip().endswith(span.close),
            )
        return ProcessedChat(
            prompt=prompt,
            parser=self._parser(tools, constrained=constrained, opened=opened),
            constraint=constraint,
            reasoning_close=span.close,
            stop=TRANSCRIPT_STOP if self._is_transcript else (),
        )

    def _tools(self, request: GenerateRequest) -> tuple[Tool, ...]:
        check_tools(request)
        return () if request.tool_choice.mode == "none" else request.tools

    def _constraint(
        self, request: GenerateRequest, tools: tuple[Tool, ...]
    ) -> tuple[Constraint | Lark | None, bool]:
        """Return the constraint (None: none), and whether it guarantees well-formed tool calls."""
        if not tools:
            return request.constraint, False
        mode = request.tool_choice.mode
        if request.constraint is not None and mode == "auto":
            return self._call_or_answer(request, request.constraint), False
        if mode == "auto" and not self._template.traits.tools:
            return None, False
        return self._grammar(msgspec.json.encode((request.cache_salt, tools, request.tool_choice)))

    def _call_or_answer(self, request: GenerateRequest, constraint: Constraint) -> Lark:
        """Return a grammar of an answer that is either tool calls or follows `constraint`."""
        tools = _constrained_tools(request, may_refuse=True)
        several = request.tool_choice.parallel
        calls = tool_call_grammar.required_calls(self._form, tools, self._facts.vocab, several=several)
        source = f"start: calls | @answer\ncalls: {calls.source.removeprefix('start: ')}"
        return Lark(source, (("answer", lark_parts(constraint)[0]),))

    def _make_grammar(self, key: bytes) -> tuple[Lark | None, bool]:
        """Make the grammar of tool calls for `key`: cache salt, tools and tool choice as JSON.

        Returns the grammar and True; (None, False) if calls are optional ("auto") and the notation of
        calls, or of the reasoning, does not allow a grammar.
        """
        salt, tools, choice = msgspec.json.decode(key, type=tuple[str, tuple[Tool, ...], ToolChoice])
        request = GenerateRequest(cache_salt=salt, tools=tools, tool_choice=choice)
        vocab = self._facts.vocab
        tools = _constrained_tools(request, may_refuse=choice.mode != "auto")
        if choice.mode == "auto":
            grammar = tool_call_grammar.text_or_calls(self._form, tools, vocab, several=choice.parallel)
            span = tool_call_grammar.control_token(self._span.open, vocab) if self.can_think else None
            return (None, False) if grammar is None or span is not None else (grammar, True)
        several = choice.mode == "required" and choice.parallel
        return tool_call_grammar.required_calls(self._form, tools, vocab, several=several), True

    def _parser(self, tools: Sequence[Tool], *, constrained: bool, opened: bool) -> AnswerParser | None:
        if self._is_transcript and not tools:
            return None
        vocab = self._facts.vocab
        has_special_span = (
            self.can_think
            and tool_call_grammar.control_token(_first_token(self._span.open), vocab) is not None
        )
        return AnswerParser(
            self._form,
            {tool.name: tool.parameters for tool in tools},
            span=self._span,
            opened=opened,
            constrained=constrained,
            special_tokens=has_special_span
            or (bool(tools) and tool_call_grammar.needs_special(self._form, vocab)),
        )

    def _adapt(self, messages: tuple[Message, ...], tools: Sequence[Tool]) -> tuple[Message, ...]:
        traits = self._template.traits
        if not traits.tool_calls:
            messages = tuple(_as_text(self._form, message) for message in messages)
        if not traits.tool_role:
            messages = tuple(_result_as_text(message) for message in messages)
        if tools and not traits.tools:
            messages = _with_description(self._form, messages, tools)
        return messages


def _first_token(marker: str) -> str:
    """Return a marker's first control token: `<|channel|>` of `<|channel|>analysis<|message|>`."""
    return marker[: marker.find(">") + 1] if marker.startswith("<|") else marker


def _callable_tools(request: GenerateRequest) -> list[tuple[int, Tool]]:
    """Return the index and the definition of each tool that the answer may call."""
    choice = request.tool_choice
    named = choice.name if choice.mode == "named" else None
    tools = request.tools if choice.mode != "none" else ()
    return [(i, tool) for i, tool in enumerate(tools) if named in (None, tool.name)]


def _constrained_tools(request: GenerateRequest, *, may_refuse: bool) -> tuple[Tool, ...]:
    """Return the callable tools. A schema that cannot be enforced is replaced: any object is allowed.

    With `may_refuse`, raises UnsupportedConstraintError for a strict tool with such a schema.
    """
    tools = []
    for i, tool in _callable_tools(request):
        fault = tool_call_grammar.schema_fault(tool, request.cache_salt)
        if fault and tool.strict and may_refuse:
            field = f"tools[{i}].parameters{fault[0]}"
            raise UnsupportedConstraintError(
                f"tool {tool.name}: {fault[1]}",
                param=field,
                hint="change that part of the tool's `parameters`, or leave out `strict`",
            )
        loose = {"type": "object", "additionalProperties": True}
        tools.append(msgspec.structs.replace(tool, parameters=loose) if fault else tool)
    return tuple(tools)


def unenforced_fields(request: GenerateRequest) -> list[str]:
    """Return the fields of a request that the engine cannot enforce or read, as JSON paths.

    They are parts of tool schemas (`tools[0].parameters#/properties/x`), and those arguments of
    earlier tool calls that are not JSON (`messages[2].tool_calls[0].arguments`).
    """
    with limit_preparation():
        faults = [
            (i, tool_call_grammar.schema_fault(tool, request.cache_salt))
            for i, tool in _callable_tools(request)
        ]
    calls = (
        (f"messages[{i}].tool_calls[{n}].arguments", call)
        for i, message in enumerate(request.messages)
        for n, call in enumerate(message.tool_calls)
    )
    return [
        *(f"tools[{i}].parameters{fault[0]}" for i, fault in faults if fault),
        *(field for field, call in calls if read_arguments(call) == call.arguments),
    ]


def _after_reasoning(
    constraint: Constraint | Lark, span: ReasoningSpan, vocab: Vocab, *, opened: bool, optional: bool
) -> Constraint | Lark:
    """Let reasoning precede the constrained text, if the prompt `opened` it or if it is `optional`."""
    if not opened and not optional:
        return constraint
    source, grammars = lark_parts(constraint)
    close = tool_call_grammar.control_token(span.close, vocab)
    if close is None:
        thought = ["thought: thinking /\\s{0,2}/", f"thinking[lazy]: ANYTHING {quote(span.close)}"]
    else:
        thought = [f"thought: ANYTHING <[{close}]> /\\s{{0,2}}/"]
    begin = "thought" if opened else f"({tool_call_grammar.marker(span.open, vocab)} thought)?"
    rules = [f"start: {begin} @answer_after", *thought, "ANYTHING: /(?s:.*)/"]
    return Lark("\n".join(rules), (("answer_after", source), *grammars))


def _as_text(form: ToolFormat, message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [
        tool_call_grammar.write_call(form, call.name, call.arguments or "{}")
        for call in message.tool_calls
    ]
    return msgspec.structs.replace(
        message, content="\n".join(filter(None, [message.content, *calls])), tool_calls=()
    )


def _result_as_text(message: Message) -> Message:
    if message.role != "tool":
        return message
    content = f"<tool_response>\n{message.content}\n</tool_response>"
    return Message(role="user", content=content, pictures=message.pictures)


def _with_description(
    form: ToolFormat, messages: tuple[Message, ...], tools: Sequence[Tool]
) -> tuple[Message, ...]:
    definitions = "\n".join(
        msgspec.json.encode(
            {"name": t.name, "description": t.description, "parameters": t.parameters}
        ).decode()
        for t in tools
    )
    calls = "\n".join(
        tool_call_grammar.write_call(form, tool.name, json.dumps(example(tool), ensure_ascii=False))
        for tool in tools[:_EXAMPLES]
    )
    text = (
        f"You can call these functions:\n{definitions}\n\nTo call one, answer with nothing but its "
        f"call, with arguments of your own:\n{calls}\nOtherwise answer in plain words."
    )
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer"):
        joined = msgspec.structs.replace(first, content=f"{first.content}\n\n{text}")
        return (joined, *messages[1:])
    return (Message(role="system", content=text), *messages)


class PictureMarkers:
    """Puts a unique marker for each picture into messages; finds the markers in the prompt."""

    @cached_property
    def _word(self) -> str:
        return secrets.token_hex(8)

    @cached_property
    def _marker(self) -> re.Pattern[str]:
        return re.compile(rf"picture{self._word}n(\d+)[be]")

    def insert(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Replace each PICTURE_MARK (a picture's place) in messages by a text that no client can guess.

        Raises InvalidRequestError if a message has more or fewer marks than pictures.
        """
        numbers = itertools.count()
        return tuple(self._insert(message, numbers) for message in messages)

    def _insert(self, message: Message, numbers: Iterator[int]) -> Message:
        content, *after_pictures = split_at_pictures(message.content, message.pictures)
        if len(after_pictures) != len(message.pictures):
            raise InvalidRequestError(
                "a message needs a placeholder in `content` for each picture; it has "
                f"pictures: {len(message.pictures)}, placeholders: {len(after_pictures)}",
                param="messages",
                hint="make `content` and `pictures` with `edgeinfer.media.pictures.join_parts`",
            )
        for text in after_pictures:
            content += f"picture{self._word}n{next(numbers)}{'e' if content else 'b'}{text}"
        return msgspec.structs.replace(message, content=content)

    def split(
        self, prompt: str, pictures: Sequence[bytes], *, is_tight: bool = False
    ) -> Iterator[str | bytes]:
        """Yield the texts and pictures of a rendered prompt, in order.

        `is_tight`: the template writes no space before a picture at the beginning of a message. Raises
        InvalidRequestError if the template dropped or repeated a picture.
        """
        text_start = 0
        order = []
        for mark in self._marker.finditer(prompt):
            text = prompt[text_start : mark.start()]
            yield text.removesuffix(" ") if is_tight and mark[0].endswith("b") else text
            order.append(int(mark[1]))
            yield pictures[order[-1]]
            text_start = mark.end()
        if sorted(order) != list(range(len(pictures))):
            problem = f"the chat template put {len(order)} of {len(pictures)} pictures into the prompt"
            raise InvalidRequestError(problem, param="messages", hint="use another model for pictures")
        yield prompt[text_start:]
