"""Wrong values of every key of config.toml and models.toml, and unknown keys in all their tables."""

import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from edgeinfer.config.config_file import Config, append_config_key, load_config
from edgeinfer.config.toml_file import _fits, _members
from edgeinfer.errors import ConfigError, UsageError
from edgeinfer.models import catalog
from edgeinfer.models.catalog import Model

#: Values of every TOML type, and extreme ones.
VALUES = (
    *(
        '"nonsense"',
        '""',
        '"3"',
        '"true"',
        '"[]"',
        "true",
        "3",
        "-3",
        "4.5",
        "-1e30",
        "1e30",
        "nan",
        "inf",
    ),
    *("1" + "0" * 30, "[]", "[3]", '["nonsense"]', "[[3]]", "{}", "{ nonsense = 3 }", "[{}]"),
    *("1979-05-27", "1979-05-27T07:32:00Z", "07:32:00"),
)
#: Words of the parser and of Python.
JARGON = re.compile(r"\$|\b(Expected|int|str|float|bool|null|None|object|array|dict|enum|tuple)\b")

Keys = tuple[str, ...]


def every_key(table: type[msgspec.Struct], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield every key with its type; of a table whose keys are names, one key."""
    for field in msgspec.structs.fields(table):
        keys, kind = (*above, field.encode_name), field.type
        yield keys, kind
        if get_origin(_members(kind)[0]) is dict:
            name, kind = get_args(_members(kind)[0])
            keys += (get_args(name)[0] if get_origin(name) is Literal else "a.b",)
            yield keys, kind
        if msgspec.inspect.is_struct_type(kind):
            yield from every_key(kind, keys)


def toml_key(keys: Keys) -> str:
    return ".".join(f'"{key}"' if "." in key else key for key in keys)


def load_config_line(folder: Path, line: str) -> None:
    (path := folder / "file.toml").write_text(f"# ctx, title\n\n{line}\n")
    load_config(path)


def load_catalog_line(folder: Path, line: str) -> None:
    needed = "" if line.startswith("sources") else 'sources = ["hf:me/mine-GGUF:Q8_0"]\n'
    (path := folder / "file.toml").write_text(f"# ctx, title\n[models.mine]\n{line}\n{needed}")
    catalog.load_catalog(path)


KEYS = [(load_config_line, *key) for key in every_key(Config)]
KEYS += [(load_catalog_line, *key) for key in every_key(Model) if key[0] != ("name",)]


@pytest.fixture(autouse=True)
def empty_shipped_catalog(tmp_path, monkeypatch):
    """Save the time of reading the shipped catalogue for every line."""
    (tmp_path / "shipped.toml").touch()
    monkeypatch.setattr(catalog, "shipped_path", lambda: tmp_path / "shipped.toml")


def refusal(load, tmp_path: Path, line: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, line)
    assert refused.value.hint
    message = refused.value.message
    assert message.startswith(f"{tmp_path / 'file.toml'}, line 3: "), message
    message = message.removeprefix(f"{tmp_path / 'file.toml'}, line 3: ")
    assert not JARGON.search(message), message
    return message


@pytest.mark.parametrize(("load", "keys", "kind"), KEYS, ids=[toml_key(row[1]) for row in KEYS])
def test_wrong_value_is_described_in_words(load, keys, kind, tmp_path):
    schema = str(msgspec.json.schema(kind))
    choices = re.findall(r"'([^']*)'", "".join(re.findall(r"'enum': \[(.*?)\]", schema)))
    limits = [float(n) for n in re.findall(r"'\w*[mM](?:in|ax)imum': (-?[\d.]+)", schema)]
    is_single = not {"properties", "additionalProperties"}.intersection(re.findall(r"'(\w+)':", schema))
    wrong = [text for text in VALUES if not _fits(tomllib.loads(f"x = {text}")["x"], kind)]
    assert len(wrong) > 4
    for text in wrong:
        message = refusal(load, tmp_path, f"{toml_key(keys)} = {text}")
        assert f"`{toml_key(keys)}" in message, message
        if "must be" not in message or not is_single:
            continue
        allowed = message.partition("must be")[2]
        assert all(f'"{choice}"' in allowed for choice in choices), message
        assert all(f"{limit:.10g}" in allowed for limit in limits), message
        if text[0] not in "[{1" and not {"env", "headers"}.intersection(keys):
            assert f"`{toml_key(keys)}` is {text.replace('e30', 'e+30')}, but" in message


@pytest.mark.parametrize(("load", "keys", "kind"), KEYS, ids=[toml_key(row[1]) for row in KEYS])
def test_misspelt_key_is_refused_with_the_right_one(load, keys, kind, tmp_path):
    if "a.b" in keys[-1:] or (load, *keys) == (load_catalog_line, "sources"):
        return
    misspelt = (*keys[:-1], f"{keys[-1]}x")
    message = refusal(load, tmp_path, f"{toml_key(misspelt)} = 3")
    assert f"unknown key `{toml_key(misspelt)}`; did you mean `" in message
    nonsense = (*keys[:-1], "qqqq")
    message = refusal(load, tmp_path, f"{toml_key(nonsense)} = 3")
    assert re.search(
        rf"unknown key `{re.escape(toml_key(nonsense))}`; valid keys: .*\b{keys[-1]}\b", message
    )


@pytest.mark.parametrize(
    ("load", "line", "expected"),
    [
        (load_config_line, 'serve.port = "80"', "write 80 without quotes"),
        (load_config_line, 'chat.mouse = "off"', "must be true or false"),
        (load_config_line, 'gpu.devices = "Vulkan0"', 'write ["Vulkan0"]'),
        (load_config_line, 'tools.builtin = ["read", "shel"]', 'item 2 of `tools.builtin` is "shel"'),
        (load_config_line, 'tools.builtin = ["shel"]', 'did you mean "shell"?'),
        (load_config_line, 'chat.theme = ["' + "long " * 99 + '"]', "is a list"),
        (load_config_line, "load = 3", "`load` is 3, but must be a table"),
        (
            load_catalog_line,
            'lora = [{ path = "/a", scal = 1 }]',
            "unknown key `scal` in item 1 of `lora`",
        ),
        (load_catalog_line, "lora = [{ scale = 999 }]", "from -100 to 100"),
        (load_catalog_line, 'sources = [["a", 3]]', "item 2 of item 1 of `sources` is 3"),
        (load_catalog_line, "sources = []", "is an empty list, but must be a list of"),
    ],
)
def test_mistake_inside_a_value_is_named_and_corrected(load, line, expected, tmp_path):
    assert expected in refusal(load, tmp_path, line)


@pytest.mark.parametrize("table", ["env", "headers"])
def test_secret_is_not_shown(table, tmp_path):
    message = refusal(load_config_line, tmp_path, f"tools.servers.a.{table}.TOKEN = 123456")
    assert message == f"`tools.servers.a.{table}.TOKEN` must be a text in quotes"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[serve]\nport = -1", 2),
        ('# port = -1\n[serve]\nhost = "x"\n\n  port = -1', 5),
        ('chat.system-prompts.x = """\nport = -1\n"""\nserve.port = -1', 4),
        ("serve = { web = true, port = -1 }\n# port", 1),
        ('[chat]\r\ntheme = "x"\r\n[serve]\r\nport = -1\r\n', 4),
        ("[tools.servers.port]\nurl = ''\n[serve]\n'port' = -1\n", 4),
        ("[gpu]\ndevices = [\n  3,\n]", 2),
        ('[serve]\n"\\u0070ort" = -1', 0),
        ('# the port\n[serve]\n"\\u0070ort" = -1', 0),
        (f"[serve]\nport = 0x{'f' * 10000}", 2),
    ],
)
def test_line_of_a_mistake_is_found(text, line, tmp_path):
    (path := tmp_path / "file.toml").write_bytes(text.encode())
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    position = f"{path}, line {line}: " if line else f"{path}: "
    assert refused.value.message.startswith(position)


def test_line_that_mentions_a_key_is_not_the_line_that_sets_the_key(tmp_path):
    lines = '# a path of an adapter\n[models.mine]\nsources = ["file:/f"]\nlora = [\n{ path = 3 }\n]'
    (path := tmp_path / "file.toml").write_text(lines)
    with pytest.raises(ConfigError) as refused:
        catalog.load_catalog(path)
    assert refused.value.message.startswith(f'{path}: model "mine": `path` in item 1 of `lora` is 3')


@pytest.mark.parametrize("n_lines", [100, 20000])
def test_search_for_a_line_ends_soon(n_lines, tmp_path):
    texts = "".join(f'p{i} = "go offline"\n' for i in range(n_lines))
    (path := tmp_path / "file.toml").write_text(f"offline = 1\n[chat.system-prompts]\n{texts}")
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert refused.value.message.startswith(f"{path}, line 1: " if n_lines == 100 else f"{path}: ")
    assert time.process_time() - began < 10


def test_new_model_needs_no_title_but_sources(tmp_path):
    load_catalog_line(tmp_path, 'stop = ["x"]')
    assert catalog.load_catalog(tmp_path / "file.toml")["mine"].title == "mine"


def test_model_without_sources_may_be_a_misspelt_one(tmp_path, monkeypatch):
    monkeypatch.undo()
    (path := tmp_path / "file.toml").write_text('[models.qwen3-4bb]\nsystem-prompt = "Be brief."\n')
    with pytest.raises(ConfigError) as refused:
        catalog.load_catalog(path)
    assert refused.value.message == f'{path}, line 1: model "qwen3-4bb": the key `sources` is missing'
    assert "did you mean [models.qwen3-4b]?" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("none of the files can be read", ""),
        ("the prompt has 9000 tokens", ""),
        ("draft model 'none': no such model", "load.draft"),
        ("cannot listen on 127.0.0.1:9000: refused", "serve.port"),
        ("cannot listen on 127.0.0.1:90000: refused", ""),
    ],
)
def test_word_of_a_message_is_not_taken_for_a_configured_one(message, key, tmp_path, monkeypatch):
    lines = ('load.draft = "none"', 'tools.builtin = ["read"]', "serve.port = 9000")
    (path := tmp_path / "config.toml").write_text("\n".join(lines))
    monkeypatch.setenv("EDGEINFER_CONFIG", str(path))
    error = UsageError(message)
    append_config_key(error)
    numbers = {line.split(" ")[0]: number for number, line in enumerate(lines, 1)}
    assert error.message == message + (key and f" (`{key}` in {path}, line {numbers[key]})")


TEXTS = [keys for load, keys, kind in KEYS if load is load_config_line and _members(kind)[0] is str]


@pytest.mark.parametrize("keys", TEXTS, ids=toml_key)
def test_later_error_about_a_configured_text_names_its_key(keys, tmp_path, monkeypatch):
    (path := tmp_path / "config.toml").write_text(f'# one\n{toml_key(keys)} = "my-value.x"\n')
    monkeypatch.setenv("EDGEINFER_CONFIG", str(path))
    load_config()
    position = f" (`{toml_key(keys)}` in {path}, line 2)"
    for message, typed, added in (
        ("no model is called 'my-value.x'", ("run", "hello"), position),
        ("my-value.x:8080: refused", (), position),
        ("no model is called 'my-value.x'", ("run", "--lora=my-value.x"), ""),
        ("no model is called 'my-value.xy' or /my-value.x", (), ""),
        (f"{path}, line 2: my-value.x is wrong", (), ""),
    ):
        error = UsageError(message)
        append_config_key(error, typed)
        assert error.message == message + added
