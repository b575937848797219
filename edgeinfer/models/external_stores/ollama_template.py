"""What Ollama says of a model beside its weights, as ours: template, stop strings, sampling, system.

Ollama's templates are Go's. The GGUF's own Jinja template is what its makers wrote, and is used where
there is one. Where there is none, the family is told by its markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.models.external_stores.reader import MAX_TEXT_BYTES

#: Stop strings that a model may bring, and their length in characters.
_STOPS, _STOP_CHARACTERS = 32, 200
_HOW = {
    "num_ctx": "--ctx",
    "num_predict": "--max-tokens",
    "num_thread": "--threads",
    "num_gpu": "--gpu-layers",
    "num_batch": "--batch",
}


def _turns(system: str, user: str, assistant: str, ask: str) -> str:
    """A Jinja template of one piece a turn, `%` being its text."""
    rows = (("system", system), ("user", user), ("assistant", assistant))
    cases = "".join(
        f"{{%- {'if' if role == 'system' else 'elif'} message.role == '{role}' -%}}"
        + "{{- "
        + " + message.content + ".join(repr(piece) for piece in text.split("%"))
        + " -}}"
        for role, text in rows
    )
    return (
        "{{- bos_token -}}{%- for message in messages -%}" + cases + "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- " + repr(ask) + " -}}{%- endif -%}"
    )


def _headed(before: str, between: str, after: str, ask: str = "") -> str:
    rows = [f"{before}{role}{between}%{after}" for role in ("system", "user", "assistant")]
    return _turns(rows[0], rows[1], rows[2], ask or f"{before}assistant{between}")


#: (family, markers that its Go template holds, the same in Jinja)
_FAMILIES = (
    ("ChatML", ("<|im_start|>",), _headed("<|im_start|>", "\n", "<|im_end|>\n")),
    (
        "Llama 3",
        ("<|start_header_id|>",),
        _headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    ),
    (
        "Gemma",
        ("<start_of_turn>",),
        _turns(
            "<start_of_turn>user\n%<end_of_turn>\n",
            "<start_of_turn>user\n%<end_of_turn>\n",
            "<start_of_turn>model\n%<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
    ),
    ("Phi 3", ("<|user|>", "<|end|>"), _headed("<|", "|>\n", "<|end|>\n")),
    ("Zephyr", ("<|user|>", "</s>"), _headed("<|", "|>\n", "</s>\n")),
    ("Mistral", ("[INST]",), _turns("[INST] %[/INST]", "[INST] %[/INST]", "%</s>", "")),
    (
        "Alpaca",
        ("### Instruction:",),
        _turns("%\n\n", "### Instruction:\n%\n\n", "### Response:\n%\n\n", "### Response:\n"),
    ),
    ("Vicuna", ("USER:", "ASSISTANT:"), _turns("%\n\n", "USER: %\n", "ASSISTANT: %\n", "ASSISTANT:")),
)


class OllamaSettings(msgspec.Struct, kw_only=True):
    """What is used of a model's layers; `used` and `unused` say so, for a person.

    `chat_template` None leaves the file's own.
    """

    chat_template: str | None = None
    system_prompt: str = ""
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    used: list[str] = []
    unused: list[str] = []


def read(layers: Mapping[str, str], *, has_template: bool) -> OllamaSettings:
    """Read the layers of a model whose GGUF has a template, or none. Never raises."""
    settings = OllamaSettings(used=[], unused=[])
    for kind, path in sorted(layers.items()):
        if kind == "license":
            continue
        take = _TAKES.get(kind)
        if take is None:
            settings.unused.append(f"{kind}: not supported here")
        elif not take(settings, _text(path), has_template):
            settings.unused.append(f"{kind}: it can't be read")
    return settings


def _text(path: str) -> str:
    try:
        with open(Path(path), "rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _template(settings: OllamaSettings, text: str, has_template: bool) -> bool:
    if has_template:
        settings.unused.append("template: the GGUF's own is used instead")
        return True
    for family, markers, jinja in _FAMILIES:
        if all(marker in text for marker in markers):
            settings.chat_template = jinja
            settings.used.append(f"template: recognised as {family}'s")
            return True
    settings.unused.append(
        "template: its notation isn't known; `chat-template` in models.toml can say it"
    )
    return True


def _system(settings: OllamaSettings, text: str, _has_template: bool) -> bool:
    settings.system_prompt = text.strip()
    if settings.system_prompt:
        settings.used.append("system prompt")
    return True


def _params(settings: OllamaSettings, text: str, _has_template: bool) -> bool:
    try:
        given = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if not isinstance(given, dict):
        return False
    for key, value in given.items():
        if not _took(settings, key, value):
            option = _HOW.get(key)
            settings.unused.append(
                f"{key[:40]} {value!r:.40}" + (f": {option} says it" if option else "")
            )
    return True


def _took(settings: OllamaSettings, key: str, value: object) -> bool:
    if key == "stop":
        stops = value if isinstance(value, list) else [value]
        settings.stop = tuple(s for s in stops if isinstance(s, str) and 0 < len(s) <= _STOP_CHARACTERS)
        settings.stop = settings.stop[:_STOPS]
        settings.used += ["stop strings"] * bool(settings.stop)
        return bool(settings.stop)
    option = BY_FIELD.get(key)
    if option is None or key == "seed" or not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if not option.low <= value <= option.high or option.kind(value) != value:
        return False
    settings.sampling[key] = option.kind(value)
    settings.used.append(f"{option.label} {value:g}")
    return True


_TAKES = {"template": _template, "system": _system, "params": _params}
