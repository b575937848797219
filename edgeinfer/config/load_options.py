"""The load options: flag, key of config.toml, field, default, allowed values and help of each.

This one table serves the parser (`cli.options`), the configuration (`config_file.LoadConfig`), the
engine (`runtime.options.LoadOptions`), and the launcher, which compares options with a snapshot's
(`launcher.selection`). It imports only cheap modules of the standard library, for the launcher's sake.
"""

from __future__ import annotations

import math
import os

from edgeinfer.platform import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Value = int | str


class LoadOption:
    """A load option. Its values are `choices` and, unless `high` is 0, integers from `low` to `high`.

    `name` is the key in config.toml and, if `is_typed`, the flag without `--`; an option without a
    `name` has neither. If `of_snapshot`, a snapshot fits only launches with the same value.
    """

    #: Whether the option's flag may be repeated; the values are then joined with commas.
    many = False
    #: Whether config.toml has a key for the option.
    is_configured = True

    def __init__(
        self,
        field: str,
        default: Any,
        help: str,
        *,
        name: str = "",
        is_typed: bool = True,
        choices: tuple[str, ...] = (),
        low: int = 0,
        high: int = 0,
        metavar: str | None = None,
        of_snapshot: bool = True,
    ) -> None:
        self.field = field
        self.default = default
        self.help = help
        self.flag = f"--{name}" if name and is_typed else ""
        self.key = name if self.is_configured else ""
        self.choices = choices
        self.low = low
        self.high = high
        self.metavar = metavar
        self.of_snapshot = of_snapshot

    def parse(self, text: str) -> Value:
        """Return the value of a typed or configured text. Raises ValueError with the allowed values."""
        if text in self.choices:
            return text
        if text.lstrip("-").isdecimal() and self.high and self.low <= int(text) <= self.high:
            return int(text)
        raise ValueError(f"{self.key or self.field}: {text} is not {self.describe_range()}")

    def describe_range(self) -> str:
        """Return the allowed values in words: `"auto", "none" or a number between 0 and 99`."""
        parts = [f'"{word}"' for word in self.choices]
        if self.high:
            parts.append(f"a number between {self.low} and {self.high}")
        return " or ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


class AdaptersOption(LoadOption):
    """A load option whose value is LoRA adapters: `NAME` or `FILE`, each optionally with `:SCALE`.

    `parse` returns absolute paths, joined with commas; `NAME` is the pulled adapter of that name. Two
    adapters must not have the same name.
    """

    many = True
    is_configured = False

    def parse(self, text: str) -> Value:
        if text == NO_ADAPTERS:
            return text
        adapters = [_adapter(entry) for entry in text.split(",") if entry]
        if len({name_of_file(path) for path, _ in adapters}) < len(adapters):
            raise ValueError(f"two adapters in {text} have the same name")
        return ",".join(path if scale == 1 else f"{path}:{scale:g}" for path, scale in adapters)


class ModelOption(LoadOption):
    """A load option whose value is a model: its name or the absolute path of its file.

    `parse` makes a name lower case if letter case does not matter, and a path absolute.
    """

    def parse(self, text: str) -> Value:
        if paths.is_model_path(text):
            return paths.absolute_path(text)
        name = text.lower()
        if name.startswith(paths.EXTERNAL_PREFIXES) and "//" not in name:
            return name.removesuffix(paths.LATEST)
        return text if "/" in text else name


#: Value of `lora` or `draft`: use no adapters or no draft model, not even those in models.toml.
NO_ADAPTERS = NO_DRAFT = "none"
UNFIT_DRAFT_HINT = "use a smaller model of the same family, or --draft none"


def _adapter(entry: str) -> tuple[str, float]:
    """Return the absolute path and the scale of `NAME:SCALE` or `FILE:SCALE`. Raises ValueError."""
    head, colon, tail = entry.rpartition(":")
    scale = 1.0
    if colon and not os.path.exists(os.path.expanduser(entry)):
        entry, scale = head, _scale(tail)
    if "/" in entry or entry.endswith(".gguf") or entry.startswith("~"):
        return paths.absolute_path(entry), scale
    return os.path.join(paths.adapters_path(), entry + ".gguf"), scale


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not -100 <= scale <= 100:  # refuses NaN, too
        raise ValueError(f"the scale {text!r} is not a number between -100 and 100")
    return scale


def adapters_of(text: str) -> dict[str, tuple[str, float]]:
    """Return name → (path, scale) of the adapters in a parsed value of `LORA`."""
    if text == NO_ADAPTERS:
        return {}
    adapters = [_adapter(entry) for entry in text.split(",") if entry]
    return {name_of_file(path): (path, scale) for path, scale in adapters}


