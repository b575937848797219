"""The families that are converted: a row each, and what config.json's keys are called in a GGUF.

The first name in `architectures` of config.json decides the row. A row says what llama.cpp calls the
architecture, which activation its graph has, and what is peculiar: tensors in another order, keys of
its own, and what cannot be expressed, which is refused instead of converted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting import changes
from edgeinfer.models.converting.changes import Change
from edgeinfer.models.converting.hyperparameters import Values, rope_parameters

_NORM_PAIRS: dict[str, Change] = {"attn_q": changes.pair_queries, "attn_k": changes.pair_keys}
_CONV1D: dict[str, Change] = dict.fromkeys(
    ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), changes.transpose
)
_SILU = ("silu", "swish")
_GELU = ("gelu",)
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `changes` go by the GGUF name's end; `needs` are values without which it is refused.

    `extra` computes keys under the architecture's name; `dropped` are tensors that nothing reads.
    """

    title: str
    arch: str
    checkpoints: tuple[str, ...]
    activations: tuple[str, ...]
    rope: bool = True
    changes: dict[str, Change] = {}
    extra: Callable[[Values], Values] | None = None
    needs: dict[str, tuple[Any, ...]] = {}
    defaults: Values = {}
    dropped: tuple[str, ...] = ()
    embeds: bool = False


def _granite(config: Values) -> Values:
    return {
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attention.scale": float(config.get("attention_multiplier", 1.0)),
        "logit_scale": float(config.get("logits_scaling", 1.0)),
    }


def _gemma2(config: Values) -> Values:
    """Only where llama.cpp computes windows: others' keys of that name would change the estimates."""
    window = config.get("sliding_window")
    return {"attention.sliding_window": int(window)} if window else {}


def _gemma3(config: Values) -> Values:
    local = rope_parameters(config, "sliding_attention")["rope_theta"]
    base = float(config.get("rope_local_base_freq") or local)
    return _gemma2(config) | {"rope.freq_base_swa": base}


def _neox(config: Values) -> Values:
    return {"use_parallel_residual": bool(config.get("use_parallel_residual", True))}


def _mpt(config: Values) -> Values:
    attention = config.get("attn_config") or {}
    if not attention.get("alibi", True) or attention.get("qk_ln"):
        raise ConversionError("config.json: an MPT without ALiBi, or with qk_ln, is not known here")
    found: Values = {"attention.max_alibi_bias": float(attention.get("alibi_bias_max", 8))}
    if attention.get("clip_qkv"):
        found["attention.clamp_kqv"] = float(attention["clip_qkv"])
    return found


def _experts(config: Values) -> Values:
    shared = config.get("shared_expert_intermediate_size")
    return {"expert_shared_feed_forward_length": int(shared)} if shared else {}


def _encoder(_config: Values) -> Values:
    return {"attention.causal": False}


def _roberta(config: Values) -> Values:
    """Positions are counted from 2, so two of them are never used."""
    return {"attention.causal": False, "context_length": int(config["max_position_embeddings"]) - 2}


