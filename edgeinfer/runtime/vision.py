"""Pictures of a prompt: their tokens, and the thread that encodes them while others decode.

Rows are cached by the picture's file, the projector and the cache salt, in memory and in the prefix
cache. So a known file after another prompt is neither decoded nor encoded again, even after a restart.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

import edgeinfer
from edgeinfer.errors import DecodeError, EngineError, InvalidRequestError
from edgeinfer.media.pictures import Picture, decode
from edgeinfer.platform.disk import CacheTable, stamps
from edgeinfer.platform.process import child_command, lower_thread_priority
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.mtmd import Chunk, Projector
from edgeinfer.runtime.options import ModelFiles
from edgeinfer.runtime.prefix_cache.block_file import Header, KvBlock, pack_tokens
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder
from edgeinfer.runtime.prompt_tokens import row_tokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sequence_state import as_state

Rows = npt.NDArray[np.float32]

_log = logging.getLogger("edgeinfer.gpu")
#: Size (bytes) of the cache of encoded rows, for pictures that occur again after another prompt. Rows
#: stay in f32: f16 rows move logits by 0.7 to 1.2.
_KEPT_BYTES = 128 << 20
#: Bytes of decoded pixels of waiting pictures; beyond that, a picture is decoded again before encoding.
_PIXEL_BYTES = 48 << 20
#: Number of image files whose token counts are cached.
_KNOWN_FILES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A picture of a request: its file, and its `size` (width, height).

    `digest` covers the file, the projector and the cache salt. Rows are read from `folder`, and stored
    there if `is_stored`.
    """

    digest: bytes
    file: bytes
    size: tuple[int, int]
    folder: BlockFolder | None = None
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a picture among the tokens of a prompt: `n_rows` from token `start` on.

    `chunk` is the number of the span within its picture. `is_whole`: one step must compute all rows.
    They take `n_positions`; with M-RoPE these are fewer than the rows, and each row has its
    `positions`.
    """

    start: int
    n_rows: int
    source: Source
    chunk: int
    is_whole: bool
    n_positions: int
    positions: npt.NDArray[np.int32] | None = None

    @property
    def end(self) -> int:
        return self.start + self.n_rows

    @property
    def digest(self) -> bytes:
        return self.source.digest


@dataclass(slots=True)
class Encoding:
    """The rows of a picture's spans, and how many requests wait for them."""

    rows: Future[list[Rows]]
    n_requests: int = 0


