"""Ollama's routes for models and embeddings, and the dialect with all of Ollama's routes.

Clients may pull and delete models only with `edgeinfer serve --ollama`.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Container, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response, StreamingResponse

from edgeinfer import __version__
from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import EdgeInferError, InvalidRequestError
from edgeinfer.models import lookup
from edgeinfer.models.external_stores.ollama import PREFIX
from edgeinfer.models.progress import PullProgress
from edgeinfer.platform.paths import LATEST
from edgeinfer.runtime.chat_format import reasoning
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo, ModelFiles
from edgeinfer.runtime.requests import Sampling
from edgeinfer.server.connection import unless, until_disconnected
from edgeinfer.server.context import RequestContext, engine_call, json_reply
from edgeinfer.server.dialect import Dialect, RouteTable, stamp
from edgeinfer.server.model_entry import LoadedReply
from edgeinfer.server.model_pool import AvailableModel, ModelAdministrator
from edgeinfer.server.ollama import chat, wire
from edgeinfer.server.ollama.chat import durations
from edgeinfer.server.problems import Problem
from edgeinfer.server.pulling import Reports, reports_of, source_of

if TYPE_CHECKING:
    from edgeinfer.models.gguf import GgufHeader

ROUTES = RouteTable()

#: Version of Ollama that /api/version reports. Some clients refuse to use old versions.
API_VERSION = "0.13.4"
#: Time (s) from now to the `expires_at` of a model that is never unloaded, as in Ollama.
_FOR_EVER_S = 100 * 365 * 86_400.0


@ROUTES.post("/api/embed")
@engine_call
def embed(
    context: RequestContext, body: wire.OllamaEmbedRequest, engine: Engine
) -> wire.OllamaEmbedReply:
    """Embed texts."""
    texts = [body.input] if isinstance(body.input, str) else list(body.input or ())
    inputs = _tokens(engine, texts, cut=body.truncate is not False)
    vectors = engine.embed(inputs) if inputs else []
    context.prompt_tokens = sum(map(len, inputs))
    return wire.OllamaEmbedReply(
        model=body.model,
        embeddings=[_shorten(vector, body.dimensions) for vector in vectors],
        prompt_eval_count=context.prompt_tokens,
        **durations(context),
    )


@ROUTES.post("/api/embeddings")
@engine_call
def embeddings(
    context: RequestContext, body: wire.OllamaEmbeddingsRequest, engine: Engine
) -> wire.OllamaEmbeddingsReply:
    """Embed one text (superseded by /api/embed)."""
    inputs = _tokens(engine, [body.prompt] if body.prompt else [], cut=True)
    vectors = engine.embed(inputs) if inputs else [[]]
    return wire.OllamaEmbeddingsReply(embedding=vectors[0])


def _tokens(engine: Engine, texts: Sequence[str], *, cut: bool) -> list[list[int]]:
    longest = engine.info.n_ctx_embed if cut else 0
    return [engine.tokenize(text, add_special=True)[: longest or None] for text in texts]


def _shorten(vector: Sequence[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` values of an embedding, scaled to length 1; all if None or 0."""
    if not dimensions or dimensions >= len(vector):
        return list(vector)
    shortened = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in shortened)) or 1.0
    return [x / length for x in shortened]


@ROUTES.get("/api/tags")
async def tags(context: RequestContext) -> wire.OllamaTags:
    """List the pulled models."""
    models = await context.endpoint.in_thread(context.endpoint.models.list_available)
    names = {model.name for model in models}
    rows = [_model_row(model, _ollama_name(model.name, names)) for model in models]
    return wire.OllamaTags(models=rows)


def _ollama_name(name: str, taken_names: Container[str] = ()) -> str:
    """Return a model's name as Ollama's API lists it: with a tag, and without the prefix `ollama/`.

    The prefix stays if another model already has the short name.
    """
    short = name.removeprefix(PREFIX)
    listed_name = name if short in taken_names else short
    return listed_name if ":" in listed_name else listed_name + LATEST


def _model_row(model: AvailableModel, name: str) -> wire.ListedModel:
    return wire.ListedModel(
        name=name,
        model=name,
        modified_at=stamp(model.created),
        size=model.size_bytes,
        digest=model.sha256,
        details=_details(model),
    )


def _details(model: AvailableModel, info: EngineInfo | None = None) -> wire.ModelDetails:
    family = model.architecture or (info.architecture if info else "")
    return wire.ModelDetails(
        family=family,
        families=[family] if family else [],
        parameter_size=_size(model.n_params or (info.n_params if info else 0)),
        quantization_level=model.quantization,
    )


def _size(n_params: int) -> str:
    if not n_params:
        return ""
    return f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.1f}M"


@ROUTES.post("/api/show", uses_model=False)
async def show(context: RequestContext, body: wire.OllamaShowRequest) -> wire.OllamaShowReply:
    """Describe a model and its capabilities."""
    model = await _find_model(context, body.model_name())
    info = context.endpoint.models.info(model.name)
    reply: wire.OllamaShowReply = await context.endpoint.in_thread(_describe, model, info)
    return reply


