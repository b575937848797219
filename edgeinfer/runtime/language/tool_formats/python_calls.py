"""Parse calls written as Python, as Gemma does in a tool_code block; never run them."""

from __future__ import annotations

import ast
import json

#: The longest block that is parsed, characters.
_MAX = 20_000


def python_calls(code: str) -> list[tuple[str, str]] | None:
    """Parse (name, arguments as JSON) of every call; None for anything but literal keywords."""
    if len(code) > _MAX:
        return None
    try:
        tree = ast.parse(code.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and len(node.args) == 1
    ):
        node = node.args[0]  # Gemma likes to print what it calls
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(keyword.arg is None for keyword in node.keywords)
    ):
        raise ValueError("not a call with keyword arguments")
    name = ast.unparse(node.func)
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, json.dumps(arguments, ensure_ascii=False)
