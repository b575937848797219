"""The manifests in docs/kubernetes fit Kubernetes' schemas, our command line and our endpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from edgeinfer.cli.parser import build_parser
from edgeinfer.server import app

FOLDER = Path(__file__).parents[2] / "docs/kubernetes"


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def _containers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for inner in value:
            yield from _containers(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers"):
                yield from inner
            else:
                yield from _containers(inner)


def test_deployment_is_what_kubernetes_takes() -> None:
    documents = _documents("deployment.yaml")
    kinds = [validate(document, "1.30", strict=True) and document["kind"] for document in documents]
    assert kinds == ["PersistentVolumeClaim", "Deployment", "Service"]


@pytest.mark.parametrize("name", ["deployment.yaml", "kserve.yaml"])
def test_containers_are_started_and_asked_as_this_program_is(name: str) -> None:
    containers = list(_containers(_documents(name)))
    assert containers
    for container in containers:
        build_parser().parse_args([str(word) for word in container["args"]])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {}).get("httpGet")
            assert asked is None or "GET" in app.match_route(asked["path"]).methods
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_image_starts_as_this_program_does() -> None:
    text = (FOLDER / "Containerfile").read_text()
    lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    command = yaml.safe_load(lines["CMD"])
    assert build_parser().parse_args(command).host == "0.0.0.0"
    assert lines["USER"].partition(":")[0].isdigit()  # Kubernetes' runAsNonRoot needs a numeric user
