"""The Ray Serve application, with a deployment per model and all routes of an endpoint.

    serve run edgeinfer.cluster.app:application model=qwen3-4b max_replicas=4

Ray places, restarts and scales the replicas. A request goes to the replica that has its prefix cached,
otherwise to one with few requests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve import metrics
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgeinfer import prefix_affinity
from edgeinfer.cluster.front import FrontEnd
from edgeinfer.cluster.messages import ModelSettings, Request, read_settings
from edgeinfer.cluster.replica import ENDING_S, EndpointReplica

#: Maximum number of running requests in the front end: so high that only the replicas' limits matter.
_MANY = 10_000
#: Interval (s) at which Ray Serve counts waiting requests. With Ray's default, the first request to a
#: model without a running replica would wait up to 10 s longer.
_COUNT_S = 0.2
_ROUTER = "edgeinfer.cluster.app.PrefixRouter"


class ModelDeployment(EndpointReplica):
    """The Ray actor of one replica: it starts an endpoint, and exports the endpoint's metrics."""

    async def __init__(self, settings: ModelSettings) -> None:  # type: ignore[misc]  # awaited by Ray
        super().__init__(settings, serve.get_replica_context().replica_id.unique_id)
        self._export = MetricsExport()
        await self.ready()

    async def check_health(self) -> None:
        """Check the endpoint, then export its metrics. Raises the errors of `check`.

        Ray calls this every 5 s, and replaces the replica after several errors.
        """
        await self.check()
        self._export.export(await self.metrics())

    async def __del__(self) -> None:
        """End the endpoint when Ray removes the replica."""
        await self.close()


class FrontDeployment:
    """The deployment that gets all HTTP requests from Ray's proxy, and forwards them to models."""

    def __init__(
        self, models: Mapping[str, DeploymentHandle], start_s: float, hosts: Sequence[str]
    ) -> None:
        answers = {name: handle.options(stream=True).answer.remote for name, handle in models.items()}
        self._front = FrontEnd(answers, start_s, hosts)

    async def __call__(self, request: HttpRequest) -> Response:
        return await self._front.answer(request)


def application(arguments: Mapping[str, object]) -> serve.Application:
    """Make the application that `serve run` deploys.

    `arguments` are the fields of `Settings`, or, for a single model, those of `ModelSettings`. Raises
    UsageError if they are invalid.
    """
    settings = read_settings(arguments)
    models = {model.model: _deployment(model) for model in settings.models}
    options = {"max_ongoing_requests": _MANY, "ray_actor_options": {"num_cpus": 0}}
    options |= {"name": "edgeinfer", "graceful_shutdown_timeout_s": ENDING_S}
    front = serve.deployment(**options)(FrontDeployment)
    return front.bind(models, settings.start_s, settings.hosts)


def _deployment(model: ModelSettings) -> Any:
    deployment = serve.deployment(
        name=model.model.replace("/", "-"),
        max_ongoing_requests=model.max_ongoing_requests,
        ray_actor_options={"num_cpus": model.cpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=model.min_replicas,
            max_replicas=model.max_replicas,
            target_ongoing_requests=model.target_ongoing_requests,
            upscale_delay_s=0.0,
            downscale_delay_s=model.idle_s,
            metrics_interval_s=_COUNT_S,
            look_back_period_s=_COUNT_S * 5,
        ),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        health_check_period_s=5.0,
        graceful_shutdown_timeout_s=ENDING_S,  # Ray waits for requests before it calls `__del__`
    )(ModelDeployment)
    return deployment.bind(model)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Chooses the replica that prefilled the longest prefix of a request, otherwise a less busy one.

    Ray Serve's interface: https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = prefix_affinity.PrefixAffinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Return lists of replicas, which Serve tries in turn.

        The last list has all replicas. A list before it has only the replica with the longest cached
        prefix, if one has such a prefix and its queue is not full.
        """
        if not candidate_replicas:
            return []
        request = _request(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        available = self.select_available_replicas(candidate_replicas)
        by_id = {replica.replica_id: replica for replica in available}
        cached_at = self._affinity.find(request.prefix_hashes, by_id) if request else None
        # shuffle the replicas, because Ray Serve takes the first of equally busy ones
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        return [shuffled] if cached_at is None else [[by_id[cached_at]], shuffled]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Record that `replica_id` prefills the request's prefix, for later requests with this prefix.

        Serve calls this after routing.
        """
        request = _request(pending_request)
        if request:
            self._affinity.note(request.prefix_hashes, replica_id)


def _request(pending: PendingRequest | None) -> Request | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Request) else None


class MetricsExport:
    """Exports an endpoint's metrics to Ray, which adds the prefix `ray_` and its own labels."""

    def __init__(self) -> None:
        self._gauges: dict[str, metrics.Gauge] = {}

    def export(self, text: str) -> None:
        """Set a Ray gauge for each time series in `text` (Prometheus' format), also for counters."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = metrics.Gauge(sample.name, family.documentation, tuple(sample.labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=dict(sample.labels))
