"""config.toml: typed, unknown keys refused by name, defaults for everything."""

import msgspec
import pytest

from edgeinfer.config import config_file
from edgeinfer.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text, "utf-8", "surrogateescape")
    return path


def test_no_file_means_defaults(tmp_path):
    assert config_file.load_config(tmp_path / "absent.toml") == config_file.Config()


def test_values_are_read(tmp_path):
    got = config_file.load_config(
        write(tmp_path, 'default-model = "x"\n[load]\nctx = 4096\n[serve]\nport = 0\n')
    )
    assert (got.default_model, got.load.ctx, got.serve.port) == ("x", 4096, 0)
    assert got.snapshots == config_file.SnapshotsConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[load]\nctxx = 1\n", 'unknown key "ctxx"; did you mean "ctx"?'),
        ("nonsense = 1\n", 'unknown key "nonsense"'),
        ("[load]\nctx = -1\n", "ctx"),
        ('[load]\nctx = "many"\n', "ctx"),
        ("[load\n", "not valid TOML"),
        ("# \udcff", "not valid TOML"),
        ("[serve]\nport = 70000\n", "port"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config_file.load_config(path)
    assert str(path) in caught.value.message
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("0", False), ("", False), ("true", True)]
)
def test_offline_by_environment(monkeypatch, value, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert config_file.offline(config_file.Config()) is expected


def test_every_key_has_a_sentence():
    sections = msgspec.json.schema(config_file.Config)["$defs"].values()
    keys = {name: key for section in sections for name, key in section["properties"].items()}
    missing = [name for name, key in keys.items() if not {"description", "$ref"} & key.keys()]
    assert len(keys) > 30
    assert missing == []
