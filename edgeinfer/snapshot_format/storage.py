"""The format of stored snapshots: names, files, manifest and its version. Standard library only.

    SNAPSHOTS/                          0700, this user's
      NAME@GENERATION-PROGRAM/          0700. GENERATION is the time of the build (hexadecimal), PROGRAM
                                        the installation (`fingerprint.program_tag`). If a NAME has
                                        several builds, the newest is used
        lock                            locked while the snapshot is built; its mtime is the last use
        manifest                        conditions checked before CRIU runs; written last, by a rename
        snapshot.json                   details for `snapshots show`; the launcher never reads it
        memory.img                      the parked process's private memory, mapped copy-on-write
        images/                         CRIU's images of everything else

A folder without a manifest belongs to a build that runs (its lock is held) or was killed.

The manifest has a line per value, with tabs between words: parsing JSON would take too long for a
launch of 40 ms. The first line has format and version, the last is "end". A backslash, tab or newline
in a word is escaped. The text is UTF-8; undecodable bytes are kept.
"""

from __future__ import annotations

import os

from edgeinfer.errors import SnapshotCorruptError, SnapshotStaleError, SnapshotUnsafeError, UsageError
from edgeinfer.platform import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MAGIC = "edgeinfer-snapshot"
#: Version of the manifest's format. Snapshots of edgeinfer 0.2.0 have the same number, although their
#: names differ (`m,ctx8192`). They are refused because the program's files have changed since.
VERSION = 4

LOCK = "lock"
MANIFEST = "manifest"
DETAILS = "snapshot.json"
MEMORY = "memory.img"
IMAGES = "images"
DUMP_LOG = "dump.log"
PARK_LOG = "park.log"
SEPARATOR = "@"
PROGRAM_SEPARATOR = "-"
OPTION_SEPARATOR = ","
#: Separates an option from its value, as in `ctx=8192`. User-given names cannot contain this character,
#: so they do not look like options.
_VALUE_SEPARATOR = "="

#: Key in `Manifest.keys` of the pulled model's quantization, for example "Q4_K_M".
QUANTIZATION = "quantization"

#: Pid of the parked process in its pid namespace: too high to collide with CRIU's processes there.
PARKED_PID = 30000
#: Descriptors of the parked process: the socket to the builder, and the pipe that wakes the process.
LINK_FD, WAKE_FD = 60, 61


class Manifest:
    """The conditions for resuming a snapshot, and the parameters of a restore.

    `requested` are the load options given to the build, `actual` the values that the load chose. `keys`
    contains the `fingerprint.machine_keys` of the build. `files` maps the absolute path of each file
    that the process has mapped or read to size, mtime and inode (`fingerprint.stamp`); `images` maps
    the names of the snapshot's own files to sizes (bytes).
    """

    def __init__(
        self, *, name: str, model: str, criu: str, tier: str, pid: int, link_inode: int, wake_inode: int
    ) -> None:
        self.name, self.model = name, model
        self.criu, self.tier = criu, tier
        self.pid = pid
        self.link_inode, self.wake_inode = link_inode, wake_inode
        self.requested: dict[str, str] = {}
        self.actual: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.images: dict[str, int] = {}


def _escape(word: str) -> str:
    return word.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")


def _unescape(word: str) -> str:
    return "\\".join(piece.replace("\\t", "\t").replace("\\n", "\n") for piece in word.split("\\\\"))


