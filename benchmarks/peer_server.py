"""llama-server as a peer in our benchmarks: started with as many slots as asked, spoken to over its
streaming completions.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from common import free_port, is_healthy

from edgeinfer.bench import Target, ask


class Server:
    """One llama-server process. Its context is cells for all slots together; it inherits our setting of
    libgomp's spin count, so that the two differ in nothing but themselves. `flags` come last.
    """

    def __init__(
        self,
        program: str,
        model: Path,
        *,
        slots: int,
        n_ctx: int,
        threads: int,
        flags: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.target = Target(url=f"http://127.0.0.1:{self.port}")
        command = [
            program,
            "-m",
            str(model),
            "-np",
            str(slots),
            "-c",
            str(n_ctx),
            "-t",
            str(threads),
            "--port",
            str(self.port),
            *flags,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not is_healthy(self.port):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("llama-server did not start")
            time.sleep(0.05)

    def stream(self, prompt: list[int], n: int, *, cache: bool) -> list[float]:
        """Generate n tokens greedily; the arrival time of each, seconds of time.perf_counter."""
        fields = {"max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": cache}
        began = time.perf_counter()
        answer = asyncio.run(ask(self.target, "/v1/completions", {"prompt": prompt, **fields}))
        textless = max(0, answer.completion_tokens - len(answer.arrivals))
        return [began + at for at in (*answer.arrivals, *answer.arrivals[-1:] * textless)]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
