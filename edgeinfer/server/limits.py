"""The limits of the endpoint."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an endpoint: `…_s` in seconds, `…_bytes` in bytes; the other fields are counts.

    - `max_queue`: generations that may wait for one model.
    - `max_requests`: running requests of all clients; `max_per_key`: running requests of one API key.
    - `max_bodies_bytes`: bodies of all running requests with the text of their documents. One caller
      may take half of this number.
    - `header_s`, `body_s`: deadlines for receiving all headers, and the whole body.
    - `write_s`: how long a client may leave its socket's buffer full before it is disconnected.
    - `idle_s`: how long a connection may stay open without a request.
    - `comment_s`: time without an event after which a stream gets a keep-alive comment.
    - `patience_s`: how long a streamed request waits for its model before the status 200 is sent. Later
      errors are events of the stream.
    - `prepare_s`: time for the chat template, the schema or grammar, and tokenization.
    - `drain_s`: how long running requests may take to finish after SIGTERM.
    - `stored_responses` (per key), `stored_bytes` (all keys), `stored_s`: stored /v1/responses.
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
