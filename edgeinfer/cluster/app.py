"""The Serve application: every route of the endpoint, a deployment a model.

    serve run edgeinfer.cluster.app:application model=qwen3-4b max_replicas=4

Ray places replicas, restarts them and scales them; nothing here is distributed by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.cluster import settings as options
from edgeinfer.cluster.asking import Asked, Part
from edgeinfer.cluster.front import Front
from edgeinfer.cluster.replica import Replica

_MANY = 10_000
#: How often Serve counts what waits: its default of 10 s would be most of the way from 0 to 1.
_COUNT_S = 0.2
_ROUTER = "edgeinfer.cluster.router.PrefixRouter"


class ModelDeployment:
    """A replica of one model."""

    #: What stands behind it.
    replica: type[Replica] = Replica

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: options.ModelSettings
    ) -> None:
        self._replica = self.replica(settings, serve.get_replica_context().replica_id.unique_id)
        self._mirror = Mirror()
        await self._replica.ready()

    async def answer(self, asked: Asked) -> AsyncIterator[Part]:
        """See `Replica.answer`."""
        async for part in self._replica.answer(asked):
            yield part

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises here several times."""
        await self._replica.check()
        self._mirror.show(await self._replica.metrics())

    async def __del__(self) -> None:
        """Called by Ray when it removes the replica."""
        await self._replica.close()


class FrontDeployment:
    """What the HTTP proxy asks."""

    def __init__(
        self, models: Mapping[str, DeploymentHandle], start_s: float, hosts: Sequence[str]
    ) -> None:
        self._front = Front({name: _Handle(handle) for name, handle in models.items()}, start_s, hosts)

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        return await self._front.answer(request)


class _Handle:
    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(stream=True)

    def answer(self, asked: Asked) -> AsyncIterator[Part]:
        stream: AsyncIterator[Part] = self._handle.answer.remote(asked)
        return stream


def application(
    arguments: Mapping[str, object], of: type[ModelDeployment] = ModelDeployment
) -> serve.Application:
    """Make an application of `{"models": [...]}` or one model's fields. Raises UsageError."""
    settings = options.read(arguments)
    models = {one.model: _deployment(one, of) for one in settings.models}
    front = serve.deployment(
        name="edgeinfer", max_ongoing_requests=_MANY, ray_actor_options={"num_cpus": 0}
    )(FrontDeployment)
    return front.bind(models, settings.start_s, settings.hosts)


def _deployment(one: options.ModelSettings, of: type[ModelDeployment]) -> Any:
    made = serve.deployment(
        name=one.model.replace("/", "-"),
        max_ongoing_requests=one.max_ongoing_requests,
        ray_actor_options={"num_cpus": one.cpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=one.min_replicas,
            max_replicas=one.max_replicas,
            target_ongoing_requests=one.target_ongoing_requests,
            upscale_delay_s=0.0,
            downscale_delay_s=one.idle_s,
            metrics_interval_s=_COUNT_S,
            look_back_period_s=_COUNT_S * 5,
        ),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        health_check_period_s=5.0,
    )(of)
    return made.bind(one)


class Mirror:
    """Shows what was scraped last. Ray puts `ray_` before names, and adds deployment and replica."""

    def __init__(self) -> None:
        self._gauges: dict[str, metrics.Gauge] = {}

    def show(self, text: str) -> None:
        """Show every series of Prometheus text as a gauge; of counters and histograms they are sums."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = metrics.Gauge(sample.name, family.documentation, tuple(sample.labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=dict(sample.labels))
