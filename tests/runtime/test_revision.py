"""The kernel revision: it must change when the bits of an answer do."""

import hashlib
from pathlib import Path

import pytest

from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.requests import GenerateRequest, Sampling
from edgeinfer.runtime.revision import KERNEL_REVISION

from .conftest import answer, load

#: Revision, and level of the kernels → digest of what both real models compute. After a change of bits,
#: raise `KERNEL_REVISION` and write down the digest that the failure shows.
_DIGESTS = dict.fromkeys(
    [(3, "v3"), (3, "v3-vnni"), (3, "v4")],
    "ffe6b0165d0056fa5349234695c5584db6674e1c55bc61865d16adb32b04ec22",
)
_PROMPT = "The sea is wide, and ships cross it: " * 12
_SAMPLING = Sampling(
    temperature=0.8, seed=3, repeat_penalty=1.1, dry_multiplier=0.8, presence_penalty=0.1
)


@pytest.mark.model
def test_bits_change_with_the_revision_only(smollm2: Path, gemma3: Path) -> None:
    level = libllama.build_info().kernels
    expected = _DIGESTS.get((KERNEL_REVISION, level))
    if expected is None:
        pytest.skip("the digest of this level of kernels is not recorded")
    hashed = hashlib.sha256()
    for path in (smollm2, gemma3):
        engine = load(path, n_ctx=512)
        request = GenerateRequest(
            prompt=_PROMPT,
            sampling=_SAMPLING,
            max_tokens=48,
            ignore_eos=True,
            record_tokens=True,
            prompt_logprobs=3,
        )
        reply = answer(engine, request)
        engine.close()
        assert reply.prompt is not None
        assert reply.finish.record is not None
        for token in reply.prompt.tokens:
            # another bit in a layer moves them by 0.01 and more; numpy's logarithm, by less than 0.0001
            hashed.update(repr([(t.token_id, round(t.logprob, 3)) for t in token.top]).encode())
        hashed.update(repr(reply.finish.record.answer).encode())
    assert hashed.hexdigest() == expected
