"""docs/kubernetes under podman: the image of the Containerfile, with volumes and keys as a kubelet mounts them.

A kubelet gives a Secret's files to root and the pod's fsGroup with group-read added, and the root of a
volume to the fsGroup with setgid (kubernetes/pkg/volume/volume_linux.go); podman does neither by itself.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from other_processes import run

from ..conftest import BUILD_CACHE, ROOT

MANIFESTS = ROOT / "docs/kubernetes"
KEY = "a-key-of-the-cluster-0123456789"
#: Restated from the manifest by test_deployment_states_what_this_test_mounts.
GROUP = 65532


def _only(name: str, kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((MANIFESTS / name).read_text("utf-8"))
    (document,) = [document for document in documents if document["kind"] == kind]
    return document


def _pod() -> dict[str, Any]:
    return _only("deployment.yaml", "Deployment")["spec"]["template"]["spec"]


class Podman:
    """podman with a store of its own, and the volume, the Secret and the model that containers mount."""

    def __init__(self, folder: Path) -> None:
        self._store = [f"--root={folder}/store", f"--runroot={folder}/run", "--cgroup-manager=cgroupfs"]
        self.volume = folder / "volume"
        self.secret = folder / "secret"
        self.models = folder / "models"
        for path in (self.volume, self.secret, self.models):
            path.mkdir()
        self.mount_as_kubelet()
        data = self.secret / "..2026"
        data.mkdir(mode=0o755)
        (data / "key").write_text(KEY + "\n")
        os.chown(data / "key", 0, GROUP)
        (data / "key").chmod(0o440)
        (self.secret / "..data").symlink_to("..2026")
        (self.secret / "key").symlink_to("..data/key")

    def mount_as_kubelet(self) -> None:
        """Give the volume's root to the group as fsGroupChangePolicy OnRootMismatch does."""
        info = self.volume.stat()
        if info.st_gid != GROUP or info.st_mode & 0o2770 != 0o2770:
            os.chown(self.volume, 0, GROUP)
            self.volume.chmod(0o2775)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        done = run("podman", *self._store, "--runtime=runc", *arguments, check=check)
        return done.stdout.strip() if check else done.stdout + done.stderr

    def run(self, *args: str, detach: bool = False) -> str:
        """Run the image under the securityContext of the manifest; returns its output, or its name."""
        mounts = (
            f"--volume={self.volume}:/var/lib/edgeinfer", f"--volume={self.models}:/mnt/models:ro",
            f"--volume={self.secret}:/run/secrets/edgeinfer:ro",
        )  # fmt: skip
        return self(
            "run", "--network=none", f"--user={GROUP}:{GROUP}", "--read-only", "--tmpfs=/tmp",
            "--cap-drop=all", "--security-opt=no-new-privileges", "--ulimit=nofile=1024:4096",
            "--ulimit=nproc=4096:4096", *mounts, *(["--detach"] if detach else ["--rm"]), "edgeinfer", *args,
        )  # fmt: skip

    def ask(self, container: str, path: str, *curl: str) -> tuple[int, str]:
        """Ask the container's port in its network; returns the status and the body."""
        pid = self("inspect", "--format={{.State.Pid}}", container)
        curl = ("curl", "-s", "-w", "\n%{http_code}", *curl, f"http://127.0.0.1:8080{path}")
        done = run("nsenter", f"--target={pid}", "--net", *curl, check=False)
        body, _, status = done.stdout.rpartition("\n")
        return int(status or 0), body

    def wait_until_ready(self, container: str) -> None:
        for _ in range(1200):
            if self.ask(container, "/health")[0] == 200:
                return
            state = self("inspect", "--format={{.State.Status}}", container)
            assert state == "running", self("logs", container, check=False)
            time.sleep(0.1)
        raise AssertionError(self("logs", container, check=False))


@pytest.fixture(scope="module")
def podman(tmp_path_factory, binary, smollm2) -> Iterator[Podman]:
    if os.getuid() != 0:
        pytest.skip("a kubelet's volumes belong to root and a group: making them needs root")
    folder = tmp_path_factory.mktemp("pod")
    podman = Podman(folder)
    (folder / "context/dist").mkdir(parents=True)
    shutil.copy(binary, folder / "context/dist/edgeinfer")
    shutil.copy(smollm2, podman.models / "model.gguf")
    base = folder / "base.tar"
    run("tar", "-C", BUILD_CACHE / "systemd-257", "-cf", base, ".")
    podman("import", str(base), "localhost/base")
    podman(
        "build", "--runtime=runc", "--isolation=chroot", "--tag=edgeinfer", "--build-arg=BASE=localhost/base",
        f"--file={MANIFESTS}/Containerfile", str(folder / "context"),
    )  # fmt: skip
    podman.run("pull", "/mnt/models/model.gguf", "--name", "smollm2-135m-instruct", "--quiet")
    try:
        yield podman
    finally:
        podman("rm", "--all", "--force", "--time=0")
        podman("rmi", "--all", "--force")
        run("umount", "--lazy", f"{folder}/store/overlay", check=False)


def test_deployment_states_what_this_test_mounts():
    context = _pod()["securityContext"]
    assert context["fsGroup"] == context["runAsUser"] == context["runAsGroup"] == GROUP
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    (secret,) = [v["secret"] for v in _pod()["volumes"] if "secret" in v]
    assert secret["defaultMode"] == 0o400


def test_deployment_answers_its_service_and_starts_again_on_its_volume(podman):
    (init,), (serve,) = _pod()["initContainers"], _pod()["containers"]
    service = _only("deployment.yaml", "Service")["metadata"]["name"]
    key = ("-H", f"authorization: Bearer {KEY}")
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
    for _ in range(2):
        podman.mount_as_kubelet()
        podman.run(*init["args"])
        container = podman.run(*serve["args"], detach=True)
        podman.wait_until_ready(container)
        for host in (service, f"{service}.default", f"{service}.default.svc.cluster.local"):
            status, answer = podman.ask(
                container, "/v1/chat/completions", *key, "-H", f"host: {host}",
                "-H", "content-type: application/json", "-d", body,
            )  # fmt: skip
            assert status == 200, (host, answer, podman("logs", container, check=False))
        assert podman.ask(container, "/v1/models", "-H", f"host: {service}")[0] == 401
        assert podman.ask(container, "/v1/models", *key, "-H", "host: evil.example")[0] == 403
        podman("stop", "--time=40", container)
        assert podman("inspect", "--format={{.State.ExitCode}}", container) == "0"


def test_kserve_runtime_serves_the_file_that_the_storage_initializer_left(podman):
    (container,) = _only("kserve.yaml", "ServingRuntime")["spec"]["containers"]
    started = podman.run(*container["args"], detach=True)
    podman.wait_until_ready(started)
    status, answer = podman.ask(
        started, "/openai/v1/models", "-H", f"authorization: Bearer {KEY}",
        "-H", "host: assistant-predictor.default.svc.cluster.local",
    )  # fmt: skip
    assert status == 200, answer
    podman("stop", "--time=40", started)
