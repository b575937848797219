"""A receipt of a made answer: no model is needed to write it."""

import json
from typing import Any

import msgspec

from edgeinfer.receipts.receipt import make_receipt, with_record
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import Chosen, EngineInfo
from edgeinfer.runtime.requests import GenerateRequest

_RECORD = {"prompt": [1, 2], "answer": [3, 4], "logprobs": [-1.0, None]}
FINISHED = msgspec.convert(
    {"type": "finished", "reason": "stop", "usage": {}, "timings": {}, "record": _RECORD}, Finished
)
INFO = EngineInfo(model="m", sha256="ab" * 32, n_ctx=64, choices={"kv_type": Chosen("f16", "")})
EXAMPLE: dict[str, Any] = json.loads(
    msgspec.json.encode(make_receipt(with_record(GenerateRequest(prompt="a b")), FINISHED, INFO))
)
