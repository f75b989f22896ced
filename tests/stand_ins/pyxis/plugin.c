/* A stand-in for NVIDIA's Pyxis on a local cluster: a plugin of srun with those of its options that the kit uses.

   An "image" is a text file with paths of this machine, a line each. A task sees these, what --container-mounts names,
   /dev, /proc, /sys and an empty /tmp, and nothing else. The plugin's argument is the image of every registry.
   Declared here is what <slurm/spank.h> declares, which test machines lack. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct spank_handle *spank_t;
struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, val;
    int (*cb)(int, const char *, int);
};
extern int spank_option_register(spank_t, struct spank_option *);
extern int spank_remote(spank_t);
extern void slurm_error(const char *, ...);

const char plugin_name[] = "pyxis", plugin_type[] = "spank";
const unsigned int plugin_version = SLURM_VERSION_NUMBER, spank_plugin_version = 1;

enum { IMAGE, MOUNTS, WORKDIR, SAVE, ENV, GIVEN };
static char *given[GIVEN];
static const char *registry = "", *root = "/mnt";

static int note(int option, const char *argument, int remote) {
    (void)remote;
    if (option < GIVEN) given[option] = strdup(argument);
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    static char *names[] = {"container-image", "container-mounts", "container-workdir", "container-save",
                            "container-env", "no-container-mount-home", "no-container-remap-root",
                            "no-container-entrypoint", "container-writable"};
    if (count) registry = strdup(arguments[0]);
    for (int number = 0; number < 9; number++) {
        struct spank_option option = {names[number], number < GIVEN ? "VALUE" : NULL, "[stand-in]",
                                      number < GIVEN, number, note};
        spank_option_register(spank, &option);
    }
    return 0;
}

static int fail(const char *what, const char *path) {
    slurm_error("pyxis: stand-in: %s %s: %s", what, path, strerror(errno));
    return -1;
}

/* Make a path below the root, as a directory or, for a file, as an empty file. */
static void make(const char *path, int directory) {
    char partial[PATH_MAX];
    for (const char *slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(partial, sizeof partial, "%.*s", (int)(slash - path), path);
        mkdir(partial, 0755);
    }
    if (directory) mkdir(path, 0755);
    else close(open(path, O_CREAT, 0644));
}

static int show(const char *source, const char *target) {
    char inside[PATH_MAX], link[PATH_MAX] = "";
    struct stat found;
    snprintf(inside, sizeof inside, "%s%s", root, target);
    if (lstat(source, &found)) return fail("no", source);
    if (S_ISLNK(found.st_mode) && readlink(source, link, sizeof link - 1) > 0 && link[0] != '/')
        return symlink(link, inside) && errno != EEXIST ? fail("link", inside) : 0;
    if (stat(source, &found)) return fail("no", source);
    make(inside, S_ISDIR(found.st_mode));
    return mount(source, inside, NULL, MS_BIND | MS_REC, NULL) ? fail("mount", source) : 0;
}

static int show_listed(const char *file) {
    char line[PATH_MAX];
    FILE *image = fopen(file, "r"), *saved = given[SAVE] ? fopen(given[SAVE], "w") : NULL;
    if (!image) return fail("cannot read", file);
    while (fgets(line, sizeof line, image)) {
        if (saved) fputs(line, saved);
        line[strcspn(line, "\n")] = 0;
        if (show(line, line)) return -1;
    }
    fclose(image);
    if (saved) fclose(saved);
    return 0;
}

/* Let an ordinary user keep the own id in a namespace. */
static void map(const char *name, const char *format, unsigned id) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/%s", name);
    FILE *file = fopen(path, "w");
    if (file) fprintf(file, format, id, id), fclose(file);
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    static const char *system[] = {"/dev", "/proc", "/sys"};
    (void)count, (void)arguments;
    if (!given[IMAGE] || !spank_remote(spank)) return 0;
    unsigned user = geteuid(), group = getegid();
    if (unshare(CLONE_NEWNS | (user ? CLONE_NEWUSER : 0))) return fail("cannot", "unshare");
    if (user) {
        map("setgroups", "deny", 0);
        map("uid_map", "%u %u 1", user);
        map("gid_map", "%u %u 1", group);
    }
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("tmpfs", root, "tmpfs", 0, NULL))
        return fail("cannot mount", root);
    for (int number = 0; number < 3; number++)
        if (show(system[number], system[number])) return -1;
    make("/mnt/tmp", 1);
    chmod("/mnt/tmp", 01777);
    if (show_listed(given[IMAGE][0] == '/' ? given[IMAGE] : registry)) return -1;
    for (char *rest = given[MOUNTS], *one; rest && (one = strsep(&rest, ","));) {
        char *source = strsep(&one, ":"), *target = strsep(&one, ":");
        if (show(source, target ? target : source)) return -1;
    }
    if (chroot(root) || chdir(given[WORKDIR] ? given[WORKDIR] : "/")) return fail("cannot enter", root);
    return 0;
}
