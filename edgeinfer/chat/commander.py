"""Run `/` commands on a chat session, for any front end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from edgeinfer.chat import attachments, commands, context, formats, presets
from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.formats import code_blocks
from edgeinfer.chat.history.store import MARK, UNMARK
from edgeinfer.chat.history.values import Attachment, Turn
from edgeinfer.chat.session import ChatSession
from edgeinfer.config import config_file
from edgeinfer.config.config_file import ChatConfig
from edgeinfer.config.load_options import LOAD_OPTIONS, LORA
from edgeinfer.error_text import similar_name_hint
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.receipts.receipt import Refusal, load_key
from edgeinfer.runtime.options import parse_adapters

if TYPE_CHECKING:
    from edgeinfer.tools.loop import ChatTools

T = TypeVar("T")

#: Maximum context (tokens) that `/ctx` accepts.
_MAX_CTX = 1 << 24


class FrontEnd(Protocol):
    """The methods that commands call on a front end: the Textual screen, or the plain chat."""

    def show_text(self, text: str) -> None:
        """Show a text that the app wrote, not the model, e.g. the result of a command."""

    def show_changed(self) -> None:
        """Show the open conversation again, after a command has changed it or opened another one."""

    def show_answer(self, answer: AnswerWriter) -> None:
        """Show an answer while it is generated, until it ends."""

    def answer_edited(self, turn: Turn) -> None:
        """Show an edited question, `turn`, and generate an answer to it."""

    def put_back(self, text: str, editing: int | None = None) -> None:
        """Put `text` into the input field. `editing`: id of the question to replace, if any."""

    def attach(self, attachment: Attachment) -> None:
        """Attach a file to the next question."""

    def copy(self, text: str, label: str) -> None:
        """Copy `text` to the clipboard, or print it. `label` names the text, e.g. "the answer"."""

    def use_model(self, name: str, n_ctx: int | None = None) -> None:
        """Load the model `name` ("": the present one) with a context of `n_ctx` tokens, if given."""

    def follow_model(self) -> None:
        """Load the model of a conversation that was just opened.

        If that fails, tell the user that the previous model answers.
        """

    def pick_model(self) -> None: ...

    def pick_session(self, query: str) -> None: ...

    def show_help(self) -> None: ...

    def show_stats(self) -> None: ...

    def fold_reasoning(self) -> None: ...

    def wait_for(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call `then` with the result of `work`, which may wait for tool servers for seconds."""

    def use_theme(self, name: str) -> None: ...

    def edit_outside(self) -> None: ...

    def summarise(self, first_sent: Turn) -> None:
        """Let the model summarise the turns before `first_sent`.

        Later requests contain the summary instead of these turns.
        """

    def leave(self) -> None: ...


#: Command → name of the front end's method that runs it; `Commander` runs all other commands.
_FRONT_END_METHODS = {
    "help": "show_help",
    "sessions": "pick_session",
    "reasoning": "fold_reasoning",
    "stats": "show_stats",
    "editor": "edit_outside",
    "quit": "leave",
}


