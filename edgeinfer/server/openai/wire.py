"""JSON types of OpenAI's chat completions and completions.

Source: OpenAI's OpenAPI document. Additional fields (`top_k`, `grammar`, `keep_alive`, …) have the
names of llama.cpp's and vLLM's servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from edgeinfer.server.wire_types import (
    Effort,
    JsonObject,
    ReasoningBudget,
    RepeatPenalty,
    Reply,
    SamplingFields,
    ShortText,
    StopString,
    Temperature,
    Text,
    TokenId,
    TokenLimit,
    ToolName,
    Wire,
    WireTimings,
)


class TextPart(Wire, frozen=True, tag="text", tag_field="type"):
    """A text part of a message."""

    other_types: ClassVar[Mapping[str, str]] = {
        "input_audio": "audio input is not supported",
        "video_url": "video input is not supported",
    }

    text: Text


class InputTextPart(TextPart, frozen=True, tag="input_text", tag_field="type"):
    """A text part with the `type` that the Responses API uses."""


class RefusalPart(Wire, frozen=True, tag="refusal", tag_field="type"):
    """A refusal in an earlier answer. The model sees it as text."""

    refusal: Text


class ImageUrl(Wire, frozen=True, kw_only=True):
    """A picture as a `data:` URI. Other URLs are refused; OpenAI's field `detail` is ignored."""

    url: Text


class ImagePart(Wire, frozen=True, tag="image_url", tag_field="type"):
    """A picture in a message."""

    image_url: ImageUrl


class FileData(Wire, frozen=True, kw_only=True):
    """A PDF, DOCX, HTML or text file, in base64 or as a `data:` URI. Other URLs are refused."""

    refused: ClassVar[Mapping[str, str]] = {"file_id": "the endpoint stores no files, send `file_data`"}

    file_data: Text
    filename: ShortText = "document"


class FilePart(Wire, frozen=True, tag="file", tag_field="type"):
    """A document. The model sees its text, or pictures of its pages if it has no text."""

    file: FileData


Content = str | Annotated[list[TextPart | InputTextPart | ImagePart | FilePart], Meta(max_length=1024)]


class FunctionCall(Wire, frozen=True, kw_only=True):
    """The called function, with its arguments as JSON text or as an object."""

    name: ToolName
    arguments: Text | JsonObject

    @property
    def json_arguments(self) -> str:
        """The arguments as JSON text."""
        if isinstance(self.arguments, str):
            return self.arguments
        return msgspec.json.encode(self.arguments).decode()


class ToolCallParam(Wire, frozen=True, tag="function", tag_field="type"):
    """A tool call of the assistant in an earlier turn."""

    other_types: ClassVar[Mapping[str, str]] = {"custom": "only function tools are supported"}
    is_untagged_form: ClassVar = True

    id: ShortText
    function: FunctionCall


class SystemMessage(Wire, frozen=True, tag="system", tag_field="role"):
    """A system message."""

    content: Content
    name: ShortText | None = None


class DeveloperMessage(SystemMessage, frozen=True, tag="developer", tag_field="role"):
    """A system message under OpenAI's newer name for this role."""


class UserMessage(SystemMessage, frozen=True, tag="user", tag_field="role"):
    """A user message."""


class AssistantMessage(Wire, frozen=True, tag="assistant", tag_field="role"):
    """An earlier answer of the assistant, with the fields that this or another server sent."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "audio input is not supported",
        "function_call": "use tool_calls",
    }

    content: str | Annotated[list[TextPart | RefusalPart], Meta(max_length=1024)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[ToolCallParam], Meta(max_length=128)] | None = None
    name: ShortText | None = None
    refusal: Text | None = None


class ToolMessage(Wire, frozen=True, tag="tool", tag_field="role"):
    """The result of a tool call."""

    other_types: ClassVar[Mapping[str, str]] = {"function": "use the role `tool`"}

    content: Content | None
    tool_call_id: ShortText


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


class FunctionTool(Wire, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolParam(Wire, frozen=True, tag="function", tag_field="type"):
    """A tool. Types other than functions are ignored."""

    dropped_types: ClassVar = ("",)
    is_untagged_form: ClassVar = True

    function: FunctionTool


class NamedFunction(Wire, frozen=True, kw_only=True):
    """The name of a function that the model must call."""

    name: ToolName


class NamedToolChoice(Wire, frozen=True, tag="function", tag_field="type"):
    """`tool_choice` that makes the model call this function."""

    other_types: ClassVar[Mapping[str, str]] = {
        "custom": "only function tools are supported",
        "allowed_tools": "send only the allowed tools",
    }
    is_untagged_form: ClassVar = True

    function: NamedFunction


ToolChoiceParam = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[list[ToolParam], Meta(max_length=256)]


class TextFormat(Wire, frozen=True, tag="text", tag_field="type"):
    """`response_format` for any text."""


class JsonObjectFormat(Wire, frozen=True, tag="json_object", tag_field="type"):
    """`response_format` for any JSON object, or, as in llama.cpp, for one that matches `schema`."""

    schema: JsonObject | None = None


class JsonSchemaSpec(Wire, frozen=True, kw_only=True):
    """A JSON schema. The output always matches it, also without `strict`."""

    name: ToolName = "answer"
    schema: JsonObject = msgspec.field(default_factory=dict)
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Wire, frozen=True, tag="json_schema", tag_field="type"):
    """`response_format` for JSON that matches a schema."""

    json_schema: JsonSchemaSpec


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Wire, frozen=True, kw_only=True):
    """vLLM's field for constrained output. Exactly one of the four must be set."""

    json: JsonObject | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    choice: Annotated[list[StopString], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262_144)] | None = None