_FIM_KEY = "tokenizer.ggml.fim_pre_token_id"


def _describe(model: AvailableModel, info: EngineInfo | None) -> wire.OllamaShowReply:
    """Describe a model for /api/show, from its file's header if `info` is None (not loaded)."""
    files, licence = _files(model.name)
    header = _header(files)
    metadata = _metadata(header, info)
    template = (files.chat_template if files else None) or (header.chat_template if header else "")
    return wire.OllamaShowReply(
        parameters=_parameters(files),
        template=template,
        details=_details(model, info),
        model_info=metadata,
        capabilities=_capabilities(info or _guess(template, metadata, files)),
        modified_at=stamp(model.created),
        license=licence,
        system=files.system_prompt if files else "",
    )


def _files(name: str) -> tuple[ModelFiles | None, str]:
    # imported here, because few endpoints get /api/show requests
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.reference import resolve

    try:
        ref = resolve(name)
        # do not call `ref.files()` for another program's model: the call would hash the whole model
        # file, which can wait until the model is loaded
        if ref.external is not None:
            return stores.describe_files(ref.external), ""
        return ref.files(), ref.entry.licence if ref.entry else ""
    except EdgeInferError:
        return None, ""


def _header(files: ModelFiles | None) -> GgufHeader | None:
    from edgeinfer.models.gguf import read_header  # imported here: few endpoints get /api/show requests

    try:
        return read_header(files.paths[0]) if files else None
    except EdgeInferError:
        return None


def _metadata(header: GgufHeader | None, info: EngineInfo | None) -> dict[str, Any]:
    """Return the GGUF metadata, with the loaded engine's context size as `llama.context_length`."""
    metadata: dict[str, Any] = {}
    if header is not None:
        metadata = {key: _plain(value) for key, value in header.metadata.items()}
        metadata["general.parameter_count"] = header.n_params
    if info is not None:
        metadata.setdefault("general.architecture", info.architecture)
        metadata.setdefault("general.parameter_count", info.n_params)
    family = metadata.get("general.architecture", "")
    metadata.setdefault("general.basename", metadata.get("general.name", family))
    context_key = f"{family}.context_length"
    if info is not None and info.n_ctx:
        metadata[context_key] = min(info.n_ctx, metadata.get(context_key) or info.n_ctx)
    metadata.pop("tokenizer.chat_template", None)
    return metadata


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else None


def _capabilities(info: EngineInfo) -> list[str]:
    capabilities = {
        "completion": info.can_generate,
        "tools": info.can_generate and bool(info.tool_format),
        "thinking": info.can_think,
        "insert": info.can_infill,
        "vision": info.can_see,
        "embedding": info.can_embed and not info.can_generate,
    }
    return [name for name, has in capabilities.items() if has]


def _guess(template: str, metadata: dict[str, Any], files: ModelFiles | None) -> EngineInfo:
    embeds = any(key.endswith((".pooling_type", ".classifier.output_labels")) for key in metadata)
    return EngineInfo(
        model="",
        can_generate=not embeds,
        can_embed=embeds,
        can_think=bool(template) and reasoning.detect(template)[1],
        can_infill=_FIM_KEY in metadata,
        can_see=bool(files and files.projector),
        tool_format="by its template" if template else "",
    )


def _parameters(files: ModelFiles | None) -> str:
    if files is None:
        return ""
    base = msgspec.structs.asdict(Sampling())
    sampling = msgspec.structs.asdict(files.sampling)
    lines = [f"{name} {sampling[name]}" for name in BY_FIELD if sampling[name] != base[name]]
    lines += [f"stop {msgspec.json.encode(text).decode()}" for text in files.stop]
    return "\n".join(lines)


@ROUTES.get("/api/ps")
async def running(context: RequestContext) -> wire.OllamaProcesses:
    """List the loaded models."""
    models = context.endpoint.models
    pulled = await context.endpoint.in_thread(models.list_available)
    by_name = {model.name: model for model in pulled}
    processes = [
        _running(loaded, info, by_name.get(loaded.id, AvailableModel(name=loaded.id)))
        for loaded in models.report()
        if (info := models.info(loaded.id)) is not None
    ]
    return wire.OllamaProcesses(models=processes)


def _running(loaded: LoadedReply, info: EngineInfo, pulled: AvailableModel) -> wire.RunningModel:
    name = _ollama_name(loaded.id)
    left_s = _FOR_EVER_S if loaded.expires_in_s is None else loaded.expires_in_s
    return wire.RunningModel(
        name=name,
        model=name,
        size=loaded.size_bytes,
        digest=pulled.sha256 or info.sha256,
        details=_details(pulled, info),
        expires_at=stamp(time.time() + left_s),
        size_vram=0,
        context_length=info.n_ctx,
    )