class Commander:
    """Runs `/` commands on a chat session.

    `deleted` is the id of the conversation that `/undo` can restore; None if there is none.
    """

    def __init__(
        self,
        session: ChatSession,
        front: FrontEnd,
        config: ChatConfig,
        make_tools: Callable[[], ChatTools] | None = None,
    ) -> None:
        self.session = session
        self.front = front
        self._make_tools = make_tools
        self.prompts = dict(config.system_prompts)
        own_presets: dict[str, Mapping[str, presets.Value]] = msgspec.to_builtins(config.presets)
        self.presets = presets.PRESETS | own_presets
        self.deleted: int | None = None

    def run(self, line: str) -> None:
        """Run a command line such as `/temp 0.3`. Raises EdgeInferError if the command fails."""
        typed = commands.parse(line)
        if typed.name in _FRONT_END_METHODS:
            arguments = [typed.argument] if commands.BY_NAME[typed.name].argument else []
            getattr(self.front, _FRONT_END_METHODS[typed.name])(*arguments)
        else:
            getattr(self, f"_{typed.name.replace('-', '_')}")(typed.argument)

    def _system(self, argument: str) -> None:
        if argument:
            text = "" if argument == "none" else self.prompts.get(argument, argument)
            self.session.set(system_prompt=text)
        shown = self.session.conversation.system_prompt
        none = "No system prompt is set; the model's own is used, if it has one."
        text = f"System prompt: {shown}" if shown else none
        saved = f"\nSaved: {', '.join(self.prompts)}" if self.prompts else ""
        self.front.show_text(text + saved)

    def _save_system(self, argument: str) -> None:
        text = self.session.conversation.system_prompt
        if not text:
            raise UsageError("there is no system prompt to save", hint="set one: `/system TEXT`")
        config_file.save(("chat", "system-prompts", argument), text)
        self.prompts[argument] = text
        self.front.show_text(f"Saved. `/system {argument}` uses it.")

    def _temp(self, argument: str) -> None:
        self._set(f"temperature {argument}".strip())

    def _set(self, argument: str) -> None:
        name, _, text = " ".join(argument.replace("=", " ").split()).partition(" ")
        if not text:
            self._show_sampling([presets.option(name)] if name else presets.OPTIONS)
            return
        field = presets.option(name)
        sampling = {**self.session.conversation.sampling, field: presets.value(field, text)}
        self.session.set(sampling={k: v for k, v in sampling.items() if v is not None})
        self._show_sampling([])

    def _show_sampling(self, fields: Iterable[str]) -> None:
        """Show which options are set, then the value in use and the help of each of `fields`."""
        lines = [f"Sampling: {presets.describe(self.session.conversation.sampling)}"]
        values = msgspec.structs.asdict(self.session.prompt.sampling())
        values |= self.session.conversation.sampling
        for option in map(presets.OPTIONS.__getitem__, fields):
            value = values.get(option.field)
            shown = "-" if value is None else f"{value:g}"
            lines.append(f"{option.label:<18} {shown:<6} {option.help}")
        self.front.show_text("\n".join(lines))

    def _preset(self, argument: str) -> None:
        if argument and argument not in self.presets:
            hint = similar_name_hint(argument, self.presets, f"presets: {', '.join(self.presets)}")
            raise UsageError(f"there is no preset {argument!r}", hint=hint)
        if argument:
            self.session.set(sampling=dict(self.presets[argument]))
        chosen = presets.matching(self.session.conversation.sampling, self.presets)
        marked = (("●" if name == chosen else " ", name) for name in self.presets)
        rows = (f"{mark} {name:<12} {presets.describe(self.presets[name])}" for mark, name in marked)
        self.front.show_text("\n".join(rows))

    def _theme(self, argument: str) -> None:
        if argument and argument not in (names := commands.theme_names()):
            hint = similar_name_hint(argument, names, f"themes: {', '.join(names)}")
            raise UsageError(f"there is no theme {argument!r}", hint=hint)
        self.front.use_theme(argument)

    def _ctx(self, argument: str) -> None:
        engine = self.session.engine
        if argument.isdecimal() and int(argument) <= _MAX_CTX:
            self.front.use_model("", int(argument))
        elif argument:
            message = f"a context is a number of tokens up to {_MAX_CTX:,}, e.g. /ctx 4096"
            raise UsageError(message, hint="`/ctx 0` chooses the longest that fits into memory")
        else:
            size = f"Context: {engine.info.n_ctx} tokens" if engine else "The model is not loaded yet."
            self.front.show_text(size)

    def _model(self, argument: str) -> None:
        if argument:
            self.front.use_model(argument)
        else:
            self.front.pick_model()

    def _lora(self, argument: str) -> None:
        engine = self.session.idle_engine()
        if argument:
            try:
                adapters = parse_adapters(str(LORA.parse(",".join(argument.split()))))
            except ValueError as error:
                raise UsageError(str(error), hint="e.g. `/lora red:0.5` or `/lora none`") from None
            engine.use_adapters(adapters)
        names = [f"{adapter.name} at {adapter.scale:g}" for adapter in engine.info.lora]
        self.front.show_text(f"Adapters: {', '.join(names) or 'none'}")

    def _file(self, argument: str) -> None:
        self.front.attach(attachments.read(Path(argument.removeprefix("@").strip('"')).expanduser()))

    def _copy(self, argument: str) -> None:
        if not re.fullmatch(r"|all|code( \d+)?", argument):
            problem = f"/copy cannot copy {argument!r}"
            raise UsageError(problem, hint="type `/copy`, `/copy code`, `/copy code 2` or `/copy all`")
        answer = self._last_answer()
        if argument == "all":
            text = formats.to_markdown(self.session.conversation, self.session.path)
            self.front.copy(text, "the conversation")
            return
        if not argument:
            self.front.copy(answer.content, "the answer")
            return
        blocks = code_blocks(answer.content)
        if not blocks:
            raise UsageError("the last answer contains no code", hint="`/copy` copies the answer")
        index = int(argument.removeprefix("code") or len(blocks))
        if not 1 <= index <= len(blocks):
            problem = f"there is no code block {index}"
            raise UsageError(problem, hint=f"the last answer contains {len(blocks)} of them")
        self.front.copy(blocks[index - 1].text, f"code block {index}")

    def _last_answer(self) -> Turn:
        answers = [t for t in self.session.path if t.role == "assistant" and t.content]
        if not answers:
            raise UsageError("there is no answer yet", hint="ask something first")
        return answers[-1]

    def _tools(self, argument: str) -> None:
        tools = self.session.tools
        if argument == "off":
            self.session.refuse_busy()
            if tools is not None:
                self.session.tools = None
                tools.close()
            self.front.show_text("The model has no tools.")
        elif argument in ("on", "check"):
            self.session.refuse_busy()
            if tools is None and self._make_tools is not None:
                tools = self._make_tools()
            if tools is not None:
                self._use_tools(tools, refresh=argument == "check")
        elif argument:
            problem = f"/tools has no option {argument!r}"
            raise UsageError(problem, hint="type `/tools on`, `/tools off` or `/tools check`")
        else:
            no_tools = "The model has no tools. `/tools on` offers those of config.toml."
            self.front.show_text(tools.describe() if tools is not None else no_tools)

    def _use_tools(self, tools: ChatTools, *, refresh: bool) -> None:
        def offer(said: list[str]) -> None:
            self.session.tools = tools
            self.front.show_text("\n".join([tools.describe(), *said]))

        self.front.wait_for(lambda: tools.prepare(refresh=refresh), offer)

    def _new(self, _: str) -> None:
        self.session.new()
        self.front.show_changed()
        sampling, prompt = self.session.conversation.sampling, self.session.conversation.system_prompt
        options = [f"{presets.describe(sampling)} (`/preset model` resets)"] if sampling else []
        options += ["the system prompt (`/system none` removes it)"] if prompt else []
        if options:
            self.front.show_text(f"Still set: {' and '.join(options)}.")

    def _open(self, argument: str) -> None:
        if not argument.isdecimal():
            problem = f"{argument!r} is not a conversation's number"
            raise UsageError(problem, hint="`/sessions` lists the numbers")
        self._show_stored(int(argument))

    def _show_stored(self, conversation_id: int) -> None:
        self.session.open(conversation_id)
        self.front.follow_model()
        self.front.show_changed()

    def _save(self, argument: str) -> None:
        if argument:
            self.session.set(title=" ".join(argument.split()))
        conversation = self.session.conversation
        if not (conversation.id or conversation.title):
            raise _not_stored_error()
        stored = f"Stored as “{conversation.title or 'untitled'}”."
        later = f"“{conversation.title}” is stored when you ask a question."
        self.front.show_text(stored if conversation.id else later)

    def _delete(self, _: str) -> None:
        self.delete(self.session.conversation.id)
        self.front.show_text("Deleted. `/undo` restores it.")

    def delete(self, conversation_id: int) -> None:
        """Delete a stored conversation; if it was open, begin a new one. Raises EdgeInferError."""
        if not conversation_id:
            raise _not_stored_error()
        self.session.store.delete(conversation_id)
        self.deleted = conversation_id
        if conversation_id == self.session.conversation.id:
            self.session.new()
            self.front.show_changed()

    def _undo(self, _: str) -> None:
        self._show_stored(self.undelete())

    def undelete(self) -> int:
        """Restore the conversation deleted last; return its id. Raises UsageError if there is none."""
        if self.deleted is None:
            problem = "this chat has deleted no conversation that can be restored"
            raise UsageError(problem, hint="`/sessions` lists the stored conversations")
        conversation_id = self.deleted
        self.session.store.undelete(conversation_id)
        self.deleted = None
        return conversation_id

    def _export(self, argument: str) -> None:
        conversation = self.session.conversation
        if not self.session.path:
            raise UsageError("there is nothing to export yet", hint="ask something first")
        path = Path(argument) if argument else Path(formats.file_name(conversation, ".md"))
        as_json = path.suffix.lower() == ".json"
        text = formats.to_json(conversation, self.session.all_turns()) if as_json else ""
        written = formats.write(path, text or formats.to_markdown(conversation, self.session.path))
        self.front.show_text(f"Written to {written}")

    def _receipt(self, argument: str) -> None:
        answer = self.session.answer
        if answer is None:
            problem = "no answer was generated since this conversation was opened"
            raise UsageError(problem, hint="ask something, or answer again: `/regen`")
        receipt = answer.receipt(load_key(config_file.load_config().receipts.key))
        if isinstance(receipt, Refusal):
            hint = "ask again in a new chat (`/new`) without pictures, or with another model (`/model`)"
            raise UsageError(f"no receipt: {receipt.refused}", hint=hint)
        if argument.startswith("-"):
            raise UsageError(
                f"/receipt takes no option: {argument}", hint="type `/receipt` or `/receipt FILE.json`"
            )
        path = Path(argument or formats.file_name(self.session.conversation, ".receipt.json"))
        written = formats.write(path, msgspec.json.encode(receipt).decode())
        command = f"edgeinfer verify {shlex.quote(str(written))}"
        self.front.show_text(f"Receipt written to {written}. Check it: `{command}`")

    def _regen(self, _: str) -> None:
        self.front.show_answer(self.session.regenerate())

    def _continue(self, _: str) -> None:
        self.front.show_answer(self.session.continue_answer())

    def _next(self, _: str) -> None:
        self._show_alternative(1)

    def _prev(self, _: str) -> None:
        self._show_alternative(-1)

    def _show_alternative(self, step: int) -> None:
        for turn in reversed(self.session.path):
            if self.session.alternatives(turn.id)[1] > 1:
                if self.session.show_alternative(turn.id, step):
                    self.front.show_changed()
                else:
                    position = "last" if step > 0 else "first"
                    self.front.show_text(f"That is the {position} alternative.")
                return
        raise UsageError("no answer of this conversation has an alternative", hint="`/regen` makes one")

    def _edit(self, argument: str) -> None:
        questions = [t for t in self.session.path if t.role == "user"]
        if not questions:
            raise UsageError("there is no question to edit", hint="ask something first")
        if argument:
            self.front.answer_edited(self.session.edit(questions[-1].id, argument))
        else:
            self.front.put_back(questions[-1].content, editing=questions[-1].id)

    def _fork(self, _: str) -> None:
        self.session.fork()
        self.front.show_changed()
        self.front.show_text("This is a copy; the first conversation is unchanged.")

    def _drop(self, _: str) -> None:
        turn = context.first_kept(self.session, self.session.idle_engine())
        self.session.drop_turns_before(turn.id, "")
        self.front.show_changed()

    def _summarise(self, _: str) -> None:
        self.front.summarise(context.first_kept(self.session, self.session.idle_engine()))


