"""Pictures in prompts: their pseudo-tokens, and a thread that encodes them into embedding rows.

Rows are cached in memory and in the on-disk prefix cache, by image file, projector and cache salt. So a
picture that was seen before is not encoded again, even in another prompt or after a restart.
"""

from __future__ import annotations

import hashlib
import logging
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
from edgeinfer.platform.process import ask_child, lower_thread_priority
from edgeinfer.runtime.llama.model import LlamaModel
from edgeinfer.runtime.llama.mtmd import Chunk, Projector
from edgeinfer.runtime.options import OTHER_PROJECTOR, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder
from edgeinfer.runtime.prefix_cache.kv_block import Header, KvBlock, pack_tokens
from edgeinfer.runtime.prompt_tokens import row_tokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sequence_state import as_state

Rows = npt.NDArray[np.float32]

_log = logging.getLogger("edgeinfer.gpu")
#: Maximum bytes of cached embeddings in memory. They are f32: f16 changes logits by 0.7 to 1.2.
_KEPT_BYTES = 128 << 20
#: Maximum bytes of decoded pixels that wait for the encoder. Above this limit, the pixels of the oldest
#: pictures are dropped, and the encoder decodes these pictures again.
_PIXEL_BYTES = 48 << 20
#: Number of image files whose size and chunks are cached.
_KNOWN_FILES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A picture of a request: its image `file` and `size` (width, height in pixels).

    `digest` is a hash of the file, the projector and the cache salt. `folder` has encoded rows on disk;
    None if the request does not use the prefix cache. If `is_stored`, new rows are written to `folder`.
    """

    digest: bytes
    file: bytes
    size: tuple[int, int]
    folder: BlockFolder | None = None
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a picture: the rows of `chunk`, from a prompt's token `start` on.

    `number` is the part's index in the picture.
    """

    start: int
    source: Source
    number: int
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.start + self.chunk.n_rows

    @property
    def digest(self) -> bytes:
        return self.source.digest


@dataclass(slots=True)
class Encoding:
    """The embedding rows of a picture, an array per span, and how many running requests need them."""

    rows: Future[list[Rows]]
    n_requests: int = 0


