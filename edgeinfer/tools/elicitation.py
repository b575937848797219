"""A tool server asks the user: its form, a question a field, and what is typed as its values."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from edgeinfer.tools.uses import safe_text

_MOST_FIELDS = 20
_MOST_SHOWN, _MOST_LINE = 2000, 300
_TRIES = 3
_DECLINED, _LEFT_OUT = object(), object()
_YES_NO = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}


@runtime_checkable
class FormFront(Protocol):
    """A front end that can ask for text."""

    def ask(self, text: str) -> str | None:
        """Show `text`, and return what the user types; None if the calls were stopped."""


def answer(front: object, server: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to `elicitation/create`; a front end that cannot ask declines."""
    schema = params.get("requestedSchema")
    fields = schema.get("properties") if isinstance(schema, dict) else None
    if (
        not isinstance(front, FormFront)
        or params.get("mode", "form") != "form"
        or not isinstance(fields, dict)
        or len(fields) > _MOST_FIELDS
        or not all(isinstance(field, dict) for field in fields.values())
    ):
        return {"action": "decline"}
    content = {}
    for name, field in fields.items():
        value = _asked(front, f"{server} asks you: {params.get('message', '')}", name, field)
        if value is None or value is _DECLINED:
            return {"action": "cancel" if value is None else "decline"}
        if value is not _LEFT_OUT:
            content[name] = value
    return {"action": "accept", "content": content}


def _asked(front: FormFront, head: str, name: str, field: dict[str, Any]) -> Any:
    """Return a field's value, or `_LEFT_OUT`; None if the user stopped."""
    choices, default = _choices(field), field.get("default", _LEFT_OUT)
    rows = [
        head,
        f"  {field.get('title') or name} ({field.get('type')})",
        f"  {field.get('description', '')}",
    ]
    rows += [f"  one of: {', '.join(choices)}"] if choices else []
    shown = "none" if default is _LEFT_OUT else safe_text(str(default), _MOST_LINE)
    ways = f"Type the value, which {head.partition(' ')[0]} gets · - for {shown} · ! declines"
    wrong = ""
    for _ in range(_TRIES):
        # apart: a long message hides neither the error nor the ways out
        asked = safe_text("\n".join(filter(str.strip, rows)), _MOST_SHOWN)
        typed = front.ask(f"{asked}\n{safe_text(wrong, _MOST_LINE)}\n{ways}")
        if typed is None or typed.strip() == "!":
            return typed and _DECLINED
        if typed.strip() == "-":
            return default
        try:
            return _value(typed.strip(), field, choices)
        except (ValueError, OverflowError) as error:
            wrong = f"  That is no answer: {error}"
    return _DECLINED


def _choices(field: dict[str, Any]) -> list[str]:
    kind = field.get("items") if field.get("type") == "array" else field
    kind = kind if isinstance(kind, dict) else {}
    named = kind.get("oneOf") or kind.get("anyOf")
    named = named if isinstance(named, list) else []
    found = kind.get("enum") or [one.get("const") for one in named if isinstance(one, dict)]
    return [str(one) for one in found] if isinstance(found, list) else []


def _limit(field: dict[str, Any], name: str, otherwise: float) -> float:
    found = field.get(name)
    return found if isinstance(found, int | float) else otherwise


def _value(typed: str, field: dict[str, Any], choices: list[str]) -> Any:
    """Raises ValueError for what the field does not take."""
    match field.get("type"):
        case "boolean":
            if typed.lower() not in _YES_NO:
                raise ValueError("yes or no")
            return _YES_NO[typed.lower()]
        case "integer" | "number" as kind:
            number = int(typed) if kind == "integer" else float(typed)
            low, high = _limit(field, "minimum", -math.inf), _limit(field, "maximum", math.inf)
            if not (math.isfinite(number) and low <= number <= high):
                raise ValueError(f"from {low} to {high}")
            return number
        case "array":
            parts = [part.strip() for part in typed.split(",")]
            if choices and not set(parts) <= set(choices):
                raise ValueError(f"some of {', '.join(choices)}, with commas")
            return parts
    if choices and typed not in choices:
        raise ValueError(f"one of {', '.join(choices)}")
    low, high = _limit(field, "minLength", 0), _limit(field, "maxLength", _MOST_SHOWN)
    if not low <= len(typed) <= high:
        raise ValueError(f"{low} to {high} characters")
    return typed
