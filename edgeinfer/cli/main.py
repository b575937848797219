"""Parse the command line, run a verb, and print the result of the verb.

stdout is for data, stderr for everything else. Only this module prints results and errors.
"""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence

import msgspec

from edgeinfer import error_text
from edgeinfer.cli.parser import (
    LINUX_ONLY,
    VERBS,
    build_parser,
    module_of,
    nearest,
    refuse_unknown,
    wants_json,
)
from edgeinfer.cli.result import Result, TimedResult, envelope, error_envelope
from edgeinfer.config.config_file import append_config_key
from edgeinfer.errors import (
    CatalogError,
    DiskFullError,
    EdgeInferError,
    SnapshotsUnavailableError,
    UsageError,
)
from edgeinfer.host import EngineHost
from edgeinfer.launcher.argv import with_verb
from edgeinfer.platform import paths
from edgeinfer.platform.early_ctrl_c import raise_on_ctrl_c
from edgeinfer.safe_text import without_controls

#: Verb of another program → the verb of edgeinfer that the error message suggests.
_OTHER_NAMES = {
    "models": "list",
    "ls": "list",
    "info": "show MODEL",
    "convert": "pull FOLDER --name NAME",
    "create": "pull FILE --name NAME",
    "import": "pull FILE --name NAME",
    "download": "pull MODEL",
    "delete": "rm MODEL",
    "remove": "rm MODEL",
    "generate": 'run "PROMPT"',
}
_CONVERSATIONS = ("sessions", "session", "conversations", "history", "chats")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None, host: EngineHost | None = None) -> int:
    """Run a command line; return its exit status. `--help` and `--version` raise SystemExit."""
    typed = with_verb(list(sys.argv[1:] if argv is None else argv))
    as_json = wants_json(typed)
    host = host or EngineHost()
    try:
        if typed[0] == "help":
            typed = [*typed[1:], "--help"]
        _refuse_unknown_verb(typed)
        parser = build_parser(typed[0])
        options, unknown = parser.parse_known_args(typed)
        refuse_unknown(parser, options, unknown)
        as_json = options.json
        result = _run(options, host)
        _print_result(result, as_json=as_json)
        return result.exit_code
    except EdgeInferError as error:
        append_config_key(error, typed)
        _print_error(error, as_json=as_json)
        return error_text.exit_code(error)
    except BrokenPipeError:
        # the program that reads stdout has ended
        _drop_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  a traceback is shown only on request
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            target = error.filename or "the output"
            failure: EdgeInferError = DiskFullError(f"cannot write {target}: {error.strerror}")
        elif isinstance(error, PermissionError) and error.filename:
            problem = f"{error.filename}: {error.strerror}"
            failure = UsageError(problem, hint=paths.DENIED_HINT)
        else:
            _print_unexpected(error, as_json=as_json)
            return 70
        _print_error(failure, as_json=as_json)
        if isinstance(failure, DiskFullError):
            _drop_output()
        return error_text.exit_code(failure)


def _refuse_unknown_verb(typed: Sequence[str]) -> None:
    """Raise UsageError if the first word is not a verb; the hint suggests a similar verb."""
    word = typed[0]
    if word.startswith("-") or word in VERBS:
        return
    if word in _CONVERSATIONS:
        hint = "the chat lists conversations: `edgeinfer chat`, then F3"
        raise UsageError(f"{word!r} is not a verb", hint=hint)
    if " " in word:
        suggestion = shlex.join(["edgeinfer", "run", word])
    elif word in _OTHER_NAMES:
        suggestion = f"edgeinfer {_OTHER_NAMES[word]}"
    elif near := nearest(word, list(VERBS)):
        suggestion = f"edgeinfer {near}"
    elif _is_model(word):
        suggestion = f"edgeinfer chat {word}"
    elif len(positionals := [each for each in typed if not each.startswith("-")]) > 1:
        suggestion = shlex.join(["edgeinfer", "run", " ".join(positionals)])
    else:
        raise UsageError(f"{word!r} is not a verb", hint="`edgeinfer --help` lists the verbs")
    raise UsageError(f"{word!r} is not a verb", hint=f"did you mean `{suggestion}`?")


def _is_model(word: str) -> bool:
    from edgeinfer.models.reference import find  # slow import (30 ms), needed only after a mistake

    try:
        return find(word) is not None
    except CatalogError:  # there is a model of this name, with an unreadable record
        return True


def _run(options: argparse.Namespace, host: EngineHost) -> Result:
    if options.verb in LINUX_ONLY and sys.platform != "linux":
        problem = f"`{options.verb}` needs Linux; on other systems every launch is a cold start"
        raise SnapshotsUnavailableError(problem, hint="")
    verb = module_of(options.verb)
    # Ctrl-C raises an exception. Only `doctor` ends at once, because its callbacks from llama.cpp would
    # drop the exception
    if options.verb != "doctor":
        raise_on_ctrl_c()
    start_s = time.monotonic()
    result: Result = verb.run(options, host)
    if isinstance(result, TimedResult):
        return msgspec.structs.replace(result, wall_s=round(time.monotonic() - start_s, 3))
    return result


def _print_result(result: Result, *, as_json: bool) -> None:
    text = envelope(result).decode() if as_json else result.human()
    if sys.stdout.isatty():
        text = without_controls(text)  # a name or file in the text may have control characters
    if text:
        print(text, flush=True)  # noqa: T201


def _drop_output() -> None:
    """Replace stdout by /dev/null, so that Python can flush it at exit without an error."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _print_error(error: EdgeInferError, *, as_json: bool) -> None:
    if os.environ.get("EDGEINFER_DEBUG") == "1":
        traceback.print_exception(error)
    if as_json:
        try:
            print(error_envelope(error).decode(), flush=True)  # noqa: T201
            return
        except OSError:
            _drop_output()
    print(error_text.describe_error(error), file=sys.stderr, flush=True)  # noqa: T201


def _print_unexpected(error: Exception, *, as_json: bool) -> None:
    hint = "run it again with EDGEINFER_DEBUG=1 to get a traceback, and report it"
    wrapped = EdgeInferError(f"unexpected {type(error).__name__}: {error}", hint=hint)
    wrapped.__cause__ = error
    _print_error(wrapped, as_json=as_json)
