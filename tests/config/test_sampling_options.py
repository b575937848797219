"""Sampling options have the same range in every front end."""

import math

import msgspec
import pytest

from edgeinfer import typed_options
from edgeinfer.chat import presets
from edgeinfer.cli.main import main
from edgeinfer.cli.parser import build_parser
from edgeinfer.config.config_file import Config
from edgeinfer.config.sampling_options import SAMPLING_OPTIONS, TYPED, SamplingOption
from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.models.catalog import SamplingDefaults
from edgeinfer.runtime.requests import Sampling, check_sampling, with_options
from edgeinfer.server.openai.wire import ChatRequest
from edgeinfer.server.responses.wire import ResponsesRequest
from edgeinfer.server.wire_types import SamplingFields

every = pytest.mark.parametrize("option", SAMPLING_OPTIONS, ids=lambda option: option.field)


def beyond(option: SamplingOption) -> list[float]:
    return [option.kind(option.high + 1), option.kind(math.floor(option.low) - 1)]


def test_table_is_the_engines_sampling() -> None:
    without_range = {"dry_sequence_breakers", "penalize_prompt", "logit_bias"}
    numbers = set(Sampling.__struct_fields__) - without_range
    assert {option.field for option in SAMPLING_OPTIONS} == numbers
    check_sampling(Sampling(), n_vocab=10)


@every
def test_engine_takes_the_range_and_no_more(option: SamplingOption) -> None:
    for value in (option.low, option.high):
        check_sampling(Sampling(**{option.field: option.kind(value)}), n_vocab=10)
    for value in (*beyond(option), math.nan):
        with pytest.raises(InvalidRequestError) as refused:
            check_sampling(Sampling(**{option.field: value}), n_vocab=10)
        assert refused.value.param == option.field


@every
def test_command_line_chat_catalogue_and_endpoint_take_the_same_range(
    option: SamplingOption, capsys
) -> None:
    for value in (*beyond(option), math.nan):
        if option.flag:
            argv = ["run", "m", "hello", f"{option.flag}={value}"]
            assert main(argv, EngineHost(config=Config())) == 2
            assert option.describe_range() in capsys.readouterr().err
            with pytest.raises(UsageError, match=option.describe_range()):
                presets.value(option.field, str(value))
        if option.field != "seed" and not math.isnan(value):  # OpenAI's seed has 64 bits
            for struct in (SamplingDefaults, SamplingFields, ChatRequest):
                if (name := _key(struct, option.field)) is None:
                    continue
                if (name, value) == ("top_k", -1) and struct is not SamplingDefaults:
                    continue  # other servers use this value for "all"
                with pytest.raises(msgspec.ValidationError, match=r"Expected `(int|float)`"):
                    msgspec.convert({name: value}, struct)


def _key(struct: type[msgspec.Struct], field: str) -> str | None:
    names = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
    return names.get(field)


@pytest.mark.parametrize("option", TYPED, ids=lambda option: option.field)
def test_typed_option_reaches_the_request(option: SamplingOption) -> None:
    options = build_parser().parse_args(["run", "m", "hello", f"{option.flag}={option.high}"])
    sampling = with_options(Sampling(), typed_options.typed_sampling(options))
    assert getattr(sampling, option.field) == option.high


def test_model_may_set_every_option_but_the_seed() -> None:
    table = {option.label: option.high for option in SAMPLING_OPTIONS if option.field != "seed"}
    sampling = msgspec.convert(table, SamplingDefaults).over(Sampling())
    options = [option for option in SAMPLING_OPTIONS if option.field != "seed"]
    assert all(getattr(sampling, option.field) == option.high for option in options)


def test_openais_routes_take_every_temperature_of_the_chat() -> None:
    highest = presets.OPTIONS["temperature"].high
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for fields, kind in ((chat, ChatRequest), ({"input": "x"}, ResponsesRequest)):
        request = msgspec.convert(fields | {"temperature": highest}, kind)
        assert getattr(request, "temperature", None) == highest
