// For LD_PRELOAD: a Vulkan loader whose devices fail when a file says so.
//
// FAILING_VULKAN names a file with a word and a number: "create" (vkCreateDevice), "memory"
// (vkAllocateMemory), "submit" (vkQueueSubmit). So many calls pass, all later ones fail; a negative
// number fails so many calls, and later ones pass. Another text begins anew. "hang": vkQueueSubmit waits,
// as long as the file says so, and makes the file FAILING_VULKAN.hangs.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*function)(void);
typedef function (*getter)(void *, const char *);
typedef int (*four)(void *, void *, void *, void *);

typedef int (*waiting)(void *, unsigned long, void *, unsigned long, unsigned long);

static const char *const wait_names[] = {"vkWaitForFences", "vkGetFenceStatus", "vkWaitSemaphores", "vkQueueWaitIdle", "vkDeviceWaitIdle"};
static waiting waits[5];
static int (*wait_idle)(void *);
static int is_lost;  // the last submission failed: who waits hears of it, as with a real device
static four create, allocate, submit;
static getter instance_getter, device_getter;

static int fails(const char *what) {
    static char before[64];
    static long calls;
    char text[64] = "", word[32] = "";
    long n = 0;
    FILE *file = fopen(getenv("FAILING_VULKAN"), "r");
    if (!file) return 0;
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
    if (strcmp(text, before)) { strcpy(before, text); calls = 0; }
    if (sscanf(text, "%31s %ld", word, &n) != 2 || strcmp(word, what)) return 0;
    calls++;
    return n < 0 ? calls <= -n : calls > n;
}

static int my_create(void *a, void *b, void *c, void *d) { return fails("create") ? -3 : create(a, b, c, d); }
static int my_allocate(void *a, void *b, void *c, void *d) { return fails("memory") ? -2 : allocate(a, b, c, d); }
static void hang(void) {
    char path[4096];
    if (!fails("hang")) return;
    snprintf(path, sizeof path, "%s.hangs", getenv("FAILING_VULKAN"));
    fclose(fopen(path, "w"));
    while (fails("hang")) usleep(1000);
}

static int my_submit(void *queue, unsigned b, void *c, void *d) {
    hang();
    is_lost = fails("submit");
    if (is_lost && wait_idle) wait_idle(queue);  // a lost device computes nothing, so its memory can be freed
    return is_lost ? -4 : ((int (*)(void *, unsigned, void *, void *))submit)(queue, b, c, d);
}

#define WAIT(n) static int my_wait_##n(void *a, unsigned long b, void *c, unsigned long d, unsigned long e) { \
    return is_lost ? -4 : waits[n](a, b, c, d, e); }
WAIT(0) WAIT(1) WAIT(2) WAIT(3) WAIT(4)
static const waiting my_waits[] = {my_wait_0, my_wait_1, my_wait_2, my_wait_3, my_wait_4};

static function hooked(const char *name, function real);

static function my_device_getter(void *device, const char *name) {
    wait_idle = (int (*)(void *))device_getter(device, "vkQueueWaitIdle");
    return hooked(name, device_getter(device, name));
}

static function hooked(const char *name, function real) {
    if (!real) return real;
    if (!strcmp(name, "vkCreateDevice")) { create = (four)real; return (function)my_create; }
    if (!strcmp(name, "vkAllocateMemory")) { allocate = (four)real; return (function)my_allocate; }
    if (!strcmp(name, "vkQueueSubmit")) { submit = (four)real; return (function)my_submit; }
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, wait_names[i])) { waits[i] = (waiting)real; return (function)my_waits[i]; }
    if (!strcmp(name, "vkGetDeviceProcAddr")) { device_getter = (getter)real; return (function)my_device_getter; }
    return real;
}

function vkGetInstanceProcAddr(void *instance, const char *name) {
    if (!instance_getter) {
        void *loader = dlopen("libvulkan.so.1", RTLD_NOW);
        instance_getter = (getter)dlsym(loader, "vkGetInstanceProcAddr");
    }
    if (!strcmp(name, "vkGetInstanceProcAddr")) return (function)vkGetInstanceProcAddr;
    return hooked(name, instance_getter(instance, name));
}