FAMILIES = (
    Family(
        title="Llama 1 to 3.3, Mistral, Mixtral, SmolLM 1 and 2, and who took their shape",
        arch="llama",
        checkpoints=(
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "LLaMAForCausalLM",
        ),
        activations=_SILU,
        changes=_NORM_PAIRS,
    ),
    Family(
        title="SmolLM3",
        arch="smollm3",
        checkpoints=("SmolLM3ForCausalLM",),
        activations=_SILU,
        changes=_NORM_PAIRS,
        needs={"no_rope_layer_interval": (4,), "use_sliding_window": (False,)},
    ),
    Family(
        title="Granite 3",
        arch="granite",
        checkpoints=("GraniteForCausalLM",),
        activations=_SILU,
        changes=_NORM_PAIRS,
        extra=_granite,
    ),
    Family(
        title="Qwen2 and 2.5",
        arch="qwen2",
        checkpoints=("Qwen2ForCausalLM",),
        activations=_SILU,
        needs={"use_sliding_window": (False,)},
    ),
    Family(
        title="Qwen2 MoE",
        arch="qwen2moe",
        checkpoints=("Qwen2MoeForCausalLM",),
        activations=_SILU,
        extra=_experts,
        needs={
            "use_sliding_window": (False,),
            "norm_topk_prob": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    Family(
        title="Qwen3",
        arch="qwen3",
        checkpoints=("Qwen3ForCausalLM",),
        activations=_SILU,
        needs={"use_sliding_window": (False,)},
    ),
    Family(
        title="Qwen3 MoE",
        arch="qwen3moe",
        checkpoints=("Qwen3MoeForCausalLM",),
        activations=_SILU,
        needs={
            "use_sliding_window": (False,),
            "norm_topk_prob": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    Family(title="OLMo 2", arch="olmo2", checkpoints=("Olmo2ForCausalLM",), activations=_SILU),
    Family(
        title="Gemma",
        arch="gemma",
        checkpoints=("GemmaForCausalLM",),
        activations=_GELU_TANH,
        changes={"norm.weight": changes.plus_one},
    ),
    Family(
        title="Gemma 2",
        arch="gemma2",
        checkpoints=("Gemma2ForCausalLM",),
        extra=_gemma2,
        activations=_GELU_TANH,
        changes={"norm.weight": changes.plus_one},
    ),
    Family(
        title="Gemma 3 (text)",
        arch="gemma3",
        checkpoints=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        activations=_GELU_TANH,
        changes={"norm.weight": changes.plus_one},
        extra=_gemma3,
        needs={"use_bidirectional_attention": (False,)},
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262_208,
        },
    ),
    Family(
        title="Phi-3, 3.5 and Phi-4", arch="phi3", checkpoints=("Phi3ForCausalLM",), activations=_SILU
    ),
    Family(
        title="GPT-2",
        arch="gpt2",
        checkpoints=("GPT2LMHeadModel",),
        activations=_GELU_TANH,
        rope=False,
        changes=_CONV1D,
        needs={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        dropped=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(
        title="GPT-NeoX, Pythia, Dolly",
        arch="gptneox",
        checkpoints=("GPTNeoXForCausalLM",),
        activations=_GELU,
        changes={"attn_qkv": changes.unzip_heads},
        extra=_neox,
        dropped=(".attention.bias", ".attention.masked_bias"),
    ),
    Family(
        title="Falcon 7B to 180B",
        arch="falcon",
        checkpoints=("FalconForCausalLM", "RWForCausalLM"),
        activations=_GELU,
        changes={"attn_qkv": changes.unzip_groups},
        needs={"alibi": (False,), "parallel_attn": (True,)},
    ),
    Family(
        title="MPT",
        arch="mpt",
        checkpoints=("MptForCausalLM", "MPTForCausalLM"),
        activations=_GELU,
        rope=False,
        extra=_mpt,
    ),
    Family(
        title="StarCoder, SantaCoder's successors",
        arch="starcoder",
        checkpoints=("GPTBigCodeForCausalLM",),
        activations=_GELU_TANH,
        rope=False,
        needs={"multi_query": (True,)},
        dropped=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(
        title="StarCoder2",
        arch="starcoder2",
        checkpoints=("Starcoder2ForCausalLM",),
        activations=_GELU_TANH,
    ),
    Family(
        title="BERT embedders (BGE, E5, GTE, MiniLM)",
        arch="bert",
        checkpoints=("BertModel", "BertForMaskedLM"),
        activations=_GELU,
        rope=False,
        extra=_encoder,
        dropped=("pooler.dense.weight", "pooler.dense.bias", "position_ids", "cls.predictions"),
        embeds=True,
    ),
    Family(
        title="XLM-RoBERTa embedders (multilingual E5, BGE-M3)",
        arch="bert",
        checkpoints=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
        activations=_GELU,
        rope=False,
        changes={"position_embd.weight": changes.drop_padding_rows},
        extra=_roberta,
        dropped=("pooler.dense.weight", "pooler.dense.bias", "position_ids", "lm_head."),
        embeds=True,
    ),
)


def find_family(architectures: list[str]) -> Family:
    """The row of a checkpoint. Raises ConversionError naming those that are known."""
    for word in architectures[:1]:
        for family in FAMILIES:
            if word in family.checkpoints:
                return family
    named = architectures[0] if architectures else "none"
    known = ", ".join(dict.fromkeys(word for family in FAMILIES for word in family.checkpoints))
    raise ConversionError(
        f"config.json names the architecture {named}, which is not converted; known: {known}",
        hint="`architectures` in config.json decides; a repository with its GGUF files may do",
    )


def check(family: Family, config: Values) -> None:
    """Refuse what the family's graph in llama.cpp does not do. Raises ConversionError."""
    words = ("hidden_act", "hidden_activation", "activation_function", "activation")
    acts = [config[word] for word in words if config.get(word)]
    if acts and acts[-1] not in family.activations:
        raise ConversionError(
            f"config.json: a {family.arch} with the activation {acts[-1]!r}; llama.cpp computes "
            f"{family.activations[0]}"
        )
    for key, allowed in family.needs.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ConversionError(
                f"config.json: {key} is {value!r}; llama.cpp's {family.arch} has {allowed[0]!r}"
            )