def manifest_text(m: Manifest) -> str:
    rows: list[tuple[object, ...]] = [(MAGIC, VERSION)]
    for field, value in vars(m).items():
        if isinstance(value, dict):
            rows += [(field, *item) for item in value.items()]
        else:
            rows.append((field, value))
    return "".join("\t".join(_escape(str(word)) for word in row) + "\n" for row in [*rows, ("end",)])


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse the text of a manifest; `where` is its path, for messages.

    Raises SnapshotStaleError if the format has another version, SnapshotCorruptError if the manifest is
    incomplete or invalid.
    """
    rows = [line.split("\t") for line in text.split("\n")]
    if "\\" in text:
        rows = [[_unescape(word) for word in row] for row in rows]
    if rows[0][0] != MAGIC or rows[-2:] != [["end"], [""]]:
        raise SnapshotCorruptError(f"the snapshot's manifest {where} is incomplete")
    if rows[0][1:] != [str(VERSION)]:
        raise SnapshotStaleError(f"another version of edgeinfer wrote {where}", key="schema")
    try:
        return _from_rows(rows[1:-2])
    except (LookupError, TypeError, ValueError) as error:
        raise SnapshotCorruptError(f"the snapshot's manifest {where} is invalid: {error!r}") from error


def _from_rows(rows: list[list[str]]) -> Manifest:
    texts = {row[0]: row[1] for row in rows if len(row) < 3}
    numbers = {field: int(texts.pop(field)) for field in ("pid", "link_inode", "wake_inode")}
    manifest = Manifest(**texts, **numbers)  # type: ignore[arg-type]
    tables = vars(manifest)
    for field, key, value in (row for row in rows if len(row) > 2):
        tables[field][key] = value
    manifest.images = {name: int(size) for name, size in manifest.images.items()}
    return manifest


def refuse_unsafe_ancestors(path: str) -> None:
    """Raise SnapshotUnsafeError if another user could replace a folder above `path`.

    If a folder is a symbolic link, the folders above the link's target are checked, too. In the user
    namespace of a process restored without root, no user has id 0, so the owner of "/" counts as root.
    """
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    effect = "could make edgeinfer run other code"
    while path.strip("/"):
        path = os.path.dirname(path)
        info, link = os.stat(path), os.lstat(path)
        if not {info.st_uid, link.st_uid} <= trusted:
            problem = f"{path} belongs to another user, who {effect}"
            hint = "set EDGEINFER_HOME to a folder that is, with all folders above it, yours or root's"
            raise SnapshotUnsafeError(problem, hint=hint)
        if info.st_mode & 0o022 and not info.st_mode & 0o1000:
            problem = f"group or other users can write to {path}, so they {effect}"
            raise SnapshotUnsafeError(problem, hint=f"chmod go-w {path}")
        if info.st_ino != link.st_ino or info.st_dev != link.st_dev:
            # the path ends with "/", so the call also checks the link's target itself
            refuse_unsafe_ancestors(os.path.join(os.path.dirname(path), os.readlink(path), ""))


def read_manifest(folder: str) -> Manifest:
    """Read the manifest in a snapshot's folder.

    Raises the errors of `paths.refuse_unsafe` and `parse_manifest`.
    """
    paths.refuse_unsafe(folder, directory=True)
    path = f"{folder}/{MANIFEST}"
    paths.refuse_unsafe(path, directory=False)
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return parse_manifest(file.read(), path)


def safe_name(model: str) -> str:
    """Turn a model's name or path into a file name: `a/b.gguf` → `b.gguf+1f2e3d4c` (with a hash)."""
    plain = model.lower()
    if plain.startswith(paths.EXTERNAL_PREFIXES):  # here, letter case and `:latest` have no meaning
        plain = plain.removesuffix(paths.LATEST) if plain.startswith("ollama/") else plain
        model = f"{plain}+{short_hash(plain)}"
    elif "/" in model or model.endswith(".gguf"):
        path = paths.absolute_path(model)
        model = f"{os.path.basename(path)}+{short_hash(path)}"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._+-") else "+" for c in model)
    return safe.lstrip(".") or "model"


def snapshot_name(model: str, requested: dict[str, str], user_name: str = "") -> str:
    """Return `MODEL`, `MODEL,ctx=8192,…` (options that are not default) or `MODEL,USER_NAME`."""
    suffixes = [_option_part(*item) for item in sorted(requested.items())]
    if user_name:
        suffixes = [safe_name(user_name)]
    return OPTION_SEPARATOR.join([safe_name(model), *suffixes])


