/* Functions newer than glibc 2.31 that libraries in the shipped file call, for machines whose libc lacks them.
 *
 * On a newer libc these functions are not used, because symbols are looked up in libc first. build/floor.py links the
 * libraries with libfloor.so, made from this file; the bootloader contains it. Why: docs/decisions/072-glibc-floor.md.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* --- 2.32: if this is not 0, libstdc++ counts references without atomics; 0 is always correct -------------------------- */
char __libc_single_threaded = 0;

/* --- 2.33: older libcs had these only inline; on x86-64 and arm64, the kernel's struct stat is libc's -------------------- */
int fstatat(int folder, const char *path, void *out, int flags) { return syscall(SYS_newfstatat, folder, path, out, flags); }
int stat(const char *path, void *out) { return fstatat(AT_FDCWD, path, out, 0); }
int lstat(const char *path, void *out) { return fstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int fstat(int file, void *out) { return syscall(SYS_fstat, file, out); }
int fstatat64(int folder, const char *path, void *out, int flags) __attribute__((alias("fstatat")));
int stat64(const char *path, void *out) __attribute__((alias("stat")));
int lstat64(const char *path, void *out) __attribute__((alias("lstat")));
int fstat64(int file, void *out) __attribute__((alias("fstat")));
int mknodat(int folder, const char *path, mode_t mode, dev_t device) { return syscall(SYS_mknodat, folder, path, mode, device); }
int mknod(const char *path, mode_t mode, dev_t device) { return mknodat(AT_FDCWD, path, mode, device); }

/* --- 2.34: a system call; its callers also work on kernels without it ------------------------------------------------ */
int close_range(unsigned first, unsigned last, int flags) { return syscall(436, first, last, flags); }

/* --- 2.35: finds the unwind tables of a code address; a libgcc built with glibc 2.35 has no other way to find them ----------- */
struct search { uintptr_t address; struct dl_find_object *found; };

static int look(struct dl_phdr_info *object, size_t size, void *given)
{
    struct search *search = given;
    uintptr_t start = UINTPTR_MAX, end = 0, frames = 0;
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        uintptr_t at = object->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_GNU_EH_FRAME) frames = at;
        if (part->p_type != PT_LOAD) continue;
        if (at < start) start = at;
        if (at + part->p_memsz > end) end = at + part->p_memsz;
    }
    if (!frames || search->address < start || search->address >= end) return 0;
    search->found->dlfo_flags = 0;
    search->found->dlfo_map_start = (void *)start;
    search->found->dlfo_map_end = (void *)end;
    search->found->dlfo_link_map = NULL;
    search->found->dlfo_eh_frame = (void *)frames;
    return 1;
}

int _dl_find_object(void *address, struct dl_find_object *found)
{
    struct search search = {(uintptr_t)address, found};
    return dl_iterate_phdr(look, &search) ? 0 : -1;
}

/* --- 2.36: random numbers from the kernel ---------------------------------------------------------------------------- */
void arc4random_buf(void *out, size_t length)
{
    for (char *at = out; length > 0;) {
        long got = syscall(SYS_getrandom, at, length, 0);
        if (got <= 0) continue; /* interrupted by a signal */
        at += got;
        length -= got;
    }
}

uint32_t arc4random(void)
{
    uint32_t number;
    arc4random_buf(&number, sizeof number);
    return number;
}
