"""config.toml: every key with its type, default and description. Unknown keys are errors.

`EDGEINFER_CONFIG` names another file. Each class below is one section of the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from edgeinfer.config.load_options import LOAD_OPTIONS, LoadOption
from edgeinfer.config.sampling_options import MAX_TOKENS, SAMPLING_OPTIONS, SamplingOption
from edgeinfer.config.toml_file import TomlFile, convert, key_name, leaves
from edgeinfer.errors import ConfigError, EdgeInferError, OfflineError
from edgeinfer.platform import listening, paths


def key_doc(sentence: str, **limits: Any) -> msgspec.Meta:
    return msgspec.Meta(description=sentence, **limits)


class _Section(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
): ...


def _key(option: LoadOption) -> tuple[str, Any, Any]:
    kind: Any = Annotated[int, msgspec.Meta(ge=option.low, le=option.high)] if option.high else str
    if option.choices:
        kind = Literal[option.choices] | kind if option.high else Literal[option.choices]
    sentence = f"{option.help[0].upper()}{option.help[1:]}."
    return option.key.replace("-", "_"), Annotated[kind, key_doc(sentence)], option.default


_LoadKeys = msgspec.defstruct(
    "_LoadKeys",
    [_key(option) for option in LOAD_OPTIONS if option.key],
    bases=(_Section,),
    frozen=True,
    kw_only=True,
)


class LoadConfig(_LoadKeys):  # type: ignore[misc, valid-type]  # its fields are computed
    """[load]: default values of load options."""

    def value(self, option: LoadOption) -> int | str:
        """Return the configured value of an option. Raises ValueError if it is out of range."""
        return option.parse(str(getattr(self, option.key.replace("-", "_"))))


class SnapshotsConfig(_Section, frozen=True, kw_only=True):
    auto_warm: Annotated[bool, key_doc("Build a snapshot in the background after a cold start.")] = True
    max_total_gib: Annotated[
        float,
        key_doc(
            "Limit (GiB) for all snapshots; the least recently used are removed first.", gt=0, le=1e6
        ),
    ] = 40.0


class BlocksConfig(_Section, frozen=True, kw_only=True):
    """[blocks]: the on-disk prefix cache."""

    enabled: Annotated[bool, key_doc("Cache KV blocks on disk; false: neither write nor read.")] = True
    max_total_gib: Annotated[
        float,
        key_doc(
            "Limit (GiB) for all KV blocks; 0: a quarter of the free space, at most 64.", ge=0, le=1e6
        ),
    ] = 0.0


class DriftConfig(_Section, frozen=True, kw_only=True):
    """[drift]: daily counts of a model's requests and answers."""

    record: Annotated[
        bool,
        key_doc("Count answers by day, without their text, for `edgeinfer drift` and `ps --usage`."),
    ] = True


class ReceiptsConfig(_Section, frozen=True, kw_only=True):
    key: Annotated[
        str, key_doc("File of an Ed25519 key (PEM) that signs receipts; empty: they are not signed.")
    ] = ""


class GpuConfig(_Section, frozen=True, kw_only=True):
    devices: Annotated[
        tuple[str, ...],
        key_doc('Devices to use, e.g. `["Vulkan0"]`; empty: discrete GPUs, else integrated ones.'),
    ] = ()


#: Rules that normalize prompts, by their names in `agents.prompt_normalization`.
PromptRule = Literal["standing", "billing-header", "day", "environment", "note", "reminder"]


