"""edgeinfer's own routes: tokenization, reranking, receipts, /infer, status, metrics and snapshots."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from edgeinfer import __version__
from edgeinfer.agents.known_agents import AGENTS
from edgeinfer.agents.prompt_normalization import predict_prefix
from edgeinfer.errors import InvalidRequestError
from edgeinfer.receipts.receipt import Receipt, parse_json, to_receipt
from edgeinfer.receipts.verify import ReceiptCheck, Verification
from edgeinfer.runtime.chat_format.tool_call_grammar import describe_loose
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.interface import Engine, HasReplicas
from edgeinfer.runtime.options import EngineInfo, ReplicasInfo
from edgeinfer.runtime.requests import GenerateRequest, Message
from edgeinfer.server.connection import unless, until_disconnected
from edgeinfer.server.context import RequestContext, engine_call, json_reply, with_engine
from edgeinfer.server.dialect import Dialect, Renderer, RouteTable, wire_timings
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.generation_response import answer
from edgeinfer.server.native import llama_routes, wire
from edgeinfer.server.openai.chat import ERRORS, finish_reason
from edgeinfer.server.openai.wire import ErrorReply
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import decode, decode_query
from edgeinfer.server.request_fields import common_fields
from edgeinfer.server.wire_types import ModelFields, PromptUsage

ROUTES = RouteTable()

#: Content type of /metrics. prometheus_client's own constant changes with the library's version.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@ROUTES.post("/tokenize")
@engine_call
def tokenize(context: RequestContext, body: wire.TokenizeRequest, engine: Engine) -> wire.TokenizeReply:
    """Tokenize text."""
    tokens = engine.tokenize(
        body.content, add_special=body.add_special, parse_special=body.parse_special
    )
    if not body.with_pieces:
        return wire.TokenizeReply(tokens=list(tokens))
    return wire.TokenizeReply(
        tokens=[wire.TokenPiece(id=t, piece=_piece(engine.detokenize([t]))) for t in tokens]
    )


@ROUTES.post("/detokenize")
@engine_call
def detokenize(
    context: RequestContext, body: wire.DetokenizeRequest, engine: Engine
) -> wire.DetokenizeReply:
    """Detokenize tokens."""
    largest, last = max(body.tokens, default=0), engine.info.n_vocab - 1
    if largest > last:
        message = f"tokens has the id {largest}, but the ids of {engine.info.model} end at {last}"
        hint = "send ids that /tokenize returns for this model"
        raise InvalidRequestError(message, param="tokens", hint=hint)
    text = engine.detokenize(body.tokens).decode("utf-8", "replace")
    return wire.DetokenizeReply(content=text)


@ROUTES.post("/v1/rerank")
@engine_call
def rerank(context: RequestContext, body: wire.RerankRequest, engine: Engine) -> wire.RerankReply:
    """Rank documents by relevance."""
    if not engine.info.can_rerank:
        problem = f"{engine.info.model} is not a reranker"
        hint = "choose a reranker: `edgeinfer list`"
        raise InvalidRequestError(problem, param="model", hint=hint)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scores = engine.rerank(body.query, texts)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or len(texts)]
    n_of_query = len(engine.tokenize(body.query, add_special=True))
    # in `n_of_query + n`, two special tokens separate query and document; BERT models get only one,
    # [SEP]
    n_shared = 1 if engine.info.eos_token == "[SEP]" else 0
    n_of_texts = [len(engine.tokenize(text, add_special=True)) for text in texts]
    tokens = sum(n_of_query + n - n_shared for n in n_of_texts)
    results = [
        wire.RerankResult(
            index=index,
            relevance_score=scores[index],
            document={"text": texts[index]} if body.return_documents else msgspec.UNSET,
        )
        for index in best
    ]
    usage = PromptUsage(prompt_tokens=tokens, total_tokens=tokens)
    return wire.RerankReply(model=engine.info.model, results=results, usage=usage)


#: Maximum size (bytes) of a receipt. Parsing 4 MiB takes 0.1 s, in which no other thread runs (GIL).
_MAX_RECEIPT_BYTES = 4 << 20


@ROUTES.post("/v1/verify", max_body_bytes=_MAX_RECEIPT_BYTES)
async def verify_receipt(context: RequestContext, body: wire.VerifyRequest) -> Verification:
    """Check that a model generates exactly the answer of a receipt."""
    receipt = await context.endpoint.in_thread(_read_receipt, context.body or b"")
    context.name_model(body.model or receipt.model)
    with await context.acquire(body.keep_alive) as lease:
        check = ReceiptCheck(receipt, lease.engine)
        working = asyncio.ensure_future(_check_in_turn(context, lease.engine, check))
        result = await unless(until_disconnected(context.request.receive), working)
        if result is None:
            await asyncio.wait([working])  # the check must stop before the model is released
            raise Problem(400, "The client disconnected.", code="client_disconnected")
    return result


def _read_receipt(body: bytes) -> Receipt:
    # parse the raw body again: `parse_json` refuses duplicate keys, which msgspec has accepted
    return to_receipt(parse_json(body)["receipt"])


async def _check_in_turn(context: RequestContext, engine: Engine, check: ReceiptCheck) -> Verification:
    """Wait for a slot of the engine, run the check. Raises QueueFullError, and what `run` raises."""
    endpoint, caller = context.endpoint, context.caller.turn
    has_slot = False
    endpoint.admit_generations(context.model, engine.info.n_parallel, 1, caller)
    try:
        if caller:
            await endpoint.engine_slots[context.model].take(caller, 1)
        has_slot = True
        endpoint.running.add(check)
        running = asyncio.wrap_future(endpoint.engine_calls.begin(caller, check.run))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # the client has disconnected
            check.cancel()
            await asyncio.wait([running])
            raise
    finally:
        endpoint.running.discard(check)
        endpoint.release_generations(context.model, 1, caller if has_slot else "")


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


class _InferRenderer(Renderer):
    def __init__(self, context: RequestContext, body: wire.InferQuery, info: EngineInfo) -> None:
        self._model = context.model

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        finished = answer.finish
        reply = wire.InferReply(
            result=answer.text,
            model=self._model,
            finish_reason=finish_reason(finished),
            timings=wire_timings(finished.usage, finished.timings),
        )
        return msgspec.json.encode(reply)


def infer_requests(body: wire.InferQuery, info: EngineInfo) -> list[GenerateRequest]:
    """Make a request: a user turn after a system prompt, or raw text if there is no chat template."""
    system = info.system_prompt if body.system is None else body.system
    turns = [Message(role="system", content=system)] if system else []
    shared = common_fields(body, info)
    if not info.has_chat_template:
        max_tokens = 256 if body.max_tokens is None else body.max_tokens
        return [GenerateRequest(prompt=body.prompt, max_tokens=max_tokens, **shared)]
    turns.append(Message(role="user", content=body.prompt))
    return [GenerateRequest(messages=tuple(turns), max_tokens=body.max_tokens, **shared)]


@ROUTES.get("/infer", query=wire.InferQuery, reply=wire.InferReply, uses_model=True)
@ROUTES.post("/infer", body=wire.InferRequest, reply=wire.InferReply)
async def infer(context: RequestContext) -> Response:
    """Answer one prompt from the query (`curl -d '' …/infer?prompt=Hello`) or the body."""
    request = context.request
    body = (
        decode_query(context, wire.InferQuery)
        if request.method != "POST" or request.query_params
        else await decode(context, wire.InferRequest)
    )
    return await answer(context, body, infer_requests, _InferRenderer, stream=False)


@ROUTES.post("/v1/models/{id}/unload", uses_model=False, is_admin=True)
async def unload(context: RequestContext) -> wire.UnloadReply:
    """Unload a model when its running requests have ended."""
    models = context.endpoint.models
    model = models.resolve(context.path_id)
    return wire.UnloadReply(id=model, state=await models.unload(model))


_SNAPSHOT_REFUSALS = {"409": ErrorReply, "507": ErrorReply}


@ROUTES.post("/v1/models/{id}/snapshot", also=_SNAPSHOT_REFUSALS, uses_model=False, is_admin=True)
async def take_snapshot(context: RequestContext, body: wire.SnapshotRequest) -> wire.SnapshotReply:
    """Take a snapshot of a loaded model, which keeps running. Later launches resume the snapshot."""
    endpoint = context.endpoint
    model = endpoint.models.resolve(context.path_id)
    async with endpoint.snapshot_lock:
        snapshot = await asyncio.to_thread(endpoint.host.take_snapshot, model, body.name)
    endpoint.log.info("snapshot-taken", model=model, snapshot=snapshot.name, built=snapshot.was_built)
    return wire.SnapshotReply(
        id=model,
        state="taken" if snapshot.was_built else "unchanged",
        snapshot=snapshot.name,
        disk_bytes=snapshot.disk_bytes,
        seconds=snapshot.seconds,
    )


@ROUTES.post("/v1/models/{id}/recall")
async def recall(context: RequestContext, body: wire.RecallRequest) -> wire.RecallReply:
    """Prefill the prompt prefix that a coding agent will send, from the disk if it is cached there."""

    def work(engine: Engine) -> wire.RecallReply:
        n_tokens = _recall(engine, body, context.add_salt(""))
        return wire.RecallReply(id=context.model, n_tokens=n_tokens)

    return await with_engine(context, ModelFields(model=context.path_id), work)


def _recall(engine: Engine, body: wire.RecallRequest, salt: str) -> int:
    """Prefill the predicted prefix of an agent's prompt; return its length (tokens), 0 if none fits."""
    tokens = engine.agent_prefix(body.agent, salt)
    if tokens and body.folder is not None:
        text = engine.detokenize(tokens).decode("utf-8", "replace")
        today, is_repository = datetime.date.today(), body.is_repository
        predicted = predict_prefix(text, body.folder, today, is_repository=is_repository)
        tokens = engine.tokenize(predicted, parse_special=True)
    if not 0 < len(tokens) < engine.info.n_ctx:
        return 0
    for _ in engine.submit(GenerateRequest(prompt=tuple(tokens), max_tokens=0, cache_salt=salt)):
        pass
    return len(tokens)


