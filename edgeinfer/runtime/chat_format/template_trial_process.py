"""The process that probes a new chat template under limits of memory and CPU time.

It reads a `TemplateTrial` as JSON from stdin, and writes `TemplateTraits` or an error text as JSON.
"""

from __future__ import annotations

import resource
import sys
import time

import msgspec

from edgeinfer.errors import ModelLoadError
from edgeinfer.runtime.chat_format.message_shapes import TemplateTraits
from edgeinfer.runtime.chat_format.templates import ChatTemplate, TemplateTrial


def main() -> int:
    """Read a TemplateTrial from stdin, probe its template, write the result to stdout; return 0."""
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=TemplateTrial)
    resource.setrlimit(resource.RLIMIT_AS, (trial.memory_bytes, trial.memory_bytes))
    cpu_s = int(time.process_time()) + trial.cpu_s  # the imports, which may take seconds, do not count
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(msgspec.json.encode(_answer(trial)))
    return 0


def _answer(trial: TemplateTrial) -> TemplateTraits | str:
    try:
        return ChatTemplate.load(trial.source, trial.bos, trial.eos).traits
    except ModelLoadError as error:
        return error.message
    except MemoryError:
        return "the model's chat template was refused: its first rendering takes too much memory"


if __name__ == "__main__":
    sys.exit(main())
