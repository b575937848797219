"""Write (with --check, compare) the generated parts of the docs; report links without a target.

A generated part is between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of GENERATORS.
Text outside of the markers is not changed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
#: First line of a figure: date, commit, machine and command; then an empty line.
FIGURE_HEAD = re.compile(r"\d{4}-\d\d-\d\d, .*commit \w+.*, \d+ cores of .*; `[^`]+`.*\.\n\n")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def command_line() -> str:
    """Return `--help` of every verb."""
    from edgeinfer.cli.parser import build_parser

    os.environ["COLUMNS"] = "100"
    parser = build_parser()
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = [f"## edgeinfer\n\n```text\n{parser.format_help().rstrip()}\n```\n"]
    for name, sub in verbs.choices.items():
        if sub.prog.endswith(f" {name}"):  # an alias would repeat its verb
            parts.append(f"## edgeinfer {name}\n\n```text\n{sub.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def configuration() -> str:
    """Return every key of config.toml with its default and description."""
    from edgeinfer.config.config_file import Config

    def rows(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
        hints = msgspec.inspect.type_info(struct)
        assert isinstance(hints, msgspec.inspect.StructType)
        for field in hints.fields:
            if isinstance(field.type, msgspec.inspect.StructType):
                yield from rows(field.type.cls, f"{prefix}{field.encode_name}.")
                continue
            meta = (
                field.type.extra_json_schema if isinstance(field.type, msgspec.inspect.Metadata) else {}
            )
            sentence = (meta or {}).get("description", "")
            default = getattr(struct(), field.name)
            shown = msgspec.json.encode(
                list(default) if isinstance(default, tuple) else default
            ).decode()
            yield f"| `{prefix}{field.encode_name}` | `{shown}` | {sentence} |"

    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows(Config, "")]) + "\n"


def comparison() -> str:
    """Return the README's table, which `make bench-readme` measures, and the table's origin."""
    source, _, table = (ROOT / "docs/figures/readme.md").read_text("utf-8").partition("\n\n")
    return f"{table.rstrip()}\n\n{source}\n"


def exit_codes() -> str:
    """Return the table of errors: code, exit code, first paragraph of the docstring, next step."""
    from edgeinfer.error_text import row
    from edgeinfer.errors import every_class

    rows = []
    for cls in every_class():
        code, hint = row(cls)
        description = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        rows.append(f"| `{cls.code}` | {code} | {description} | {hint} |")
    return (
        "\n".join(["| `code` | exit | what happened | next step |", "| --- | --- | --- | --- |", *rows])
        + "\n"
    )


def models() -> str:
    """Return the shipped catalogue as a table."""
    from edgeinfer.models.catalog import load_catalog, shipped_path

    rows = []
    for model in load_catalog(user=shipped_path().with_name("none.toml")).values():
        first = next(part for parts in model.parsed_sources() for part in parts)
        n_more = len(model.sources) - 1
        source = f"`{first}`" + (f" and {n_more} more" if n_more else "")
        quant = f"{model.quantization} → {model.quantize}" if model.quantize else model.quantization
        about = f"{model.parameters} | {quant} | {model.context_length:,} | {model.licence} | {model.purpose}"
        rows.append(f"| `{model.name}` | {model.title} | {about} | {source} |")
    head = [
        "| name | | parameters | quantization | context | licence | for | first source |",
        "| --- " * 8 + "|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def model_keys() -> str:
    """Return every key of a model's table in models.toml, and of its sampling table."""
    from edgeinfer.models.catalog import Model

    rows = []
    hints = msgspec.inspect.type_info(Model)
    assert isinstance(hints, msgspec.inspect.StructType)
    for field in hints.fields:
        if field.name == "name":
            continue
        if isinstance(field.type, msgspec.inspect.StructType):
            keys = ", ".join(f"`{inner.encode_name}`" for inner in field.type.fields)
            rows.append(f"| `{field.encode_name}` | a table of {keys} |")
            continue
        meta = field.type.extra_json_schema if isinstance(field.type, msgspec.inspect.Metadata) else {}
        needed = " Required." if field.required else ""
        rows.append(f"| `{field.encode_name}` | {(meta or {}).get('description', '')}{needed} |")
    return "\n".join(["| key | |", "| --- | --- |", *rows]) + "\n"


