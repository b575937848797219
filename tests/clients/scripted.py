"""An endpoint whose answers are scripted, and whose prompts are not: `python scripted.py FOLDER`.

A real engine reads every prompt: template, tokens, cache and usage are real, of a small random model with
SmolLM2's vocabulary. Then a script answers instead of it: once a call of a tool that is offered, then a
sentence. It listens on a free port, logs as `serve` does, and keeps every body in FOLDER.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edgeinfer.errors import EngineError
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import Event, Finished, TextDelta, ToolCallDelta
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool, ToolChoice
from edgeinfer.server import request_body
from edgeinfer.server.context import RequestContext

#: What the first answer has done, whatever the client calls its tool for it.
COMMAND = "echo hello > hello.txt"
_SHELLS = ("Bash", "bash", "exec_command", "run_shell_command", "shell")
_COMMAND_FIELDS = ("command", "cmd")
AFTER_TOOL = "The tool has done it."
SECOND = "That was the second turn."
#: aider has no tools: files stand in its answers.
WHOLE_FILE = "Here it is.\n\nhello.txt\n```\nhello\n```\n"
N_CTX = 65_536


class ScriptedEngine:
    """Prefills with `real`, and answers a request with the events that `choose` returns."""

    def __init__(self, real: Engine, choose: Callable[[GenerateRequest], Sequence[Event]]) -> None:
        self._real = real
        self._choose = choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def submit(self, request: GenerateRequest) -> EventStream:
        """Prefill the prompt, then play the script. Raises as the real engine does."""
        only_read = {"max_tokens": 0, "constraint": None, "continue_final": False}
        reading = self._real.submit(replace(request, tool_choice=ToolChoice(), **only_read))
        script = () if request.max_tokens == 0 else self._choose(request)
        stream = EventStream(reading.cancel)
        threading.Thread(target=self._play, args=(reading, script, stream), daemon=True).start()
        return stream

    def _play(self, reading: Any, script: Sequence[Event], stream: EventStream) -> None:
        try:
            for event in reading:
                if not isinstance(event, Finished) or event.reason == "cancelled" or not script:
                    stream.put(event)
                    continue
                for scripted in script:
                    stream.put(scripted)
                stream.put(self._end(event, script))
        except EngineError as error:
            stream.put(error)

    def _end(self, finished: Finished, script: Sequence[Event]) -> Finished:
        """Return the prefill's last event with the usage of the scripted answer."""
        said = "".join(e.text if isinstance(e, TextDelta) else _arguments(e) for e in script)
        usage = replace(finished.usage, completion_tokens=max(1, len(self._real.tokenize(said))))
        calls = any(isinstance(event, ToolCallDelta) for event in script)
        return replace(finished, reason="tool_calls" if calls else "stop", usage=usage)


def _arguments(event: Event) -> str:
    return event.arguments if isinstance(event, ToolCallDelta) else ""


def answer(request: GenerateRequest) -> Sequence[Event]:
    """Return the scripted answer: a tool call in the first turn, otherwise a sentence."""
    roles = [message.role for message in request.messages]
    if roles and roles[-1] == "tool":
        return [TextDelta(AFTER_TOOL)]
    if request.tools and "assistant" not in roles and request.tool_choice.mode != "none":
        return _call(request.tools)
    if any("*file listing*" in message.content for message in request.messages):
        return [TextDelta(SECOND if _is_second(request.messages) else WHOLE_FILE)]
    return [TextDelta(SECOND)]


def _is_second(messages: Sequence[Message]) -> bool:
    return any("what you did" in message.content for message in messages)


def _call(tools: Sequence[Tool]) -> Sequence[Event]:
    tool = next((tool for tool in tools if tool.name in _SHELLS), tools[0])
    fields = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", ())
    arguments = {name: _value(fields[name]) for name in required if name in fields}
    for name in _COMMAND_FIELDS:
        if name in fields:
            is_list = fields[name].get("type") == "array"
            arguments[name] = ["sh", "-c", COMMAND] if is_list else COMMAND
    opening = ToolCallDelta(0, "", f"call_{time.monotonic_ns():x}", tool.name)
    return [opening, ToolCallDelta(0, json.dumps(arguments))]


def _value(schema: dict[str, Any]) -> Any:
    """Return a value of the type that a field's schema names."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    plain: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    return plain.get(kind, "Paris")


def reader(folder: Path, vocabulary_of: Path) -> Engine:
    """Make and load the engine that prefills the prompts."""
    from made_decoders import make_reader

    path = make_reader(folder / "reader.gguf", vocabulary_of, N_CTX)
    files = ModelFiles(name="reader", paths=(str(path),), sha256="cd" * 32)
    return load_engine(files, LoadOptions(n_ctx=N_CTX, n_parallel=2, n_threads=2), None)


def keep_bodies(folder: Path) -> None:
    """Write the body of every request to `folder`, numbered in order."""
    plain = request_body.read_body
    count = 0

    async def keeping(context: RequestContext) -> bytes:
        nonlocal count
        raw = await plain(context)
        count += 1
        facts = {"path": context.route, "user_agent": context.headers.get("user-agent", "")}
        record = {**facts, "body": json.loads(raw)}
        (folder / f"request-{count:03}.json").write_text(json.dumps(record), "utf-8")
        return raw

    request_body.read_body = keeping


def main() -> None:
    clients = Path(__file__).parent
    sys.path += [str(clients.parent / "made"), str(clients)]
    from install import build_cache
    from served_endpoint import serving

    folder = Path(sys.argv[1])
    models = build_cache() / "test-home/data/models"
    smollm2 = models / "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    keep_bodies(folder)
    engine = ScriptedEngine(reader(folder, smollm2), answer)
    with serving(engine, keep_alive_s=-1, log=sys.stderr, wait_ready=False):
        threading.Event().wait()


if __name__ == "__main__":
    main()