class Vision:
    """Encodes pictures with a model's projector on a thread, and caches their rows.

    `key` identifies the projector. A step can compute at most `max_rows` rows.
    """

    def __init__(self, projector: Projector, key: str, *, max_rows: int) -> None:
        self._projector, self._key = projector, hashlib.sha256(key.encode()).digest()
        self._max_rows = max_rows
        #: A copy of the projector on a GPU. None if the CPU encodes pictures.
        self.on_device: Projector | None = None
        #: Returns the folder of the on-disk prefix cache, None if it is closed.
        self.block_folder: Callable[[], BlockFolder | None] = lambda: None
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._encodings: OrderedDict[bytes, Encoding] = OrderedDict()
        self._pixels: OrderedDict[bytes, Picture] = OrderedDict()
        self._chunks_by_digest: OrderedDict[bytes, tuple[tuple[int, int], list[Chunk]]] = OrderedDict()

    def append(
        self, tokens: list[int], spans: list[Span], file: bytes, request: GenerateRequest
    ) -> None:
        """Append a picture to the tokens and spans of a prompt. Raises InvalidRequestError."""
        source, chunks = self._source(file, request)
        n_spans = 0
        for chunk in chunks:
            if not chunk.n_rows:
                tokens += chunk.tokens
                continue
            spans.append(Span(len(tokens), source, n_spans, chunk))
            key = b"%s %d %d" % (source.digest, n_spans, chunk.n_rows)
            n_positions = 0 if chunk.positions is None else chunk.n_positions
            tokens += row_tokens(key, chunk.n_rows, n_positions)
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
            if min(chunk.tokens, default=0) < 0:  # a separator of tiles that the vocabulary lacks
                message = f"a picture of {width}x{height} pixels needs tokens that the model lacks: "
                message += "the projector belongs to another model"
                raise InvalidRequestError(message, param="messages", hint=OTHER_PROJECTOR)
            if chunk.is_whole and chunk.n_rows > self._max_rows:
                message = f"a picture has {chunk.n_rows} embedding rows; the model's batch holds "
                message += f"{self._max_rows}, and all rows must fit into one batch"
                raise InvalidRequestError(message, param="messages", hint="send a smaller picture")
        return chunks

    def _read(
        self, folder: BlockFolder | None, digest: bytes
    ) -> tuple[tuple[int, int], list[Rows]] | None:
        """Read a picture's size and rows from the on-disk prefix cache; None if they are not there."""
        block = folder.read(folder.names.rows(digest)) if folder is not None else None
        if block is None:
            return None
        width, height = block.tokens
        shape = (-1, self._projector.width)
        return (width, height), [
            np.frombuffer(state.join_pieces(), np.float32).reshape(shape) for state in block.states
        ]

    def _store(self, source: Source, rows: Sequence[Rows]) -> None:
        """Write rows to the on-disk prefix cache, unless they are there.

        A request made before a move to a GPU has the CPU's folder. Rows of the GPU are not written
        there, because they differ in rounding.
        """
        folder = source.folder
        if folder is None or not source.is_stored or folder is not self.block_folder():
            return
        name = folder.names.rows(source.digest)
        if folder.has(name):
            return
        header = Header("rows", name, b"", folder.names.identity, pack_tokens(source.size), ())
        folder.write(KvBlock(header, tuple(as_state(row.data.cast("B")) for row in rows)))

    def encode(self, span: Span) -> Future[list[Rows]]:
        """Return a future with the rows of the picture of `span`, one array per span of that picture.

        If the rows are not cached, start to encode the picture.

        At the end of the request, call `leave` as often as `encode` was called.
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
        rows = self._encode_pixels(pixels or decode(source.file))
        self._store(source, rows)
        return rows

    def _encode_pixels(self, pixels: Picture) -> list[Rows]:
        if (on_device := self.on_device) is not None:
            try:
                return on_device.encode(pixels)
            except DecodeError as error:
                self.leave_device()
                _log.warning("a GPU could not encode a picture, so the CPU does: %s", error.message)
        return self._projector.encode(pixels)

    def leave_device(self) -> None:
        """Encode pictures on the CPU from now on, and drop the rows cached in memory.

        The projector on the GPU is not freed, because a lost device may never answer.
        """
        self.on_device = None
        with self._lock:
            self._encodings.clear()

    def leave(self, digest: bytes, rows: Future[list[Rows]]) -> None:
        """Record that a request no longer needs `rows`; cancel their encoding if none needs them."""
        with self._lock:
            encoding = self._encodings.get(digest)
            if encoding is not None and encoding.rows is rows:
                encoding.n_requests -= 1
                if not encoding.n_requests and rows.cancel():
                    del self._encodings[digest]

    def _limit(self) -> None:
        """Drop the least recently used rows until the others fit into _KEPT_BYTES."""
        n_bytes = 0
        for digest, encoding in reversed(list(self._encodings.items())):
            if encoding.rows.done() and encoding.rows.exception() is None:
                n_bytes += sum(row.nbytes for row in encoding.rows.result())
                if n_bytes > _KEPT_BYTES:
                    del self._encodings[digest]

    def park(self) -> None:
        """End the encoding thread and drop all pictures. The next picture starts the thread again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._encodings.clear()
            self._pixels.clear()
            self._chunks_by_digest.clear()
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End the encoding thread and free the projectors. Idempotent."""
        self.park()
        if self.on_device is not None:
            self.on_device.free()
        self._projector.free()


def open_vision(files: ModelFiles, loaded: LlamaModel) -> tuple[Vision | None, str]:
    """Open the model's projector. Raises ModelLoadError.

    Returns None and "" for a model without one, None and the reason if the projector is refused.
    """
    if not files.projector:
        return None, ""
    failure = projector_failure(files.projector, files.paths)
    if failure:
        return None, f": its projector {files.projector} was refused: {failure}"
    from PIL import __version__  # versions of Pillow may decode differently

    key = f"{stamps((files.projector,))} {__version__}"
    projector = Projector(files.projector, loaded.model, loaded.n_threads)
    return Vision(projector, key, max_rows=loaded.n_batch), ""


@dataclass(slots=True, eq=False)
class PromptPictures:
    """The pictures of one prompt: their `spans`, and the rows that `vision` encodes, until `close`.

    `vision` may be None only if there are no spans.
    """

    vision: Vision | None = None
    spans: Sequence[Span] = ()
    _rows: dict[bytes, Future[list[Rows]]] = field(default_factory=dict)

    def encode_after(self, n_past: int) -> None:
        """Start to encode all pictures that are not within the first `n_past` tokens."""
        for span in self.spans:
            if span.end > n_past and span.digest not in self._rows:
                assert self.vision is not None
                self._rows[span.digest] = self.vision.encode(span)

    def close(self) -> None:
        """Release all pictures, and cancel those that are not encoded yet. Idempotent."""
        while self._rows:
            assert self.vision is not None
            self.vision.leave(*self._rows.popitem())

    def at(self, n_past: int) -> Span | None:
        """Return the span that contains token `n_past`, None if that is text."""
        return next((span for span in self.spans if span.start <= n_past < span.end), None)

    def text_end(self, n_past: int, n_tokens: int) -> int:
        """Return where the text that begins at `n_past` ends: at the next picture or `n_tokens`."""
        return min((span.start for span in self.spans if span.start >= n_past), default=n_tokens)

    def is_edge(self, n_past: int) -> bool:
        """Return whether `n_past` is the first token of a picture, or the first after one."""
        begins = [span.start for span in self.spans if not span.number]
        goes_on = [*(bool(span.number) for span in self.spans[1:]), False]
        ends = [span.end for span, more in zip(self.spans, goes_on, strict=False) if not more]
        return n_past in begins or n_past in ends

    def is_pending(self, n_past: int) -> bool:
        """Return whether at least one picture is not wholly within the first `n_past` tokens."""
        return bool(self.spans) and self.spans[-1].end > n_past

    def is_encoding(self, span: Span) -> bool:
        return not self._rows[span.digest].done()

    def wait(self, span: Span, timeout_s: float) -> None:
        """Wait until `span` is encoded, or its encoding has failed, but at most `timeout_s`."""
        wait([self._rows[span.digest]], timeout_s)

    def failure(self, span: Span) -> EngineError | None:
        """Return the error that ended the encoding of `span`, None if there was none."""
        rows = self._rows[span.digest]
        error = rows.exception() if rows.done() else None
        return error if error is None or isinstance(error, EngineError) else DecodeError(str(error))

    def rows(self, span: Span) -> Rows:
        """Return the rows of `span`, which must be encoded: float32[n_rows, width]."""
        return self._rows[span.digest].result()[span.number]


_HELPER = "edgeinfer.runtime.llama.helpers.projector_trial"
#: Time limit (s) of a projector's test. The largest projectors take 40 s per picture on two cores.
_PATIENCE_S = 600.0

#: Projectors that passed the test, by path, size, mtime and inode of their file and the model's files.
_KNOWN = CacheTable("projectors.json", dict[str, bool])


def projector_failure(projector: str, model_paths: Sequence[str]) -> str:
    """Test a projector in another process; return why the model cannot use it, "" if it can.

    A test that succeeds is not repeated until a file changes.
    """
    key = f"{edgeinfer.__version__} {stamps((projector, *model_paths))}"
    if key in _KNOWN.read():
        return ""
    out, ending = ask_child(_HELPER, projector, *model_paths, patience_s=_PATIENCE_S)
    try:
        reason = msgspec.json.decode(out, type=str)
    except msgspec.MsgspecError:
        return f"its first picture {ending}"
    if not reason:
        _KNOWN.put(key, True)
    return reason
