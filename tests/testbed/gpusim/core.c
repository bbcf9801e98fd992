#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t global_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned initialized;

static struct handle gpus[MAX_GPUS];
static struct handle migs[MAX_GPUS][MAX_GI][MAX_CI];
static struct gpu_instance gis[MAX_GPUS][MAX_GI];
static struct compute_instance cis[MAX_GPUS][MAX_GI][MAX_CI];

__attribute__((constructor)) static void number_handles(void) {
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        gpus[gpu] = (struct handle){gpu, -1, -1};
        for (int gi = 0; gi < MAX_GI; gi++) {
            gis[gpu][gi] = (struct gpu_instance){gpu, gi};
            for (int ci = 0; ci < MAX_CI; ci++) {
                migs[gpu][gi][ci] = (struct handle){gpu, gi, ci};
                cis[gpu][gi][ci] = (struct compute_instance){gpu, gi, ci};
            }
        }
    }
}

static bool within(const void *pointer, const void *array, size_t array_size, size_t item) {
    uintptr_t at = (uintptr_t)pointer, start = (uintptr_t)array;
    return at >= start && at < start + array_size && (at - start) % item == 0;
}

nvmlDevice_t gpu_handle(int gpu) { return &gpus[gpu]; }
nvmlDevice_t mig_handle(int gpu, int gi, int ci) { return &migs[gpu][gi][ci]; }
nvmlGpuInstance_t gi_handle(int gpu, int gi) { return &gis[gpu][gi]; }
nvmlComputeInstance_t ci_handle(int gpu, int gi, int ci) { return &cis[gpu][gi][ci]; }

bool gi_of(nvmlGpuInstance_t handle, int *gpu, int *gi) {
    if (!within(handle, gis, sizeof gis, sizeof gis[0][0])) {
        return false;
    }
    *gpu = handle->gpu;
    *gi = handle->gi;
    return true;
}

bool ci_of(nvmlComputeInstance_t handle, int *gpu, int *gi, int *ci) {
    if (!within(handle, cis, sizeof cis, sizeof cis[0][0][0])) {
        return false;
    }
    *gpu = handle->gpu;
    *gi = handle->gi;
    *ci = handle->ci;
    return true;
}

/* ---- faults ------------------------------------------------------------------------------- */

/* Puts this process into a frozen cgroup (v1): nothing ends it, SIGKILL included, until `gpusim.py thaw`. */
static void freeze(void) {
    static const char *const roots[] = {"/run/gpusim/freezer", "/sys/fs/cgroup/freezer"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++) {
        char folder[128], path[192], word[32];
        struct timespec now = {0, 0};
        clock_gettime(CLOCK_MONOTONIC, &now); /* containers share the hierarchy, so a pid alone is no unique name */
        snprintf(folder, sizeof folder, "%s/gpusim-%ld-%ld%09ld", roots[i], (long)getpid(), (long)now.tv_sec, now.tv_nsec);
        if (mkdir(folder, 0755) != 0) {
            continue;
        }
        const char *const steps[] = {"cgroup.procs", "freezer.state"};
        for (size_t step = 0; step < 2; step++) {
            snprintf(path, sizeof path, "%s/%s", folder, steps[step]);
            int fd = open(path, O_WRONLY | O_CLOEXEC);
            snprintf(word, sizeof word, "%ld", (long)getpid());
            const char *content = step == 0 ? word : "FROZEN";
            if (fd >= 0) {
                if (write(fd, content, strlen(content)) < 0) {
                    fprintf(stderr, "gpusim: cannot write %s\n", path);
                }
                close(fd);
            }
        }
        return;
    }
    fprintf(stderr, "gpusim: no writable freezer hierarchy, hanging in the ordinary way\n");
}

__attribute__((noreturn)) static void hang(const char *how) {
    if (strcmp(how, "stubborn") == 0 || strcmp(how, "unkillable") == 0) {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, NULL);
    }
    if (strcmp(how, "unkillable") == 0) {
        freeze();
    }
    for (;;) {
        pause();
    }
}

