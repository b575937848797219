"""The Open Inference Protocol: KServe's V2, and Triton's generate extension."""

from __future__ import annotations

from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.inference_v2 import routes, wire
from edgeinfer.server.inference_v2.render import error_body, error_events

INFERENCE_V2 = Dialect(
    name="inference-v2",
    error_type=wire.V2Error,
    error_body=error_body,
    error_events=error_events,
    prefix="/v2/",
    operations=(
        Operation(
            method="GET",
            path="/v2",
            handler=routes.server_metadata,
            summary="This program's name and version.",
            reply=wire.ServerMetadata,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v2/health/live",
            handler=routes.live,
            summary="Whether somebody is here.",
            reply=wire.Live,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v2/health/ready",
            handler=routes.ready,
            summary="Whether the default model has been loaded; 400 until then, and while draining.",
            reply=wire.Ready,
            also={"400": wire.Ready},
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v2/models/{id}",
            handler=routes.model_metadata,
            summary="What goes into a model and comes out.",
            reply=wire.ModelMetadata,
            uses_model=False,
        ),
        Operation(
            method="GET",
            path="/v2/models/{id}/ready",
            handler=routes.model_ready,
            summary="Whether a model is loaded.",
            reply=wire.ModelReady,
            also={"400": wire.ModelReady},
            uses_model=False,
        ),
        Operation(
            path="/v2/models/{id}/infer",
            handler=routes.infer,
            summary="Go on with texts.",
            body=wire.InferBody,
            reply=wire.InferenceReply,
        ),
        Operation(
            path="/v2/models/{id}/generate",
            handler=routes.generate,
            summary="Go on with a text.",
            body=wire.GenerateBody,
            reply=wire.GenerateReply,
        ),
        Operation(
            path="/v2/models/{id}/generate_stream",
            handler=routes.generate_stream,
            summary="Go on with a text, in pieces.",
            body=wire.GenerateBody,
            reply=wire.GenerateReply,
            streams=True,
        ),
    ),
)
