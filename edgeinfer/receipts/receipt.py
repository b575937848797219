"""A receipt: everything needed to check an answer, as a small JSON document that may be signed.

The conversation is in `Receipt.content`, of which the receipt contains a salted digest. So a private
receipt, which lacks the content, has the same digest and signature but does not reveal the
conversation.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import secrets
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from edgeinfer import __version__
from edgeinfer.errors import ConfigError, ReceiptError
from edgeinfer.platform.disk import path_errors, read_regular
from edgeinfer.platform.ed25519 import SigningKey, is_signed_by, parse_key
from edgeinfer.runtime.events import Finished, FinishReason, TokenRecord
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Sampling, random_bytes
from edgeinfer.runtime.revision import KERNEL_REVISION

#: Largest receipt (bytes). The receipt of 131,072 tokens takes 2 MB.
MAX_BYTES = 16 << 20
#: A signature signs this text, then the receipt's digest, so that no signature of another message is
#: valid for a receipt.
_SIGNED = b"edgeinfer receipt 1\n"

_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Name = Annotated[str, Meta(max_length=1024)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[tuple[_Number, ...], Meta(min_length=1)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a receipt; unknown fields are refused, because nothing would check them."""


class AdapterDigest(_Part, frozen=True, kw_only=True):
    """A LoRA adapter that was used to generate the answer, with the SHA-256 of the adapter's file."""

    name: _Name
    scale: float
    sha256: _Digest


class Signature(_Part, frozen=True, kw_only=True):
    """An Ed25519 signature of the receipt's digest; both fields are hexadecimal."""

    public_key: _Digest
    value: Annotated[str, Meta(pattern="^[0-9a-f]{128}$")]