struct fault {
    char call[96], device[96], hang[16];
    int code, late_code, crash, silent;
    long delay_ms, nth, times;
};

static void parse_fault(const char *value, struct fault *fault) {
    char words[512], *rest = words;
    *fault = (struct fault){.call = "*", .device = "*", .times = -1};
    snprintf(words, sizeof words, "%s", value);
    for (char *word; (word = strsep(&rest, " ")) != NULL;) {
        char *equals = strchr(word, '=');
        if (equals == NULL) {
            continue;
        }
        *equals++ = '\0';
        if (strcmp(word, "call") == 0) {
            snprintf(fault->call, sizeof fault->call, "%s", equals);
        } else if (strcmp(word, "device") == 0) {
            snprintf(fault->device, sizeof fault->device, "%s", equals);
        } else if (strcmp(word, "hang") == 0) {
            snprintf(fault->hang, sizeof fault->hang, "%s", equals);
        } else if (strcmp(word, "code") == 0) {
            fault->code = atoi(equals);
        } else if (strcmp(word, "late_code") == 0) {
            fault->late_code = atoi(equals);
        } else if (strcmp(word, "crash") == 0) {
            fault->crash = atoi(equals);
        } else if (strcmp(word, "silent") == 0) {
            fault->silent = atoi(equals);
        } else if (strcmp(word, "delay_ms") == 0) {
            fault->delay_ms = atol(equals);
        } else if (strcmp(word, "nth") == 0) {
            fault->nth = atol(equals);
        } else if (strcmp(word, "times") == 0) {
            fault->times = atol(equals);
        }
    }
}

/* A pattern fits the symbol and the symbol without its version suffix. */
static bool fits(const char *pattern, const char *name) {
    char bare[96];
    snprintf(bare, sizeof bare, "%s", name);
    size_t length = strlen(bare);
    if (length > 3 && bare[length - 3] == '_' && bare[length - 2] == 'v') {
        bare[length - 3] = '\0';
    }
    return fnmatch(pattern, name, 0) == 0 || fnmatch(pattern, bare, 0) == 0;
}

static bool fits_device(const char *wanted, int gpu) {
    char *end;
    if (strcmp(wanted, "*") == 0) {
        return true;
    }
    if (gpu < 0) {
        return false;
    }
    long index = strtol(wanted, &end, 10);
    if (*end == '\0') {
        return index == gpu;
    }
    char key[32];
    snprintf(key, sizeof key, "gpu.%d.uuid", gpu);
    const char *uuid = state_get(key);
    return uuid != NULL && strcmp(uuid, wanted) == 0;
}

struct hits {
    struct call *call;
    nvmlReturn_t result;
    char spent[8][64]; /* keys of `times` faults that were used up by this call */
    size_t spent_count;
};

static struct {
    char key[64];
    long seen;
} calls_seen[64];

static long nth_call(const char *key) {
    for (size_t i = 0; i < sizeof calls_seen / sizeof *calls_seen; i++) {
        if (calls_seen[i].key[0] == '\0') {
            snprintf(calls_seen[i].key, sizeof calls_seen[i].key, "%s", key);
        }
        if (strcmp(calls_seen[i].key, key) == 0) {
            return ++calls_seen[i].seen;
        }
    }
    return 0;
}

static bool visit_fault(const char *key, const char *value, void *arg) {
    struct hits *hits = arg;
    struct fault fault;
    parse_fault(value, &fault);
    if (!fits(fault.call, hits->call->name) || !fits_device(fault.device, hits->call->gpu) || fault.times == 0 ||
        (fault.nth > 0 && nth_call(key) != fault.nth)) {
        return true;
    }
    if (fault.times > 0 && hits->spent_count < 8) {
        snprintf(hits->spent[hits->spent_count++], sizeof hits->spent[0], "%s", key);
    }
    if (fault.delay_ms > 0) {
        struct timespec wait = {fault.delay_ms / 1000, fault.delay_ms % 1000 * 1000000L};
        while (nanosleep(&wait, &wait) != 0) {
        }
    }
    if (fault.crash != 0) {
        abort();
    }
    if (fault.hang[0] != '\0') {
        hang(fault.hang);
    }
    hits->call->silent = hits->call->silent || fault.silent != 0;
    if (fault.late_code != 0) {
        hits->call->late_code = fault.late_code;
    }
    if (fault.code != 0 && hits->result == NVML_SUCCESS) {
        hits->result = fault.code;
    }
    return true;
}

