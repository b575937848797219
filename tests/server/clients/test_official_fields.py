"""Every field of the official clients' request types is supported, refused, or in `IGNORED`.

Their types are compared with ours. A test fails if a new version of a client adds a field or a type of
object that our wire types do not declare.
"""

import importlib
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from typing_extensions import get_type_hints, is_typeddict

from edgeinfer.server.anthropic.wire import MessagesRequest
from edgeinfer.server.openai.routes import EmbeddingRequest
from edgeinfer.server.openai.wire import ChatRequest, CompletionRequest
from edgeinfer.server.request_body import declaration_of
from edgeinfer.server.responses.wire import ResponsesRequest

ROUTES = [
    (ChatRequest, "openai.types.chat.completion_create_params:CompletionCreateParamsBase"),
    (CompletionRequest, "openai.types.completion_create_params:CompletionCreateParamsBase"),
    (EmbeddingRequest, "openai.types.embedding_create_params:EmbeddingCreateParams"),
    (ResponsesRequest, "openai.types.responses.response_create_params:ResponseCreateParamsBase"),
    (MessagesRequest, "anthropic.types.message_create_params:MessageCreateParamsBase"),
    (MessagesRequest, "anthropic.types.beta.message_create_params:MessageCreateParamsBase"),
]
#: Fields that are ignored: they cannot change what an answer means.
IGNORED = frozenset(
    "access_programs allowed_callers annotations async background_options betas billing_policy block_binding "
    "cache_control caller citations clear_at client_metadata context context_management defer_loading "
    "description detail diagnostics display eager_input_streaming encrypted_content fallback_credit_token "
    "fallbacks generate_summary id image include_obfuscation index inference_geo input_examples logprobs "
    "max_tool_calls media_type metadata mode name namespace output_config output_schema parsed "
    "parsed_arguments phase prompt_cache_breakpoint prompt_cache_options prompt_cache_retention "
    "safety_identifier service_tier speed stream_options summary task_budget toolset_name user "
    "user_profile_id verbosity workspace_id".split()
)
#: Minimum number of types that are compared, so that a walk that misses some fails.
AT_LEAST = {ChatRequest: 19, CompletionRequest: 2, EmbeddingRequest: 1}
AT_LEAST |= {ResponsesRequest: 20, MessagesRequest: 20}


def _objects(kind: Any) -> Iterator[Any]:
    """Yield the TypedDicts in an annotation."""
    if is_typeddict(kind):
        yield kind
    elif get_origin(kind) is not None or isinstance(kind, UnionType):
        for inner in get_args(kind):
            yield from _objects(inner)


def _words(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from (word for word in get_args(kind) if isinstance(word, str))
    elif get_origin(kind) in (Union, UnionType):
        for inner in get_args(kind):
            yield from _words(inner)


def _unknown_parts(own_type: Any, official: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """Yield the fields and types of the official client that our wire type does not declare."""
    if (own_type, official) in seen:
        return
    seen.add((own_type, official))
    declared = declaration_of(own_type)
    for name, kind in get_type_hints(official).items():
        live_server = f"{where}.{name}"
        field = declared.fields.get(name)
        if field is not None:
            for inner in _objects(kind):
                yield from _unknown_parts_of_plan(field.plan, inner, live_server, seen)
        elif name != declared.tag_field and name not in IGNORED and name not in declared.refused:
            yield live_server


def _unknown_parts_of_plan(plan: Any, official: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """Compare an object of the official client with the alternatives of our field."""
    plan = plan if plan.objects or plan.item is None else plan.item
    if not plan.objects:
        return  # any JSON object
    if not plan.tag_field:
        yield from _unknown_parts(plan.objects[""], official, where, seen)
        return
    tags = list(_words(get_type_hints(official).get(plan.tag_field)))
    assert tags, f"{where}: {official.__name__} has no {plan.tag_field}"
    for tag in tags:
        if tag in plan.objects:
            yield from _unknown_parts(plan.objects[tag], official, f"{where}<{tag}>", seen)
        elif not tag.startswith((*plan.dropped, *plan.other_types)):
            yield f"{where}<{tag}>"


@pytest.mark.parametrize(("struct", "path"), ROUTES, ids=[name for _, name in ROUTES])
def test_every_field_and_type_is_honoured_refused_or_ignored_knowingly(struct, path):
    module, name = path.split(":")
    official = getattr(importlib.import_module(module), name)
    seen: set[Any] = set()
    assert list(_unknown_parts(struct, official, struct.__name__, seen)) == []
    assert len(seen) >= AT_LEAST[struct], "the walk went past their types"


@pytest.mark.parametrize("struct", [struct for struct, _ in ROUTES])
def test_a_field_is_of_one_kind(struct):
    declared = declaration_of(struct)
    assert not set(declared.fields) & set(declared.refused)
    assert all(reason and not reason.endswith(".") for reason in declared.refused.values())