@ROUTES.get("/health", reply=wire.Health, also={"503": wire.Health})
async def health(context: RequestContext) -> Response:
    """Report whether the default model is ready: 200, or 503 with the reason."""
    report = _health(context.endpoint)
    is_ok = report.status == "ok"
    return json_reply(report) if is_ok else json_reply(report, 503, {"retry-after": "1"})


def _health(endpoint: Endpoint) -> wire.Health:
    models = endpoint.models
    state = models.state(models.default)
    endpoint.was_ready = endpoint.was_ready or state == "loaded"
    status: wire.Status = "ok"
    error = endpoint.failure()
    if endpoint.draining:
        status = "draining"
    elif error:
        status = "error"
    elif not endpoint.was_ready:
        error = models.last_error
        status = "error" if state == "cold" and error else "loading"
    reason, loading = error or msgspec.UNSET, models.loading()
    return wire.Health(status=status, model=models.default, loading=loading, error=reason)


@ROUTES.get("/metrics", reply_type="text/plain", is_admin=True)
async def metrics(context: RequestContext) -> Response:
    """Return metrics in Prometheus' text format."""
    endpoint = context.endpoint
    text = await endpoint.in_thread(endpoint.metrics.exposition)
    return Response(text, headers={"content-type": METRICS_TYPE})


