"""Find the files of a Hugging Face repository, with sizes, SHA-256 and addresses.

huggingface_hub handles endpoint, tokens and gated repositories. The caller has checked offline mode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.errors import AuthenticationError, DownloadError, OfflineError, SourceNotFoundError
from edgeinfer.models import names
from edgeinfer.models.converting.checkpoint_files import checkpoint_files
from edgeinfer.models.fetching.download import Remote
from edgeinfer.models.fetching.http_client import status_error, without_errno
from edgeinfer.models.projectors import is_projector
from edgeinfer.models.sources import HubFile, HubQuant

_TIMEOUT_S = 15.0


def resolve(source: HubFile | HubQuant) -> list[Remote]:
    """Return the files of `source` at the current commit, and the repository's smallest projector.

    Raises AuthenticationError, SourceNotFoundError, DownloadError.
    """
    from huggingface_hub import HfApi, get_token  # slow import: 130 ms

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    token = os.environ.get("HF_TOKEN") or get_token()
    api = HfApi(endpoint=endpoint, token=token or False, library_name="edgeinfer")
    query = {"revision": source.revision, "files_metadata": True, "timeout": _TIMEOUT_S}
    with _hub_errors(source):
        info = api.model_info(source.repo, **query)
    listed = {file.rfilename: file for file in info.siblings or []}
    chosen = _choose_files(source, list(listed))
    commit = info.sha or source.revision
    remotes = [_remote(source, listed[path], commit, api) for path in chosen]
    encoders = [_remote(source, file, commit, api) for file in _projectors(chosen, listed)]
    return remotes + [msgspec.structs.replace(encoder, is_projector=True) for encoder in encoders]


def _projectors(chosen: list[str], listed: dict[str, Any]) -> list[Any]:
    """Return a list with the smallest projector of a repository; [] if no chosen file is a model."""
    if not _ggufs(chosen) or is_projector(chosen[0]):
        return []
    projectors = [file for path, file in listed.items() if is_projector(path)]
    return sorted(projectors, key=lambda file: (file.size or 0, file.rfilename))[:1]


def _choose_files(source: HubFile | HubQuant, paths: list[str]) -> list[str]:
    if isinstance(source, HubFile):
        if source.path not in paths:
            hint = _offer(_ggufs(paths)[:8])
            raise SourceNotFoundError(f"{source.repo} has no file {source.path}", hint=hint)
        return _whole_split(source.path, paths, source.repo)
    candidates = [path for path in paths if names.quantization_of(path) == source.quant]
    if not candidates and not _ggufs(paths) and (files := checkpoint_files(paths)):
        return files
    if not candidates:
        types = sorted({q for path in paths if (q := names.quantization_of(path))})
        raise SourceNotFoundError(f"{source.repo} has no GGUF in {source.quant}", hint=_offer(types))
    best = min(candidates, key=lambda path: (path.count("/"), len(path), path))
    return _whole_split(best, paths, source.repo)


def _whole_split(path: str, paths: list[str], repo: str) -> list[str]:
    parts = [str(name) for name in names.split_parts(Path(path))]
    missing = [name for name in parts if name not in paths]
    if missing:
        n_here = len(parts) - len(missing)
        problem = f"{repo} has only {n_here} of the {len(parts)} parts of {path}"
        raise SourceNotFoundError(problem, hint="name another file, or another repository")
    return parts


def _ggufs(paths: list[str]) -> list[str]:
    return [path for path in paths if path.lower().endswith(".gguf")]


def _offer(ggufs: list[str]) -> str:
    return f"the repository has {', '.join(ggufs) or 'no GGUF at all'}"


def _remote(source: HubFile | HubQuant, file: Any, commit: str, api: Any) -> Remote:
    from huggingface_hub import hf_hub_url  # already imported by `resolve`

    return Remote(
        url=hf_hub_url(source.repo, file.rfilename, revision=commit, endpoint=api.endpoint),
        file_name=names.check_file_name(file.rfilename),
        origin=f"hf:{source.repo}/{file.rfilename}",
        size_bytes=file.size or 0,
        sha256=file.lfs.sha256 if file.lfs else "",
        headers={"Authorization": f"Bearer {api.token}"} if api.token else {},
        login=_gate(source),
    )


def _gate(source: HubFile | HubQuant) -> str:
    page = f"https://huggingface.co/{source.repo}"
    return f"accept the licence on {page}, then set HF_TOKEN and pull again"


@contextmanager
def _hub_errors(source: HubFile | HubQuant) -> Iterator[None]:
    import httpx2  # already imported by huggingface_hub
    from huggingface_hub import errors as hf

    page = f"https://huggingface.co/{source.repo}"
    try:
        yield
    except hf.GatedRepoError as error:
        raise AuthenticationError(f"{source}: the repository is gated", hint=_gate(source)) from error
    except hf.OfflineModeIsEnabled as error:
        raise OfflineError(f"{source}: Hugging Face's offline mode is on") from error
    except hf.HfHubHTTPError as error:
        check = f"check that there is {page}; if it is private, set HF_TOKEN and pull again"
        raise status_error(str(source), "hub", error.response.status_code, check) from error
    except hf.HFValidationError as error:
        raise SourceNotFoundError(f"{source}: {error}") from error
    except (httpx2.HTTPError, OSError) as error:
        reason = without_errno(str(error)) or type(error).__name__
        raise DownloadError(f"{source}: Hugging Face cannot be reached: {reason}") from error