static void spend(const char *key) {
    const char *value = state_get(key);
    const char *word = value == NULL ? NULL : strstr(value, "times=");
    if (word == NULL) {
        return;
    }
    char changed[512];
    const char *rest = word + strcspn(word, " ");
    snprintf(changed, sizeof changed, "%.*stimes=%ld%s", (int)(word - value), value, atol(word + 6) - 1, rest);
    state_put(key, changed);
}

/* Faults act before anything else does. State is loaded; the state lock is not held. */
static nvmlReturn_t apply_faults(struct call *call) {
    struct hits hits = {.call = call};
    state_each("fault.", visit_fault, &hits);
    if (hits.spent_count > 0 && state_begin() == NVML_SUCCESS) {
        for (size_t i = 0; i < hits.spent_count; i++) {
            spend(hits.spent[i]);
        }
        state_end(true);
    }
    return hits.result;
}

/* ---- the frame of a call ------------------------------------------------------------------ */

static nvmlReturn_t enter(struct call *call, const char *name, int gpu, int gi, int ci) {
    *call = (struct call){.name = name, .gpu = gpu, .gi = gi, .ci = ci};
    pthread_mutex_lock(&global_lock);
    if (initialized == 0) {
        return NVML_ERROR_UNINITIALIZED;
    }
    nvmlReturn_t result = state_load();
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (gpu >= gpu_count()) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    result = apply_faults(call);
    if (result == NVML_SUCCESS && gpu >= 0) {
        unsigned lost;
        if (get_uint(call, "lost", &lost) == NVML_SUCCESS && lost != 0) {
            result = (nvmlReturn_t)lost; /* 15: GPU is lost */
        }
    }
    return result;
}

nvmlReturn_t begin_system(struct call *call, const char *name) { return enter(call, name, -1, -1, -1); }

nvmlReturn_t begin_any_device(struct call *call, const char *name, nvmlDevice_t device) {
    bool is_gpu = within(device, gpus, sizeof gpus, sizeof gpus[0]);
    if (!is_gpu && !within(device, migs, sizeof migs, sizeof migs[0][0][0])) {
        nvmlReturn_t result = enter(call, name, -1, -1, -1);
        return result == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : result;
    }
    nvmlReturn_t result = enter(call, name, device->gpu, device->gi, device->ci);
    if (result == NVML_SUCCESS && device->gi >= 0 && !mig_attributes(device->gpu, device->gi, device->ci, NULL, NULL, 0, NULL, 0)) {
        result = NVML_ERROR_INVALID_ARGUMENT; /* the slice is gone */
    }
    return result;
}

nvmlReturn_t begin_device(struct call *call, const char *name, nvmlDevice_t device) {
    nvmlReturn_t result = begin_any_device(call, name, device);
    return result == NVML_SUCCESS && call->gi >= 0 ? NVML_ERROR_INVALID_ARGUMENT : result;
}

static nvmlReturn_t start_change(struct call *call) {
    const char *anyone = state_get("system.anyone_may_set");
    if (geteuid() != 0 && (anyone == NULL || strcmp(anyone, "1") != 0)) {
        return NVML_ERROR_NO_PERMISSION;
    }
    nvmlReturn_t result = state_begin();
    call->changing = result == NVML_SUCCESS;
    return result;
}

nvmlReturn_t begin_change(struct call *call, const char *name, nvmlDevice_t device) {
    nvmlReturn_t result = begin_device(call, name, device);
    return result == NVML_SUCCESS ? start_change(call) : result;
}

nvmlReturn_t begin_index(struct call *call, const char *name, int gpu, int gi, int ci, bool change) {
    nvmlReturn_t result = enter(call, name, gpu, gi, ci);
    return result == NVML_SUCCESS && change ? start_change(call) : result;
}

