"""Change and answer the user's stored conversations, and send their changes to open chat pages.

An answer is not sent to a page directly, but written to the conversation store (SQLite). The event
stream of each page polls the store. Therefore a page also shows answers that the terminal chat
writes, and nothing is lost if the page is reloaded or the endpoint is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edgeinfer.chat.answer import AnswerWriter
from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Conversation
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import EdgeInferError, EngineClosedError
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import sse
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.model_pool import Lease
from edgeinfer.server.problems import Problem
from edgeinfer.server.web.render import GrowingHtml, render_turn
from edgeinfer.tools.approval import Decision
from edgeinfer.tools.tool_use import Stop, ToolUse

if TYPE_CHECKING:
    from edgeinfer.tools.loop import Card, ChatTools

T = TypeVar("T")
Begin = Callable[[ChatSession], AnswerWriter]
#: Interval (s) at which the conversation store is polled for changes. Polling an unchanged store takes
#: 0.1 ms.
_POLL_S = 0.05
#: Maximum number of answers that are generated at once for the page.
_MAX_ANSWERS = 16
#: Maximum time (s) that a request of the page waits for its answer to begin. If loading the model takes
#: longer, the answer begins after the request has ended.
_BEGIN_S = 1.0
#: How long (s) a tool call waits for the user's permission while no page is open.
UNSEEN_S = 600.0
_CARDS = itertools.count(1)


class _ShownCard:
    """A tool call for which pages ask the user's permission, with a queue for the user's decision."""

    def __init__(self, card: Card, folder: str) -> None:
        self.plain: dict[str, object] = {**card.page_fields(), "folder": folder, "number": next(_CARDS)}
        self.decided: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        self.is_decided = False


class RunningAnswer:
    """The latest answer of a conversation, while and after it is generated. Thread-safe.

    A RunningAnswer also has texts for the user (why the answer waits or has failed, what happened to
    tool servers), and the tool call that waits for the user's permission.
    """

    def __init__(self, conversation_id: int = 0, *, is_running: bool = True) -> None:
        #: Id of the conversation; 0 until a new conversation is stored.
        self.conversation_id = conversation_id
        self.is_running = is_running
        self.answer: AnswerWriter | None = None
        self.tools: ChatTools | None = None
        self.stop = Stop()
        #: Why the answer waits or has failed, as text for the user.
        self.notice = ""
        #: Texts for the user about tool servers that changed or failed.
        self.tool_notices: tuple[str, ...] = ()
        #: time.monotonic() at which a page last polled for changes.
        self.seen = time.monotonic()
        self._call_notes: dict[str, str] = {}
        self._shown: _ShownCard | None = None

    def decide(self, card: Card) -> Decision:
        """Ask the user in every page whether the tool call on `card` may run; wait for the decision.

        The decision is "no" if the answer is stopped, or if no page has been open for `UNSEEN_S`.
        """
        card_shown = _ShownCard(card, "" if self.tools is None else str(self.tools.toolbox.folder))

        def refuse() -> None:
            card_shown.decided.put(Decision("no", "stopped"))

        self._call_notes = {**self._call_notes, card.id: "waits for your decision"}
        self._shown = card_shown
        try:
            with self.stop.calling(refuse):
                while time.monotonic() - self.seen < UNSEEN_S:
                    with contextlib.suppress(queue.Empty):
                        return card_shown.decided.get(timeout=min(1.0, UNSEEN_S))
            return Decision("no", "no page was open to allow the call")
        finally:
            self._shown = None

    def show_use(self, use: ToolUse, text: str) -> None:
        self._call_notes = {**self._call_notes, use.id: text or use.status}

    def take(self, number: int, decision: Decision) -> None:
        """Set the user's decision on the tool call that the pages show with the number `number`.

        Raises Problem 409 if the call no longer waits for a decision.
        """
        shown = self._shown  # read only once, because the thread in `decide` may replace `_shown`
        if shown is None or shown.is_decided or shown.plain["number"] != number:
            raise Problem(409, "This tool call no longer waits for permission.", code="not_waiting")
        shown.is_decided = True
        shown.decided.put(decision)

    def cancel(self) -> None:
        """Stop generating the answer and running its tool calls."""
        self.stop.set()
        if self.answer is not None:
            self.answer.stop()

    def calls(self) -> dict[str, object]:
        """Return the data of the event `calls`, which tells the pages about the answer's tool calls.

        The data are the call that waits for permission, the state of each call, and texts about tool
        servers.
        """
        shown = self._shown
        card = None if shown is None or shown.is_decided else shown.plain
        return {"card": card, "words": self._call_notes, "said": self.tool_notices}


_NOTHING_RUNS = RunningAnswer(is_running=False)


class Conversations:
    """Serves the conversations of the user who runs the endpoint. Use it on the event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._reader = ThreadPoolExecutor(1, "conversations")
        self._writers = ThreadPoolExecutor(_MAX_ANSWERS, "answers")
        #: Runs tool calls, one thread for each, because a call may wait for the user's permission.
        self._callers = ThreadPoolExecutor(endpoint.limits.max_requests, "page calls")
        self._store: ConversationStore | None = None
        self._answers: dict[int, RunningAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def report(self, error: Exception) -> None:
        """Log an unexpected exception that affects only one turn, e.g. an error in rendering."""
        self._endpoint.log.error("internal", error)

    def latest_answer(self, conversation_id: int) -> RunningAnswer:
        """Return the latest answer that this process has generated in a conversation, or is generating.

        If there is none, return a RunningAnswer that has ended and has no text.
        """
        return self._answers.get(conversation_id, _NOTHING_RUNS)

    async def use(self, work: Callable[[ConversationStore], T]) -> T:
        """Run `work(store)` in the store's thread. Raises what `work` and opening the store raise."""

        def working() -> T:
            self._store = self._store or ConversationStore.open()
            return work(self._store)

        return await asyncio.get_running_loop().run_in_executor(self._reader, working)

    async def change(self, conversation_id: int, work: Callable[[ChatSession], T]) -> T:
        """Run `work(session)` with a conversation open (id 0: a new one), and return its result.

        Raises what `work` raises, and Problem 404 if there is no such conversation.
        """

        def changing(store: ConversationStore) -> T:
            session = ChatSession(lambda: store)
            if conversation_id:
                if store.conversation_version(conversation_id) is None:
                    raise no_conversation()
                session.open(conversation_id)
            return work(session)

        return await self.use(changing)

    async def answer(
        self,
        context: RequestContext,
        conversation_id: int,
        update_session: Callable[[ChatSession], object],
        begin: Begin,
    ) -> int:
        """Change a conversation and begin an answer, which continues after the request ends.

        `update_session` stores the question, or applies settings before an answer is generated again.
        Then `begin` begins the answer. Return the conversation's id. Raises Problem 409 if another
        answer in the conversation is being generated, 503 or 429 if too many requests are running, and
        what `update_session` raises.
        """
        if self.latest_answer(conversation_id).is_running:
            raise _busy_problem()
        running = RunningAnswer(conversation_id)
        if conversation_id:
            self._answers[conversation_id] = running

        def update_if_idle(session: ChatSession) -> Conversation:
            if conversation_id and session.store.is_answering(conversation_id):
                raise _busy_problem()
            update_session(session)
            return session.conversation

        try:
            conversation = await self.change(conversation_id, update_if_idle)
            self._endpoint.admit_request(context.key)
        except BaseException:
            running.is_running = False
            raise
        running.conversation_id = conversation.id
        self._answers[conversation.id] = running
        began = asyncio.Event()
        task = asyncio.create_task(self._answer(context, conversation, running, begin, began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # wait briefly, so that the page's next event contains the beginning of the answer
        waiting = asyncio.create_task(began.wait())
        await asyncio.wait({task, waiting}, timeout=_BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return conversation.id

    async def _answer(
        self,
        context: RequestContext,
        conversation: Conversation,
        running: RunningAnswer,
        begin: Begin,
        began: asyncio.Event,
    ) -> None:
        loop = asyncio.get_running_loop()

        def begin_and_notify(session: ChatSession) -> AnswerWriter:
            answer = begin(session)
            loop.call_soon_threadsafe(began.set)
            return answer

        async def has_calls(begin: Begin) -> bool:
            try:
                return await self._generate(context, conversation, running, begin)
            except EngineClosedError:  # the model's process had died: a second attempt loads the model
                return await self._generate(context, conversation, running, begin)

        try:
            if conversation.tools:
                running.notice = "Loading the tools…"
                running.tools = await self._endpoint.use_tools()
            waits = await has_calls(begin_and_notify)
            while waits and await loop.run_in_executor(self._callers, self._run_calls, running):
                waits = await has_calls(ChatSession.begin_answer)
        except (EdgeInferError, Problem) as error:
            running.notice = self._endpoint.problem_of(error, context.id).message
        except Exception as error:  # noqa: BLE001  the page shows that the answer failed, the log has the cause
            self._endpoint.log.error("internal", error, request_id=context.id)
            running.notice = f"An internal error; the log has it under request id {context.id}."
        finally:
            running.is_running = False
            self._endpoint.release_request(context.key)

    async def _generate(
        self, context: RequestContext, conversation: Conversation, running: RunningAnswer, begin: Begin
    ) -> bool:
        endpoint, models = self._endpoint, self._endpoint.models
        context.name_model(conversation.model or None)
        if not models.is_loaded(context.model):
            running.notice = f"Loading {context.model}…"
        with await models.acquire(context.model) as lease:
            running.notice = ""
            endpoint.admit_generations(context.model, lease.engine.info.n_parallel, 1)
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(
                    self._writers, self._write, running, begin, lease, loop
                )
            finally:
                endpoint.release_generations(context.model, 1)

    def _write(
        self, running: RunningAnswer, begin: Begin, lease: Lease, loop: asyncio.AbstractEventLoop
    ) -> bool:
        """Write an answer to the store, in a thread; return whether the answer has calls to run."""
        endpoint, engine = self._endpoint, lease.engine
        with self._session(running, engine) as session:
            answer = running.answer = begin(session)
            if running.stop.is_set:
                answer.stop()
            loop.call_soon_threadsafe(endpoint.running.add, answer.generation)
            try:
                for event in answer.generation:
                    answer.add(event)
                    answer.flush()  # takes 0.05 ms; without it, tokens would be shown late
                    if isinstance(event, Finished):
                        version = engine.info.version
                        endpoint.metrics.generation_ended(lease.model, version, event)
            except EdgeInferError as error:
                answer.fail(error)
            finally:
                if answer.done is None:
                    answer.abandon()
                with contextlib.suppress(RuntimeError):  # the event loop is already closed
                    loop.call_soon_threadsafe(endpoint.running.discard, answer.generation)
            if answer.cache_report is not None:
                endpoint.host.note_prompt(answer.cache_report)
            return session.calls is not None

    def _run_calls(self, running: RunningAnswer) -> bool:
        """Run the last answer's tool calls, in a thread; return whether to generate another answer."""
        with self._session(running) as session:
            turn, tools = session.calls, session.tools
            continues = turn is not None and session.run_calls(turn, running, running.stop)
        running.tool_notices += tuple(tools.notices()) if tools is not None else ()
        return continues

    @contextlib.contextmanager
    def _session(self, running: RunningAnswer, engine: Engine | None = None) -> Iterator[ChatSession]:
        """Open the answer's conversation on a new connection to the store, for use by this thread."""
        with contextlib.closing(ConversationStore.open()) as store:
            session = ChatSession(lambda: store, engine=engine)
            session.tools = running.tools
            session.open(running.conversation_id)
            yield session

    def stop(self, conversation_id: int) -> None:
        """Stop the running answer. Raises Problem 409 if this process does not generate one."""
        running = self.latest_answer(conversation_id)
        if not running.is_running:
            message = "This endpoint is not generating an answer in this conversation."
            raise Problem(409, message, code="not_answering")
        running.cancel()

    async def follow(self, conversation_id: int, latest: int) -> AsyncIterator[bytes]:
        """Yield server-sent events when a conversation, or the list of all conversations, changes.

        If `conversation_id` is 0, only the list is followed. Only the last `latest` turns are sent. The
        first events give the whole state, so that a page may reconnect at any time.
        """
        follower = Follower(self, conversation_id, latest)
        commented = time.monotonic()
        while not self._endpoint.draining:
            began = time.monotonic()
            events = b"".join([sse(data, name) for name, data in await self.use(follower.poll)])
            now = time.monotonic()
            if not events and now - commented > self._endpoint.limits.comment_s:
                events = b": here\n\n"
            if events:
                commented = now
                yield events
            # pause, so that rendering, which slows the engine, takes at most a fifth of the time
            await asyncio.sleep(max(_POLL_S, 4 * (now - began) if events else 0))


class Follower:
    """Finds what has changed in a conversation since the last event that one page got."""

    def __init__(self, conversations: Conversations, conversation_id: int, latest: int) -> None:
        self._conversations = conversations
        self._id = conversation_id
        self._latest = latest
        self._changes: object = None
        self._newest_change: object = None
        self._stamp: object = None
        self._sent: dict[int, object] = {}
        self._session: ChatSession | None = None
        self._growing = GrowingHtml()
        self._calls: object = None

    def poll(self, store: ConversationStore) -> Sequence[tuple[str, object]]:
        """Return the changes since the last call as (event name, data); () if there are none."""
        running = self._conversations.latest_answer(self._id)
        running.seen = time.monotonic()
        is_answered = bool(self._id) and store.is_answering(self._id)
        state = (running.notice, running.is_running, running.calls())
        changes = (store.change_count(), is_answered, *state)
        if changes == self._changes:
            return ()
        self._changes = changes
        return list(self._events(store, running))

    def _events(self, store: ConversationStore, running: RunningAnswer) -> Iterator[tuple[str, object]]:
        newest_change = store.newest_change()
        if newest_change != self._newest_change:
            self._newest_change = newest_change
            yield "list", {}
        if not self._id:
            return
        if self._session is None:
            self._session = ChatSession(lambda: store)
            if store.conversation_version(self._id) is not None:
                self._session.open(self._id)
        session, stamp = self._session, (running.notice, running.is_running)
        is_new = session.refresh()
        if session.conversation.id != self._id:
            yield "gone", {}
        elif is_new or stamp != self._stamp:
            self._stamp = stamp
            yield "branch", self._changed_turns(session, running)
        elif (turn := session.answer_elsewhere) is not None:
            yield from self._pieces(turn.id, session.follow())
        if (calls := running.calls()) != self._calls:
            self._calls = calls
            yield "calls", calls

    def _changed_turns(self, session: ChatSession, running: RunningAnswer) -> dict[str, object]:
        path = session.path
        changed = []
        for turn in path[-self._latest :]:
            page = session.alternatives(turn.id)
            key = (turn.status, len(turn.content), turn.error, turn.calls, page)
            if turn.status == "streaming":
                self._growing = GrowingHtml(turn.content, self._conversations.report)
            if self._sent.get(turn.id) != key:
                self._sent[turn.id] = key
                changed.append(render_turn(turn, page, self._conversations.report))
        described = msgspec.structs.asdict(session.conversation)
        return {
            "conversation": {**described, "draft": ""},
            "path": [turn.id for turn in path[-self._latest :]],
            "earlier": max(0, len(path) - self._latest),
            "turns": changed,
            "answering": session.answer_elsewhere is not None or running.is_running,
            "notice": running.notice,
        }

    def _pieces(self, turn_id: int, new: CollectedAnswer) -> Iterator[tuple[str, object]]:
        if new.text or new.reasoning:
            growing = self._growing
            first = growing.add(new.text) if new.text else len(growing.blocks)
            blocks = growing.blocks[first:]
            piece = {"turn": turn_id, "from": first, "blocks": blocks, "reasoning": new.reasoning}
            yield "piece", piece


def no_conversation() -> Problem:
    """Make the error for a conversation id that does not exist."""
    return Problem(404, "There is no such conversation.", code="not_found")


def _busy_problem() -> Problem:
    message = "An answer in this conversation is being generated: wait until it ends, or stop it."
    return Problem(409, message, code="conversation_busy")
