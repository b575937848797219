"""Real stores on this machine: moto's S3 server, and Debian's docker-registry."""

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from other_processes import free_port, wait_until

_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def moto() -> Iterator[str]:
    """Yield the address of an S3 server that accepts every key and has its objects in memory."""
    command, pipe = [sys.executable, "-c", _MOTO], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


@contextmanager
def docker_registry(program: Path, folder: Path) -> Iterator[str]:
    """Yield HOST:PORT of a registry that stores its blobs under `folder`."""
    address = f"127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
        "http": {"addr": address},
    }
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [program, "serve", str(folder / "config.yml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(address, process), "the registry")
        yield address
    finally:
        process.kill()
        process.wait()


def push(address: str, name: str, tag: str, layers: list[tuple[str, bytes]]) -> str:
    """Push an artifact of (media type, content) layers; return its manifest's digest."""
    base = f"http://{address}/v2/{name}"

    def send(method: str, url: str, body: bytes, kind: str) -> dict[str, str]:
        answer = httpx2.request(method, url, content=body, headers={"Content-Type": kind}, timeout=60)
        return dict(answer.raise_for_status().headers)

    described = []
    for kind, content in [("application/vnd.docker.ai.model.config.v0.1+json", b"{}"), *layers]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        upload_url = send("POST", f"{base}/blobs/uploads/", b"", "application/octet-stream")["location"]
        joint = "&" if "?" in upload_url else "?"
        send("PUT", f"{upload_url}{joint}digest={digest}", content, "application/octet-stream")
        described.append({"mediaType": kind, "digest": digest, "size": len(content)})
    config, *layer_descriptors = described
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layer_descriptors}
    ).encode()
    send("PUT", f"{base}/manifests/{tag}", manifest, MANIFEST)
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "docker-registry ended"
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
