"""What a Serve application is told: the models and how many replicas of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from edgeinfer.errors import UsageError


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's deployment.

    `serve` are further words for `edgeinfer serve`, as they are typed. Ray keeps `min_replicas` to
    `max_replicas` of it, one for each `target_ongoing_requests` that run or wait, and removes one that
    was not needed for `idle_s` seconds. A replica computes on `cpus` cores, which Ray books for it.
    """

    model: str
    serve: tuple[str, ...] = ()
    min_replicas: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    max_ongoing_requests: Annotated[int, msgspec.Meta(ge=1)] = 64
    idle_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    cpus: Annotated[int, msgspec.Meta(ge=1)] = 1


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The models of an application; the first answers requests that name none.

    A request that no replica has taken after `start_s` seconds is answered with a 503. `hosts` are
    names under which the application is asked, beside loopback's and addresses.
    """

    models: Annotated[tuple[ModelSettings, ...], msgspec.Meta(min_length=1)]
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    hosts: tuple[str, ...] = ()


def read(arguments: Mapping[str, object]) -> Settings:
    """Read `{"models": [...]}` or one model's fields. Raises UsageError that names the wrong field."""
    given = arguments if "models" in arguments else {"models": [arguments]}
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"this is no Serve application of ours: {error}", hint="docs/cluster.md has the fields"
        ) from error
    names = [one.model for one in settings.models]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UsageError(f"{', '.join(sorted(doubled))} stands twice among the models")
    return settings
