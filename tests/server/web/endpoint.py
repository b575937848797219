"""An endpoint with the chat page and a scripted engine, as a process that a test can kill.

`python endpoint.py PORT_FILE PORT TEXT` writes its port to PORT_FILE, and answers each question with
TEXT, word by word.
"""

import asyncio
import sys
from pathlib import Path

from edgeinfer.cli.endpoint_setup import ModelAdmin
from edgeinfer.host import EngineHost
from edgeinfer.server import lifecycle
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.lifecycle import EndpointServer, RunOptions
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.model_pool import AvailableModel, LoadedEngine, ModelPool, ModelPoolCallbacks
from edgeinfer.server.web.access import Access, Web


async def main(port_file: str, port: str, text: str) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "made"))
    from fake_engine import Delay, FakeEngine

    (listener,) = lifecycle.bind("127.0.0.1", int(port))
    script = [item for word in text.split(" ") for item in (word + " ", Delay(0.02))]
    callbacks = ModelPoolCallbacks(
        load=lambda name, progress: LoadedEngine(engine=FakeEngine([script])),
        list_pulled=lambda: [AvailableModel(name="fake")],
    )
    models = ModelPool(callbacks, default="fake", keep_alive_s=300)
    endpoint = Endpoint(models, Limits(), Log("off"), EngineHost())
    port = listener.getsockname()[1]
    endpoint.web = Web(Access(port, Keys([])), endpoint, ModelAdmin())
    server = EndpointServer(endpoint, Gate(keys=Keys([])), [listener], RunOptions())
    partial = Path(f"{port_file}.part")
    partial.write_text(str(port))
    partial.rename(port_file)
    await server.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
