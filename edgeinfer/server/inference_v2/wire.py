"""The Open Inference Protocol's requests and answers, and those of its generate extension.

Source: KServe's documents of the V2 protocol, and Triton's of the extension. Texts are `BYTES` tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.core.wire import (
    JsonObject,
    OpenAIPenalty,
    Probability,
    Reply,
    SamplingFields,
    Seed,
    ShortText,
    StopList,
    StopString,
    Temperature,
    Text,
    TokenCount,
    Wire,
)

#: The one version that a model has here.
VERSION = "1"
TEXT_IN = "text_input"
TEXT_OUT = "text_output"
_MAX_TEXTS = 64


class Parameters(SamplingFields, frozen=True, kw_only=True):
    """`parameters` of a request: how an answer is made."""

    hints: ClassVar = frozenset({"stream"})

    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: OpenAIPenalty | None = None
    frequency_penalty: OpenAIPenalty | None = None
    seed: Seed | None = None
    stop: StopString | StopList | None = None


class GenerateBody(Wire, frozen=True, kw_only=True):
    """POST /v2/models/{id}/generate and generate_stream. The prompt is taken as it is."""

    hints: ClassVar = frozenset({"exclude_input_in_output", "stream"})
    refused: ClassVar[Mapping[str, str]] = {
        "image": "images cannot be read",
        "sampling_parameters": "use parameters",
    }

    text_input: Text
    id: ShortText | None = None
    parameters: Parameters | None = None


class TensorIn(Wire, frozen=True, kw_only=True):
    """Prompts, each taken as it is. `shape` is how many there are."""

    hints: ClassVar = frozenset({"parameters"})

    name: ShortText
    datatype: Literal["BYTES"]
    data: Annotated[list[Text], Meta(min_length=1, max_length=_MAX_TEXTS)]
    shape: Annotated[list[Annotated[int, Meta(ge=1, le=_MAX_TEXTS)]], Meta(min_length=1, max_length=4)]


class TensorWanted(Wire, frozen=True, kw_only=True):
    """What is to be answered: `text_output` is all there is."""

    hints: ClassVar = frozenset({"parameters"})

    name: Literal["text_output"]


class InferBody(Wire, frozen=True, kw_only=True):
    """POST /v2/models/{id}/infer."""

    inputs: Annotated[list[TensorIn], Meta(min_length=1, max_length=1)]
    id: ShortText | None = None
    parameters: Parameters | None = None
    outputs: Annotated[list[TensorWanted], Meta(max_length=1)] | None = None


class GenerateReply(Reply, frozen=True, kw_only=True):
    """An answer, or a piece of a streamed one."""

    model_name: str
    text_output: str
    model_version: str = VERSION
    id: str | msgspec.UnsetType = msgspec.UNSET


class TensorOut(Reply, frozen=True, kw_only=True):
    """Answers, in the order of the prompts."""

    data: list[str]
    shape: list[int]
    name: str = TEXT_OUT
    datatype: str = "BYTES"


class InferenceReply(Reply, frozen=True, kw_only=True):
    """The answer of infer."""

    model_name: str
    outputs: list[TensorOut]
    model_version: str = VERSION
    id: str | msgspec.UnsetType = msgspec.UNSET


class TensorShape(Reply, frozen=True, kw_only=True):
    """What goes in or comes out: as many as are sent."""

    name: str
    datatype: str = "BYTES"
    shape: list[int] = msgspec.field(default_factory=lambda: [-1])


class ModelMetadata(Reply, frozen=True, kw_only=True):
    """GET /v2/models/{id}."""

    name: str
    platform: str = "llama.cpp_gguf"
    versions: list[str] = msgspec.field(default_factory=lambda: [VERSION])
    inputs: list[TensorShape] = msgspec.field(default_factory=lambda: [TensorShape(name=TEXT_IN)])
    outputs: list[TensorShape] = msgspec.field(default_factory=lambda: [TensorShape(name=TEXT_OUT)])
    properties: JsonObject = msgspec.field(default_factory=dict[str, Any])


class ServerMetadata(Reply, frozen=True, kw_only=True):
    """GET /v2."""

    version: str
    name: str = "edgeinfer"
    extensions: list[str] = msgspec.field(default_factory=lambda: ["generate"])


class Live(Reply, frozen=True, kw_only=True):
    """Whether somebody is here."""

    live: bool = True


class Ready(Reply, frozen=True, kw_only=True):
    """Whether the default model has been loaded, and requests are taken."""

    ready: bool


class ModelReady(Reply, frozen=True, kw_only=True):
    """Whether a model is loaded. One that is not is loaded when it is asked."""

    name: str
    ready: bool


class V2Error(Reply, frozen=True, kw_only=True):
    """The protocol's error envelope."""

    error: str
