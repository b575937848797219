"""Stores of other programs in the home folder, in their own layouts, and records of their content."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from fake_hub import sha


def parts(*contents: bytes) -> Iterator[tuple[str, bytes]]:
    """Name the files of a model, one or several."""
    for number, content in enumerate(contents, 1):
        suffix = f"-{number:05}-of-{len(contents):05}" if len(contents) > 1 else ""
        yield f"tiny-F32{suffix}.gguf", content


class OllamaStore:
    """`~/.ollama/models`, with the model `tiny:1b`."""

    name = "ollama/tiny:1b"
    program = "Ollama"

    def __init__(self, content: bytes, **layers: str | dict[str, object]) -> None:
        self.root = Path.home() / ".ollama/models"
        self.file = self.link = self.blob(content)
        self.layers = [("model", content)]
        for kind, layer in layers.items():
            text = layer if isinstance(layer, str) else json.dumps(layer)
            self.layers.append((kind, text.encode()))
            self.blob(text.encode())
        self.manifest = self.root / "manifests/registry.ollama.ai/library/tiny/1b"
        self.write_manifest()

    def blob(self, content: bytes) -> Path:
        path = self.root / f"blobs/sha256-{sha(content)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def write_manifest(self, path: Path | None = None, **of_model: object) -> Path:
        layers: list[dict[str, object]] = []
        for kind, content in self.layers:
            media_type = f"application/vnd.ollama.image.{kind}"
            digest = f"sha256:{sha(content)}"
            layers.append({"mediaType": media_type, "digest": digest, "size": len(content)})
        layers[0] |= of_model
        path = path or self.manifest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return path

    def replace(self, content: bytes) -> None:
        """Replace the model's file by other bytes under their digest, as a new pull does."""
        self.layers[0] = ("model", content)
        self.file = self.link = self.blob(content)
        self.write_manifest()


class HubCache:
    """`~/.cache/huggingface/hub`, with one quantization of `someone/Tiny-GGUF`."""

    name = "hf:someone/Tiny-GGUF:F32"
    program = "Hugging Face"
    revision = "a" * 40

    def __init__(self, content: bytes, *more: bytes) -> None:
        self.root = Path.home() / ".cache/huggingface/hub"
        self.repo = self.root / "models--someone--Tiny-GGUF"
        self.snapshot = self.repo / "snapshots" / self.revision
        (self.repo / "refs").mkdir(parents=True)
        (self.repo / "refs/main").write_text(self.revision)
        for name, part_of_file in parts(content, *more):
            self.add(name, part_of_file)
        self.link = min(self.snapshot.iterdir())
        self.file = self.link.resolve()

    def add(self, name: str, content: bytes, revision: str = "") -> Path:
        blob = self.repo / "blobs" / sha(content)
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        link = self.repo / "snapshots" / (revision or self.revision) / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def replace(self, content: bytes) -> None:
        self.file.unlink()
        self.link.unlink()
        self.link = self.add(self.link.name, content)
        self.file = self.link.resolve()


class StudioFolder:
    """`~/.lmstudio/models`, with one quantization of `someone/Tiny-GGUF`."""

    name = "lmstudio/someone/Tiny-GGUF:F32"
    program = "LM Studio"

    def __init__(self, content: bytes, *more: bytes) -> None:
        self.root = Path.home() / ".lmstudio/models"
        self.repo = self.root / "someone/Tiny-GGUF"
        self.repo.mkdir(parents=True)
        for name, part_of_file in parts(content, *more):
            (self.repo / name).write_bytes(part_of_file)
        self.file = self.link = min(self.repo.iterdir())

    def replace(self, content: bytes) -> None:
        self.file.write_bytes(content)


AnyStore = OllamaStore | HubCache | StudioFolder
STORES = (OllamaStore, HubCache, StudioFolder)


def picture(root: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a write to a tree would change: content, modes, links and times except access."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        info = path.lstat()
        content = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and os.access(path, os.R_OK):
            content = sha(path.read_bytes())
        times = info.st_mtime_ns, info.st_ctime_ns
        seen[str(path)] = (info.st_ino, info.st_mode, info.st_nlink, info.st_size, times, content)
    return seen
