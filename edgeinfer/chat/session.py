"""The open conversation of a chat, without a screen: its turns and branches, and new answers.

The Textual app, the plain chat and the web page use this module. A question is stored before the engine
is asked; an answer is stored as a turn while it is generated, a failed answer with its error.

The front end passes each event of `answer.generation` to `answer.add`, and shows the text that
`answer.flush` returns, which is stored by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.attachments import merge
from edgeinfer.chat.history.lease import Lease
from edgeinfer.chat.history.store import ConversationStore, memory_store, other_writer_error
from edgeinfer.chat.history.values import (
    CONTINUABLE,
    Attachment,
    Conversation,
    Stats,
    Turn,
    branch_to,
    newest_leaf,
    siblings,
)
from edgeinfer.chat.requests import PromptContext, rounds_of
from edgeinfer.errors import EdgeInferError, EngineClosedError, StoreError, UsageError
from edgeinfer.receipts.receipt import with_record
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.tools.tool_use import Stop, ToolUse

if TYPE_CHECKING:
    from edgeinfer.tools.loop import CallFrontEnd, ChatTools

_TITLE_CELLS = 60
#: A submitted answer: its turn, its request and its generation.
_Submitted = tuple[Turn, GenerateRequest, Generation]
#: Offset (bytes) in the lock file. The byte at this offset plus a conversation's id locks the draft of
#: the conversation; the byte at the id itself locks the conversation.
_DRAFTS = 1 << 40


class ChatSession:
    """Holds the open conversation, changes its turns, and starts answers.

    `loaded_model` is the name of the model in `engine`, "" without an engine. `answer` is the latest
    answer in this conversation since it was opened, None before the first. `unstored` tells the user
    why conversations are not stored in the file; "" if they are.
    """

    def __init__(
        self, open_store: Callable[[], ConversationStore], model: str = "", engine: Engine | None = None
    ) -> None:
        self._open_store = open_store
        self.engine = engine
        self.loaded_model = model if engine is not None else ""
        self.answer: AnswerWriter | None = None
        self.tools: ChatTools | None = None
        self.unstored = ""
        #: Whether this session is a chat window, which locks the draft of its open conversation.
        self.is_window = False
        self._draft_lease, self._draft_of = Lease(), 0
        self.conversation = Conversation(model=model)
        self._turns: dict[int, Turn] = {}
        self._seen: object = None
        self._journal_id = 0
        self._calls_leases: dict[int, Lease] = {}

    @cached_property
    def store(self) -> ConversationStore:
        """Store of the conversations, opened on first use; in memory if the file cannot be opened."""
        try:
            return self._open_store()
        except StoreError as error:
            self.unstored = f"{error.message}. This chat is not stored."
            return memory_store()

    @property
    def path(self) -> list[Turn]:
        return branch_to(self._turns, self.conversation.head_id)

    @property
    def head(self) -> Turn | None:
        return self._turns.get(self.conversation.head_id or 0)

    @property
    def question(self) -> Turn | None:
        """Last question of the open branch, None if there is none."""
        return next((turn for turn in reversed(self.path) if turn.role == "user"), None)

    def last_stats(self, model: str) -> Stats | None:
        """Return the statistics of the branch's last answer; None if `model` did not generate it."""
        answers = [t for t in self.path if t.role == "assistant" and t.stats.completion_tokens]
        return answers[-1].stats if answers and answers[-1].model == model else None

    @property
    def retries_after_shortening(self) -> bool:
        """Return whether the last answer failed before its first token, and turns were dropped since.

        If so, the front end answers the last question again, with the shorter prompt.
        """
        failed = self.head is not None and self.head.failed_without_text
        return failed and any(t.cut_summary is not None for t in self.path)

    @property
    def is_answering(self) -> bool:
        """Return whether this session is generating an answer or running its tool calls."""
        if self.tools is not None and self.tools.running is not None:
            return True
        return self.answer is not None and self.answer.done is None

    @property
    def answer_elsewhere(self) -> Turn | None:
        """Unfinished answer that another process was writing at the last `refresh`; otherwise None."""
        head = self.head
        is_streaming = head is not None and head.status == "streaming"
        return head if is_streaming and not self.is_answering else None

    @property
    def busy(self) -> bool:
        """Return whether this or another process is writing an answer to this conversation."""
        return self.is_answering or self.answer_elsewhere is not None

    def refuse_busy(self) -> None:
        """Raise UsageError if this or another process is writing an answer."""
        if self.is_answering:
            raise UsageError("an answer is being written", hint="Esc stops the answer")
        owner = self.conversation.id
        if self.answer_elsewhere is not None or (owner and self.store.is_answering(owner)):
            raise other_writer_error()

    @property
    def model(self) -> str:
        """Name of the model that answers: the loaded one, otherwise the conversation's."""
        return self.loaded_model or self.conversation.model

    def use_engine(self, engine: Engine | None, model: str) -> None:
        """Let `engine`, which has loaded `model`, answer from now on.

        `engine` is None while a model is being loaded.
        """
        self.engine, self.loaded_model = engine, model if engine is not None else ""

    def all_turns(self) -> list[Turn]:
        """Return all turns of all branches in the order of their ids, for a JSON export."""
        return [self._turns[key] for key in sorted(self._turns)]

    def turn(self, turn_id: int) -> Turn:
        """Return a turn. Raises UsageError if this conversation has no such turn."""
        try:
            return self._turns[turn_id]
        except KeyError:
            hint = "open the conversation again"
            problem = f"this conversation has no question or answer with the id {turn_id}"
            raise UsageError(problem, hint=hint) from None

    def new(self) -> None:
        """Begin a conversation with the model, system prompt and sampling options of the open one.

        Stops the running answer. The new conversation is stored with its first question.
        """
        old = self.conversation
        self._stop_all()
        self.conversation = Conversation(
            model=self.model, system_prompt=old.system_prompt, sampling=old.sampling
        )
        self._turns = {}

    def open(self, conversation_id: int) -> None:
        """Stop the running answer, and open a stored conversation.

        Raises StoreError if there is no conversation with this id.
        """
        conversation = self.store.conversation(conversation_id)
        turns = self.store.turns(conversation_id)
        self._stop_all()
        self.conversation, self._turns = conversation, turns
        self._hold()

    def refresh(self) -> bool:
        """Read the conversation again if another process wrote to it; return whether anything changed.

        Takes 0.05 ms if nothing was written. A deleted conversation is replaced by a new one. Raises
        StoreError.
        """
        before = self.conversation
        if not before.id or self.is_answering:
            return False
        seen = before.id, self.store.conversation_version(before.id)
        if seen == self._seen:
            return False
        self._seen = seen
        if seen[1] is None:
            self.new()
            return True
        with self.store.reading():
            stored, turns = self.store.conversation(before.id), self.store.turns(before.id)
            rows = self.store.pieces(stored.head_id or 0, 0)
        stored = msgspec.structs.replace(stored, draft=before.draft, updated_ms=before.updated_ms)
        is_new = (stored, turns) != (before, self._turns)
        self.conversation, self._turns = stored, turns
        self._journal_id = rows[-1][0] if rows else 0
        return is_new

    def follow(self) -> CollectedAnswer:
        """Return the text that another process has added to its answer since the last call.

        Raises StoreError.
        """
        turn = self.answer_elsewhere
        rows = self.store.pieces(turn.id, self._journal_id) if turn is not None else ()
        new = CollectedAnswer("".join(row[1] for row in rows), "".join(row[2] for row in rows))
        if turn is not None and rows:
            self._journal_id = rows[-1][0]
            content, reasoning = turn.content + new.text, turn.reasoning + new.reasoning
            grown = msgspec.structs.replace(turn, content=content, reasoning=reasoning)
            self._turns[turn.id] = grown
        return new

    def owns_draft(self) -> bool:
        """Return whether this chat window may store the draft, i.e. the conversation's unsent text.

        Of all windows, only the first that opens the conversation may: the call locks the draft.
        """
        owner = self.conversation.id
        if owner != self._draft_of:
            self.release_draft()
            if owner:
                try:
                    self._draft_lease = self.store.acquire(_DRAFTS + owner)
                    self._draft_of = owner
                except UsageError:
                    return False
                except StoreError:  # without a lock file, no other window stores the draft
                    return True
        return True

    def _hold(self) -> None:
        if self.is_window:
            self.owns_draft()

    def release_draft(self) -> None:
        """Unlock the draft, so that another window may store one. Idempotent."""
        self._draft_lease.release()
        self._draft_of = 0

    def open_last(self, model: str = "") -> str:
        """Open the newest conversation that no other window has open, or begin a new one.

        `model`, unless "", becomes the model of the opened conversation. Returns "" if the newest
        conversation of all was opened, otherwise a note for the user.
        """
        conversations = self.store.listing()
        for n_skipped, conversation in enumerate(conversations):
            self.open(conversation.id)
            if self.owns_draft():
                if model:
                    self.set(model=model)
                return "The last conversation is open in another window." if n_skipped else ""
        if not conversations:
            return "There is no conversation yet to continue."
        self.new()
        return "Every conversation is open in another window."

    def set(self, **fields: Any) -> None:
        """Set fields of the conversation, e.g. `title`; store them if the conversation is stored."""
        self.conversation = msgspec.structs.replace(self.conversation, **fields)
        if self.conversation.id:
            self.store.update(self.conversation.id, **fields)

    def ask(self, text: str, attachments: Sequence[Attachment] = ()) -> Turn:
        """Store a question at the end of the branch, and return its turn.

        If the last question has no answer, the new question becomes an alternative to it. Raises
        UsageError for an empty question or while an answer is being written, and StoreError.
        """
        return self._add_user(text, attachments, self._parent_of_next())

    def _parent_of_next(self) -> int | None:
        """Return the id of the last answer, which the next question follows; None if there is none."""
        head = self.head
        if head is not None and head.failed_without_text:
            head = self._turns.get(head.parent_id or 0)
        if head is not None and head.role == "user":
            return head.parent_id
        return head.id if head else None

    def edit(self, turn_id: int, text: str, attachments: Sequence[Attachment] = ()) -> Turn:
        """Store an edited question as an alternative to the question `turn_id`, and return its turn.

        The old attachments stay, unless new ones have the same name. Raises the errors of `ask`.
        """
        turn = self.turn(turn_id)
        if turn.role != "user":
            raise UsageError("only a question can be edited", hint="`/regen` answers again")
        return self._add_user(text, merge(turn.attachments, attachments), turn.parent_id)

    def begin_answer(self) -> AnswerWriter:
        """Submit the branch to the engine; return the answer, to which the front end adds the events.

        Raises UsageError if there is no question, or an answer is being written; EngineClosedError if
        no model is loaded; StoreError; and the errors of `Engine.submit`, after which the conversation
        has a failed answer.
        """
        head = self.head
        if head is None or (head.role != "user" and not head.calls):
            raise UsageError("there is no question to answer", hint="type a question")
        return self._begin(lambda engine: self._submit(engine, head.id))

    def regenerate(self) -> AnswerWriter:
        """Answer the last question again; earlier answers stay as alternatives.

        The result and the errors are those of `begin_answer`.
        """
        question = self.question
        if question is None:
            raise UsageError("there is no answer to regenerate", hint="ask something first")
        return self._begin(lambda engine: self._submit(engine, question.id))

    def continue_answer(self) -> AnswerWriter:
        """Let the model continue the last answer. Raises UsageError if that answer was not cut off.

        The result and the other errors are those of `begin_answer`.
        """
        head = self.head
        is_cut = head is not None and head.role == "assistant" and head.status in CONTINUABLE
        if head is None or not (is_cut and head.content):
            raise UsageError("the last answer was not cut off", hint="`/regen` answers again")

        def submit(engine: Engine) -> _Submitted:
            request = with_record(self.prompt.request(self.path, continue_final=True))
            generation = engine.submit(request)
            self.store.reopen(head.id)
            turn = msgspec.structs.replace(head, status="streaming", error="", model=self.model)
            return turn, request, generation

        return self._begin(submit)

    @property
    def calls(self) -> Turn | None:
        """Last answer if it has tool calls without results, otherwise None."""
        head = self.head
        return head if self.tools is not None and head is not None and head.waits_for_results else None

    @property
    def _approved_in(self) -> tuple[int, int]:
        # the permissions to call tools belong to this pair. The id would not suffice: a new database
        # begins with id 1 again, and the permissions given in the old one must not apply
        return self.conversation.id, self.conversation.created_ms

    def start_calls(self, turn: Turn, front: CallFrontEnd) -> Callable[[], tuple[ToolUse, ...]]:
        """Lock the conversation; return a function that runs the tool calls of `turn` in any thread.

        `front` asks the user for approval. The caller passes the function's result to `note_calls`,
        which unlocks the conversation. Raises UsageError if another process has locked the
        conversation, StoreError if the lock file cannot be opened.
        """
        tools = self.tools
        assert tools is not None
        self._calls_leases[turn.id] = self.store.acquire(turn.conversation_id)
        past = rounds_of(self.path)[:-1]
        return tools.start(turn.calls, front, past=past, conversation=self._approved_in)

    def run_calls(self, turn: Turn, front: CallFrontEnd, stop: Stop) -> bool:
        """Run the tool calls of `turn`, and store results; return whether the model should continue.

        `front` asks the user for approval. The conversation is locked during the calls. Raises
        UsageError if another process has locked the conversation.
        """
        assert self.tools is not None
        past, owner = rounds_of(self.path)[:-1], turn.conversation_id
        lease = self.store.acquire(owner)
        try:
            calls = self.tools.run(turn.calls, front, stop, past=past, conversation=self._approved_in)
            return self.note_calls(turn, calls) and not stop.is_set
        finally:
            lease.release()

    def note_calls(self, turn: Turn, calls: tuple[ToolUse, ...]) -> bool:
        """Store the results of a turn's tool calls; return whether the model should continue.

        Returns False if the user stopped a call, or has opened another branch. Raises StoreError.
        """
        try:
            self.store.update_turn(turn.id, calls=calls)
        finally:
            self._calls_leases.pop(turn.id, Lease()).release()
        self._replace(msgspec.structs.replace(turn, calls=calls))
        is_here = self.conversation.head_id == turn.id
        return is_here and all(use.status != "stopped" for use in calls)

    def _begin(self, submit: Callable[[Engine], _Submitted]) -> AnswerWriter:
        """Lock the conversation and submit a request; the lock is released when the answer ends."""
        engine = self.idle_engine()
        lease = self.store.acquire(self.conversation.id)
        try:
            if self.conversation.model != self.model:
                self.set(model=self.model)
            turn, request, generation = submit(engine)
        except BaseException:
            lease.release()
            raise
        self._turns[turn.id] = turn

        def on_end(done: Turn) -> None:
            lease.release()
            self._replace(done)

        self.answer = AnswerWriter(self.store, turn, request, generation, engine.info, on_end)
        return self.answer

    def _submit(self, engine: Engine, question_id: int) -> _Submitted:
        blank = Turn(
            conversation_id=self.conversation.id,
            parent_id=question_id,
            role="assistant",
            model=self.model,
            status="streaming",
        )
        try:
            request = with_record(self.prompt.request(branch_to(self._turns, question_id)))
            generation = engine.submit(request)
        except EdgeInferError as error:
            failed = msgspec.structs.replace(blank, status="failed", error=error.message)
            self._append(self.store.add(failed))
            raise
        try:
            stored = self._append(self.store.add(blank))
        except EdgeInferError:
            generation.cancel()
            raise
        return stored, request, generation

    def _replace(self, turn: Turn) -> None:
        if turn.conversation_id == self.conversation.id:
            self._turns[turn.id] = turn

    def idle_engine(self) -> Engine:
        """Return the engine. Raises UsageError during an answer, EngineClosedError if there is none."""
        self.refuse_busy()
        if self.engine is None:
            raise EngineClosedError("the model is not loaded", hint="wait, or choose one: `/model`")
        return self.engine

    def _add_user(self, text: str, attachments: Sequence[Attachment], parent_id: int | None) -> Turn:
        if not text.strip() and not attachments:
            raise UsageError("the question is empty", hint="type a question, or attach a file")
        self.refuse_busy()
        if not self.conversation.id:
            title = self.conversation.title or title_of(text or attachments[0].name)
            blank = msgspec.structs.replace(self.conversation, title=title, draft="")
            self.conversation = self.store.create(blank)
            self._hold()
        turn = Turn(
            conversation_id=self.conversation.id,
            parent_id=parent_id,
            content=text,
            attachments=tuple(attachments),
        )
        return self._append(self.store.add(turn))

    def _append(self, turn: Turn) -> Turn:
        self._turns[turn.id] = turn
        self.conversation = msgspec.structs.replace(self.conversation, head_id=turn.id)
        return turn

    def _stop_all(self) -> None:
        if self.answer is not None and self.answer.done is None:
            self.answer.abandon()
        if self.tools is not None:
            self.tools.stop()
        self.answer = None
        self.release_draft()

    def alternatives(self, turn_id: int) -> tuple[int, int]:
        """Return a turn's number (from 1) among its alternatives, and how many there are: (2, 3)."""
        ids = [t.id for t in siblings(self._turns, turn_id)]
        return ids.index(turn_id) + 1, len(ids)

    def show_alternative(self, turn_id: int, step: int) -> bool:
        """Show the next (1) or previous (-1) alternative of a turn; return False if there is none."""
        ids = [t.id for t in siblings(self._turns, turn_id)]
        index = ids.index(turn_id) + step
        if not 0 <= index < len(ids):
            return False
        self.back_to(newest_leaf(self._turns, ids[index]))
        return True

    def back_to(self, turn_id: int | None) -> None:
        """End the shown branch at a turn (None: before the first turn). Later turns stay stored."""
        self.store.update(self.conversation.id, head_id=turn_id)
        self.conversation = msgspec.structs.replace(self.conversation, head_id=turn_id)

    def fork(self) -> None:
        """Copy the open branch into a new conversation, and open that. Raises UsageError if empty."""
        turns = self.path
        if not turns:
            raise UsageError("there is nothing to fork yet", hint="ask something first")
        self._stop_all()
        title = f"{self.conversation.title} (fork)"
        fork = msgspec.structs.replace(self.conversation, title=title, head_id=None, draft="")
        self.conversation = self.store.create(fork)
        self._hold()
        self._turns = {}
        parent: int | None = None
        for turn in turns:
            copy = msgspec.structs.replace(turn, conversation_id=self.conversation.id, parent_id=parent)
            parent = self._append(self.store.add(copy)).id

    def drop_turns_before(self, turn_id: int, summary: str) -> None:
        """Stop sending the turns before `turn_id` to the model; send `summary` instead, if any."""
        self.store.update_turn(turn_id, cut_summary=summary)
        self._turns[turn_id] = msgspec.structs.replace(self.turn(turn_id), cut_summary=summary)

    @property
    def prompt(self) -> PromptContext:
        """Conversation, engine and tools from which requests are built."""
        return PromptContext(self.conversation, self.engine, self.tools)

    def request_if_sent(
        self, text: str, attachments: Sequence[Attachment] = (), editing: int | None = None
    ) -> GenerateRequest | None:
        """Return the request that sending `text` would cause; None if nothing would be sent.

        `editing`: id of the question that the text would replace.
        """
        edited = self._turns.get(editing) if editing is not None else None
        parent_id = self._parent_of_next()
        if edited is not None:
            parent_id = edited.parent_id
            attachments = merge(edited.attachments, attachments)
        turns = branch_to(self._turns, parent_id)
        if text or attachments:
            turns.append(Turn(content=text, attachments=tuple(attachments)))
        return self.prompt.request(turns) if turns else None


def title_of(text: str) -> str:
    """Return the title of a conversation: the first line of its first question, cut off at a word."""
    line = " ".join(text.strip().splitlines()[0].split()) if text.strip() else ""
    if len(line) <= _TITLE_CELLS:
        return line
    start = line[:_TITLE_CELLS].rpartition(" ")[0].rstrip(",.;:")
    return f"{start}…" if start else line[:_TITLE_CELLS]
