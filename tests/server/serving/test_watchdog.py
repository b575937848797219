"""The watchdog of the endpoint's event loop, and regressions for stalls that it detected."""

import asyncio
import time

import pytest
from loop_watchdog import MOST_S, watched

FORM = {"content-type": "multipart/form-data; boundary=a"}


def _work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_callback_that_holds_the_loop_is_named():
    async def busy(seconds: float) -> None:
        await asyncio.sleep(0)
        _work(seconds)

    async def main() -> None:
        with watched(asyncio.get_running_loop()):
            await asyncio.create_task(busy(2 * MOST_S))

    with pytest.raises(AssertionError, match=r"busy held the event loop for 0\.[4-9]"):
        asyncio.run(main())


def test_waiting_is_not_working():
    async def main() -> None:
        with watched(asyncio.get_running_loop()):
            time.sleep(2 * MOST_S)
            await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "body", [b"--a" * 5_000_000, b"\r\n--a\r\n" * 2_000_000], ids=["text", "lines"]
)
def test_large_forms_leave_the_loop_free(serve, tmp_path, body):
    from edgeinfer.server.batches import Batches

    here = serve(batches=Batches(tmp_path / "batches"))
    assert here.client.post("/v1/files", content=body, headers=FORM).status_code == 400


def test_folder_with_many_files_leaves_the_loop_free(serve, tmp_path):
    from edgeinfer.server.batches import Batches, Folder, new_record

    here = serve(batches=Batches(tmp_path / "batches"))
    folder: Folder = here.endpoint.batches.folder("")
    for number in range(1000):
        folder.write(new_record(f"file-{number:024x}", 1, "a", "batch"))
    for path in ("/v1/files?limit=10000", "/v1/batches", f"/v1/files/file-{5:024x}"):
        assert here.client.get(path).status_code == 200
