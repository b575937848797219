"""Render messages and tools with a model's chat template.

A template is a jinja2 program in the model's file. At load time, `probe` renders small conversations to
find what the template supports: system messages, tools, earlier tool calls. `render` adapts messages to
that, so that requests work with every model: for Gemma, for example, the system prompt goes into the
first user message.

A new template is probed in a separate process with limits; later it runs in the `sandbox`. The traits
that the probe has found are cached by the template's digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2
import msgspec

import edgeinfer
from edgeinfer.errors import InvalidRequestError, ModelLoadError
from edgeinfer.platform.disk import CacheTable
from edgeinfer.platform.process import ask_child
from edgeinfer.runtime.chat_format.message_shapes import TemplateTraits, adaptations, tool_dict
from edgeinfer.runtime.chat_format.sandbox import (
    MAX_SOURCE,
    ExhaustedError,
    Fuel,
    TemplateEnvironment,
    limit_fuel,
)
from edgeinfer.runtime.requests import Message, Tool

#: Errors that rendering can raise. RecursionError, and StopIteration in a template, are RuntimeErrors.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_OTHER_TEMPLATE = "set `chat-template` of the model in models.toml, or use another model"
#: Content of a test message: no template contains it, so its place in a rendered prompt can be found.
_MARK = "\u2060\u2063{}\u2063\u2060"
#: Limit of the CPU time (s) of all probes of one template; the longest known template takes 0.02 s.
_PROBE_CPU_S = 1.0

#: Template for models with ChatML's tokens but no template.
CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
#: Template of base models: a plain transcript, "User: … Assistant: …". No space is added before an
#: answer that begins with a space, so that a later prompt has the same tokens as the cached answer.
TRANSCRIPT = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{- message.content + '\n\n' -}}"
    "{%- else -%}{{- 'User:' if message.role == 'user' else 'Assistant:' -}}"
    "{{- ('' if message.content[:1] == ' ' else ' ') + message.content + '\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
TRANSCRIPT_STOP = ("\nUser:", "\nAssistant:")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template with the texts of BOS and EOS. Immutable, so thread-safe."""

    source: str
    bos: str = ""
    eos: str = ""
    traits: TemplateTraits = field(default_factory=TemplateTraits)
    _compiled: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def load(
        cls, source: str, bos: str = "", eos: str = "", traits: TemplateTraits | None = None
    ) -> ChatTemplate:
        """Compile the template, and probe it unless `traits` are known. Raises ModelLoadError."""
        if len(source) > MAX_SOURCE:
            problem = f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE}"
            raise ModelLoadError(problem, hint=_OTHER_TEMPLATE)
        try:
            with limit_fuel(Fuel()):
                compiled = TemplateEnvironment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            problem = f"the model's chat template does not parse: line {error.lineno}: {error.message}"
            raise ModelLoadError(problem, hint=_OTHER_TEMPLATE) from error
        except (*_TEMPLATE_FAILURES, SyntaxError) as error:
            problem = f"the model's chat template does not compile: {error}"
            raise ModelLoadError(problem, hint=_OTHER_TEMPLATE) from error
        bare = cls(source, bos, eos, traits or TemplateTraits(), compiled)
        if traits is not None:
            return bare
        try:
            with limit_fuel(Fuel(cpu_s=_PROBE_CPU_S)):
                return replace(bare, traits=probe(bare))
        except (ExhaustedError, MemoryError) as error:
            reason = str(error) or "it takes too much memory"
            problem = f"the model's chat template was refused: {reason}"
            raise ModelLoadError(problem, hint=_OTHER_TEMPLATE) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        options: dict[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """Render the prompt. `options` are variables for the template, such as `enable_thinking`.

        With `continue_final`, the prompt ends inside the last message. Raises InvalidRequestError.
        """
        if not messages:
            raise InvalidRequestError(
                "`messages` is empty", param="messages", hint="send at least one message"
            )
        variables = {**(options or {}), "add_generation_prompt": not continue_final}
        if tools:
            variables["tools"] = [tool_dict(tool) for tool in tools]
        if continue_final:
            return self._render_open(messages, variables)
        return self._render_adapted(messages, variables)

    def _render_open(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        last = messages[-1]
        if last.role not in ("assistant", "user") or last.tool_calls:
            problem = "only a user or assistant message without tool calls can be continued"
            hint = "end `messages` with such a message, or do not request a continuation"
            raise InvalidRequestError(problem, param="messages", hint=hint)
        mark = _MARK.format("continue")
        marked = (*messages[:-1], msgspec.structs.replace(last, content=mark))
        head, has_mark, _ = self._render_adapted(marked, variables).rpartition(mark)
        if not has_mark:
            variables = {**variables, "add_generation_prompt": True}
            head = self._render_adapted(messages[:-1], variables) if len(messages) > 1 else ""
        return head + last.content

    def _render_adapted(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """Render in the first form of `adaptations` that works. Raises InvalidRequestError."""
        first_error: Exception | None = None  # errors of later forms are about changed messages
        for turns in adaptations(messages, self.traits):
            try:
                return self.render_raw(turns, variables)
            except _TEMPLATE_FAILURES as error:
                first_error = first_error or error
        assert first_error is not None
        problem = f"the model's chat template refuses these messages: {_describe(first_error)}"
        hint = "change the roles or the order of the messages, or use another model"
        raise InvalidRequestError(problem, param="messages", hint=hint) from first_error

    def render_raw(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Render message dictionaries, with `variables` for the template.

        Raises the template's own errors, such as jinja2.TemplateError or TypeError.
        """
        if self.traits.typed_content:
            messages = [_with_typed_content(message) for message in messages]
        names = {**variables, "messages": messages, "bos_token": self.bos, "eos_token": self.eos}
        if names.get("tools") is None:
            names.pop("tools", None)  # some templates test `tools is defined`
        with limit_fuel():
            return str(self._compiled.render(names))


def _with_typed_content(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


_MARKS = {name: _MARK.format(name) for name in ("system", "user", "tool", "key", "value", "result")}
_USER = {"role": "user", "content": _MARKS["user"]}
_RESULT = {
    "role": "tool",
    "tool_call_id": "abcdefghi",
    "name": _MARKS["tool"],
    "content": _MARKS["result"],
}


def probe(template: ChatTemplate) -> TemplateTraits:
    """Find out what `template` supports by rendering small conversations."""
    source = template.source
    mark, typed_message = _MARKS["user"], _with_typed_content(_USER)
    typed_content = mark not in _render_probe(template, _USER) and mark in _render_probe(
        template, typed_message
    )
    if typed_content:
        template = replace(template, traits=TemplateTraits(typed_content=True))
    calls = _probe_calls(template)
    call = _probe_message(*calls) if calls else {"role": "assistant", "content": _MARKS["value"]}
    system = {"role": "system", "content": _MARKS["system"]}
    tool = tool_dict(Tool(name=_MARKS["tool"]))
    return TemplateTraits(
        system=_MARKS["system"] in _render_probe(template, system, _USER),
        late_system=_probe_late_system(template),
        developer=bool(re.search(r"""role[^%}]{0,40}['"]developer['"]""", source)),
        tools=_MARKS["tool"] in _render_probe(template, _USER, tools=[tool]),
        tool_calls=calls is not None,
        tool_role=_MARKS["result"] in _render_probe(template, _USER, call, _RESULT),
        string_arguments=calls is not None and calls[0],
        null_content=calls is not None and calls[1],
        typed_content=typed_content,
        tight_pictures=typed_content and _probe_tight_pictures(template),
        short_ids="length != 9" in source or "length == 9" in source,
        reasoning_key=next(
            (key for key in ("reasoning_content", "thinking", "reasoning") if _uses(source, key)), ""
        ),
    )


def _render_probe(template: ChatTemplate, *messages: dict[str, Any], tools: Any = None) -> str:
    """Render a probe; return "" if the template fails. Raises ExhaustedError, MemoryError."""
    try:
        return template.render_raw(list(messages), {"tools": tools, "add_generation_prompt": True})
    except (ExhaustedError, MemoryError):
        raise
    except _TEMPLATE_FAILURES:
        return ""


def _probe_late_system(template: ChatTemplate) -> bool:
    """Return whether a system message after others is rendered after them, not moved or dropped."""
    turns = (("user", "user"), ("assistant", "value"), ("system", "system"), ("user", "result"))
    text = _render_probe(template, *({"role": role, "content": _MARKS[mark]} for role, mark in turns))
    return -1 < text.find(_MARKS["value"]) < text.find(_MARKS["system"]) < text.find(_MARKS["result"])


def _probe_tight_pictures(template: ChatTemplate) -> bool:
    parts = [{"type": "image"}, {"type": "text", "text": _MARKS["user"]}]
    head = _render_probe(template, _USER).partition(_MARKS["user"])[0]
    pictured = _render_probe(template, {"role": "user", "content": parts})
    return head.endswith(" ") and pictured.startswith(head[:-1]) and not pictured.startswith(head)


def _uses(source: str, key: str) -> bool:
    return bool(re.search(rf"""(\.{key}\b|\[['"]{key}['"]\]|get\(['"]{key}['"])""", source))


def _probe_message(string_arguments: bool, null_content: bool) -> dict[str, Any]:
    arguments: Any = {_MARKS["key"]: _MARKS["value"]}
    function = {
        "name": _MARKS["tool"],
        "arguments": msgspec.json.encode(arguments).decode() if string_arguments else arguments,
    }
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}


