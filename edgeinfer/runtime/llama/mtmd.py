"""Encode pictures into rows of a model's input embeddings, with a projector: `Projector`.

`Projector` calls libmtmd, the core of llama.cpp's tools/mtmd without image decoders (native/mtmd.sh).
`context.Batch` passes the rows to llama_decode.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import DecodeError, InvalidRequestError, ModelLoadError
from edgeinfer.media.pictures import Picture
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.options import OTHER_PROJECTOR

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_I32 = ctypes.c_int32
_TEXT_CHUNK = 0  # value of the C constant MTMD_INPUT_CHUNK_TYPE_TEXT
#: Width and height (pixels) of the picture that tests a new projector.
_PROBE = 64
#: Largest accepted absolute value in the embedding of a picture; real values are below 1,000.
_LARGEST = 1e6


class _Params(ctypes.Structure):
    """The struct mtmd_context_params."""

    _fields_ = (
        ("use_gpu", ctypes.c_bool),
        ("device", _POINTER),
        ("print_timings", ctypes.c_bool),
        ("n_threads", ctypes.c_int),
        ("image_marker", ctypes.c_char_p),
        ("media_marker", ctypes.c_char_p),
        ("flash_attn_type", ctypes.c_int),
        ("warmup", ctypes.c_bool),
        ("image_min_tokens", ctypes.c_int),
        ("image_max_tokens", ctypes.c_int),
        ("cb_eval", _POINTER),
        ("cb_eval_user_data", _POINTER),
        ("batch_max_tokens", _I32),
        ("progress_callback", _POINTER),
        ("progress_callback_user_data", _POINTER),
    )


class _Position(ctypes.Structure):
    """The struct mtmd_decoder_pos: a row's position within its picture."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("t", "x", "y", "z"))


