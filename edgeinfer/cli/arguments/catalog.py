"""`pull`, `list`, `show`, `rm`, `forget`, `quantize`, `merge`: models as files."""

from __future__ import annotations

import argparse

from edgeinfer.cli.options import add_load_option
from edgeinfer.cli.parser import Verbs, add_model, add_quiet, add_verb, add_yes
from edgeinfer.config.load_options import GPU_LAYERS, KV_TYPE


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_pull(verbs)
    _add_list(verbs)
    _add_show(verbs)
    _add_rm(verbs)
    _add_forget(verbs)
    _add_quantize(verbs)
    _add_merge(verbs)


def _add_pull(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "pull",
        "pull:pull",
        "fetch, verify and store a model; an interrupted pull continues",
        "pull qwen3-4b",
        "pull bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M",
        "pull ~/Downloads/model.gguf --name mine",
    )
    add_model(
        parser,
        "NAME, NAME:QUANT, OWNER/REPO:QUANT, https://…, s3://…, oci://…, FILE.gguf, or a FOLDER "
        "of safetensors; default model",
    )
    parser.add_argument("--name", help="store it under this name")
    parser.add_argument(
        "--base",
        default="",
        metavar="MODEL",
        help="MODEL is a PEFT LoRA adapter; this is its base model",
    )
    parser.add_argument(
        "--quantize",
        default="",
        metavar="TYPE",
        help="store it in this type; a checkpoint's own is BF16 or F16",
    )
    parser.add_argument(
        "--sha256", default="", metavar="HEX", help="refuse a file that has another SHA-256"
    )
    parser.add_argument(
        "--in-place", action="store_true", help="point at a local file instead of copying it"
    )
    parser.add_argument("--again", action="store_true", help="fetch it even if it is already here")
    parser.add_argument(
        "--connections",
        type=int,
        default=8,
        metavar="N",
        help="connections for a large file (default 8)",
    )
    add_quiet(parser)


def _add_list(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "list",
        "list:list_models",
        "list models on this machine, and models that can be pulled",
        "list --fits",
        "list coder",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="list only models whose name, title or purpose has every word",
    )
    parser.add_argument("--pulled", action="store_true", help="only those on this machine")
    parser.add_argument(
        "--fits",
        action="store_true",
        help="group by what this machine can hold and how fast it would answer",
    )


def _add_show(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "show",
        "show:show",
        "show a model's architecture, sizes, licence, source and memory needs",
        "show qwen3-4b --ctx 32768",
    )
    add_model(parser, "NAME, NAME:QUANT or FILE.gguf (default: the configured one)")
    parser.add_argument(
        "--ctx", dest="n_ctx", type=int, metavar="TOKENS", help="estimate memory for this context"
    )
    parser.add_argument("--kv-type", choices=KV_TYPE.words, help=KV_TYPE.help)
    add_load_option(parser, GPU_LAYERS)
    parser.add_argument("--template", action="store_true", help="print the chat template alone")


def _add_rm(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "rm", "rm:rm", "remove models; files used in place are left alone", "rm qwen3-4b"
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="NAME or NAME:QUANT")
    add_yes(parser)
    parser.add_argument(
        "--forget", action="store_true", help="forget the pinned SHA-256 too: the next pull trusts anew"
    )


def _add_forget(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "forget",
        "forget:forget",
        "delete cached prefixes: of a model, of a conversation, or all",
        "forget qwen3-4b",
        "forget --conversation chat-12",
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="NAME, NAME:QUANT or FILE.gguf, or `all`"
    )
    add_yes(parser)
    parser.add_argument(
        "--conversation",
        action="append",
        default=[],
        metavar="ID",
        help="a conversation's own prefixes: chat-NUMBER, or a request's prompt_cache_key",
    )


def _add_quantize(verbs: Verbs[argparse.ArgumentParser]) -> None:
    from edgeinfer.models.ggml_types import FILE_TYPES  # 1 ms: a table

    parser = add_verb(
        verbs,
        "quantize",
        "quantize:quantize_model",
        "make a smaller copy of a model, and measure what it costs",
        "quantize qwen3-4b:F16 Q4_K_M",
    )
    parser.add_argument("model", metavar="MODEL", help="a pulled model, or FILE.gguf (with --name)")
    types = tuple(FILE_TYPES.values())
    parser.add_argument(
        "type", metavar="TYPE", type=str.upper, choices=types, help=f"one of {', '.join(types)}"
    )
    parser.add_argument(
        "--text",
        default="",
        metavar="FILE",
        help="measure what it costs, and make the importance matrix, with this text instead of ours",
    )
    parser.add_argument("--name", help="store it under this name instead of MODEL:TYPE")
    parser.add_argument(
        "--pure", action="store_true", help="use TYPE for every tensor, with no mix of types"
    )
    parser.add_argument("--keep-output", action="store_true", help="leave the output tensor as it is")
    parser.add_argument(
        "--imatrix",
        default="",
        metavar="FILE|make",
        help="importance matrix in GGUF form; make: one of what the model computes on --text, or on a "
        "text of ours; some types need one, small ones gain most",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads; 0 takes all we may use"
    )
    parser.add_argument(
        "--no-perplexity", action="store_true", help="do not measure the perplexity of both"
    )
    add_quiet(parser)


def _add_merge(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "merge",
        "merge:merge",
        "store a model with LoRA adapters merged into its weights",
        "merge qwen3-4b my-adapter --name mine",
    )
    parser.add_argument("model", metavar="MODEL", help="a pulled model, or FILE.gguf")
    parser.add_argument(
        "adapters",
        metavar="ADAPTER[:SCALE]",
        nargs="+",
        help="a pulled adapter's NAME, FILE.gguf, or a FOLDER of PEFT's",
    )
    parser.add_argument("--name", required=True, help="store it under this name")
    parser.add_argument(
        "--quantize",
        default="",
        metavar="TYPE",
        help="type of the merged model (default: each tensor keeps its own)",
    )
    add_quiet(parser)