def chat_commands() -> str:
    """Return every `/` command of the chat."""
    from edgeinfer.chat.commands import COMMANDS

    rows = []
    for c in COMMANDS:
        also = f" Also `/{'`, `/'.join(c.aliases)}`." if c.aliases else ""
        usage = c.usage.replace("|", "\\|")
        rows.append(f"| `{usage}` | {c.summary[0].upper()}{c.summary[1:]}.{also} |")
    return "\n".join(["| command | |", "| --- | --- |", *rows]) + "\n"


def chat_keys() -> str:
    """Return every key of the chat with the id by which it can be rebound."""
    from edgeinfer.tui.bindings import HEADINGS, KEYS, format_keys

    rows = [f"| {HEADINGS[k.where]} | {format_keys(k.keys)} | `{k.id}` | {k.tooltip} |" for k in KEYS]
    return "\n".join(["| where | key | id | |", "| --- | --- | --- | --- |", *rows]) + "\n"


def quantizations() -> str:
    """Return every type that `quantize` offers, with a * if the type needs an importance matrix."""
    from edgeinfer.models.gguf import FILE_TYPES
    from edgeinfer.models.quantizing import NEEDS_IMATRIX

    return (
        ", ".join(f"`{name}`{'*' if name in NEEDS_IMATRIX else ''}" for name in FILE_TYPES.values())
        + "\n"
    )


def converted_families() -> str:
    """Return the model families whose checkpoints can be converted."""
    from edgeinfer.models.converting.families import FAMILIES

    rows = [
        f"| {family.title} | {', '.join(f'`{name}`' for name in family.checkpoints)} | `{family.arch}` |"
        for family in FAMILIES
    ]
    return "\n".join(["| family | `architectures` | in llama.cpp |", "|---|---|---|", *rows]) + "\n"


def metrics() -> str:
    """Return every Prometheus metric of the endpoint."""
    from edgeinfer.server.metrics import Metrics

    rows = [
        f"| `{name}` | {kind} | {labels} | {text} |"
        for name, kind, labels, text in Metrics(lambda: []).describe()
    ]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows]) + "\n"


def prompt_rules() -> str:
    """Return the rules of prompt normalization."""
    from edgeinfer.agents.prompt_normalization import RULES

    goes = {
        "dropped": "dropped",
        "system turn": "into the system turn before",
        "first user turn": "before the text of the first user turn",
        "last turn": "behind the last turn",
        "where it was": "kept where it first stood too",
    }
    rows = [f"| `{rule.name}` | {rule.description} | {goes[rule.to]} |" for rule in RULES]
    return "\n".join(["| rule | what | where it goes |", "|---|---|---|", *rows]) + "\n"


def agents() -> str:
    """Return the agents that can be launched, and how each is configured."""
    from edgeinfer.agents.known_agents import AGENTS, AgentTarget

    target = AgentTarget(url="URL", model="MODEL", n_ctx=65536, key="KEY")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for agent in AGENTS.values():
            arguments, variables = agent.setup(target, Path(folder))
            told = [f"`{name}`" for name in variables]
            told += [f"`{word}`" for word in dict.fromkeys(arguments) if word.startswith("-")]
            sizes = f"{agent.first_tokens:,} | {agent.needs_tokens:,}"
            rows.append(f"| `{agent.name}` | {agent.title} | {sizes} | {', '.join(told)} |")
    return (
        "\n".join(
            ["| name | | first request | needs | configured through |", "|---|---|---|---|---|", *rows]
        )
        + "\n"
    )


