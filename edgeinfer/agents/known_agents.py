"""The coding agents that `edgeinfer launch` knows, and how to make each use this endpoint.

To add an agent, write a function that returns its `AgentSetup`, decorated with `@_agent`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.platform.process import SignalHandlers, start_child

#: Name of this endpoint in agents that have a list of model providers.
PROVIDER = "edgeinfer"
#: An agent's answer may have at most `n_ctx // _ANSWER_SHARE` tokens, and at most `_ANSWER_TOKENS`.
_ANSWER_SHARE = 8
_ANSWER_TOKENS = 8192
#: Default of `Agent.room_tokens`: part of the context (tokens) that an agent's first request must leave
#: free for answers and tool results.
_ROOM_TOKENS = 4096
#: Minimum value (tokens) of Claude Code's variable CLAUDE_CODE_AUTO_COMPACT_WINDOW.
_CLAUDE_WINDOW = 100_000


class AgentTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint and model that an agent will use. `key` is never "": agents require an API key."""

    url: str
    model: str
    n_ctx: int
    key: str = "none"

    @property
    def answer_tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return min(_ANSWER_TOKENS, self.n_ctx // _ANSWER_SHARE)


#: Arguments to pass to an agent before the user's arguments, and environment variables to set.
AgentSetup = tuple[tuple[str, ...], dict[str, str]]
_SetupFunction = Callable[[AgentTarget, Path], AgentSetup]


class Agent(NamedTuple):
    """A coding agent. `name` is its program on PATH, `install` the command that installs it.

    `title` is the name for users. `setup` returns arguments and environment variables for the program,
    and may write files into a folder.
    `first_tokens` is the length of the first request, in SmolLM2's tokens (other models: ± 20 %). If
    the context has less than `room_tokens` left after that request, the agent compacts its history at
    once. `user_agent` is the start of its User-Agent header; "" if the header does not name the agent.
    """

    name: str
    title: str
    install: str
    setup: _SetupFunction
    first_tokens: int
    user_agent: str
    room_tokens: int

    @property
    def needs_tokens(self) -> int:
        """Minimum context (tokens) with which the agent works."""
        return self.first_tokens + self.room_tokens


AGENTS: dict[str, Agent] = {}


def _agent(
    title: str, install: str, first_tokens: int, user_agent: str, room_tokens: int = _ROOM_TOKENS
) -> Callable[[_SetupFunction], _SetupFunction]:
    """Return a decorator that registers an agent; the function's name becomes the agent's `name`."""

    def register(setup: _SetupFunction) -> _SetupFunction:
        name = setup.__name__
        AGENTS[name] = Agent(name, title, install, setup, first_tokens, user_agent, room_tokens)
        return setup

    return register


@_agent("Claude Code", "npm install -g @anthropic-ai/claude-code", 12_101, "claude-cli/", 20_000)
def claude(target: AgentTarget, _folder: Path) -> AgentSetup:
    """Return environment variables that map all of Claude Code's models to the target's model."""
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    sizes = ("OPUS", "SONNET", "HAIKU")
    window = {}
    if target.n_ctx >= _CLAUDE_WINDOW:  # with less, Claude Code compacts only after an error response
        window["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.n_ctx)
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        **dict.fromkeys(models, target.model),
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": target.model for size in sizes},
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.answer_tokens),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.n_ctx),
        **window,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",
    }
    return (), variables


@_agent("Codex", "npm install -g @openai/codex", 6_248, "codex_")
def codex(target: AgentTarget, _folder: Path) -> AgentSetup:
    """Return arguments that override Codex's configuration, and a variable with the API key."""
    provider = f"model_providers.{PROVIDER}"
    overrides: dict[str, Any] = {
        "model": target.model,
        "model_provider": PROVIDER,
        "model_context_window": target.n_ctx,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": f"{target.url}/v1",
        f"{provider}.env_key": "EDGEINFER_AGENT_KEY",
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": 3_600_000,
        f"{provider}.request_max_retries": 1,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    arguments = tuple(word for setting in settings for word in ("-c", setting))
    return arguments, {"EDGEINFER_AGENT_KEY": target.key}


@_agent("opencode", "npm install -g opencode-ai", 7_377, "opencode/")
def opencode(target: AgentTarget, _folder: Path) -> AgentSetup:
    """Return an environment variable with a configuration, which overrides the user's."""
    limit = {"context": target.n_ctx, "output": target.answer_tokens}
    name = f"{PROVIDER}/{target.model}"
    content = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key, "timeout": False},
                "models": {target.model: {"name": target.model, "limit": limit}},
            }
        },
        "model": name,
        "small_model": name,
        "autoupdate": False,
    }
    return (), {"OPENCODE_CONFIG_CONTENT": json.dumps(content)}


