/* The first stage of the shipped file, which runs before PyInstaller's bootloader.
 *
 * If the application in this file is unpacked already, this process starts Python from the unpacked libpython and the
 * launcher's zip, without extraction, a second process or a second exec. Otherwise, and in the processes of a first start,
 * PyInstaller's own main runs: it extracts a small Python that unpacks the application and executes this file again.
 * Measured in docs/decisions/070-first-stage.md.
 *
 * build/assemble.py writes the two fields below into the finished executable (the second one for release.py --model).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#define FIELD 112

/* Name of the application's folder below DATA/app, and of the model in this file ("" for none). */
static volatile const char app_field[FIELD] = "EDGEINFER-APP=";
static volatile const char model_field[FIELD] = "EDGEINFER-MODEL=";

extern char **environ;
int pyinstaller_main(int argc, char **argv); /* PyInstaller's main, renamed when it is compiled */

static const char *field(volatile const char *whole, size_t key)
{
    static char copies[2][FIELD];
    static int used;
    char *copy = copies[used++ % 2];
    memcpy(copy, (const char *)whole, FIELD);
    copy[FIELD - 1] = 0;
    return copy + key;
}

/* Return $HOME, otherwise the folder in the password database, like Python; NULL without either. */
static const char *home_dir(void)
{
    const char *home = getenv("HOME");
    struct passwd *user = home ? NULL : getpwuid(getuid());
    return user ? user->pw_dir : home;
}

/* Write the path that edgeinfer.platform.paths.data_dir() returns to `out`; return 0 if no home is known. */
static int data_dir(char *out, size_t size)
{
    char here[PATH_MAX] = "";
    const char *home = getenv("EDGEINFER_HOME");
    int n;
    if (home && *home) {
        if (*home != '/' && (!getcwd(here, sizeof here - 1) || !strcat(here, "/"))) return 0;
        n = snprintf(out, size, "%s%s/data", here, home);
    } else if ((home = getenv("XDG_DATA_HOME")) && *home == '/') {
        n = snprintf(out, size, "%s/edgeinfer", home);
    } else if ((home = home_dir()) && (*home == '/' || !*home)) {
        n = snprintf(out, size, "%s/.local/share/edgeinfer", home);
    } else {
        return 0;
    }
    return n > 0 && (size_t)n < size;
}

/* Write the unpacked application's path to `app`; return 1 if it exists, is this user's, and only this user can change it. */
static int find_app(const char *data, char *app, size_t size)
{
    char marker[PATH_MAX];
    const char *name = field(app_field, sizeof "EDGEINFER-APP=" - 1);
    const char *model = field(model_field, sizeof "EDGEINFER-MODEL=" - 1);
    struct stat info;
    if ((size_t)snprintf(app, size, "%s/app/%s", data, name) >= size) return 0;
    if (lstat(app, &info) || !S_ISDIR(info.st_mode)) return 0;
    if (info.st_uid != geteuid() || (info.st_mode & 022)) return 0;
    if (!*model) return 1;
    if ((size_t)snprintf(marker, sizeof marker, "%s/app/%s.model", data, model) >= sizeof marker) return 0;
    return access(marker, F_OK) == 0;
}

static void *python; /* libpython's handle */

static void *symbol(const char *name)
{
    void *found = dlsym(python, name);
    if (!found) {
        fprintf(stderr, "error: the unpacked Python has no %s\n", name);
        exit(70);
    }
    return found;
}

static void set_flag(const char *name) { *(int *)symbol(name) = 1; }

static void set_text(const char *name, const char *value)
{
    void *(*decode)(const char *) = (void *(*)(const char *))symbol("PyUnicode_DecodeFSDefault");
    int (*set)(const char *, void *) = (int (*)(const char *, void *))symbol("PySys_SetObject");
    set(name, decode(value));
}

static void set_arguments(int argc, char **argv)
{
    void *(*decode)(const char *) = (void *(*)(const char *))symbol("PyUnicode_DecodeFSDefault");
    void *(*list)(ssize_t) = (void *(*)(ssize_t))symbol("PyList_New");
    int (*put)(void *, ssize_t, void *) = (int (*)(void *, ssize_t, void *))symbol("PyList_SetItem");
    int (*set)(const char *, void *) = (int (*)(const char *, void *))symbol("PySys_SetObject");
    void *all = list(argc);
    for (int i = 0; i < argc; i++) put(all, i, decode(argv[i]));
    set("argv", all);
}