class _Part(ctypes.Structure):
    """The struct mtmd_input_part; `text` stays null here."""

    _fields_ = (("text", _POINTER), ("bitmap", _POINTER))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mtmd_context_params_default": (_Params, []),
    "mtmd_init_from_file": (_POINTER, [ctypes.c_char_p, _POINTER, _Params]),
    "mtmd_free": (None, [_POINTER]),
    "mtmd_support_vision": (ctypes.c_bool, [_POINTER]),
    "mtmd_decode_use_mrope": (ctypes.c_bool, [_POINTER]),
    "mtmd_decode_use_non_causal": (ctypes.c_bool, [_POINTER, _POINTER]),
    "mtmd_bitmap_init": (_POINTER, [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p]),
    "mtmd_bitmap_free": (None, [_POINTER]),
    "mtmd_input_chunks_init": (_POINTER, []),
    "mtmd_input_chunks_free": (None, [_POINTER]),
    "mtmd_input_chunks_size": (_SIZE, [_POINTER]),
    "mtmd_input_chunks_get": (_POINTER, [_POINTER, _SIZE]),
    "mtmd_tokenize_from_parts": (
        _I32,
        [_POINTER, _POINTER, ctypes.POINTER(ctypes.POINTER(_Part)), _SIZE, ctypes.c_bool],
    ),
    "mtmd_input_chunk_get_type": (ctypes.c_int, [_POINTER]),
    "mtmd_input_chunk_get_n_tokens": (_SIZE, [_POINTER]),
    "mtmd_input_chunk_get_tokens_text": (ctypes.POINTER(_I32), [_POINTER, ctypes.POINTER(_SIZE)]),
    "mtmd_input_chunk_get_n_pos": (_I32, [_POINTER]),
    "mtmd_input_chunk_get_tokens_image": (_POINTER, [_POINTER]),
    "mtmd_image_tokens_get_decoder_pos": (_Position, [_POINTER, _I32, _SIZE]),
    "mtmd_encode_chunk": (_I32, [_POINTER, _POINTER]),
    "mtmd_get_output_embd": (ctypes.POINTER(ctypes.c_float), [_POINTER]),
    "mtmd_log_set": (None, [_POINTER, _POINTER]),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a picture: text `tokens` (such as separators of tiles), or `n_rows` embedding rows.

    `is_whole`: the rows attend to each other in both directions, so one step must compute all of them.
    The rows take `n_positions` positions of the prompt, fewer than `n_rows` with M-RoPE. `positions` is
    None without M-RoPE, otherwise int32[4, n_rows]: time, y, x, z of each row, relative to the first.
    """

    tokens: tuple[int, ...] = ()
    n_rows: int = 0
    is_whole: bool = False
    n_positions: int = 0
    positions: npt.NDArray[np.int32] | None = None


def _open_library() -> ctypes.CDLL:
    """Open libmtmd, and declare its functions. Raises ModelLoadError if libmtmd is missing."""
    try:
        library = libllama.declare_functions(libllama.own_library("mtmd"), _SIGNATURES)
    except (OSError, AttributeError) as error:
        problem = f"the library for pictures cannot be opened: {error}"
        raise ModelLoadError(problem, hint="build it: `make full`") from error
    library.mtmd_log_set(libllama.log_callback(), None)
    return library


class Projector:
    """Encodes pictures for one model. `chunks` may run on any thread, `encode` only on one."""

    def __init__(self, path: str, model: Any, n_threads: int, device: int = 0) -> None:
        """Open the projector at `path` on `device`, a ggml_backend_dev_t, 0 for the CPU.

        Raises ModelLoadError for an invalid or another model's file, DecodeError if the device fails.
        """
        self._library = _open_library()
        self._context: int | None = None
        #: Number of elements of an embedding row: the size of the model's input embeddings.
        self.width = int(libllama.L.llama_model_n_embd_inp(model))
        params = self._library.mtmd_context_params_default()
        params.print_timings = params.warmup = False
        params.use_gpu, params.device = bool(device), device
        params.n_threads = n_threads
        libllama.clear_log()
        pointer = ctypes.cast(model, _POINTER)
        self._context = libllama.call(
            self._library.mtmd_init_from_file, os.fsencode(path), pointer, params
        )
        if not self._context:
            reason = libllama.recent_reason()
            problem = f"llama.cpp could not load the projector {path}: {reason}"
            raise ModelLoadError(problem, hint=OTHER_PROJECTOR)
        try:
            self._check(path)
        except BaseException:
            self.free()
            raise

    def _check(self, path: str) -> None:
        if not self._library.mtmd_support_vision(self._context):
            raise ModelLoadError(f"the projector {path} is not for pictures", hint=OTHER_PROJECTOR)
        tried = self.chunks(_PROBE, _PROBE)
        # -1 stands for a separator that the vocabulary lacks: llama.cpp would abort in a step with -1
        if any(token < 0 for chunk in tried for token in chunk.tokens):
            problem = f"the projector {path} belongs to another model: this vocabulary lacks its tokens"
            raise ModelLoadError(problem, hint=OTHER_PROJECTOR)

    def chunks(self, width: int, height: int) -> list[Chunk]:
        """Return the parts of a picture of this size (pixels).

        Raises InvalidRequestError if the projector does not accept the size.
        """
        with self._tokenize(width, height, None) as natives:
            return [self._chunk(native) for native in natives]

    def encode(self, picture: Picture) -> list[npt.NDArray[np.float32]]:
        """Return the rows of each chunk that is not text: float32[n_rows, width].

        Raises InvalidRequestError as `chunks` does, and DecodeError if the encoder fails.
        """
        rows = []
        with self._tokenize(picture.width, picture.height, picture.rgb) as natives:
            for native in natives:
                n_rows = self._chunk(native).n_rows
                if n_rows:
                    rows.append(self._encode(native, n_rows))
        return rows

    def _encode(self, native: int, n_rows: int) -> npt.NDArray[np.float32]:
        code = _I32(libllama.call(self._library.mtmd_encode_chunk, self._context, native)).value
        pointer = self._library.mtmd_get_output_embd(self._context) if code == 0 else None
        if not pointer:
            reason = libllama.recent_reason()
            raise DecodeError(f"the projector could not encode the picture (code {code}): {reason}")
        rows = np.ctypeslib.as_array(pointer, (n_rows, self.width)).copy()
        # a NaN in the KV cache spreads to all sequences: masked cells count 0 times, and 0 * NaN is NaN
        if not -_LARGEST < rows.min() <= rows.max() < _LARGEST:
            raise DecodeError(
                "the projector's output for this picture contains NaN, infinite or huge values",
                hint="try another projector file or picture",
            )
        return rows

    @contextmanager
    def _tokenize(self, width: int, height: int, rgb: bytes | None) -> Iterator[list[int]]:
        """Yield libmtmd's pointers to the chunks of a picture. Only encoding needs `rgb`."""
        library = self._library
        bitmap = library.mtmd_bitmap_init(width, height, rgb)
        chunks = library.mtmd_input_chunks_init()
        try:
            picture_part = _Part(None, bitmap)
            parts = (ctypes.POINTER(_Part) * 1)(ctypes.pointer(picture_part))
            code = library.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False)
            if code:
                problem = f"the model does not accept pictures of {width}x{height} pixels"
                raise InvalidRequestError(problem, param="messages", hint="resize the picture")
            n_chunks = library.mtmd_input_chunks_size(chunks)
            yield [library.mtmd_input_chunks_get(chunks, i) for i in range(n_chunks)]
        finally:
            library.mtmd_input_chunks_free(chunks)
            library.mtmd_bitmap_free(bitmap)

    def _chunk(self, native: int) -> Chunk:
        library = self._library
        if library.mtmd_input_chunk_get_type(native) == _TEXT_CHUNK:
            n_tokens = _SIZE()
            tokens = library.mtmd_input_chunk_get_tokens_text(native, ctypes.byref(n_tokens))
            return Chunk(tokens=tuple(tokens[: n_tokens.value]))
        n_rows = library.mtmd_input_chunk_get_n_tokens(native)
        is_mrope = library.mtmd_decode_use_mrope(self._context)
        return Chunk(
            n_rows=n_rows,
            is_whole=library.mtmd_decode_use_non_causal(self._context, native),
            n_positions=library.mtmd_input_chunk_get_n_pos(native),
            positions=self._positions(native, n_rows) if is_mrope else None,
        )

    def _positions(self, native: int, n_rows: int) -> npt.NDArray[np.int32]:
        image = self._library.mtmd_input_chunk_get_tokens_image(native)
        get = self._library.mtmd_image_tokens_get_decoder_pos
        positions = (get(image, 0, i) for i in range(n_rows))
        return np.array(
            [(position.t, position.y, position.x, position.z) for position in positions], np.int32
        ).T

    def free(self) -> None:
        """Free the projector. Idempotent."""
        if self._context:
            with suppress(DecodeError):
                libllama.call(self._library.mtmd_free, self._context)
            self._context = None