@ROUTES.get("/api/version")
async def version(context: RequestContext) -> wire.OllamaVersion:
    """Return the version of Ollama whose API is implemented."""
    return wire.OllamaVersion(version=API_VERSION, edgeinfer=__version__)


_DONE = wire.OllamaStatus(status="success")


def _admin_of(context: RequestContext) -> ModelAdministrator:
    admin = context.endpoint.model_admin
    if admin is None:
        message = (
            "Clients may not pull or remove models: "
            "the endpoint was started without `edgeinfer serve --ollama`."
        )
        raise Problem(403, message, code="models_are_fixed")
    return admin


@ROUTES.post("/api/pull", reply=wire.OllamaStatus, streams=True, is_admin=True)
async def pull(context: RequestContext, body: wire.OllamaPullRequest) -> Response:
    """Pull a model; each line of the stream reports progress."""
    admin, text = _admin_of(context), source_of(body.model_name())
    reports = reports_of(lambda report, cancel: admin.pull(text, report, cancel))
    first = await anext(reports, None)  # an error before the first report still gets an HTTP status
    if body.stream is False:
        await unless(until_disconnected(context.request.receive), _read_all(reports))
        return json_reply(_DONE)
    return StreamingResponse(
        _progress_lines(context, first, reports), media_type="application/x-ndjson"
    )


async def _read_all(reports: Reports) -> None:
    async for _ in reports:
        pass


async def _progress_lines(
    context: RequestContext, first: PullProgress | None, reports: Reports
) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield msgspec.json.encode(progress_line(first)) + b"\n"
        async for report in reports:
            yield msgspec.json.encode(progress_line(report)) + b"\n"
        last = msgspec.json.encode(_DONE) + b"\n"
    except Exception as error:  # noqa: BLE001  the status is sent, so the stream itself must report any failure
        problem = context.endpoint.problem_of(error, context.id)
        context.outcome = problem.code or "error"
        last = error_line(problem, context.id)
    finally:
        await reports.aclose()
    yield last


@ROUTES.delete("/api/delete", is_admin=True)
async def delete(context: RequestContext, body: wire.OllamaDeleteRequest) -> wire.OllamaStatus:
    """Remove a model."""
    admin, name = _admin_of(context), body.model_name()
    model = await _find_model(context, name)
    if lookup.find(name, [model]) is None:
        message = f"{name} is an alias, which cannot be deleted"
        raise InvalidRequestError(message, hint=f"name the model: {model.name}", param="model")
    await context.endpoint.models.unload(model.name)
    await context.endpoint.in_thread(admin.remove, model.name)
    return _DONE


def progress_line(now: PullProgress) -> wire.OllamaStatus:
    """Convert a progress report to a line. Clients draw a progress bar for each value of `digest`."""
    if now.note:
        return wire.OllamaStatus(status=now.note)
    match now.stage:
        case "downloading" | "copying":
            return wire.OllamaStatus(
                status=f"pulling {now.file}",
                digest=now.file,
                total=now.total_bytes or 0,
                completed=now.done_bytes,
            )
        case "verifying":
            return wire.OllamaStatus(status="verifying sha256 digest")
        case "converting" | "quantizing" | "scoring":
            total = now.total_bytes or 0
            return wire.OllamaStatus(status=now.stage, total=total, completed=now.done_bytes)
        case "done":
            return wire.OllamaStatus(status="writing manifest")
    return wire.OllamaStatus(status="pulling manifest")


async def _find_model(context: RequestContext, name: str) -> AvailableModel:
    """Return the model that a client means by `name`. Raises UnknownModelError."""
    models = context.endpoint.models
    resolved = models.resolve(name)
    pulled = await context.endpoint.in_thread(models.list_available)
    return next((model for model in pulled if model.name == resolved), AvailableModel(name=resolved))


#: `Problem.code` → beginning of Ollama's error text, which clients search for.
_PREFIXES = {
    "model_not_found": "model not found: ",
    "context_length_exceeded": "the input length exceeds the context length: ",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"error": "…"}`. Ollama's error has no field for `request_id`."""
    prefix = _PREFIXES.get(problem.code or "", "")
    return msgspec.json.encode(wire.OllamaError(error=prefix + problem.message))


def error_line(problem: Problem, request_id: str) -> bytes:
    """Encode the error as the last line of a stream."""
    return error_body(problem, request_id) + b"\n"


def waiting_line(text: str) -> bytes:
    """Return a space, not `text`: JSON lines have no comments, but a space keeps the stream alive."""
    return b" "


OLLAMA = Dialect(
    name="ollama",
    error_type=wire.OllamaError,
    error_body=error_body,
    error_events=error_line,
    stream_type="application/x-ndjson",
    comment=waiting_line,
    prefix="/api/",
    checks_body_type=False,
    operations=[*chat.ROUTES, *ROUTES],
)
