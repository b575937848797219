"""Every limit of the endpoint in one value. Durations in seconds, sizes in bytes."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`max_queue` is the number of generations that may wait for a model.

    `max_requests` counts requests of all models, `max_per_key` those of one key.

    `header_s` and `body_s` are deadlines for a whole header block and a whole body; receiving a byte
    does not extend them. `write_s` is how long a client may leave its socket full. `comment_s` is the
    pause between keep-alive comments. `patience_s` is how long a streaming client waits for an HTTP
    status while its model loads; then the stream begins. `prepare_s` is the time to prepare a request:
    template, schema, grammar, tokens.

    `max_bodies_bytes` limits the bodies of all running requests with the text of their documents; one
    caller gets half of it.

    `stored_responses` (per key), `stored_bytes` (all keys) and `stored_s` limit the stored responses.
    """

    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 256 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_url_bytes: int = 96 << 10
    max_connections: int = 1024
    max_queue: int = 64
    max_requests: int = 256
    max_per_key: int = 64
    header_s: float = 20.0
    body_s: float = 60.0
    write_s: float = 30.0
    idle_s: float = 75.0
    comment_s: float = 5.0
    patience_s: float = 2.0
    prepare_s: float = 60.0
    drain_s: float = 30.0
    stored_responses: int = 64
    stored_bytes: int = 64 << 20
    stored_s: float = 3600.0