def matching_names(names: Collection[str], requested: str, model: str = "") -> list[str]:
    """Return those `names` of snapshots that a user may mean by `requested`.

    That is the equal full name, or the snapshot of `model` with this user-given name. If there is
    neither, the snapshots of all models with this user-given name are returned.
    """
    whole = [name for name in (requested, snapshot_name(model, {}, requested)) if name in names][:1]
    return whole or sorted(name for name in names if name.partition(OPTION_SEPARATOR)[2] == requested)


def refuse_bad_name(user_name: str) -> None:
    """Raise UsageError unless `safe_name` leaves a user-given name as it is."""
    if user_name and safe_name(user_name) != user_name:
        raise UsageError(
            f"{user_name!r} is not a valid snapshot name",
            hint="use letters, digits and ._+-, no dot first and no .gguf last: --name my-snap",
        )


def user_name_of(name: str) -> str:
    """Return the part of a snapshot's name that a user chose (`warm --name`), "" if it was derived.

    A launch resumes a snapshot with a user's name only if `--snapshot` names it.
    """
    suffix = name.partition(OPTION_SEPARATOR)[2]
    return "" if _VALUE_SEPARATOR in suffix else suffix


def _option_part(name: str, value: str) -> str:
    """Return an option's part of a snapshot's name: `ctx=8192`; for paths, file names and a hash."""
    if "/" in value:
        files = "+".join(os.path.basename(path).partition(".gguf")[0] for path in value.split(","))
        value = f"{files}+{short_hash(value)}"
    return f"{name.removeprefix('n_')}{_VALUE_SEPARATOR}{safe_name(value)}"


def model_prefix(model: str) -> str:
    """Return the first part of the names of this model's snapshots, in lower case."""
    return safe_name(model).lower()


def model_prefix_of(name: str) -> str:
    """Return the model's part of a snapshot's name, in lower case."""
    return name.partition(OPTION_SEPARATOR)[0].lower()


def short_hash(text: str) -> str:
    """Return eight hex digits of a text (FNV-1a, which needs no import; it is no security check)."""
    value = 0x811C9DC5
    for byte in os.fsencode(text):
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"


def folder_name(name: str, generation: int, program: str) -> str:
    """Return the name of a new snapshot's folder. `generation` is the time of the build (ns)."""
    return f"{name}{SEPARATOR}{generation:016x}{PROGRAM_SEPARATOR}{program}"


def name_of(folder: str) -> str:
    return os.path.basename(folder).rpartition(SEPARATOR)[0]


def generation_of(folder: str) -> str:
    """Return the time of the build from a folder's name: 16 hex digits (ns)."""
    return folder.rpartition(SEPARATOR)[2].partition(PROGRAM_SEPARATOR)[0]


def program_of(folder: str) -> str:
    """Return the installation's tag from a folder's name: 8 hex digits."""
    return folder.rpartition(SEPARATOR)[2].partition(PROGRAM_SEPARATOR)[2]


def generations(root: str | None = None, program: str = "") -> dict[str, list[str]]:
    """Return snapshot name → folders of its complete builds, the newest first.

    `root` is by default `paths.snapshots_path`. A `program` (`fingerprint.program_tag`) leaves out the
    builds of other installations.
    """
    root = root or paths.snapshots_path()
    by_name: dict[str, list[str]] = {}
    for folder in sorted(_folders(root), key=generation_of, reverse=True):
        if program in ("", program_of(folder)) and os.path.lexists(f"{root}/{folder}/{MANIFEST}"):
            by_name.setdefault(name_of(folder), []).append(f"{root}/{folder}")
    return by_name


def _folders(root: str) -> Iterator[str]:
    try:
        names = os.listdir(root)
    except OSError:
        return
    yield from (name for name in names if SEPARATOR in name and not name.startswith("."))
