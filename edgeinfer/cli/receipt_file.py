"""The file of `run --receipt FILE`, checked with the command line and written after the answer."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.platform.disk import folder_for, path_errors, write_durably
from edgeinfer.receipts.receipt import Receipt, Refusal, with_record
from edgeinfer.runtime.requests import GenerateRequest

_HINT = "name another file for --receipt"


class ReceiptFile(msgspec.Struct, frozen=True):
    """The file of `run --receipt FILE`.

    With `--private`, FILE is the receipt without prompt and answer; FILE.content is the whole receipt.
    """

    path: Path

    @classmethod
    def parse(cls, text: str) -> ReceiptFile:
        """Return the file with this path. Raises UsageError if a receipt cannot be written there."""
        if text == "-":
            raise UsageError("--receipt needs a file, not -", hint="name a file: `--receipt FILE`")
        file = cls(Path(text))
        folder = folder_for(file.path, _HINT)
        if not file.is_stream and not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"you may not write to the folder {folder}", hint=_HINT)
        return file

    @property
    def is_stream(self) -> bool:
        """Return whether to append: to a device, a FIFO, or an open file such as /dev/stdout."""
        is_open_file = str(self.path.absolute()).startswith(("/dev/std", "/dev/fd/", "/proc/"))
        return is_open_file or (self.path.exists() and not self.path.is_file())

    @property
    def _content_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.content")

    def record(self, request: GenerateRequest, *, is_private: bool) -> GenerateRequest:
        """Return `request` with the option to record the tokens that a receipt needs.

        Raises UsageError if `is_private`, but FILE.content cannot be written.
        """
        if is_private and self.is_stream:
            problem = f"--private writes two files, so {self.path} must be an ordinary file"
            raise UsageError(problem, hint=_HINT)
        if is_private:
            self.parse(str(self._content_path))
        return with_record(request)

    def write(self, receipt: Receipt | Refusal, *, is_private: bool) -> None:
        """Write a receipt, and print the command that checks it. Raises UsageError on failure.

        If there is no receipt, print the reason, and remove the files of an earlier receipt, because
        they do not belong to this answer.
        """
        secret = self._content_path
        if isinstance(receipt, Refusal):
            sys.stderr.write(f"edgeinfer: no receipt: {receipt.refused}\n")
            for path in (self.path, secret) if is_private else (self.path,):
                if path.is_file() and not self.is_stream:
                    with path_errors(path, _HINT):
                        path.unlink()
                    sys.stderr.write(f"edgeinfer: the old {path} was removed\n")
            return
        private = msgspec.structs.replace(receipt, content=None)
        line = msgspec.json.encode(private if is_private else receipt) + b"\n"
        if is_private:  # content first: without it, a private receipt cannot be checked
            with path_errors(secret, _HINT):
                write_durably(secret, msgspec.json.encode(receipt) + b"\n", 0o600)
        with path_errors(self.path, _HINT):
            if self.is_stream:
                with self.path.open("ab") as file:
                    file.write(line)
                return
            write_durably(self.path, line, None if is_private else 0o600)
        content = ["--content", str(secret)] if is_private else []
        command = shlex.join(["edgeinfer", "verify", str(self.path), *content])
        sys.stderr.write(f"edgeinfer: receipt in {self.path}; check it: {command}\n")
