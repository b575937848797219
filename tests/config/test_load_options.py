"""The table of load options reaches command line, configuration, engine and launcher."""

import argparse
from typing import Any

import msgspec
import pytest

from edgeinfer import typed_options
from edgeinfer.cli.main import main
from edgeinfer.cli.parser import build_parser
from edgeinfer.cli.verbs import doctor
from edgeinfer.config.config_file import Config, LoadConfig, load_config
from edgeinfer.config.load_options import LOAD_OPTIONS, LoadOption, snapshot_options
from edgeinfer.errors import ConfigError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.launcher import selection
from edgeinfer.platform.machine import Memory
from edgeinfer.runtime.llama.model import check_options
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.snapshots.inputs import SnapshotInputs
from edgeinfer.snapshots.restore import app_host

TYPED = [option for option in LOAD_OPTIONS if option.flag]
CONFIGURED = [option for option in LOAD_OPTIONS if option.key]


def other(option: LoadOption) -> Any:
    """Return a value of the option that is not its default."""
    choices = [word for word in option.choices if word != option.default]
    return choices[-1] if choices else option.high or "/folder/other.gguf"


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


def test_table_is_the_engines_options() -> None:
    fields = set(LoadOptions.__struct_fields__) - {"max_queue", "is_counted"}
    assert {option.field for option in LOAD_OPTIONS} == fields
    for option in LOAD_OPTIONS:
        assert getattr(LoadOptions(), option.field) == option.default
    check_options(LoadOptions())


@pytest.mark.parametrize("option", TYPED, ids=lambda option: option.flag)
def test_typed_option_reaches_the_engine(option: LoadOption) -> None:
    typed = parse("run", "m", "hello", option.flag, str(other(option)))
    assert getattr(typed_options.load_options(typed, LoadConfig()), option.field) == other(option)


@pytest.mark.parametrize("option", CONFIGURED, ids=lambda option: option.key)
def test_configured_option_reaches_the_engine(option, tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[load]\n{option.key} = {msgspec.json.encode(other(option)).decode()}\n")
    loaded = typed_options.load_options(parse("run", "m"), load_config(path).load)
    assert getattr(loaded, option.field) == other(option)


NUMBERS = [option for option in TYPED if option.high]


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.flag)
def test_one_range_on_every_way_in(option: LoadOption, tmp_path, capsys) -> None:
    beyond = option.high + 1
    assert main(["run", "m", "hello", option.flag, str(beyond)], EngineHost(config=Config())) == 2
    assert f"between {option.low} and {option.high}" in capsys.readouterr().err
    path = tmp_path / "config.toml"
    path.write_text(f"[load]\n{option.key} = {beyond}\n")
    message = f"`load.{option.key}` is {beyond}, but must be .*from {option.low} to {option.high}"
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    with pytest.raises(UsageError, match=f"between {option.low} and {option.high}"):
        check_options(LoadOptions(**{option.field: beyond}))
    path.write_text(f"[load]\n{option.key} = {option.high}\n")
    assert load_config(path).load.value(option) == option.high
    check_options(LoadOptions(**{option.field: option.high}))


@pytest.mark.parametrize("option", TYPED, ids=lambda option: option.field)
def test_chats_warm_builds_what_its_own_launch_finds(option: LoadOption) -> None:
    """Compare the chat's options with those of the snapshot that its `/warm` builds."""
    requested = LoadOptions(**{option.field: other(option)})
    typed = parse("warm", *app_host.warm_argv("m", requested))
    built = typed_options.load_options(typed, LoadConfig())
    assert built == requested
    inputs = SnapshotInputs(model="m", files=ModelFiles(name="m", paths=()), options=built)
    assert inputs.name == ("m" if not option.of_snapshot else inputs.name)
    assert snapshot_options(built) == snapshot_options(requested)
    assert (option.field in snapshot_options(built)) == option.of_snapshot


def test_options_of_one_model_are_not_used_for_another() -> None:
    mine = LoadOptions(n_ctx=512, lora="/a.gguf")
    assert mine.for_another_model() == LoadOptions(n_ctx=512)


def test_hint_of_a_cold_start_is_the_whole_command():
    choice = selection.LaunchChoice("m", {"draft": "small", "n_ctx": "512"}, "auto")
    assert choice.warm_hint == "`edgeinfer warm m --ctx 512 --draft small` builds it now"


def test_a_command_names_a_default_that_the_configuration_replaces(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text('[load]\nctx = 4096\ndraft = "small"\nthreads = 3\n')
    monkeypatch.setenv("EDGEINFER_CONFIG", str(tmp_path / "config.toml"))
    options = LoadOptions(draft="none")
    choice = selection.LaunchChoice("m", snapshot_options(options), "auto")
    assert choice.warm_hint == "`edgeinfer warm m --ctx 0 --draft none` builds it now"
    inputs = SnapshotInputs(model="m", files=ModelFiles(name="m", paths=()), options=options)
    assert inputs.warm_command == "edgeinfer warm m --ctx=0 --draft=none"
    typed = parse(*inputs.warm_command.split()[1:])
    assert typed_options.load_options(typed, load_config().load).n_ctx == 0


def test_doctor_names_a_limit_of_memory(monkeypatch):
    sizes = {"total_bytes": doctor.GIB // 4, "available_bytes": doctor.GIB // 8}
    group = Memory(**sizes, reason="the limit in /x")
    monkeypatch.setattr("edgeinfer.platform.machine.read_memory", lambda: group)
    assert "a limit of 0.2 GiB is set (the limit in /x)" in doctor._memory().fix
