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


class Words(msgspec.Struct, kw_only=True):
    """What is used of a model's layers; `used` and `unused` say so, for a person.

    `chat_template` None leaves the file's own.
    """

    chat_template: str | None = None
    system_prompt: str = ""
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    used: list[str] = []
    unused: list[str] = []


def read(layers: Mapping[str, str], *, has_template: bool) -> Words:
    """Read the layers of a model whose GGUF has a template, or none. Never raises."""
    words = Words(used=[], unused=[])
    for kind, path in sorted(layers.items()):
        if kind == "license":
            continue
        take = _TAKES.get(kind)
        if take is None:
            words.unused.append(f"{kind}: not supported here")
        elif not take(words, _text(path), has_template):
            words.unused.append(f"{kind}: it can't be read")
    return words


def _text(path: str) -> str:
    try:
        with open(Path(path), "rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _template(words: Words, text: str, has_template: bool) -> bool:
    if has_template:
        words.unused.append("template: the GGUF's own is used instead")
        return True
    for family, markers, jinja in _FAMILIES:
        if all(marker in text for marker in markers):
            words.chat_template = jinja
            words.used.append(f"template: recognised as {family}'s")
            return True
    words.unused.append("template: its notation isn't known; `chat-template` in models.toml can say it")
    return True


def _system(words: Words, text: str, _has_template: bool) -> bool:
    words.system_prompt = text.strip()
    if words.system_prompt:
        words.used.append("system prompt")
    return True


def _params(words: Words, text: str, _has_template: bool) -> bool:
    try:
        given = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if not isinstance(given, dict):
        return False
    for key, value in given.items():
        if not _took(words, key, value):
            option = _HOW.get(key)
            words.unused.append(f"{key[:40]} {value!r:.40}" + (f": {option} says it" if option else ""))
    return True


def _took(words: Words, key: str, value: object) -> bool:
    if key == "stop":
        stops = value if isinstance(value, list) else [value]
        words.stop = tuple(s for s in stops if isinstance(s, str) and 0 < len(s) <= _STOP_CHARACTERS)
        words.stop = words.stop[:_STOPS]
        words.used += ["stop strings"] * bool(words.stop)
        return bool(words.stop)
    option = BY_FIELD.get(key)
    if option is None or key == "seed" or not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if not option.low <= value <= option.high or option.kind(value) != value:
        return False
    words.sampling[key] = option.kind(value)
    words.used.append(f"{option.label} {value:g}")
    return True


_TAKES = {"template": _template, "system": _system, "params": _params}
