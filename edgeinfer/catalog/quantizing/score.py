"""What quantizing costs: perplexity and the distance from the source, computed in a helper process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from edgeinfer.catalog.progress.job import Job
from edgeinfer.catalog.quantizing import children
from edgeinfer.catalog.quantizing.quantizer import QuantizeOptions
from edgeinfer.errors import QuantizeError, UsageError
from edgeinfer.system import paths


def perplexity_text() -> Path:
    """The text we ship for it: some nine hundred tokens of prose written for this."""
    return paths.shipped_file("perplexity.txt")


def scored(model: str, job: Job, options: QuantizeOptions, compared: str = "") -> dict[str, float]:
    """What the helper says of a model, beside another of the same vocabulary where one is given."""
    text = checked_text(options.text) if options.text else perplexity_text()
    limit = str(options.score_tokens or 0)
    job.begin("scoring", Path(model).name)
    said: dict[str, object] = {}
    child = "edgeinfer.runtime.helpers.perplexity"
    with closing(children.events(child, model, str(text), limit, compared, job=job)) as work:
        for said in work:
            if said["event"] == "progress":
                job.at(int(str(said["done"])), int(str(said["total"])))
    if said["event"] == "error":
        raise QuantizeError(
            f"the perplexity of {Path(model).name} cannot be measured: {said['message']}"
        )
    return {name: float(str(value)) for name, value in said.items() if name != "event"}


def checked_text(text: str) -> Path:
    """The path of a text that somebody named. Raises UsageError where there is none."""
    if not Path(text).is_file():
        raise UsageError(f"there is no text {text}")
    return Path(text)