def fields(root: str) -> str:
    """Return the table of a request type's fields, and those of its objects: used, refused, ignored.

    `root` is `MODULE:CLASS` below edgeinfer.server.
    """
    module, name = root.split(":")
    kind = getattr(importlib.import_module(f"edgeinfer.server.{module}"), name)
    rows: list[str] = []
    seen: set[type] = set()
    waiting = [("", kind)]
    while waiting:
        where, kind = waiting.pop(0)
        if kind not in seen:
            seen.add(kind)
            rows.append(_fields_row(where, kind))
            waiting += [(f"{where}.{path}".lstrip("."), inner) for path, inner in objects_of(kind)]
    head = ["| in | honoured | refused | left out |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _fields_row(where: str, kind: type) -> str:
    from edgeinfer.server.request_body import declaration_of

    declared = declaration_of(kind)
    dropped = f"objects of the types {_join_types(kind.dropped_types)}" if kind.dropped_types else ""
    refused = [f"`{name}` ({reason})" for name, reason in sorted(declared.refused.items())]
    refused += [f"type {_join_types([name])} ({reason})" for name, reason in kind.other_types.items()]
    honoured = ", ".join(f"`{name}`" for name in declared.fields)
    return f"| {f'`{where}`' if where else 'the request'} | {honoured} | {'; '.join(refused)} | {dropped} |"


def _join_types(types: Sequence[str]) -> str:
    return ", ".join(f"`{name}…`" if name else "that are not named here" for name in types)


def objects_of(kind: type) -> list[tuple[str, type]]:
    """Return the object types in the fields of a wire type, each with its path, such as `tools[]`."""
    from edgeinfer.server.request_body import declaration_of

    objects = []
    for name, field in declaration_of(kind).fields.items():
        plan, path = field.plan, name
        while plan is not None:
            objects += [(f"{path}<{tag}>" if tag else path, cls) for tag, cls in plan.objects.items()]
            plan, path = plan.item, f"{path}[]"
    return objects


GENERATORS: dict[str, Callable[[], str]] = {
    "agents": agents,
    "chat-commands": chat_commands,
    "chat-keys": chat_keys,
    "command-line": command_line,
    "comparison": comparison,
    "configuration": configuration,
    "converted-families": converted_families,
    "exit-codes": exit_codes,
    "fields-chat": partial(fields, "openai.wire:ChatRequest"),
    "fields-completions": partial(fields, "openai.wire:CompletionRequest"),
    "fields-embeddings": partial(fields, "openai.routes:EmbeddingRequest"),
    "fields-messages": partial(fields, "anthropic.wire:MessagesRequest"),
    "fields-responses": partial(fields, "responses.wire:ResponsesRequest"),
    "metrics": metrics,
    "models": models,
    "model-keys": model_keys,
    "quantizations": quantizations,
    "prompt-rules": prompt_rules,
}


def generate(name: str) -> str:
    """Return the text for one marker. Raises KeyError for an unknown name."""
    return GENERATORS[name]()


def render(text: str) -> str:
    """Return `text` with every generated part written anew."""
    return BLOCK.sub(lambda m: f"{m[1]}{generate(m['name'])}{m[4]}", text)


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Yield the links of a document whose file or heading does not exist in the repository."""
    for target in LINK.findall(FENCED.sub("", text)):
        file, _, anchor = target.partition("#")
        document = (path.parent / file).resolve() if file else path
        has_anchors = anchor and document.suffix == ".md" and document.exists()
        if not document.exists() or (
            has_anchors and anchor not in anchors(document.read_text("utf-8"))
        ):
            yield target


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in headings}


def figures_without_head() -> list[str]:
    """List the tables in docs/figures/ without a first line as `FIGURE_HEAD` requires.

    The table of families, which a test writes, and notes need no such line.
    """
    files = (ROOT / "docs/figures").glob("*.md")
    texts = {
        path.name: path.read_text("utf-8")
        for path in files
        if path.stem != "families" and not path.stem.startswith("notes-")
    }
    return sorted(name for name, text in texts.items() if not FIGURE_HEAD.match(text))


def missing_tests() -> list[str]:
    """Return the tests that .ci/run or the Makefile names but that do not exist."""
    missing = set()
    for script in (".ci/run", "Makefile"):
        for path, name in re.findall(
            r"(tests/[\w/]+(?:\.py)?)(?:::(\w+))?", (ROOT / script).read_text("utf-8")
        ):
            file = ROOT / path
            if not file.exists() or (name and f"def {name}(" not in file.read_text("utf-8")):
                missing.add(f"{script}: {path}{'::' if name else ''}{name}")
    return sorted(missing)


def main() -> int:
    """Write all documents; with --check, return 1 if one is stale or a link is broken."""
    check = "--check" in sys.argv[1:]
    stale = []
    broken = missing_tests()
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        before = path.read_text("utf-8")
        after = render(before)
        if before != after:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(after, "utf-8")
        broken += [f"{path.relative_to(ROOT)}: {link}" for link in broken_links(path, after)]
    headless = figures_without_head()
    for name in headless:
        print(
            f"docs/figures/{name} does not begin with date, commit, machine and command",
            file=sys.stderr,
        )
    for link in broken:
        print(f"broken link: {link}", file=sys.stderr)
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}", file=sys.stderr)
    if stale and check:
        print("\nhint: make docs", file=sys.stderr)
    return 1 if check and (stale or broken or headless) else 0


if __name__ == "__main__":
    sys.exit(main())
