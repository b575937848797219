"""What `bench_resume.py` found, as medians and as a table."""

from __future__ import annotations

import contextlib
import statistics
from typing import Any


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each name over the runs, with the least, the greatest and how many there were."""
    names = runs[0]
    return {
        name: {
            "median": round(statistics.median(r[name] for r in runs), 1),
            "least": round(min(r[name] for r in runs), 1),
            "greatest": round(max(r[name] for r in runs), 1),
            "runs": len(runs),
        }
        for name in names
    }


def table(results: dict[str, Any]) -> str:
    """The measurements as Markdown."""
    lines = ["| | " + " | ".join(results["models"]) + " |", "|---|" + "---|" * len(results["models"])]

    def row(words: str, pick: Any) -> None:
        cells = []
        for found in results["models"].values():
            with contextlib.suppress(KeyError, TypeError):
                cells.append(pick(found))
                continue
            cells.append("–")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")

    def ms(value: dict[str, float]) -> str:
        return f"{value['median']:.0f} ms ({value['least']:.0f}–{value['greatest']:.0f})"

    row("model file", lambda f: f"{f['file_bytes'] / 1e9:.2f} GB")
    row("exec → launcher's main", lambda f: ms(f["resumed"]["launcher"]))
    row("exec → CRIU started", lambda f: ms(f["resumed"]["restore"]))
    row("exec → Python runs again", lambda f: ms(f["resumed"]["running"]))
    row("exec → **running with its request**", lambda f: ms(f["resumed"]["request"]))
    row(
        "exec → **first token**, a prompt of one token",
        lambda f: ms(f["one_token"]["ours"]["first_token"]),
    )
    row("`llama-server`, the same", lambda f: ms(f["one_token"]["default"]["first_token"]))
    row(
        "`llama-server --no-repack --no-warmup`, the same",
        lambda f: ms(f["one_token"]["no-repack, no-warmup"]["first_token"]),
    )
    prompt = "a chat's prompt (tokens to prefill)"
    row(
        f"exec → first token, {prompt}",
        lambda f: f"{ms(f['resumed']['first_token'])}, {f['resumed']['prompt_tokens']['median']:.0f}",
    )
    row(
        "the same, cold start",
        lambda f: f"{ms(f['cold']['first_token'])}, {f['cold']['prompt_tokens']['median']:.0f}",
    )
    row("the same, resumed, nothing in the page cache", lambda f: ms(f["cold_cache"]["first_token"]))
    row("reading the snapshot from this disk", lambda f: ms(f["cold_cache"]["read"]))
    row("one decode step, resumed", lambda f: f"{f['decode']['resumed_step_ms']:.1f} ms")
    row("one decode step, freshly loaded", lambda f: f"{f['decode']['fresh_step_ms']:.1f} ms")
    row(
        "decode rate, resumed : fresh",
        lambda f: (
            f"{f['decode']['rate_ratio']:.3f} "
            f"({f['decode']['least']:.2f}–{f['decode']['greatest']:.2f})"
        ),
    )
    row("private memory, idle", lambda f: f"{f['memory']['idle_private_bytes'] / 1e6:.0f} MB")
    row("four copies : one (PSS)", lambda f: f"{f['memory']['four_to_one']:.2f}")
    row("snapshot on disk", lambda f: f"{f['snapshot']['disk_bytes'] / 1e6:.0f} MB")
    row(
        "`warm`",
        lambda f: f"{f['warm']['wall_s']:.1f} s ({f['warm']['least']:.1f}–{f['warm']['greatest']:.1f})",
    )
    row("`warm` : cold start and writing as much", lambda f: f"{f['warm']['ratio']:.2f}")
    return "\n".join(lines) + "\n"
