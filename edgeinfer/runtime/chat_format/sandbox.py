"""Render untrusted chat templates in jinja2 with limits: a GGUF's template is downloaded code.

jinja2's ImmutableSandboxedEnvironment keeps a template from Python's internals (CVE-2024-34359), but
not from endless loops or a string of a terabyte. So `Fuel` counts the work of a render: iterations,
macro calls and the sizes of values. A render ends within CPU_LIMIT_S and uses about four times FUEL
bytes. Operations that can make a huge value at once (multiplication, padding, replacing, joining) are
checked before they run.
"""

from __future__ import annotations

import contextvars
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edgeinfer.runtime.requests import check_deadline

#: Work (units) that rendering a template may take: a character costs 1, an iteration 16, an element of
#: a container 256.
FUEL = 64 * 1024 * 1024
#: CPU time (s) of one render; a long conversation takes a few milliseconds.
CPU_LIMIT_S = 2.0
#: Longest template source (characters) that is compiled; real ones have fewer than 40,000.
MAX_SOURCE = 512 * 1024
#: Largest number that a template may pass to a string method or a filter, as a width or count.
_MAX_WIDTH = 100_000
_MAX_BITS = 4096
_TICK_COST = 16
_NODE_COST = 256
_CHECK_EVERY = 16
_WIDE = re.compile(r"\d{6}")
#: Characters other than \n at which `splitlines` splits.
_LINE_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
#: String methods that compare each character with each of the argument's; FUEL counts 16 as 1 unit.
_QUADRATIC = ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim")
#: The filters that chat templates use; jinja2's others can produce long output, or are for web pages.
_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort
    string title tojson trim unique upper
"""
#: The allowed string methods. `format` and the operator % can pad to any width; no known template needs
#: them.
_STR_METHODS = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit
    isidentifier islower isnumeric isspace istitle isupper join ljust lower lstrip partition
    removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
    startswith strip swapcase title upper zfill
"""
_CONTAINERS = (list, tuple, dict, set, frozenset)


class ExhaustedError(SecurityError):
    """A template did more work than any real conversation needs."""


class Fuel:
    """Limits the work and the CPU time of one render.

    Work is counted in units: a character costs 1, an iteration 16, an element of a container 256.
    """

    __slots__ = ("deadline", "units_left", "until_check")

    def __init__(self, amount: int = FUEL, cpu_s: float = CPU_LIMIT_S) -> None:
        self.units_left = amount
        self.deadline = time.thread_time() + cpu_s
        self.until_check = _CHECK_EVERY

    def spend(self, units: int) -> None:
        """Spend `units`. Raises ExhaustedError if fuel or CPU time is used up."""
        self.units_left -= units
        if self.units_left < 0:
            raise ExhaustedError("the chat template produces too much text or loops too often")
        self.until_check -= 1 if units < 4096 else _CHECK_EVERY
        if self.until_check <= 0:
            self.until_check = _CHECK_EVERY
            check_deadline()
            if time.thread_time() > self.deadline:
                raise ExhaustedError("the chat template takes too long")

    def require(self, units: int) -> None:
        """Raise ExhaustedError unless `units` are left. Spends nothing."""
        if units > self.units_left:
            raise ExhaustedError("the chat template produces too much text or loops too often")


_fuel: contextvars.ContextVar[Fuel] = contextvars.ContextVar("edgeinfer_template_fuel")


@contextmanager
def limit_fuel(fuel: Fuel | None = None) -> Iterator[Fuel]:
    """Limit the work of all templates that a `with` block renders; yield the `Fuel` that they spend.

    If `fuel` is None, a nested block spends the enclosing block's, and an outermost block a new one.
    """
    tank = fuel or _fuel.get(None) or Fuel()
    token = _fuel.set(tank)
    try:
        yield tank
    finally:
        _fuel.reset(token)


