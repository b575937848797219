"""The chat template of a loaded model, and what it is rendered with."""

from __future__ import annotations

from edgeinfer.runtime import libllama
from edgeinfer.runtime.language.prepared import TemplateFacts
from edgeinfer.runtime.loading.load import Loaded
from edgeinfer.runtime.options import LoadOptions, ModelFiles


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