def _not_stored_error() -> UsageError:
    return UsageError("this conversation is not stored yet", hint="ask a question first")


def other_model_text(error: EdgeInferError, answering: str) -> str:
    """Return a text for the user: why a conversation's model was not loaded, and which model answers.

    `answering` is the name of that other model.
    """
    return f"{error.message}. {answering} answers in this conversation; `/model` picks another"


def sessions_text(session: ChatSession, query: str) -> str:
    """Return a list of the conversations that match `query` (all for ""), each with its number."""
    summaries = session.store.search(query, 20)
    if not summaries:
        return "No conversation contains these words." if query else "No conversations yet."
    clean = str.maketrans("", "", MARK + UNMARK)
    lines: list[str] = []
    for s in summaries:
        lines.append(f"{s.id:>5}  {s.length:>13}  {s.title}")
        lines += [f"       {s.snippet.translate(clean)}"] if s.snippet else []
    return "\n".join([*lines, "Open one: /open NUMBER"])


def stats_text(session: ChatSession, started: str) -> str:
    """Return a table about the last answer and this process: model, start, context, speed.

    `started` says how the model was loaded, e.g. `resumed in 84 ms`.
    """
    engine = session.engine
    stats = session.last_stats(session.model)
    rows = [("model", session.model), ("started", started)]
    if engine is not None:
        used = stats.context_tokens if stats else 0
        rows.append(("context", f"{used:,} of {engine.info.n_ctx:,} tokens"))
    if stats:
        rows += [
            ("prompt", f"{stats.prompt_tokens:,} tokens, {stats.cached_tokens:,} cached"),
            ("first token", f"{stats.ttft_ms:,.0f} ms"),
            ("speed", f"{stats.tokens_per_s:.1f} tokens/s over {stats.completion_tokens:,} tokens"),
            *([("cost", stats.cost)] if stats.cost else []),
        ]
    last = session.answer.cache_report if session.answer is not None else None
    if last is not None and last.divergence.cause != "off":
        rows.append(("prefix", last.summary))
    rows.append(("sampling", presets.describe(session.conversation.sampling)))
    if engine is not None:
        chosen = engine.info.choices
        shown = (option for option in LOAD_OPTIONS if option.flag and option.field in chosen)
        rows += [(option.flag, str(chosen[option.field].value)) for option in shown]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