class ServeConfig(_Section, frozen=True, kw_only=True):
    host: Annotated[str, key_doc("Address to bind.")] = listening.HOST
    port: Annotated[int, key_doc("Port to bind; 0 chooses a free port.", ge=0, le=65535)] = (
        listening.PORT
    )
    keep_alive_s: Annotated[
        float,
        key_doc(
            "How long an idle model stays loaded (s); 0 unloads it at once, -1 never.", ge=-1, le=1e9
        ),
    ] = 300.0
    max_queue: Annotated[int, key_doc("Requests that may wait; others get 503.", ge=1, le=100_000)] = 64
    ollama: Annotated[
        bool,
        key_doc(
            "Also listen on Ollama's port (127.0.0.1:11434); its clients may pull and delete models."
        ),
    ] = False
    web: Annotated[bool, key_doc("Serve the chat page to browsers.")] = True
    any_user: Annotated[bool, key_doc("Without a key, accept other users of this machine.")] = False
    aliases: Annotated[
        dict[str, str],
        key_doc(
            'Other names for models, e.g. `"gpt-4o" = "qwen3-4b"`, `"claude-*" = "default"`. '
            'If only one model is here, it answers to every name unless `"*"` or `ollama` is set.'
        ),
    ] = {}
    log_payloads: Annotated[
        str, key_doc("Folder to write every request with its answer to, for 30 days; empty: none.")
    ] = ""
    store_responses: Annotated[
        bool,
        key_doc("Keep answers of /v1/responses in memory for an hour, to continue and get them by id."),
    ] = False
    normalize_prompts: Annotated[
        tuple[PromptRule, ...],
        key_doc("Rules that normalize the prompts of known coding agents; `[]`: none."),
    ] = get_args(PromptRule)


def sampling_keys(options: Iterable[SamplingOption]) -> list[tuple[str, Any, None]]:
    """Return the fields of a table of sampling options, each None by default, for `defstruct`."""
    return [
        (each.field, Annotated[each.kind, key_doc(each.help, ge=each.low, le=each.high)], None)
        for each in options
    ]


#: [chat.presets.NAME]: sampling options with underscores, such as `top_p`.
PresetConfig = msgspec.defstruct(
    "PresetConfig",
    sampling_keys((*SAMPLING_OPTIONS, MAX_TOKENS)),
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
)
#: Ids of the chat's key bindings, which `[chat.keys]` can change; `tui.bindings` describes each.
BINDING_IDS = """
    send newline complete undo editor stop copy-or-quit regenerate continue previous next copy-answer
    copy-code fold turn-up turn-down scroll-up scroll-down scroll-home scroll-end new help models
    sessions repaint suspend quit turn-edit turn-copy turn-code turn-fork turn-fold turn-previous
    turn-next model-warm model-cancel session-delete session-undo
""".split()
_BindingId: Any = Literal[tuple(BINDING_IDS)]


class ChatConfig(_Section, frozen=True, kw_only=True):
    theme: Annotated[str, key_doc('"edgeinfer-dark", "edgeinfer-light", or any Textual theme.')] = (
        "edgeinfer-dark"
    )
    keys: Annotated[
        dict[_BindingId, str], key_doc('Keys by a binding\'s id, e.g. `stop = "ctrl+x"`.')
    ] = {}
    system_prompts: Annotated[dict[str, str], key_doc("System prompts, for `/system NAME`.")] = {}
    presets: Annotated[
        dict[str, PresetConfig],  # type: ignore[valid-type]  # its fields are computed
        key_doc("Sampling options by name, for `/preset NAME`, e.g. `temperature = 0.4`."),
    ] = {}
    read_ahead: Annotated[bool, key_doc("Prefill what is typed, attached or opened.")] = True
    mouse: Annotated[bool, key_doc("Mouse support; false leaves the mouse to the terminal.")] = True


class ToolServerConfig(_Section, frozen=True, kw_only=True):
    """[tools.servers.NAME]: an MCP server, either a program or a URL."""

    command: Annotated[tuple[str, ...], key_doc("Program to start, and its arguments.")] = ()
    env: Annotated[dict[str, str], key_doc("Environment variables of the program.")] = {}
    pass_env: Annotated[tuple[str, ...], key_doc("Further variables that the program gets.")] = ()
    url: Annotated[str, key_doc("URL of a server, instead of a program.")] = ""
    headers: Annotated[dict[str, str], key_doc("Headers of each request to the URL.")] = {}


BuiltinTool = Literal["read", "glob", "grep", "write", "edit", "shell", "python", "fetch"]


