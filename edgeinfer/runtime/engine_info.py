"""What an engine says of itself once its model is loaded, and what its template is rendered with."""

from __future__ import annotations

import ctypes

from edgeinfer.runtime import libllama
from edgeinfer.runtime.embeddings import Embedder
from edgeinfer.runtime.language.dialogue import Conversations
from edgeinfer.runtime.language.prepared import TemplateFacts
from edgeinfer.runtime.loading.load import Loaded
from edgeinfer.runtime.loading.lora import LoraAdapters
from edgeinfer.runtime.options import Chosen, EngineInfo, LoadOptions, ModelFiles


def make_info(
    files: ModelFiles,
    loaded: Loaded,
    lora: LoraAdapters,
    conversations: Conversations,
    embedder: Embedder,
) -> EngineInfo:
    """Describe a loaded model and the choices made for it."""
    llama = libllama.lib()
    meta = loaded.meta
    draft = Chosen(files.draft or "none", "as asked, or as the catalogue says")
    return EngineInfo(
        model=files.name,
        sha256=files.sha256,
        description=_description(loaded),
        architecture=meta.get("general.architecture", ""),
        n_params=int(llama.llama_model_n_params(loaded.model)),
        n_vocab=loaded.vocab.n_vocab,
        n_ctx=loaded.n_ctx,
        n_ctx_train=int(llama.llama_model_n_ctx_train(loaded.model)),
        n_parallel=loaded.n_parallel,
        n_embd=int(llama.llama_model_n_embd_out(loaded.model)),
        n_ctx_embed=embedder.max_tokens,
        weights_bytes=loaded.shape.weights_bytes,
        kv_bytes=loaded.kv_bytes,
        compute_bytes=loaded.compute_bytes,
        least_kv_bytes=loaded.least_kv_bytes,
        chat_template=chat_template(files, loaded),
        bos_token=_piece(loaded, loaded.vocab.bos),
        eos_token=_piece(loaded, loaded.vocab.eos),
        can_generate=loaded.can_generate,
        can_embed=embedder.can_embed,
        can_rerank=embedder.can_rerank,
        can_infill=loaded.can_generate and loaded.vocab.fim is not None,
        can_think=conversations.can_think,
        can_shift=bool(loaded.memory and libllama.L.llama_memory_can_shift(loaded.memory)),
        tool_format=conversations.tool_format,
        system_prompt=files.system_prompt,
        sampling=files.sampling,
        lora=lora.loaded,
        choices={
            **loaded.choices,
            **conversations.choices,
            "pooling": embedder.pooling,
            "draft": draft,
        },
        load_ms=loaded.load_ms,
        warnings=loaded.warnings,
    )


def _piece(loaded: Loaded, token: int) -> str:
    return loaded.vocab.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""


def _description(loaded: Loaded) -> str:
    buffer = ctypes.create_string_buffer(256)
    libllama.lib().llama_model_desc(loaded.model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


def chat_template(files: ModelFiles, loaded: Loaded) -> str:
    """The template that the catalogue names, else the file's own; "" where there is none."""
    if files.chat_template:
        return files.chat_template
    text = libllama.lib().llama_model_chat_template(loaded.model, None)
    return text.decode("utf-8", "replace") if text else ""


def template_facts(files: ModelFiles, options: LoadOptions, loaded: Loaded) -> TemplateFacts:
    """What is known of a model's way of talking before its template is read."""
    vocab, meta = loaded.vocab, loaded.meta
    named = {
        k.removeprefix("tokenizer.chat_template."): v
        for k, v in meta.items()
        if k.startswith("tokenizer.chat_template.")
    }
    return TemplateFacts(
        template=chat_template(files, loaded),
        named_templates=named,
        architecture=meta.get("general.architecture", ""),
        name=files.name,
        bos_text=vocab.text(vocab.bos),
        eos_text=vocab.text(vocab.eos),
        vocab=vocab,
        add_bos=vocab.adds_bos,
        guard_content=options.special_tokens_in_content == "off",
    )
