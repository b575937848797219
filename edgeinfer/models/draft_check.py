"""Check a draft model that a user named, before any model is loaded."""

from __future__ import annotations

from edgeinfer.config.load_options import MAX_DRAFT_PADDING, NO_DRAFT
from edgeinfer.errors import CatalogError, ModelLoadError
from edgeinfer.models import gguf
from edgeinfer.models.reference import ModelRef, resolve


def refuse_unfit(model: ModelRef, draft: str) -> None:
    """Raise for a draft model that is not pulled, or whose vocabulary differs in size from `model`'s.

    Raises UnknownModelError, ModelNotPulledError, InvalidGgufError, ChecksumError, ModelLoadError.
    """
    try:
        files = resolve(draft).files(draft=NO_DRAFT)
    except CatalogError as error:
        reason = error.message.replace(f"no model is called {draft!r}", "no model is called that")
        hint = f"{error.hint or '`edgeinfer list`'}, or --draft none"
        raise type(error)(f"draft model {draft!r}: {reason}", hint=hint) from error
    parts = model.parts
    if not parts or not parts[0].is_file():
        return  # resolving the model itself gives a better error
    mine, others = (gguf.check(path, vocabulary=False).n_vocab for path in (files.paths[0], parts[0]))
    if abs(mine - others) > MAX_DRAFT_PADDING:
        vocabulary = f"its vocabulary differs ({mine:,} tokens, not {others:,})"
        hint = "use a smaller model of the same family, or --draft none"
        raise ModelLoadError(f"{draft} cannot draft for {model.name}: {vocabulary}", hint=hint)
