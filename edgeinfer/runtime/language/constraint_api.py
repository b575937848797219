"""The seam between the decode loop and constrained output. `runtime/language/constraints.py` provides
what is drawn here.

The loop owns the logits; a matcher only says which tokens may come next. One `CompiledConstraint`
serves any number of requests (it is cached by its source); each request starts a `Matcher` of its own,
used from the decode loop's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgeinfer.runtime.requests import Constraint

    Logits = npt.NDArray[np.float32]


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """A constraint of our own making: a grammar in llguidance's dialect of Lark, from its rule `start`.

    What the conversation side needs besides what a request may ask for: calls in a family's format,
    reasoning before JSON. `grammars` are further ones by name, which `source` reaches as `@name`.
    """

    source: str
    grammars: tuple[tuple[str, str], ...] = ()


class VocabView(Protocol):
    """What a constraint compiler may ask of the model's vocabulary. `runtime.vocab.Vocab` is one."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """Every token that ends a generation, the model's end of turn first."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; control tokens are empty unless `special`."""

    def is_control(self, token: int) -> bool: ...

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]: ...


class Matcher(Protocol):
    """One request's place in its constraint."""

    def mask_into(self, logits: Logits) -> None:
        """Set every logit whose token may not come next to minus infinity, in place. `logits` has
        `n_vocab` entries.

        At least one token stays possible; once the output may end, the end-of-generation tokens are
        among them.
        """

    def accept(self, token: int) -> bool:
        """Take `token` as the next one; False when the constraint forbids it (nothing changes then)."""

    def forced(self) -> Sequence[int]:
        """The tokens that must come next whatever the model says; empty when there is a choice. Changes
        nothing.
        """

    @property
    def is_done(self) -> bool:
        """The output is complete and nothing may follow but the end."""


class CompiledConstraint(Protocol):
    """A constraint ready for this vocabulary."""

    def start(self) -> Matcher: ...


class Compiler(Protocol):
    """Compiles and caches. Any thread."""

    def compile(self, constraint: Constraint | Lark, vocab: VocabView) -> CompiledConstraint:
        """Raises UnsupportedConstraintError, `param` naming the place in the schema or grammar."""
