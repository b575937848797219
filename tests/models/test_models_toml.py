"""The shipped catalogue, and how the user's models.toml overrides it."""

import re
from pathlib import Path

import pytest

from edgeinfer.errors import ConfigError
from edgeinfer.models import catalog as catalog_module
from edgeinfer.models import sources
from edgeinfer.models.catalog import load_catalog, shipped_path, user_path

MINIMAL = '[models.mine]\ntitle = "Mine"\nsources = ["hf:me/mine-GGUF:Q8_0"]\n'
SAMPLING = f"{MINIMAL}[models.mine.sampling]\n"
OF_MINE = 'model "mine"'


def user_file(text: str) -> Path:
    user_path().parent.mkdir(parents=True, exist_ok=True)
    user_path().write_text(text)
    return user_path()


def test_shipped_catalogue_is_whole() -> None:
    catalog = load_catalog()
    assert len(catalog) >= 17
    marked = set(re.findall(r'# Not verified: .*\n\[models\."?([^"\]]+)', shipped_path().read_text()))
    for model in catalog.values():
        assert model.title
        assert model.family
        assert model.parameters
        unknown = not model.licence or not model.context_length
        assert not unknown or model.name in marked, "what could not be verified is marked in the file"
        assert model.final_quantization
        assert model.parsed_sources()
    purposes = {model.purpose for model in catalog.values()}
    assert purposes == {"chat", "base", "code", "embedding", "reranker", "reasoning"}


def test_models_of_up_to_500m_parameters_have_penalties_on_repeats() -> None:
    for model in load_catalog().values():
        small = model.parameters.endswith("M") and float(model.parameters[:-1]) <= 500
        sampling = model.default_sampling
        assert (sampling.dry_multiplier > 0) is small
        assert (sampling.repeat_penalty == 1.1) is small
        assert (sampling.dry_sequence_breakers == ()) is small, "they would exempt the lines of lists"
        assert sampling.penalize_prompt is not small, "an answer repeats words of its question"


def test_users_own_sampling_wins_over_that_of_the_size() -> None:
    user_file(f'{MINIMAL}parameters = "135M"\n{SAMPLING.removeprefix(MINIMAL)}repeat-penalty = 1.0\n')
    sampling = load_catalog()["mine"].default_sampling
    assert (sampling.repeat_penalty, sampling.dry_multiplier) == (1.0, 0.8)


def test_shipped_file_is_the_top_level_one() -> None:
    assert shipped_path().resolve() == Path(__file__).parents[2] / "models.toml"


def test_file_with_samplers_that_are_gone_is_read_without_them() -> None:
    user_file(f"{SAMPLING}typical-p = 0.9\nmirostat = 2\nmirostat-tau = 5.0\nmin-p = 0.1\n")
    assert load_catalog()["mine"].sampling.chosen_options() == {"min_p": 0.1}


def test_user_adds_a_model() -> None:
    user_file(MINIMAL)
    (parts,) = load_catalog()["mine"].parsed_sources()
    assert parts == (sources.HubQuant("me/mine-GGUF", "Q8_0"),)


@pytest.mark.parametrize(
    ("entry", "prompt", "size_bytes"),
    [
        ('system-prompt = "Be brief."', "Be brief.", 98_362_432),
        ('sources = ["file:/x/other.gguf"]', "", 0),
    ],
)
def test_user_overrides_one_key_and_new_sources_drop_the_old_digest(entry, prompt, size_bytes) -> None:
    user_file(f"[models.smollm2-135m-instruct]\n{entry}\n")
    model = load_catalog()["smollm2-135m-instruct"]
    assert (model.system_prompt, model.size_bytes) == (prompt, size_bytes)
    assert bool(model.sha256) == bool(size_bytes)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (f"{MINIMAL}contxt-length = 5\n", [OF_MINE, "`contxt-length`; did you mean `context-length`"]),
        (f"{SAMPLING}temprature = 1\n", [OF_MINE, "`sampling.temprature`; did you mean `temperature`"]),
        (f"{SAMPLING}temperature = -1\n", [OF_MINE, "temperature"]),
        (f'{MINIMAL}quantize = "Q4_KM"\n', [OF_MINE, '"quantize"', 'did you mean "Q4_K_M"']),
        (f'{MINIMAL}sha256 = "abc"\n', [OF_MINE, "SHA-256"]),
        (f'{MINIMAL}name = "x"\n', [OF_MINE, "`name`"]),
        (
            f'{MINIMAL}lora = [{{path = "/a/red.gguf"}}, {{path = "/b/red.gguf"}}]\n',
            [OF_MINE, 'key "lora": two adapters in /a/red.gguf:1,/b/red.gguf:1 have the same name'],
        ),
        (f'{MINIMAL}parameters = "many"\n', [OF_MINE, "parameters"]),
        ('[models.mine]\ntitle = "x"\n', [OF_MINE, "sources"]),
        ('[models.mine]\ntitle = "x"\nsources = ["ftp://x/y"]\n', [OF_MINE, "not a valid source"]),
        ('[models."../x"]\ntitle = "x"\nsources = ["a/b:Q8_0"]\n', ["'../x' is not a model name"]),
        ("[model.mine]\n", ["unknown key `model`; did you mean `models`"]),
        ("[models]\nmine = 3\n", ["`models.mine` is 3, but must be a table", "[models.NAME]"]),
        ("models = 3\n", ["`models` is 3, but must be a table", "[models.NAME]"]),
        (MINIMAL.replace("me/mine-GGUF:Q8_0", "http://me/mine.gguf"), ["http://me/mine.gguf", "https"]),
        ("[models\n", ["not valid TOML", "at this position"]),
        ("x = " + "[" * 5000, ["not valid TOML"]),
    ],
)
def test_errors_name_file_model_key_and_the_nearest(text: str, fragments: list[str]) -> None:
    path = user_file(text)
    with pytest.raises(ConfigError) as caught:
        load_catalog()
    assert str(path) in caught.value.message
    for word in fragments:
        assert word in f"{caught.value.message} {caught.value.hint}"


def test_unchanged_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    user_file(MINIMAL)
    load_catalog().clear()
    with monkeypatch.context() as patch:
        patch.delattr(catalog_module, "_read")
        assert "mine" in load_catalog(), "a caller cannot change the cached catalogue"
    user_file("[models")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_catalog()
    with monkeypatch.context() as patch:
        patch.delattr(catalog_module, "_read")
        with pytest.raises(ConfigError, match="not valid TOML"):
            load_catalog()
    user_file(f'{MINIMAL}family = "Ours"\n')
    assert load_catalog()["mine"].family == "Ours"
    user_path().unlink()
    assert "mine" not in load_catalog()


def test_file_that_cannot_be_looked_up_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="too long"):
        load_catalog(Path("x" * 300))
