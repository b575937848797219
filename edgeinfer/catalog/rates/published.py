"""Of the quantizations that a repository publishes, the one that suits a purpose on this CPU."""

from __future__ import annotations

from edgeinfer.catalog import names, sources
from edgeinfer.catalog.models import load_catalog
from edgeinfer.catalog.progress.job import Job
from edgeinfer.catalog.rates import probe
from edgeinfer.catalog.rates.fits import active_parameters, parameters
from edgeinfer.catalog.rates.purpose import Purpose
from edgeinfer.catalog.rates.speed import Choice, choose
from edgeinfer.errors import SourceNotFoundError
from edgeinfer.system.machine import read_memory

#: For a repository that is in no catalogue and says no size: speeds are compared, not told.
_SOME_PARAMS = 1e9


def best_published(text: str, purpose: Purpose, job: Job) -> tuple[str, Choice] | None:
    """What to pull for `text`, a catalogue name or a repository, and why; None where nothing is to be
    chosen: what comes as one file, or as a checkpoint.

    Raises what asking the hub and measuring raise.
    """
    found = _repository(text)
    if found is None:
        return None
    source, prefix, total, active = found
    from edgeinfer.catalog.fetching import hub  # 200 ms: httpx2, huggingface_hub

    job.begin("resolving", str(source))
    published = hub.quantizations(source)
    if not published:
        return None
    rates = probe.kept_or_measured(job)
    room = read_memory().available_bytes if total in (0, active) else 1 << 62
    try:
        choice = choose(purpose, published, rates, active, room)
    except ValueError as error:
        raise SourceNotFoundError(
            f"{source.repo} publishes no type to choose from", hint=f"it has {', '.join(published)}"
        ) from error
    return f"{prefix}:{choice.type}", choice


def _repository(text: str) -> tuple[sources.HubQuant, str, float, float] | None:
    """The repository that `text` means, the name before its quantization, all and active parameters."""
    if sources.looks_like_source(text):
        source = sources.parse(text)
        if isinstance(source, sources.HubQuant):
            revision = "" if source.revision == "main" else f"@{source.revision}"
            total = parameters(source.repo.upper())
            active = active_parameters(source.repo, total or _SOME_PARAMS)
            return source, f"hf:{source.repo}{revision}", total, active
    elif not names.is_path(text):
        entry = load_catalog().find(names.reference(text).name)
        for one in entry.parsed_sources():
            if isinstance(one[0], sources.HubQuant):
                total = parameters(entry.parameters)
                active = active_parameters(entry.name, total or _SOME_PARAMS, entry.active_parameters)
                return one[0], entry.name, total, active
    return None