class ToolsConfig(_Section, frozen=True, kw_only=True):
    """[tools]: tools of the model in `chat --tools` and `run --tools`."""

    builtin: Annotated[
        tuple[BuiltinTool, ...],
        key_doc('Built-in tools for the current folder and the web, e.g. `["read", "grep", "shell"]`.'),
    ] = ()
    fetch_hosts: Annotated[
        tuple[str, ...],
        key_doc(
            'Hosts that the tool `fetch` may contact, e.g. `["*.python.org"]`, also private addresses.'
        ),
    ] = ()
    servers: Annotated[
        dict[str, ToolServerConfig],
        key_doc(
            'MCP servers by name: `{ command = ["npx", "…"], pass-env = ["TOKEN"] }` or '
            '`{ url = "https://…", headers = { Authorization = "Bearer ${env:TOKEN}" } }`.'
        ),
    ] = {}
    mcp_files: Annotated[
        tuple[str, ...],
        key_doc("Files of other programs whose MCP servers are used too, e.g. `~/.cursor/mcp.json`."),
    ] = ()
    allow: Annotated[
        tuple[str, ...],
        key_doc("Calls that run without approval, e.g. `github.get_*` or `files.write(path=notes/*)`."),
    ] = ()
    deny: Annotated[tuple[str, ...], key_doc("Calls always refused, even if `allow` has them.")] = ()
    choice: Annotated[
        Literal["auto", "required"],
        key_doc('"required" forces a tool call first, which helps small models.'),
    ] = "auto"
    timeout_s: Annotated[float, key_doc("Time limit of a call (s).", gt=0, le=1e9)] = 120.0

    @property
    def has_tools(self) -> bool:
        return bool(self.builtin or self.servers or self.mcp_files)


class Config(_Section, frozen=True, kw_only=True):
    default_model: Annotated[str, key_doc("Model used when none is named.", min_length=1)] = (
        paths.DEFAULT_MODEL
    )
    offline: Annotated[
        bool, key_doc("Block all network access (also EDGEINFER_OFFLINE=1 or HF_HUB_OFFLINE=1).")
    ] = False
    load: LoadConfig = LoadConfig()
    snapshots: SnapshotsConfig = SnapshotsConfig()
    blocks: BlocksConfig = BlocksConfig()
    drift: DriftConfig = DriftConfig()
    receipts: ReceiptsConfig = ReceiptsConfig()
    gpu: GpuConfig = GpuConfig()
    serve: ServeConfig = ServeConfig()
    chat: ChatConfig = ChatConfig()
    tools: ToolsConfig = ToolsConfig()


def config_path() -> Path:
    return Path(paths.config_file())


#: Keys of earlier versions → what to do instead. Such a key is ignored with a warning that says this.
REMOVED_KEYS = {
    "load.flash-attention": "flash attention is chosen automatically",
    "snapshots.resume": "type `--resume never`, or set `auto-warm = false` and remove the snapshots",
    "snapshots.disk-margin-gib": "building a snapshot always leaves 4 GiB free",
    "gpu.max-memory-gib": "`--gpu-layers N` limits the memory used on GPUs",
    "serve.replicas": "type `--replicas`",
    "serve.replicas-wait-s": "the number of replicas is fixed",
    "serve.replicas-idle-s": "the number of replicas is fixed",
    "serve.allowed-origins": "type `--allow-origin`",
    "serve.allowed-hosts": "type `--allow-host`",
    "serve.unknown-fields": "unknown fields are named in the header `x-edgeinfer-ignored`",
    "tools.max-rounds": "the limit is always 10 rounds",
    "tools.max-result-kib": "the limit is always 32 KiB",
}


def load_config(
    path: Path | None = None, on_removed: Callable[[str], None] = lambda _message: None
) -> Config:
    """Read the configuration. Raises ConfigError, which names file and key, and a similar valid key.

    `on_removed` is called with a message for each removed key.
    """
    source = path or config_path()
    try:
        content = source.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}", hint=paths.DENIED_HINT) from error
    return _parse(content, source, on_removed)