class StreamOptions(Wire, frozen=True, kw_only=True):
    """`include_usage` adds a last chunk with the token counts of the request."""

    include_usage: bool = False


LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024),
]


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """Base of the bodies of POST /v1/chat/completions and /v1/completions."""

    #: Request fields of other servers, which are refused → hint for the error text.
    refused: ClassVar[Mapping[str, str]] = {
        "ebnf": "use structured_outputs.grammar",
        "regex": "use structured_outputs.regex",
        "guided_json": "use structured_outputs.json",
        "guided_regex": "use structured_outputs.regex",
        "guided_choice": "use structured_outputs.choice",
        "guided_grammar": "use structured_outputs.grammar",
        "json_schema": "use response_format",
        "min_tokens": "a minimum length is not supported",
        "prompt_logprobs": "use echo with logprobs on /v1/completions",
    }

    temperature: Temperature | None = None
    logit_bias: LogitBias | None = None
    n: Annotated[int, Meta(ge=1, le=32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    repetition_penalty: RepeatPenalty | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=262_144)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "only text output is supported",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "moderation is not supported",
        "prediction": "predicted output is not supported",
        "web_search_options": "web search is not supported",
    }

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    reasoning_budget: ReasoningBudget | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    store: bool | Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None = None


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
#: A text, a list of texts, a list of token ids, or a list of lists of token ids (`prompts_of`).
Prompt = Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    best_of: Literal[1] | None = None
    suffix: Text | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class ErrorBody(Reply, frozen=True, kw_only=True):
    """An error. `param` is the field of the request that is wrong, null if the error is about no field.

    `code` is one of OpenAI's codes, or edgeinfer's own if no code of OpenAI fits.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply, frozen=True, kw_only=True):
    """OpenAI's error response."""

    error: ErrorBody


class PromptTokensDetails(Reply, frozen=True, kw_only=True):
    """Cached tokens of the prompt. `cached_disk_tokens` is the part that came from the disk."""

    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(Reply, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class WireUsage(Reply, frozen=True, kw_only=True):
    """Token counts of a request with all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(Reply, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob] = msgspec.field(default_factory=list)


class ChoiceLogprobs(Reply, frozen=True, kw_only=True):
    content: list[TokenLogprob] | None = None
    refusal: None = None


class WireFunction(Reply, frozen=True, kw_only=True):
    name: str
    arguments: str


class WireToolCall(Reply, frozen=True, kw_only=True):
    id: str
    function: WireFunction
    type: Literal["function"] = "function"


class ReplyMessage(Reply, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str | None = msgspec.field(default_factory=lambda: None)
    refusal: None = msgspec.field(default_factory=lambda: None)
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = None


WireFinish = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatChoice(Reply, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    finish_reason: WireFinish
    logprobs: ChoiceLogprobs | None = None


class CompletionFields(Reply, frozen=True, kw_only=True):
    """Base of the responses of /v1/chat/completions and /v1/completions."""

    id: str
    created: int
    model: str
    usage: WireUsage
    timings: WireTimings
    system_fingerprint: str = ""


class ChatCompletion(CompletionFields, frozen=True, kw_only=True):
    """Response of POST /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    service_tier: str = "default"


class CompletionLogprobs(Reply, frozen=True, kw_only=True):
    """Log probabilities of tokens; null for a prompt's first token, which no token precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: WireFinish | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(CompletionFields, frozen=True, kw_only=True):
    """Response of POST /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
