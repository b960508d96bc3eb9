/* A plugin of SLURM that gives the nodes of tests/slurm/cluster.py two properties of a real cluster's:

   - The batch host has no Python: programs that are named by `hide=FILE:FILE...` in plugstack.conf cannot be run by
     batch scripts. Steps of srun can run them.
   - srun has pyxis' options --container-image, --container-mounts, --container-workdir and --container-mount-home. An
     image is a folder as bin/apptainer makes it; mounts, root and work folder change for real, in a mount namespace. */

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(host, 1)

enum { IMAGE, MOUNTS, WORKDIR, HOME };

static char *given[4];

static int set_option(int option, const char *value, int remote)
{
    given[option] = strdup(value ? value : "");
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "PATH", "[pyxis' stand-in] folder that becomes the root", 1, IMAGE, set_option},
    {"container-mounts", "SRC:DST[,SRC:DST...]", "[pyxis' stand-in] folders that are in it", 1, MOUNTS, set_option},
    {"container-workdir", "PATH", "[pyxis' stand-in] working folder", 1, WORKDIR, set_option},
    {"container-mount-home", NULL, "[pyxis' stand-in] the home of the user is in it", 0, HOME, set_option},
    SPANK_OPTIONS_TABLE_END,
};

static int fail(const char *what)
{
    slurm_error("host: %s: %s", what, strerror(errno));
    return -1;
}

static int own_mounts(void)
{
    return unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ? fail("mount namespace") : 0;
}

static int hide(char *files)
{
    for (char *file = strtok(files, ":"); file; file = strtok(NULL, ":"))
        if (mount("/dev/null", file, NULL, MS_BIND, NULL))
            return fail(file);
    return 0;
}

/* Bind `source` into the image. */
static int bind_at(const char *source, const char *target)
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s", given[IMAGE], target);
    for (char *slash = path + strlen(given[IMAGE]) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
    mkdir(path, 0755);
    return mount(source, path, NULL, MS_BIND | MS_REC, NULL) ? fail(path) : 0;
}

static int enter_image(void)
{
    static const char *always[] = {"/proc", "/sys", "/dev"};
    for (int number = 0; number < 3; number++)
        if (bind_at(always[number], always[number]))
            return -1;
    char name[4096], source[4096], target[4096];
    snprintf(name, sizeof name, "%s/layers", given[IMAGE]);
    FILE *layers = fopen(name, "r");
    while (layers && fscanf(layers, "%4095s %4095s", source, target) == 2)
        if (bind_at(source, target))
            return -1;
    if (layers)
        fclose(layers);
    if (given[HOME] && getenv("HOME") && bind_at(getenv("HOME"), getenv("HOME")))
        return -1;
    for (char *pair = strtok(given[MOUNTS] ? given[MOUNTS] : "", ","); pair; pair = strtok(NULL, ",")) {
        char *target = strchr(pair, ':');
        if (!target) {
            errno = EINVAL;
            return fail(pair);
        }
        *target++ = 0;
        if (bind_at(pair, target))
            return -1;
    }
    if (chroot(given[IMAGE]) || chdir(given[WORKDIR] ? given[WORKDIR] : "/"))
        return fail(given[IMAGE]);
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **words)
{
    uint32_t step;
    if (spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
        return -1;
    if (step == SLURM_BATCH_SCRIPT)
        return own_mounts() || hide(words[0] + strlen("hide=")) ? -1 : 0;
    return given[IMAGE] && (own_mounts() || enter_image()) ? -1 : 0;
}