def _probe_calls(template: ChatTemplate) -> tuple[bool, bool] | None:
    """Return `string_arguments` and `null_content` of `TemplateTraits`; None without tool calls.

    Content None is tried first, because DeepSeek's templates render "" as an answer; "" is used if the
    template fails for None or prints "None". A template that needs arguments as JSON text prints a
    dictionary in Python's notation, with single quotes, so the probe looks for double quotes.
    """
    for key in (f'"{_MARKS["key"]}"', _MARKS["key"]):
        for string_arguments in (False, True):
            for null_content in (True, False):
                call = _probe_message(string_arguments, null_content)
                text = _render_probe(template, _USER, call, _RESULT)
                if _MARKS["tool"] not in text or key not in text or (null_content and "None" in text):
                    continue
                if not null_content or _render_probe(template, _USER, call):
                    return string_arguments, null_content
    return None


_HELPER = "edgeinfer.runtime.chat_format.template_trial_process"
#: Limits of the process that probes a downloaded template: address space (bytes), CPU time (s) and
#: elapsed time (s).
MEMORY_BYTES = 1 << 30
CPU_S = 8
_PATIENCE_S = 60.0

_KNOWN = CacheTable("templates.json", dict[str, TemplateTraits])


class TemplateTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A template to probe, and the limits of the probing process."""

    source: str
    bos: str
    eos: str
    memory_bytes: int
    cpu_s: int


def load_untrusted(source: str, bos: str, eos: str) -> ChatTemplate:
    """Load a downloaded template, probed in a process with limits. Raises ModelLoadError."""
    named = "\0".join((edgeinfer.__version__, bos, eos, source))
    key = hashlib.sha256(named.encode("utf-8", "replace")).hexdigest()
    traits = _KNOWN.read().get(key)
    if traits is None:
        traits = _probe_in_process(
            TemplateTrial(source=source, bos=bos, eos=eos, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
        )
        if traits is not None:
            _KNOWN.put(key, traits)
    return ChatTemplate.load(source, bos, eos, traits=traits)


def _probe_in_process(trial: TemplateTrial) -> TemplateTraits | None:
    """Return the probed traits; None if no process can be started. Raises ModelLoadError."""
    failure = "the model's chat template was refused: its first rendering "
    try:
        raw = msgspec.json.encode(trial)
        out, ending = ask_child(_HELPER, content=raw, patience_s=_PATIENCE_S)
        answer = msgspec.json.decode(out, type=TemplateTraits | str)
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{failure}{ending}", hint=_OTHER_TEMPLATE) from error
    if isinstance(answer, str):
        raise ModelLoadError(answer, hint=_OTHER_TEMPLATE)
    return answer


def choose(source: str, bos: str, eos: str, *, has_chatml: bool) -> tuple[ChatTemplate, str]:
    """Return a model's chat template, and the reason for the choice. Raises ModelLoadError.

    If the model has none (`source` is empty), ChatML is chosen if `has_chatml` (the vocabulary has the
    tokens `<|im_start|>` and `<|im_end|>`), otherwise a plain transcript.
    """
    if source.strip():
        return load_untrusted(source, bos, eos), "the model's own"
    if has_chatml:
        reason = "ChatML: the model has no template, and its vocabulary has ChatML's tokens"
        return ChatTemplate.load(CHATML, bos, eos), reason
    reason = "a plain transcript: the model has no template (a base model?)"
    return ChatTemplate.load(TRANSCRIPT, bos, eos), reason
