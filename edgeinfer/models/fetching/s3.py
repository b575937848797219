"""Turn objects of S3 and Google Cloud Storage into signed addresses, with botocore.

Credentials, region and endpoint come from where S3 tools look for them: environment, profile, instance.
Without credentials, requests are anonymous. For gs://, Google's S3-compatible endpoint is used.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgeinfer.errors import DownloadError, SourceNotFoundError, UsageError
from edgeinfer.models import names
from edgeinfer.models.converting.checkpoint_files import checkpoint_files
from edgeinfer.models.fetching.download import Remote
from edgeinfer.models.fetching.http_client import status_error
from edgeinfer.models.sources import StoredObject

_GOOGLE = "https://storage.googleapis.com"
#: How long (s) a signed address is valid: the longest that S3 allows, a week.
_SIGNED_S = 7 * 24 * 3600
_LOGIN = "check AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_ENDPOINT_URL, and who may read the object"


def resolve(source: StoredObject) -> list[Remote]:
    """Return the files of an object, a split model or a checkpoint's folder, with signed addresses.

    Raises UsageError without botocore, AuthenticationError, SourceNotFoundError, DownloadError.
    """
    if importlib.util.find_spec("botocore") is None:
        hint = "`pip install 'edgeinfer[s3]'`, or give a signed https: address"
        raise UsageError(f"{source} needs botocore, which is not installed", hint=hint)
    with _botocore_errors(source):
        client = _client(source, "")
        return [_remote(source, client, *pair) for pair in _keys(source, client)]


def _keys(source: StoredObject, client: Any) -> list[tuple[str, str]]:
    if not source.key.endswith("/"):
        name = names.sanitize_file_name(source.key)
        siblings = names.split_names(name) or [name]
        return [(source.key.replace(name, sibling), sibling) for sibling in siblings]
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=source.bucket, Prefix=source.key)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    files = checkpoint_files([key.removeprefix(source.key) for key in keys])
    if not files:
        problem = f"{source} has no config.json with safetensors next to it"
        raise SourceNotFoundError(problem, hint="give the complete key of a GGUF file")
    return [(source.key + path, names.check_file_name(path)) for path in files]


def _client(source: StoredObject, region: str) -> Any:
    import botocore.session  # slow import: 110 ms
    from botocore import UNSIGNED
    from botocore.config import Config

    session = botocore.session.get_session()
    google = source.scheme == "gs"
    config = Config(connect_timeout=15, read_timeout=30, signature_version="s3v4")
    if session.get_credentials() is None:
        config = config.merge(Config(signature_version=UNSIGNED))
    usual = "auto" if google else session.get_config_variable("region") or "us-east-1"
    return session.create_client(
        "s3", region_name=region or usual, endpoint_url=_GOOGLE if google else None, config=config
    )


def _remote(source: StoredObject, client: Any, key: str, file_name: str) -> Remote:
    about = {"Bucket": source.bucket, "Key": key}
    digests = {} if source.scheme == "gs" else {"ChecksumMode": "ENABLED"}
    head = client.head_object(**about, **digests)
    home = head["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
    if home and home != client.meta.region_name:
        client = _client(source, home)  # a signature is valid only in the bucket's region
    return Remote(
        url=client.generate_presigned_url("get_object", Params=about, ExpiresIn=_SIGNED_S),
        file_name=file_name,
        origin=f"{source.scheme}://{source.bucket}/{key}",
        size_bytes=head["ContentLength"],
        sha256=_sha256(head),
        login=_LOGIN,
    )


def _sha256(head: dict[str, Any]) -> str:
    """Return an object's SHA-256 (hex), "" if the store has none, or only one for each part."""
    digest = head.get("ChecksumSHA256", "")
    if not digest or "-" in digest or head.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return ""
    return base64.b64decode(digest).hex()


@contextmanager
def _botocore_errors(source: StoredObject) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError  # an optional dependency

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        response = getattr(error, "response", None) or {}
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if "Credentials" in type(error).__name__:
            status = 401
        if not status:
            raise DownloadError(f"{source}: {error}") from error
        raise status_error(f"{source}: {error}", "store", status, _LOGIN) from error