class Vision:
    """Encodes pictures with a model's projector, in a thread, and caches the rows of recent ones.

    `key` identifies the projector's file. `max_rows` fit into one step.
    """

    def __init__(self, projector: Projector, key: str, *, max_rows: int) -> None:
        self._projector, self._key = projector, hashlib.sha256(key.encode()).digest()
        self._max_rows = max_rows
        #: The projector on a device, which encodes until it fails.
        self.on_device: Projector | None = None
        #: Returns the prefix cache's folder, None while that is closed.
        self.block_folder: Callable[[], BlockFolder | None] = lambda: None
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._encodings: OrderedDict[bytes, Encoding] = OrderedDict()
        self._pixels: OrderedDict[bytes, Picture] = OrderedDict()
        self._chunks_by_digest: OrderedDict[bytes, tuple[tuple[int, int], list[Chunk]]] = OrderedDict()

    def append(
        self, tokens: list[int], spans: list[Span], file: bytes, request: GenerateRequest
    ) -> None:
        """Append a picture's tokens and rows to the prompt of `request`. Raises InvalidRequestError.

        A new file is decoded first, in a separate process.
        """
        source, chunks = self._source(file, request)
        n_spans = 0
        for chunk in chunks:
            if not chunk.n_rows:
                tokens += chunk.tokens
                continue
            n, places = chunk.n_rows, chunk.positions
            spans.append(
                Span(len(tokens), n, source, n_spans, chunk.is_whole, chunk.n_positions, places)
            )
            key = b"%s %d %d" % (source.digest, n_spans, n)
            tokens += row_tokens(key, n, 0 if places is None else chunk.n_positions)
            n_spans += 1

    def _source(self, file: bytes, request: GenerateRequest) -> tuple[Source, list[Chunk]]:
        salt = hashlib.sha256(request.cache_salt.encode()).digest()
        digest = hashlib.sha256(self._key + salt + file).digest()
        folder = self.block_folder() if request.cache_prompt else None
        with self._lock:
            size_and_chunks = self._chunks_by_digest.get(digest)
        if size_and_chunks is None:
            stored = self._read(folder, digest)
            if stored is None:
                pixels = decode(file)
                size = pixels.width, pixels.height
                self._keep_pixels(digest, pixels)
            else:
                size = stored[0]
            size_and_chunks = size, self._chunks(*size)
            with self._lock:
                self._chunks_by_digest[digest] = size_and_chunks
                if len(self._chunks_by_digest) > _KNOWN_FILES:
                    self._chunks_by_digest.popitem(last=False)
                if stored is not None and digest not in self._encodings:
                    rows: Future[list[Rows]] = Future()
                    rows.set_result(stored[1])
                    self._encodings[digest] = Encoding(rows)
                    self._limit()
        is_stored = folder is not None and request.cache_on_disk
        if folder is not None and is_stored:
            name = folder.names.rows(digest)
            folder.touch([name])
            if request.conversation:
                folder.add_owner(request.conversation, [name])
        return Source(digest, file, size_and_chunks[0], folder, is_stored), size_and_chunks[1]

    def _keep_pixels(self, digest: bytes, pixels: Picture) -> None:
        with self._lock:
            self._pixels[digest] = pixels
            while sum(len(picture.rgb) for picture in self._pixels.values()) > _PIXEL_BYTES:
                self._pixels.popitem(last=False)

    def _chunks(self, width: int, height: int) -> list[Chunk]:
        chunks = self._projector.chunks(width, height)
        for chunk in chunks:
            if min(chunk.tokens, default=0) < 0:  # a tile's separator, which small pictures lack
                message = f"a picture of {width}x{height} pixels needs tokens that the model lacks: "
                message += "its projector belongs to another model"
                raise InvalidRequestError(message, param="messages")
            if chunk.is_whole and chunk.n_rows > self._max_rows:
                message = f"a picture has {chunk.n_rows} rows, which one step must compute, but a "
                message += f"batch holds {self._max_rows}"
                raise InvalidRequestError(message, param="messages")
        return chunks

    def _read(
        self, folder: BlockFolder | None, digest: bytes
    ) -> tuple[tuple[int, int], list[Rows]] | None:
        """Read a picture's size and rows from disk; None if they are missing or unusable."""
        block = folder.read(folder.names.rows(digest)) if folder is not None else None
        if block is None:
            return None
        width, height = block.tokens
        shape = (-1, self._projector.width)
        return (width, height), [
            np.frombuffer(state.join_pieces(), np.float32).reshape(shape) for state in block.states
        ]

    def _store(self, source: Source, rows: Sequence[Rows]) -> None:
        """Store encoded rows, unless they are on disk."""
        folder = source.folder
        if folder is None or not source.is_stored:
            return
        name = folder.names.rows(source.digest)
        if folder.has(name):
            return
        header = Header("rows", name, b"", folder.names.identity, pack_tokens(source.size), ())
        folder.write(KvBlock(header, tuple(as_state(row.data.cast("B")) for row in rows)))

    def encode(self, span: Span) -> Future[list[Rows]]:
        """Return the rows of the picture that contains `span`, one array per span; encode them if they
        are not cached.

        Call `leave` once for each call, when the request ends.
        """
        with self._lock:
            encoding = self._encodings.get(span.digest)
            if encoding is None or (encoding.rows.done() and encoding.rows.exception()):
                if self._thread is None:
                    name = "edgeinfer-encoder"
                    self._thread = ThreadPoolExecutor(1, name, initializer=lower_thread_priority)
                encoding = Encoding(self._thread.submit(self._encode, span.source))
                self._encodings[span.digest] = encoding
            encoding.n_requests += 1
            self._encodings.move_to_end(span.digest)
            self._limit()
        if encoding.rows.done() and not encoding.rows.exception():
            self._store(span.source, encoding.rows.result())
        return encoding.rows

    def _encode(self, source: Source) -> list[Rows]:
        stored = self._read(source.folder, source.digest)
        if stored is not None:
            return stored[1]
        with self._lock:
            pixels = self._pixels.pop(source.digest, None)
        # the folder of the CPU, from before a device was attached, gets no rows that round differently
        on_device = self.on_device if source.folder in (None, self.block_folder()) else None
        rows = self._encode_pixels(pixels or decode(source.file), on_device)
        self._store(source, rows)
        return rows

    def _encode_pixels(self, pixels: Picture, on_device: Projector | None) -> list[Rows]:
        if on_device is not None:
            try:
                return on_device.encode(pixels)
            except DecodeError as error:
                self.leave_device()
                _log.warning("a GPU failed at a picture, and the CPU encodes it: %s", error.message)
        return self._projector.encode(pixels)

    def leave_device(self) -> None:
        """Encode on the CPU, and forget the device's rows. It is left alone: it may never answer."""
        self.on_device = None
        with self._lock:
            self._encodings.clear()

    def leave(self, digest: bytes, rows: Future[list[Rows]]) -> None:
        """Record that a request has ended; a picture for which no request waits is not encoded."""
        with self._lock:
            encoding = self._encodings.get(digest)
            if encoding is not None and encoding.rows is rows:
                encoding.n_requests -= 1
                if not encoding.n_requests and rows.cancel():
                    del self._encodings[digest]

    def _limit(self) -> None:
        """Drop the least recently used rows beyond the byte limit."""
        n_bytes = 0
        for digest, encoding in reversed(list(self._encodings.items())):
            if encoding.rows.done() and encoding.rows.exception() is None:
                n_bytes += sum(row.nbytes for row in encoding.rows.result())
                if n_bytes > _KEPT_BYTES:
                    del self._encodings[digest]

    def park(self) -> None:
        """End the thread and forget all pictures; the next picture starts another thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._encodings.clear()
            self._pixels.clear()
            self._chunks_by_digest.clear()
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free the projector. Idempotent."""
        self.park()
        if self.on_device is not None:
            self.on_device.free()
        self._projector.free()


