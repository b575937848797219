"""Computes long prompts on devices for a context that decodes on the CPU."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from edgeinfer.blocks.format import State
from edgeinfer.errors import DecodeError
from edgeinfer.runtime.attaching.target import Target
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.decoding.blocks.restore import Piece, Restore
from edgeinfer.runtime.decoding.cache.kvcache import Resident, common_prefix
from edgeinfer.runtime.decoding.cache.states import SequenceStates
from edgeinfer.runtime.libllama import L

#: The sequence of the devices' context that everything is computed in.
_SEQ = 0


@dataclass(slots=True)
class _Job:
    """A prompt to be computed from `start` on, chunk by chunk.

    The devices have its first `shared` tokens; `before` is the state of the others up to `start`.
    """

    tokens: list[int]
    shared: int
    start: int
    before: State | None
    chunks: Sequence[list[int]]
    futures: Sequence[Future[Piece | None]]


class DeviceReader:
    """A `Reader` with a thread of its own, which alone uses the devices' context.

    `here` are the states of the context that decodes, `there` those of the devices'. What the last
    prompt left on the devices is used by the next one that begins like it.
    """

    def __init__(
        self, target: Target, batch: Batch, here: SequenceStates, there: SequenceStates
    ) -> None:
        self._target, self._batch = target, batch
        self._here, self._there = here, there
        self._planned: list[int] = []
        self._has: list[int] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closing = False
        self.failure = ""
        # a lost device may never answer: nobody waits for this thread when the process ends
        self._thread = threading.Thread(target=self._main, name="edgeinfer-read", daemon=True)
        self._thread.start()

    def begin(self, resident: Resident, tokens: list[int]) -> Restore[Piece] | None:
        """See `Reader`. On the thread that decodes."""
        start, end = len(resident.tokens), len(tokens) - 1
        shared = common_prefix(self._planned, tokens[:start])
        before = None
        if shared < start:
            before = self._here.read(resident.seq_id, shared, start)
            if before is None:
                return None
        steps = range(start, end, self._batch.capacity)
        chunks = [tokens[at : min(at + self._batch.capacity, end)] for at in steps]
        futures: list[Future[Piece | None]] = [Future() for _ in chunks]
        self._planned = tokens[:end]
        self._jobs.put(_Job(tokens[:end], shared, start, before, chunks, futures))
        return Restore(futures, start, end)

    def put(self, resident: Resident, piece: Piece) -> bool:
        """See `Reader`. On the thread that decodes."""
        return self._here.write(resident.seq_id, piece.state)

    def close(self) -> None:
        """End after the chunk that is being computed, and wait for that."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closing:
            try:
                self._compute(job)
            except Exception as error:  # noqa: BLE001  the main of a thread: who waits must hear of it
                self.failure = str(error)
                for future in job.futures:
                    with contextlib.suppress(
                        InvalidStateError
                    ):  # taken already, or not wanted any more
                        future.set_result(None)

    def _compute(self, job: _Job) -> None:
        """Compute the chunks until one is not wanted any more; then none is."""
        goes_on = not self.failure and self._go_to(job)
        for future, chunk in zip(job.futures, job.chunks, strict=True):
            if not future.set_running_or_notify_cancel():
                return
            piece = self._piece(chunk) if goes_on and not self._is_closing else None
            goes_on = piece is not None
            future.set_result(piece)

    def _go_to(self, job: _Job) -> bool:
        """Have on the devices what comes before `job.start`. False when it isn't what was planned."""
        if common_prefix(self._has, job.tokens) < job.shared:
            return False
        L.llama_memory_seq_rm(self._target.active.memory, _SEQ, job.shared, -1)
        self._has = job.tokens[: job.shared]
        if job.before is not None:
            if not self._there.write(_SEQ, job.before):
                raise DecodeError("a device did not take what the CPU has computed")
            self._has = job.tokens[: job.start]
        return True

    def _piece(self, chunk: list[int]) -> Piece:
        start = len(self._has)
        self._batch.clear()
        self._batch.add(chunk, start, _SEQ, outputs=0)
        if code := self._batch.decode(self._target.active):
            raise DecodeError(f"llama_decode returned {code} for {len(chunk)} tokens of a prompt")
        self._has = self._has + chunk
        state = self._there.read(_SEQ, start, start + len(chunk))
        if state is None:
            raise DecodeError("what a device has computed could not be read")
        return Piece(chunk, state)