/* Set sys.path: the launcher's zip, then the folder of extension modules. Return 0 if `app` is not valid UTF-8. */
static int set_path(const char *app)
{
    wchar_t *(*decode)(const char *, size_t *) = (wchar_t * (*)(const char *, size_t *)) symbol("Py_DecodeLocale");
    char bytes[2 * PATH_MAX];
    snprintf(bytes, sizeof bytes, "%s/launcher.zip:%s/_internal/python3.11/lib-dynload", app, app);
    wchar_t *wide = decode(bytes, NULL); /* from UTF-8 in any locale, because Py_UTF8Mode is set */
    for (const wchar_t *at = wide; *at; at++)
        if (*at >= 0xdc80 && *at <= 0xdcff) return 0; /* an escaped byte that is not valid UTF-8 */
    ((void (*)(const wchar_t *))symbol("Py_SetPath"))(wide);
    return 1;
}

/* Run the launcher in isolated UTF-8 mode: no site, no PYTHON variables, no user directory. Returns only after an error. */
static int run(const char *app, const char *file, int argc, char **argv)
{
    static const char *flags[] = {"Py_IsolatedFlag", "Py_NoSiteFlag", "Py_IgnoreEnvironmentFlag", "Py_NoUserSiteDirectory",
                                  "Py_DontWriteBytecodeFlag", "Py_FrozenFlag", "Py_UTF8Mode"};
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/_internal/libpython3.11.so.1.0", app);
    python = dlopen(path, RTLD_LAZY | RTLD_GLOBAL); /* global, because extension modules use libpython's symbols */
    if (!python) {
        fprintf(stderr, "error: the unpacked application is damaged: %s\n\nhint: remove %s and start again\n", dlerror(), app);
        return 70;
    }
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) set_flag(flags[i]);
    if (!set_path(app)) {
        fprintf(stderr, "error: %s is not valid UTF-8\n\nhint: set EDGEINFER_HOME to a folder with a valid name\n", app);
        return 70;
    }
    ((void (*)(int))symbol("Py_InitializeEx"))(1);
    set_arguments(argc, argv);
    set_text("_edgeinfer_app", app);
    set_text("_edgeinfer_file", file);
    set_text("_edgeinfer_model", field(model_field, sizeof "EDGEINFER-MODEL=" - 1));
    return ((int (*)(const char *))symbol("PyRun_SimpleString"))(
        "import sys, edgeinfer.shipping.shipped\n"
        "edgeinfer.shipping.shipped.start()\n"
        "from edgeinfer.launcher import main\n"
        "sys.exit(main())") ? 70 : 0;
}

/* Unset the variables of another PyInstaller program that started this one: the launcher must not inherit them. */
static void forget_outer(void)
{
    static const char *names[] = {"_PYI_ARCHIVE_FILE", "_PYI_APPLICATION_HOME_DIR", "_PYI_PARENT_PROCESS_LEVEL",
                                  "_PYI_LINUX_PROCESS_NAME"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

int main(int argc, char **argv)
{
    char data[PATH_MAX], app[PATH_MAX], file[PATH_MAX];
    const char *outer = getenv("_PYI_ARCHIVE_FILE");
    ssize_t n = readlink("/proc/self/exe", file, sizeof file - 1);
    if (n <= 0) return pyinstaller_main(argc, argv); /* without /proc, PyInstaller reports the error */
    file[n] = 0;
    if (outer && !strcmp(outer, file)) return pyinstaller_main(argc, argv); /* the second process of a first start */
    if (!*field(app_field, sizeof "EDGEINFER-APP=" - 1))
        return pyinstaller_main(argc, argv); /* edgeinfer-app, the unpacked executable, which needs no home */
    if (!data_dir(data, sizeof data)) {
        fprintf(stderr, "error: no home directory is known for this user\n\nhint: set HOME, or EDGEINFER_HOME\n");
        return 2;
    }
    if (!find_app(data, app, sizeof app)) {
        if (getenv("EDGEINFER_UNPACKED")) {
            fprintf(stderr, "error: the application was unpacked but is not found at %s\n", app);
            return 70;
        }
        return pyinstaller_main(argc, argv);
    }
    unsetenv("EDGEINFER_UNPACKED");
    forget_outer();
    return run(app, file, argc, argv);
}
