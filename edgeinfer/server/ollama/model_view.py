"""Describe a model in Ollama's fields: from the catalogue, a file's header and a loaded engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.chat_format import reasoning
from edgeinfer.runtime.options import EngineInfo, ModelFiles
from edgeinfer.runtime.requests import Sampling
from edgeinfer.server.context import RequestContext
from edgeinfer.server.model_pool import AvailableModel, listed_name
from edgeinfer.server.ollama import wire
from edgeinfer.server.ollama.render import stamp

if TYPE_CHECKING:
    from edgeinfer.models.gguf import GgufHeader

_FIM_KEY = "tokenizer.ggml.fim_pre_token_id"


def details(model: AvailableModel, info: EngineInfo | None = None) -> wire.ModelDetails:
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


def listed(models: Sequence[AvailableModel]) -> wire.OllamaTags:
    own = {model.name for model in models}
    return wire.OllamaTags(models=[_listed(model, listed_name(model.name, own)) for model in models])


def _listed(model: AvailableModel, name: str) -> wire.ListedModel:
    return wire.ListedModel(
        name=name,
        model=name,
        modified_at=stamp(model.created),
        size=model.size_bytes,
        digest=model.sha256,
        details=details(model),
    )


def describe(model: AvailableModel, info: EngineInfo | None) -> wire.OllamaShowReply:
    """Describe a model for /api/show; engine facts are missing while it is cold."""
    files, licence = _files(model.name)
    header = _header(files)
    found = _metadata(header, info)
    template = (files.chat_template if files else None) or (header.chat_template if header else "")
    return wire.OllamaShowReply(
        parameters=_parameters(files),
        template=template,
        details=details(model, info),
        model_info=found,
        capabilities=_capabilities(info or _guess(template, found, files)),
        modified_at=stamp(model.created),
        license=licence,
        system=files.system_prompt if files else "",
    )


def _files(name: str) -> tuple[ModelFiles | None, str]:
    # the catalogue is not needed before a client asks
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.reference import resolve

    try:
        ref = resolve(name)
        if ref.external is not None:  # what would check every byte of it can wait until it is used
            return stores.described(ref.external), ""
        return ref.files(), ref.entry.licence if ref.entry else ""
    except EdgeInferError:
        return None, ""


def _header(files: ModelFiles | None) -> GgufHeader | None:
    from edgeinfer.models.gguf import read_header  # as in `_files`

    try:
        return read_header(files.paths[0]) if files else None
    except EdgeInferError:
        return None


def _metadata(header: GgufHeader | None, info: EngineInfo | None) -> dict[str, Any]:
    """Return GGUF metadata; clients use `ARCHITECTURE.context_length`, so it is the loaded context."""
    found: dict[str, Any] = {}
    if header is not None:
        found = {key: _plain(value) for key, value in header.metadata.items()}
        found["general.parameter_count"] = header.n_params
    if info is not None:
        found.setdefault("general.architecture", info.architecture)
        found.setdefault("general.parameter_count", info.n_params)
    family = found.get("general.architecture", "")
    found.setdefault("general.basename", found.get("general.name", family))
    own = f"{family}.context_length"
    if info is not None and info.n_ctx:
        found[own] = min(info.n_ctx, found.get(own) or info.n_ctx)
    found.pop("tokenizer.chat_template", None)
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else None


def _capabilities(info: EngineInfo) -> list[str]:
    found = {
        "completion": info.can_generate,
        "tools": info.can_generate and bool(info.tool_format),
        "thinking": info.can_think,
        "insert": info.can_infill,
        "vision": info.can_see,
        "embedding": info.can_embed and not info.can_generate,
    }
    return [name for name, has in found.items() if has]


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
    own = msgspec.structs.asdict(files.sampling)
    lines = [f"{name} {value}" for name, value in own.items() if value != base[name]]
    lines += [f"stop {msgspec.json.encode(text).decode()}" for text in files.stop]
    return "\n".join(lines)


async def find(context: RequestContext, name: str) -> AvailableModel:
    """Find an available model. Raises UnknownModelError."""
    models = context.endpoint.models
    wanted = models.resolve(name)
    pulled = await context.endpoint.in_thread(models.pulled)
    return next((model for model in pulled if model.name == wanted), AvailableModel(name=wanted))