def open_vision(files: ModelFiles, loaded: LlamaModel) -> tuple[Vision | None, str]:
    """Open the model's projector; if there is none, return None and why. Raises ModelLoadError."""
    if not files.projector:
        return None, ""
    failure = projector_failure(files.projector, files.paths)
    if failure:
        return None, f": its projector {files.projector} was refused: {failure}"
    from PIL import __version__  # another version of the decoder may give different pixels

    key = f"{stamps((files.projector,))} {__version__}"
    projector = Projector(files.projector, loaded.model, loaded.n_threads)
    return Vision(projector, key, max_rows=loaded.n_batch), ""


@dataclass(slots=True, eq=False)
class PromptPictures:
    """The pictures of one prompt: their `spans`, and the rows that must be computed."""

    vision: Vision | None = None
    spans: Sequence[Span] = ()
    _rows: dict[bytes, Future[list[Rows]]] = field(default_factory=dict)

    def encode_after(self, n_past: int) -> None:
        """Begin to encode the pictures that are not within the first `n_past` tokens."""
        for span in self.spans:
            if span.end > n_past and span.digest not in self._rows:
                assert self.vision is not None
                self._rows[span.digest] = self.vision.encode(span)

    def close(self) -> None:
        """Stop waiting for pictures. Idempotent."""
        while self._rows:
            assert self.vision is not None
            self.vision.leave(*self._rows.popitem())

    def at(self, n_past: int) -> Span | None:
        """Return the span that contains token `n_past`."""
        return next((span for span in self.spans if span.start <= n_past < span.end), None)

    def text_end(self, n_past: int, n_tokens: int) -> int:
        """Return the end of the text from `n_past` on: the next picture, or `n_tokens`."""
        return min((span.start for span in self.spans if span.start >= n_past), default=n_tokens)

    def is_edge(self, n_past: int) -> bool:
        """Return whether a picture, with all its spans, begins or ends at `n_past`."""
        begins = [span.start for span in self.spans if not span.chunk]
        goes_on = [*(bool(span.chunk) for span in self.spans[1:]), False]
        ends = [span.end for span, more in zip(self.spans, goes_on, strict=False) if not more]
        return n_past in begins or n_past in ends

    def is_pending(self, n_past: int) -> bool:
        """Return whether a picture comes after the first `n_past` tokens."""
        return bool(self.spans) and self.spans[-1].end > n_past

    def is_encoding(self, span: Span) -> bool:
        return not self._rows[span.digest].done()

    def wait(self, span: Span, timeout_s: float) -> None:
        """Wait until the rows of `span` are encoded."""
        wait([self._rows[span.digest]], timeout_s)

    def failure(self, span: Span) -> EngineError | None:
        """Return the error for which `span` could not be encoded."""
        rows = self._rows[span.digest]
        error = rows.exception() if rows.done() else None
        return error if error is None or isinstance(error, EngineError) else DecodeError(str(error))

    def rows(self, span: Span) -> Rows:
        """Return the encoded rows of `span`."""
        return self._rows[span.digest].result()[span.chunk]


_HELPER = "edgeinfer.runtime.llama.helpers.projector_trial"
#: Limit (s) of a trial; the largest encoders take 40 s per picture on two cores.
_PATIENCE_S = 600.0

#: Projectors that worked, by the stamps of their files and the model's.
_KNOWN = CacheTable("projectors.json", dict[str, bool])


def projector_failure(projector: str, model: Sequence[str]) -> str:
    """Return why the projector cannot be used with the model's files; "" if it can."""
    key = f"{edgeinfer.__version__} {stamps((projector, *model))}"
    if key in _KNOWN.read():
        return ""
    reason = _try_projector([projector, *model])
    if not reason:
        _KNOWN.put(key, True)
    return reason


def _try_projector(files: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            child_command(_HELPER, *files), capture_output=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its first picture takes more than {_PATIENCE_S:.0f} s"
    try:
        return msgspec.json.decode(done.stdout, type=str)
    except msgspec.MsgspecError:
        code = done.returncode
        ending = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"its first picture ended the process ({ending})"
