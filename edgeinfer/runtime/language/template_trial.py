"""Load a model's chat template, the first time in a process whose memory and time are limited.

The sandbox bounds each step it knows of; the process bounds the steps that it does not. What the probes
found is remembered by the template's digest, so a known template starts no process.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess

import msgspec

import edgeinfer
from edgeinfer.errors import ModelLoadError
from edgeinfer.platform.cache_files import CacheTable
from edgeinfer.platform.process import child_command
from edgeinfer.runtime.language.message_shapes import TemplateTraits
from edgeinfer.runtime.language.templates import CHATML, TRANSCRIPT, ChatTemplate

_HELPER = "edgeinfer.runtime.language.template_trial_process"
#: Limits of the process: address space, processor time, and time with all that waits.
MEMORY_BYTES = 1 << 30
CPU_S = 8
_PATIENCE_S = 60.0

_KNOWN = CacheTable("templates.json", dict[str, TemplateTraits])


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A template to try, and the limits under which."""

    source: str
    bos: str
    eos: str
    memory_bytes: int = MEMORY_BYTES
    cpu_s: int = CPU_S


def load_untrusted(
    source: str, bos: str, eos: str, *, memory_bytes: int = MEMORY_BYTES
) -> ChatTemplate:
    """Load a template that was downloaded. Raises ModelLoadError."""
    named = "\0".join((edgeinfer.__version__, bos, eos, source))
    key = hashlib.sha256(named.encode("utf-8", "replace")).hexdigest()
    traits = _KNOWN.read().get(key)
    if traits is None:
        traits = _tried(Trial(source=source, bos=bos, eos=eos, memory_bytes=memory_bytes))
        if traits is not None:
            _KNOWN.put(key, traits)
    return ChatTemplate.load(source, bos, eos, traits=traits)


def _tried(trial: Trial) -> TemplateTraits | None:
    """Return what a process of its own found; None where none can be started."""
    wrong = "the model's chat template is not to be trusted: its first rendering "
    try:
        done = subprocess.run(
            child_command(_HELPER),
            input=msgspec.json.encode(trial),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        answer = msgspec.json.decode(done.stdout, type=TemplateTraits | str)
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(f"{wrong}took more than {_PATIENCE_S:.0f} s") from error
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        ended = f"{-done.returncode}" if done.returncode >= 0 else signal.Signals(-done.returncode).name
        raise ModelLoadError(f"{wrong}ended its process ({ended})") from error
    if isinstance(answer, str):
        raise ModelLoadError(answer)
    return answer


def choose(source: str, bos: str, eos: str, *, has_chatml: bool) -> tuple[ChatTemplate, str]:
    """Choose the template to use and say why. Raises ModelLoadError as `load` does.

    `source` is the model's own, "" when it has none; `has_chatml` says whether its vocabulary holds
    `<|im_start|>` and `<|im_end|>` as tokens.
    """
    if source.strip():
        return load_untrusted(source, bos, eos), "the model's own"
    if has_chatml:
        return ChatTemplate.load(
            CHATML, bos, eos
        ), "ChatML: the model has no template, and its vocabulary has ChatML's tokens"
    return ChatTemplate.load(
        TRANSCRIPT, bos, eos
    ), "a plain transcript: the model has no template (a base model?)"