def charge(value: Any) -> Any:
    """Spend fuel for the size of `value`, and return `value`. Raises ExhaustedError.

    Containers count by their size as text: nested lists that contain each element twice, forty levels
    deep, are small in memory and a terabyte as text.
    """
    if isinstance(value, str):
        _fuel.get().spend(len(value))
    elif isinstance(value, _CONTAINERS):
        _measure(value)
    return value


def _measure(value: Any) -> int:
    fuel = _fuel.get()
    total = 0
    counted = 0
    stack = [value]
    while stack:
        item = stack.pop()
        counted += 1
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        if total + (counted + len(stack)) * _NODE_COST > fuel.units_left:
            raise ExhaustedError("the chat template produces a value that is too large")
    fuel.spend(counted)
    return total


def _tick() -> None:
    _fuel.get().spend(_TICK_COST)


def _join(*parts: Any) -> str:
    charge(parts)
    return charge("".join(map(str, parts)))  # type: ignore[no-any-return]


def _concat(parts: Iterable[str]) -> str:
    """Join the pieces that a template or macro has written, and spend fuel for each."""
    fuel, pieces = _fuel.get(), []
    for piece in parts:
        fuel.spend(len(piece) + 1)
        pieces.append(piece)
    return "".join(pieces)


def _check_text_call(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a string method's arguments, perhaps limited. Raises ExhaustedError for huge results."""
    fuel = _fuel.get()
    if any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in args):
        raise ExhaustedError(f"the chat template calls str.{name} with too large a number")
    if name in _QUADRATIC and args and isinstance(args[0], str):
        fuel.require(len(text) * len(args[0]) // 16)
    if name in ("split", "rsplit"):
        max_parts = fuel.units_left // _NODE_COST + 1  # `charge` refuses a list with more parts
        limit = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
        return (args[0] if args else None, limit if 0 <= limit < max_parts else max_parts)
    if name == "splitlines":
        fuel.require((text.count("\n") + sum(map(text.count, _LINE_BREAKS))) * _NODE_COST)
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        fuel.require((text.count(args[0]) + 1) * len(args[1]) + len(text))
    if name == "join" and args:
        items = list(islice(args[0], 1_000_000))
        charge(items)
        fuel.require(len(items) * len(text))
        return (items, *args[1:])
    return args


def _wrap_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `inner` with its arguments checked and its result charged."""
    takes_environment = hasattr(inner, "jinja_pass_arg")

    def run(*args: Any, **kwargs: Any) -> Any:
        passed, operands = (args[:1], args[1:]) if takes_environment else ((), args)
        if operands and isinstance(operands[0], Iterator):
            operands = (charge(list(islice(operands[0], 1_000_000))), *operands[1:])
        if operands and name in ("replace", "join", "indent", "trim"):
            operands = _check_filter(name, operands, kwargs)
        if any(
            isinstance(arg, int) and arg > _MAX_WIDTH for arg in (*operands[1:], *kwargs.values())
        ) and name not in ("default", "d"):
            raise ExhaustedError(f"the chat template passes too large a number to the filter {name}")
        result = inner(*passed, *operands, **kwargs)
        return charge(result)

    if takes_environment:
        run.jinja_pass_arg = inner.jinja_pass_arg  # type: ignore[attr-defined]
    return run


def _check_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    def argument(position: int, key: str, default: Any = "") -> Any:
        return kwargs.get(key, args[position] if len(args) > position else default)

    if name == "join":
        if isinstance(args[0], Iterable):
            return (*_check_text_call(str(argument(1, "d")), name, (args[0],)), *args[1:])
    elif name == "replace":
        _check_text_call(str(args[0]), name, (str(argument(1, "old")), str(argument(2, "new"))))
    elif name == "trim":
        _check_text_call(str(args[0]), name, (str(argument(1, "chars") or ""),))
    else:
        width = argument(1, "width", 4)
        n = width if isinstance(width, int) else len(str(width))
        _fuel.get().require(str(args[0]).count("\n") * n)
    return args


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON as Hugging Face does: without the escapes for HTML that jinja2 adds."""
    if len(str(indent)) > 64 or len(str(separators)) > 64:
        raise ExhaustedError("the chat template passes too long a separator to tojson")
    if isinstance(value, jinja2.Undefined):
        raise TemplateRuntimeError("the chat template passes an undefined value to tojson")
    # `| map(…) | tojson` passes a generator: write it as a list, as other engines do
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, Iterator):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return charge(list(islice(value, 1_000_000)))  # type: ignore[no-any-return]