def _parse(
    content: bytes, source: Path, on_removed: Callable[[str], None] = lambda _message: None
) -> Config:
    file = TomlFile(source, content)
    document = file.tables
    for key, replacement in REMOVED_KEYS.items():
        section, _, name = key.partition(".")
        table = document.get(section)
        if isinstance(table, dict) and table.pop(name, None) is not None:
            on_removed(f"{source}: `{key}` is no longer a key and is ignored; {replacement}")
    bundled = os.environ.get(paths.BUNDLED_MODEL)
    if bundled:
        document.setdefault("default-model", bundled)
    return convert(document, Config, file.position)


def append_config_key(error: EdgeInferError, typed: Iterable[str] = ()) -> None:
    """If the message of `error` quotes a value of config.toml, append the key and line of that value.

    Values that occur in `typed`, the words of the command line, are left out.
    """
    try:
        file = TomlFile(config_path(), config_path().read_bytes())
    except (OSError, ConfigError):
        return
    for keys, value in leaves(file.tables):
        text = str(value)
        is_quoted = len(text) > 3 and re.search(_quotation_pattern(value), error.message)
        if is_quoted and not any(text in word for word in typed):
            position = file.position(keys)
            if position not in error.message:
                error.message += f" ({key_name(keys)} in {position})"
            return


def _quotation_pattern(value: object) -> str:
    """Return a regular expression that finds a configured value, but not inside other words."""
    text = re.escape(str(value))
    if not isinstance(value, str):
        return rf":{text}\b"  # a port
    return rf"[\"'`]{text}[\"'`]" if value.isalpha() else rf"(?<![\w./-]){text}(?![\w-])"


def way_out_of_offline(config: Config) -> str:
    """Return the step that ends offline mode ("unset EDGEINFER_OFFLINE"); "" if the mode is off."""
    variables = ("EDGEINFER_OFFLINE", "HF_HUB_OFFLINE")
    is_on = (name for name in variables if os.environ.get(name, "") not in ("", "0", "false", "no"))
    steps = [f"unset {name}" for name in is_on]
    steps += ["remove `offline = true` from config.toml"] * config.offline
    return " and ".join(steps)


def refuse_offline(target: str) -> None:
    """Raise OfflineError in offline mode. Call this before every network access."""
    if way_out := way_out_of_offline(load_config()):
        hint = f"{way_out}, or import a local file: `edgeinfer pull FILE.gguf`"
        raise OfflineError(f"{target} needs the network, but offline mode is on", hint=hint)


def save(keys: tuple[str, ...], value: Any, path: Path | None = None) -> None:
    """Set a key of config.toml, such as `("chat", "theme")`; None removes it. Raises ConfigError."""
    change(keys, lambda _before: value, path)


def change(keys: tuple[str, ...], new_value: Callable[[Any], Any], path: Path | None = None) -> Config:
    """Replace a key's value by `new_value(current)`; return the new configuration.

    Comments and order stay. `current` (None if missing) is read under a lock, so that no other change
    is lost. Returning None removes the key. Raises ConfigError; then nothing has changed.
    """
    import tomlkit  # slow import (30 ms): only a changed setting needs this module

    from edgeinfer.platform.disk import locked, new_file

    file = (path or config_path()).resolve()
    try:
        paths.make_folder(file.parent)
        with locked(file.with_name(f".{file.name}.lock")):
            before = file.read_bytes() if file.exists() else b""
            _parse(before, file)
            document = tomlkit.parse(before)
            table: Any = document
            for key in keys[:-1]:
                table = table.setdefault(key, tomlkit.table())
            value = new_value(table.get(keys[-1]))
            if value is None:
                table.pop(keys[-1], None)
            else:
                table[keys[-1]] = value
            content = tomlkit.dumps(document).encode()
            config = _parse(content, file)
            with new_file(file, 0o600) as out:
                out.write(content)
        return config
    except OSError as error:
        lasts = "check its permissions; until then, the setting is lost when the chat ends"
        raise ConfigError(f"{file}: {error.strerror}", hint=lasts) from error
    except tomlkit.exceptions.TOMLKitError as error:
        raise ConfigError(f"{file}: {error}") from error
