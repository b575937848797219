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

libc = ctypes.CDLL(None, use_errno=True)
NEWNS = 0x00020000
NEWUSER = 0x10000000
NEWNET = 0x40000000
RDONLY = 1
REMOUNT = 32
BIND = 4096
REC = 16384
PRIVATE = 1 << 18
NOSUID_NODEV_NOEXEC = 2 | 4 | 8
PIVOT_ROOT = 41 if os.uname().machine == "aarch64" else 155


def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}{args}: {os.strerror(code)}")


def mount(source, target, kind=None, flags=0, data=None):
    encoded = [os.fsencode(argument) if argument else None for argument in (source, target, kind)]
    call("mount", *encoded, ctypes.c_ulong(flags), os.fsencode(data) if data else None)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def enter(options):
    """Make the root the only one; returns the uid to become, None where the caller has it already."""
    outside, outside_group = os.geteuid(), os.getegid()  # both are nobody's once the namespace is new
    call("unshare", NEWNS | (NEWUSER if outside else 0) | (NEWNET if options.no_network else 0))
    uid = options.uid
    if outside:
        uid = outside
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{outside_group} {outside_group} 1")
    mount("none", "/", None, REC | PRIVATE)
    mount(options.root, options.root, None, BIND | REC)
    for folder in ("proc", "dev"):
        os.makedirs(f"{options.root}/{folder}", exist_ok=True)
        mount(f"/{folder}", f"{options.root}/{folder}", None, BIND | REC)
    for path in options.read_only:
        mount(options.root + path, options.root + path, None, BIND)
        # those stay in a user namespace
        locked = os.statvfs(options.root + path).f_flag & NOSUID_NODEV_NOEXEC
        mount("none", options.root + path, None, BIND | REMOUNT | RDONLY | locked)
    if options.tmpfs:
        path, _, size = options.tmpfs.partition("=")
        data = f"size={size},mode=0700,uid={uid},gid={outside_group or uid}"
        mount("tmpfs", options.root + path, "tmpfs", 0, data)
    os.chdir(options.root)
    call("syscall", PIVOT_ROOT, b".", b".")
    call("umount2", b".", 2)  # MNT_DETACH: the old root lies under the new one
    os.chdir("/")
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
    remaining = sorted(
        os.path.join(d, f) for d, _, files in os.walk(path) for f in files if f != ".lock"
    )
    print(f"first run: {code}, left: {remaining}", file=sys.stderr, flush=True)
    mount("tmpfs", path, "tmpfs", REMOUNT, f"size={size}")


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