def _raise_exception(message: Any = "") -> None:
    raise jinja2.TemplateError(str(message)[:500])


#: Time that templates get for a replayed prompt; None means the present time.
render_time: contextvars.ContextVar[datetime | None] = contextvars.ContextVar(
    "edgeinfer_render_time", default=None
)


def _strftime_now(form: str) -> str:
    if len(form) > 200 or _WIDE.search(form):
        raise ExhaustedError("strftime_now is given too long a format")
    return (render_time.get() or datetime.now().astimezone()).strftime(form)


class GenerationTag(Extension):
    """Ignore the tags `{% generation %}` and `{% endgeneration %}`, which are used only in training."""

    tags = {"generation"}  # noqa: RUF012 jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _AddCharges(NodeTransformer):
    """Adds calls of `tick` to loops and macros, and of `charge` to expressions that build values."""

    def _make_call(self, node: nodes.Node, method: str, args: list[nodes.Expr]) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
        call.set_lineno(node.lineno)
        return call

    def _add_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._make_call(node, "tick", []))
        tick.set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node

    visit_For = visit_Macro = visit_CallBlock = _add_tick

    def _add_charge(self, node: Any) -> Any:
        plain = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        self.generic_visit(node)
        is_value = not plain and getattr(node, "ctx", "load") == "load"
        return self._make_call(node, "charge", [node]) if is_value else node

    visit_List = visit_Dict = visit_Tuple = _add_charge

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._make_call(node, "join", node.nodes)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits on work. Thread-safe: each thread has a separate `Fuel`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concat)
    tick = staticmethod(_tick)
    charge = staticmethod(charge)
    join = staticmethod(_join)
    str_methods = frozenset(_STR_METHODS.split())

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, cache_size=0, extensions=_EXTENSIONS
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _wrap_filter(name, self.filters[name]) for name in _FILTERS.split()}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _AddCharges().visit(tree)
        return tree.set_environment(self)  # type: ignore[return-value]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ in ("split", "rsplit"):
                arguments = dict(zip(("sep", "maxsplit"), args, strict=False)) | kwargs
                args, kwargs = (arguments.get("sep"), arguments.get("maxsplit", -1)), {}
            args = _check_text_call(owner, __obj.__name__, args)
        elif __obj is not charge and (kwargs or any(isinstance(arg, _CONTAINERS) for arg in args)):
            charge((*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        return result if __obj is _tick or __obj is charge else charge(result)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in self.str_methods
        return not isinstance(obj, (int, float, bytes)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Do nothing: `is_safe_attribute` already refuses `str.format`."""

    def call_binop(self, context: Context, operator: str, left_operand: Any, right_operand: Any) -> Any:
        if isinstance(left_operand, int) and isinstance(right_operand, int):
            bits = left_operand.bit_length()
            sizes = {"*": bits + right_operand.bit_length(), "**": bits * abs(right_operand)}
            if sizes.get(operator, bits) > _MAX_BITS:
                raise ExhaustedError("the chat template computes a number that is too large")
        elif operator == "*":
            self._check_product(left_operand, right_operand)
        elif operator == "%" and isinstance(left_operand, str):
            raise SecurityError("the chat template formats text with %, which is not allowed")
        return charge(super().call_binop(context, operator, left_operand, right_operand))

    @staticmethod
    def _check_product(left_operand: Any, right_operand: Any) -> None:
        for many, times in ((left_operand, right_operand), (right_operand, left_operand)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                cost = 1 if isinstance(many, str) else _NODE_COST
                _fuel.get().require(len(many) * times * cost)


_EXTENSIONS = (GenerationTag, "jinja2.ext.loopcontrols", "jinja2.ext.do")