class Content(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """The conversation of a receipt. `request` is what `request_fields` returns.

    `prompt` and `answer` are token ids. `salt` is random in each receipt, so that digests do not reveal
    equal conversations. `logprobs` has the log-probability (base e) of each token of the answer, None
    for a token that a constraint forced. `stop_sequence` is the stop string that ended the answer, if
    any.
    """

    salt: _Digest
    request: dict[str, Any]
    prompt: _Tokens
    answer: _Tokens
    logprobs: tuple[float | None, ...]
    stop_sequence: str | None = None


class Receipt(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """The record of how an answer was generated, with which `edgeinfer verify` can check the answer.

    `content` (the conversation) is None in a private receipt, `signature` if no key is configured.
    `program` is the version of edgeinfer. `constraint_sha256` is the salted digest of schema, grammar
    and tools, "" without any. `n_prompt` and `n_answer` are numbers of tokens. `index` is the number of
    the answer, from 0, among those of its request. `seconds` is how long prefill and generation took.
    `sha256` is the digest of all fields above it.
    """

    version: Literal[1]
    program: _Name
    kernel_revision: _Number
    model: _Name
    model_sha256: _Digest
    adapters: Annotated[tuple[AdapterDigest, ...], Meta(max_length=64)] = ()
    kv_type: Annotated[str, Meta(pattern="^(f16|q8_0|q4_0)$")]
    n_ctx: Annotated[int, Meta(ge=1, lt=1 << 31)]
    time: datetime
    sampling: Sampling
    constraint_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    n_prompt: int
    n_answer: int
    finish_reason: FinishReason
    index: _Number = 0
    seconds: Annotated[float, Meta(ge=0, le=1e9)]
    content_sha256: _Digest
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    signature: Signature | None = None
    content: Content | None = None

    def digest(self) -> str:
        """Compute the value that `sha256` must have."""
        return _sha256(msgspec.structs.replace(self, sha256="", signature=None, content=None))

    def alteration(self) -> str:
        """Return an error text if the receipt was changed after it was made; "" otherwise."""
        if self.digest() != self.sha256:
            return "the receipt was changed: its digest does not match"
        if self.content and _sha256(self.content) != self.content_sha256:
            return "the receipt's content was changed: its digest does not match"
        if signature := self.signature:
            key, signed = bytes.fromhex(signature.public_key), bytes.fromhex(signature.value)
            if not is_signed_by(key, signed, _SIGNED + self.sha256.encode()):
                return "the signature does not match"
        return ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which an answer has no receipt."""

    refused: str


def with_record(request: GenerateRequest) -> GenerateRequest:
    """Return a copy of `request` that makes the engine record what `make_receipt` needs.

    The copy has `record_tokens` set, and a random seed if `request` has none.
    """
    sampling = request.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(random_bytes(4), "little"))
    return msgspec.structs.replace(request, sampling=sampling, record_tokens=True)


def make_receipt(
    request: GenerateRequest,
    finished: Finished,
    info: EngineInfo,
    *,
    index: int = 0,
    key: SigningKey | None = None,
) -> Receipt | Refusal:
    """Make the receipt of answer `index` to a request from `with_record`, or say why there is none.

    Without `key`, the receipt is not signed.
    """
    record = finished.record
    reason = "the engine recorded no tokens" if record is None else _why_refused(request, record, info)
    if record is None or reason:
        return Refusal(refused=reason)
    content = Content(
        salt=secrets.token_hex(32),
        request=request_fields(request),
        prompt=record.prompt,
        answer=record.answer,
        logprobs=tuple(None if p is None else round(p, 3) + 0.0 for p in record.logprobs),
        stop_sequence=finished.stop_sequence,
    )
    receipt = Receipt(
        version=1,
        program=__version__,
        kernel_revision=KERNEL_REVISION,
        model=info.model,
        model_sha256=info.sha256,
        adapters=msgspec.convert(record.adapters, tuple[AdapterDigest, ...], from_attributes=True),
        kv_type=str(info.choices["kv_type"].value),
        n_ctx=info.n_ctx,
        time=datetime.now().astimezone(),
        # encode and decode, so that a float field has a float: the digests of 0 and 0.0 differ
        sampling=msgspec.json.decode(msgspec.json.encode(request.sampling), type=Sampling),
        constraint_sha256=constraint_digest(request, content.salt),
        n_prompt=len(record.prompt),
        n_answer=len(record.answer),
        finish_reason=finished.reason,
        index=index,
        seconds=round((finished.timings.prefill_ms + finished.timings.decode_ms) / 1000, 4),
        content_sha256=_sha256(content),
        content=content,
    )
    receipt = msgspec.structs.replace(receipt, sha256=receipt.digest())
    return receipt if key is None else sign(receipt, key)


def sign(receipt: Receipt, key: SigningKey) -> Receipt:
    value = key.sign(_SIGNED + receipt.sha256.encode())
    signature = Signature(public_key=key.public.hex(), value=value.hex())
    return msgspec.structs.replace(receipt, signature=signature)


def _why_refused(request: GenerateRequest, record: TokenRecord, info: EngineInfo) -> str:
    biases = request.sampling.logit_bias.values()
    reasons = {
        record.irreproducible: bool(record.irreproducible),
        "the request has pictures, which a receipt cannot contain": request.n_pictures > 0,
        "the SHA-256 of the model's file is unknown; `edgeinfer pull FILE` records it": not info.sha256,
        "no token was generated": not record.answer,
        "the context was shifted": len(record.prompt) + len(record.answer) > info.n_ctx,
        "logit_bias has an infinite value, which JSON cannot express": any(map(math.isinf, biases)),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


#: Fields of a request that do not affect its tokens, or that a receipt has elsewhere.
_SERVER_FIELDS = (
    "background cache_on_disk cache_prompt cache_salt conversation deadline_s lora preamble "
    "prompt_logprobs record_tokens replay sampling speculative"
).split()
_DEFAULTS = msgspec.json.decode(msgspec.json.encode(GenerateRequest()))


def request_fields(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request that affect its tokens, without those that have the default."""
    fields = msgspec.json.decode(msgspec.json.encode(request)).items()
    return {key: v for key, v in fields if key not in _SERVER_FIELDS and v != _DEFAULTS[key]}


def constraint_digest(request: GenerateRequest, salt: str) -> str:
    fields = (salt, request.constraint, request.tools, request.tool_choice)
    return _sha256(fields) if request.constraint or request.tools else ""


def _sha256(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def parse_json(data: bytes) -> Any:
    """Parse untrusted JSON. Raises ReceiptError if it is invalid, long or deep, or repeats a key."""
    if len(data) > MAX_BYTES:
        problem = f"the receipt has {len(data):,} bytes; at most {MAX_BYTES:,} are allowed"
        raise ReceiptError(problem, hint="check the file: a receipt of 131,072 tokens takes 2 MB")
    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (RecursionError, ValueError) as error:
        raise ReceiptError(f"this is not a receipt: {_describe_json_error(error)}") from error


def _describe_json_error(error: RecursionError | ValueError) -> str:
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return "the file is not UTF-8 text"
        case json.JSONDecodeError():
            return f"the text is not JSON (line {error.lineno}, column {error.colno})"
    return str(error)


def to_receipt(document: Any) -> Receipt:
    """Convert a parsed document to a receipt. Raises ReceiptError, which names the fault."""
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > 1:
        problem = f"the receipt's format, version {version}, is newer than this program"
        raise ReceiptError(problem, hint="update edgeinfer")
    try:
        receipt = msgspec.convert(document, Receipt, str_keys=True)
        if receipt.content is not None:
            request = msgspec.convert(receipt.content.request, GenerateRequest)
            if request_fields(request) != receipt.content.request:
                raise ValueError("content.request lacks a field or has an unknown one")
        msgspec.json.encode(receipt)  # raises for invalid Unicode and integers beyond 64 bits
    except (ValueError, OverflowError, RecursionError) as error:  # ValidationError is a ValueError
        fault = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ReceiptError(f"this is not a receipt: {fault}") from error
    return receipt


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a JSON object contains a key twice")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@functools.lru_cache(maxsize=4)
def load_key(path: str) -> SigningKey | None:
    """Read the configured signing key; None if `path` is "". Raises ConfigError."""
    if not path:
        return None
    file = Path(path).expanduser()
    with path_errors(f"receipts.key: {file}", "name a file that you may read", ConfigError):
        is_shared = file.stat().st_mode & 0o077
        key = parse_key(read_regular(file).decode("utf-8", "replace"))
    if is_shared:
        raise ConfigError(f"receipts.key: other users may open {file}", hint=f"chmod 600 {file}")
    if key is None:
        hint = f"make one: `openssl genpkey -algorithm ed25519 -out {file}`"
        raise ConfigError(f"receipts.key: {file} is not an Ed25519 key", hint=hint)
    return key