def name_of_file(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


N_CTX = LoadOption(
    "n_ctx",
    0,
    "context in tokens; 0: the largest that fits into memory",
    name="ctx",
    high=1 << 24,
    metavar="TOKENS",
)
N_PARALLEL = LoadOption(
    "n_parallel",
    0,
    "sequences decoded at once; 0: chosen from cores and memory",
    name="parallel",
    high=240,  # llama.cpp has 256 sequence ids; finished conversations keep some
    metavar="N",
)
N_THREADS = LoadOption(
    "n_threads",
    0,
    "decode threads; 0: the physical cores that are available",
    name="threads",
    high=1024,
    metavar="N",
    of_snapshot=False,  # a resumed process can get another number of threads
)
N_BATCH = LoadOption("n_batch", 512, "tokens in one batch", low=32, high=1 << 16)
KV_TYPE = LoadOption(
    "kv_type",
    "auto",
    "type of the KV cache; auto: f16, or q8_0 if a long context fits only with that",
    name="kv-type",
    choices=("auto", "f16", "q8_0", "q4_0"),
)
FLASH_ATTENTION = LoadOption(
    "flash_attention",
    "auto",
    "llama.cpp's flash attention; a quantized KV cache needs it",
    choices=("auto", "on", "off"),
)
GPU_LAYERS = LoadOption(
    "gpu_layers",
    "auto",
    'layers on GPUs: "none", "all", a number, or "auto": those that fit, if at least half of them do',
    name="gpu-layers",
    choices=("auto", "none", "all"),
    high=1 << 16,
    metavar="auto|none|all|N",
    of_snapshot=False,  # a resumed process attaches GPUs itself
)
CONTENT_TOKENS = LoadOption(
    "special_tokens_in_content",
    "off",
    "parse control tokens such as <|im_end|> in messages",
    name="special-tokens-in-content",
    is_typed=False,
    choices=("on", "off"),
)

LORA = AdaptersOption(
    "lora",
    "",
    "LoRA adapter of every request that names none; may be repeated; `none`: ignore models.toml's",
    name="lora",
    metavar="ADAPTER|FILE[:SCALE]",
)

DRAFT = ModelOption(
    "draft",
    "",
    "a smaller pulled model or FILE.gguf that drafts, e.g. qwen3-0.6b for qwen3-4b; the text stays the "
    "same; none: ignore models.toml's",
    name="draft",
    metavar="MODEL",
)

LOAD_OPTIONS = (
    N_CTX,
    N_PARALLEL,
    N_THREADS,
    N_BATCH,
    KV_TYPE,
    FLASH_ATTENTION,
    GPU_LAYERS,
    CONTENT_TOKENS,
    LORA,
    DRAFT,
)


def snapshot_options(options: object) -> dict[str, str]:
    """Return field → value (as text) of the options that select a snapshot and are not default."""
    values = ((option, getattr(options, option.field)) for option in LOAD_OPTIONS if option.of_snapshot)
    return {option.field: str(value) for option, value in values if value != option.default}


def first_difference(
    launch: dict[str, str], requested: dict[str, str], actual: dict[str, str], *, is_named: bool = False
) -> str:
    """Return the field of the first option in which a launch differs from a snapshot; "" if none does.

    `launch` has the launch's options (field → text), `requested` those of the snapshot's build, and
    `actual` the values that the build chose for automatic options. An option does not differ if the
    launch has its requested or its actual value. If the launch names the snapshot (`is_named`), only
    the options in `launch` are compared.
    """
    for field in launch if is_named else launch | requested:
        built_with = filter(None, (requested.get(field), actual.get(field)))
        if not any(_is_same(field, launch.get(field, ""), value) for value in built_with):
            return field
    return ""


def _is_same(field: str, value: str, other: str) -> bool:
    """Return whether two values are equal, or two paths of one file, such as a link and its target.

    Adapters must also have the same name, by which requests choose them.
    """
    if value == other or not (value.startswith("/") and other.startswith("/")):
        return value == other
    if field == LORA.field and name_of_file(value) != name_of_file(other):
        return False
    try:
        return os.path.samefile(value, other)
    except OSError:
        return False


def refuse_out_of_range(options: object) -> None:
    """Raise ValueError for the first field of `options` out of its range in `LOAD_OPTIONS`."""
    for option in LOAD_OPTIONS:
        option.parse(str(getattr(options, option.field)))