@_agent("aider", "python -m pip install aider-install && aider-install", 829, "")
def aider(target: AgentTarget, folder: Path) -> AgentSetup:
    """Write a file with the model's context and answer limits; return environment variables."""
    name = f"openai/{target.model}"
    sizes = {
        "max_input_tokens": target.n_ctx,
        "max_output_tokens": target.answer_tokens,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    metadata = folder / "models.json"
    metadata.write_text(json.dumps({name: sizes}), "utf-8")
    variables = {
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_OPENAI_API_BASE": f"{target.url}/v1",
        "AIDER_OPENAI_API_KEY": target.key,
        "AIDER_MODEL_METADATA_FILE": str(metadata),
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_TIMEOUT": "3600",
    }
    return (), variables


@_agent("pi", "npm install -g @mariozechner/pi-coding-agent", 1_326, "pi/", 22_000)
def pi(target: AgentTarget, folder: Path) -> AgentSetup:
    """Write an extension that adds this endpoint as a provider; return arguments that load it."""
    provider = {
        "baseUrl": f"{target.url}/v1",
        "apiKey": target.key,
        "api": "openai-completions",
        "headers": {"User-Agent": "pi/launched"},
        "models": [
            {
                "id": target.model,
                "name": target.model,
                "reasoning": False,
                "input": ["text"],
                "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
                "contextWindow": target.n_ctx,
                "maxTokens": target.answer_tokens,
            }
        ],
    }
    extension = folder / f"{PROVIDER}.ts"
    code = (
        f"export default (pi) => pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)});\n"
    )
    extension.write_text(code, "utf-8")
    arguments = ("-e", str(extension), "--provider", PROVIDER, "--model", target.model)
    return arguments, {"PI_TELEMETRY": "0"}


@_agent("qwen-code", "npm install -g @qwen-code/qwen-code", 17_900, "QwenCode/")
def qwen(target: AgentTarget, _folder: Path) -> AgentSetup:
    """Return arguments that choose the OpenAI API and the model, and OpenAI's environment variables."""
    variables = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(target.answer_tokens),
    }
    return ("--auth-type", "openai", "--model", target.model), variables


@_agent("goose", "see https://github.com/aaif-goose/goose", 4_174, "goose/")
def goose(target: AgentTarget, _folder: Path) -> AgentSetup:
    """Return environment variables that override goose's configuration and keyring."""
    variables = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "GOOSE_CONTEXT_LIMIT": str(target.n_ctx),
        "GOOSE_MAX_TOKENS": str(target.answer_tokens),
        "GOOSE_DISABLE_KEYRING": "1",
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key,
        "OPENAI_TIMEOUT": "3600",
        "OPENAI_CUSTOM_HEADERS": "user-agent=goose/launched",
    }
    return (), variables


def agent_of(user_agent: str) -> str:
    """Return the name of the known agent with this User-Agent header; "" if none has it."""
    begins = (a.name for a in AGENTS.values() if a.user_agent and user_agent.startswith(a.user_agent))
    return next(begins, "")


#: Signals to forward to the agent. For Ctrl-C and Ctrl-Z, the terminal itself signals the agent.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def find_program(agent: Agent) -> str:
    """Return the agent's program on PATH. Raises UsageError with the install command."""
    program = shutil.which(agent.name)
    if program is None:
        missing = f"{agent.title} is not installed: there is no `{agent.name}` on PATH"
        raise UsageError(missing, hint=f"install it: {agent.install}")
    return program


def run_agent(agent: Agent, target: AgentTarget, arguments: Sequence[str]) -> int:
    """Run the agent; return its exit status (128 + number for a signal). Raises UsageError."""
    program = find_program(agent)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        own_arguments, variables = agent.setup(target, Path(folder))
        process = _start(agent, [program, *own_arguments, *arguments], variables)
        # ignore Ctrl-C, which the agent handles; forward the signals that only this process receives
        forwarding = dict.fromkeys(_FORWARDED, lambda number, _frame: process.send_signal(number))
        with SignalHandlers({**forwarding, signal.SIGINT: signal.SIG_IGN}):
            status = process.wait()
    return status if status >= 0 else 128 - status


def _start(agent: Agent, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return start_child(command, signal.SIGTERM, env={**os.environ, **environment})
    except OSError as error:
        hint = f"install {agent.title} again: {agent.install}"
        raise UsageError(f"cannot run {command[0]}: {error.strerror}", hint=hint) from error