nvmlReturn_t finish(struct call *call, nvmlReturn_t result) {
    if (call->changing) {
        nvmlReturn_t written = state_end(result == NVML_SUCCESS && !call->silent);
        result = result == NVML_SUCCESS ? written : result;
    }
    if (result == NVML_SUCCESS && call->late_code != 0) {
        result = call->late_code;
    }
    pthread_mutex_unlock(&global_lock);
    return result;
}

/* ---- values ------------------------------------------------------------------------------- */

const char *text(const struct call *call, const char *key) {
    char full[160];
    snprintf(full, sizeof full, "gpu.%d.%s", call->gpu, key);
    return state_get(full);
}

static nvmlReturn_t usable(const char *value) {
    if (value == NULL) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return value[0] == '!' ? (nvmlReturn_t)atoi(value + 1) : NVML_SUCCESS;
}

nvmlReturn_t copy_text(const char *value, char *out, unsigned size) {
    nvmlReturn_t result = usable(value);
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    size_t length = strlen(value);
    if (length + 1 > size) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    memcpy(out, value, length + 1);
    return NVML_SUCCESS;
}

nvmlReturn_t get_text(const struct call *call, const char *key, char *out, unsigned size) {
    return copy_text(text(call, key), out, size);
}

nvmlReturn_t get_u64(const struct call *call, const char *key, unsigned long long *out) {
    const char *value = text(call, key);
    nvmlReturn_t result = usable(value);
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    char *end;
    unsigned long long number = strtoull(value, &end, 0);
    if (end == value || *end != '\0') {
        return NVML_ERROR_UNKNOWN;
    }
    *out = number;
    return NVML_SUCCESS;
}

nvmlReturn_t get_uint(const struct call *call, const char *key, unsigned *out) {
    unsigned long long number = 0;
    nvmlReturn_t result = get_u64(call, key, &number);
    if (result == NVML_SUCCESS) {
        if (out == NULL) {
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        *out = (unsigned)number;
    }
    return result;
}

unsigned long long value_or(const struct call *call, const char *key, unsigned long long otherwise) {
    unsigned long long number;
    return get_u64(call, key, &number) == NVML_SUCCESS ? number : otherwise;
}

void put_text(const struct call *call, const char *key, const char *value) {
    char full[160];
    snprintf(full, sizeof full, "gpu.%d.%s", call->gpu, key);
    state_put(full, value);
}

void put_uint(const struct call *call, const char *key, unsigned long long value) {
    char number[32];
    snprintf(number, sizeof number, "%llu", value);
    put_text(call, key, number);
}

int gpu_count(void) {
    const char *value = state_get("system.gpus");
    long number = value == NULL ? 0 : strtol(value, NULL, 10);
    return number < 0 ? 0 : number > MAX_GPUS ? MAX_GPUS : (int)number;
}

/* ---- init and shutdown -------------------------------------------------------------------- */

static nvmlReturn_t init_checks(struct call *call) {
    nvmlReturn_t result = state_load();
    if (result != NVML_SUCCESS) {
        return result;
    }
    result = apply_faults(call);
    if (result != NVML_SUCCESS) {
        return result;
    }
    const char *loaded = state_get("system.driver_loaded");
    if (loaded != NULL && strcmp(loaded, "0") == 0) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    const char *kernel = state_get("system.kernel_driver_version"), *user = state_get("system.driver_version");
    if (kernel != NULL && user != NULL && strcmp(kernel, user) != 0) {
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t init(const char *name) {
    struct call call = {.name = name, .gpu = -1, .gi = -1, .ci = -1};
    pthread_mutex_lock(&global_lock);
    nvmlReturn_t result = init_checks(&call);
    if (result == NVML_SUCCESS) {
        initialized++;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlInit(void) { return init("nvmlInit"); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return init("nvmlInit"); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init("nvmlInit");
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    struct call call;
    nvmlReturn_t result = begin_system(&call, __func__);
    if (result == NVML_SUCCESS) {
        initialized--;
    }
    return finish(&call, result);
}
