"""Run a program in another root, as an ordinary user, with nothing there but what the folder holds.

usage: bare.py ROOT [--uid N] [--read-only PATH]... [--tmpfs PATH=SIZE] [--grow PATH=SIZE]
[--no-network] -- PROGRAM ARG...

pivot_root, not chroot: the kernel forbids user namespaces, which resuming needs, in a chrooted process.
Run by root it takes the given uid; run by another user it makes a user namespace with that person's own
uid. With `--grow` the program is run twice: its first exit status and what it left in the folder are
said on stderr, then the tmpfs grows and it is executed again.
"""

import argparse
import ctypes
import os
import sys

from edgeinfer.platform import linux

NEWNET = 0x40000000
REMOUNT = 32
PRIVATE = 1 << 18 | 1 << 14  # with all mounts below


def enter(options):
    """Make the root the only one; returns the uid to become, None where the caller has it already."""
    outside, outside_group = os.geteuid(), os.getegid()  # both are nobody's once the namespace is new
    flags = linux.CLONE_NEWNS | (NEWNET if options.no_network else 0)
    flags |= linux.CLONE_NEWUSER if outside else 0
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    uid = outside or options.uid
    if outside:
        linux.map_this_user(outside, outside_group)
    linux.mount("none", "/", "", PRIVATE)
    linux.bind(options.root, options.root, read_only=False)
    for folder in ("proc", "dev"):
        os.makedirs(f"{options.root}/{folder}", exist_ok=True)
        linux.bind(f"/{folder}", f"{options.root}/{folder}", read_only=False)
    for path in options.read_only:
        linux.bind(options.root + path, options.root + path, read_only=True)
    if options.tmpfs:
        path, _, size = options.tmpfs.partition("=")
        data = f"size={size},mode=0700,uid={uid},gid={outside_group or uid}"
        linux.mount("tmpfs", options.root + path, "tmpfs", 0, data)
    linux.pivot_root(options.root)
    return None if outside else uid


def become(uid):
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def run_and_grow(options, uid):
    pid = os.fork()
    if pid == 0:
        become(uid)
        os.execve(options.program[0], options.program, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    path, _, size = options.grow.partition("=")
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    remaining = sorted(file for file in files if os.path.basename(file) != ".lock")
    print(f"first run: {code}, left: {remaining}", file=sys.stderr, flush=True)
    linux.mount("tmpfs", path, "tmpfs", REMOUNT, f"size={size}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--uid", type=int, default=1000)
    parser.add_argument("--read-only", action="append", default=[])
    parser.add_argument("--tmpfs")
    parser.add_argument("--grow")
    parser.add_argument("--no-network", action="store_true")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    uid = enter(options)
    if options.grow:
        run_and_grow(options, uid)
    become(uid)
    os.execve(options.program[0], options.program, os.environ)


if __name__ == "__main__":
    main()