@ROUTES.get("/", reply_type="text/plain")
async def root(context: RequestContext) -> Response:
    """Identify the server. With `serve --ollama` it says "Ollama is running", for Ollama's clients."""
    server_name = "edgeinfer" if context.endpoint.model_admin is None else "Ollama"
    return Response(f"{server_name} is running", media_type="text/plain")


@ROUTES.get("/slots")
async def slots(context: RequestContext) -> wire.Slots:
    """List the latest generations, and where each prompt differed from the cached prefixes."""
    return wire.Slots(slots=[slot for key, slot in context.endpoint.slots if key == context.key])


def _replicas(engines: Sequence[tuple[str, Engine]]) -> dict[str, ReplicasInfo]:
    return {name: engine.replicas() for name, engine in engines if isinstance(engine, HasReplicas)}


@ROUTES.get("/status")
@ROUTES.get("/props")
async def props(context: RequestContext) -> wire.Props:
    """Describe the endpoint and its loaded models."""
    endpoint = context.endpoint
    info = endpoint.models.info(endpoint.models.default)
    replicas = await endpoint.in_thread(_replicas, endpoint.models.engines())
    models = endpoint.models.report()
    tools = endpoint.tools.request_tools() if endpoint.tools is not None else ()
    loose_tools = await endpoint.in_thread(lambda: list(filter(None, map(describe_loose, tools))))
    params = msgspec.to_builtins(info.sampling) if info else {}
    defaults = wire.LlamaDefaults(n_ctx=info.n_ctx if info else 0, params=params)
    return wire.Props(
        version=__version__,
        health=_health(endpoint),
        requests=endpoint.in_flight,
        default_model=endpoint.models.default,
        models=[msgspec.structs.replace(model, replicas=replicas.get(model.id)) for model in models],
        how_started=endpoint.host.start.how,
        start_reason=endpoint.host.start.reason,
        start_stages_ms=endpoint.host.start.stages_ms,
        limits=msgspec.to_builtins(endpoint.limits),
        loose_tools=loose_tools,
        prompt_normalization=wire.PromptNormalization(
            rules=list(endpoint.normalizer.rules),
            agents=[agent.name for agent in AGENTS.values() if agent.user_agent],
        ),
        default_generation_settings=defaults,
        total_slots=info.n_parallel if info else 0,
        model_alias=endpoint.models.default,
        model_path=endpoint.models.default,
        chat_template=info.chat_template if info else "",
        build_info=f"edgeinfer-{__version__}",
        modalities=wire.Modalities(vision=info.can_see if info else False),
        payload_log=endpoint.payload_log.status if endpoint.payload_log is not None else None,
    )


NATIVE = Dialect(name="native", operations=[*ROUTES, *llama_routes.ROUTES], **ERRORS)
