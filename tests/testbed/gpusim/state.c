#define _GNU_SOURCE
#include "state.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_STATE "/var/lib/gpusim/state"

struct entry {
    char *key;
    char *value;
};

static struct entry *entries;
static size_t count, room;
static struct stat loaded; /* identity of the file that the cache was made from */
static bool cached;
static int lock_fd = -1;

static const char *state_path(void) {
    const char *path = getenv("GPUSIM_STATE");
    return path != NULL && *path != '\0' ? path : DEFAULT_STATE;
}

/* "<folder of the state file>/<name>" */
static void beside_state(const char *name, char *out, size_t size) {
    const char *path = state_path();
    const char *slash = strrchr(path, '/');
    snprintf(out, size, "%.*s%s", slash == NULL ? 0 : (int)(slash - path + 1), path, name);
}

static void forget(void) {
    for (size_t i = 0; i < count; i++) {
        free(entries[i].key);
        free(entries[i].value);
    }
    count = 0;
    cached = false;
}

__attribute__((destructor)) static void release(void) {
    forget();
    free(entries);
    entries = NULL;
    room = 0;
}

static bool append(const char *key, size_t key_length, const char *value) {
    if (count == room) {
        size_t wanted = room == 0 ? 256 : room * 2;
        struct entry *grown = realloc(entries, wanted * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        entries = grown;
        room = wanted;
    }
    entries[count].key = strndup(key, key_length);
    entries[count].value = strdup(value);
    if (entries[count].key == NULL || entries[count].value == NULL) {
        free(entries[count].key);
        free(entries[count].value);
        return false;
    }
    count++;
    return true;
}

static int by_key(const void *left, const void *right) {
    return strcmp(((const struct entry *)left)->key, ((const struct entry *)right)->key);
}

/* Position of key, or where it would have to be. */
static size_t lower_bound(const char *key) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(entries[middle].key, key) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

nvmlReturn_t state_load(void) {
    struct stat now;
    const char *path = state_path();
    if (stat(path, &now) != 0) {
        forget();
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (cached && same_file(&now, &loaded)) {
        return NVML_SUCCESS;
    }
    forget();
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return errno == EACCES ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_DRIVER_NOT_LOADED;
    }
    char *line = NULL;
    size_t size = 0, number = 0;
    ssize_t length;
    nvmlReturn_t result = NVML_SUCCESS;
    if (fstat(fileno(file), &now) != 0 || !S_ISREG(now.st_mode)) {
        result = NVML_ERROR_UNKNOWN;
    }
    while (result == NVML_SUCCESS && (length = getline(&line, &size, file)) > 0) {
        number++;
        while (length > 0 && (line[length - 1] == '\n' || line[length - 1] == '\r')) {
            line[--length] = '\0';
        }
        if (length == 0 || line[0] == '#') {
            continue;
        }
        char *equals = strchr(line, '=');
        if (equals == NULL || equals == line || strlen(line) != (size_t)length) {
            fprintf(stderr, "gpusim: %s:%zu: not a key=value line\n", path, number);
            result = NVML_ERROR_UNKNOWN;
        } else if (!append(line, (size_t)(equals - line), equals + 1)) {
            result = NVML_ERROR_UNKNOWN;
        }
    }
    free(line);
    fclose(file);
    if (result != NVML_SUCCESS) {
        forget();
        return result;
    }
    if (count > 1) {
        qsort(entries, count, sizeof *entries, by_key);
    }
    loaded = now;
    cached = true;
    return NVML_SUCCESS;
}

const char *state_get(const char *key) {
    size_t at = lower_bound(key);
    return at < count && strcmp(entries[at].key, key) == 0 ? entries[at].value : NULL;
}

void state_each(const char *prefix, bool (*visit)(const char *, const char *, void *), void *arg) {
    size_t length = strlen(prefix);
    for (size_t at = lower_bound(prefix); at < count && strncmp(entries[at].key, prefix, length) == 0; at++) {
        if (!visit(entries[at].key, entries[at].value, arg)) {
            return;
        }
    }
}

nvmlReturn_t state_begin(void) {
    char path[4096];
    beside_state("lock", path, sizeof path);
    lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock_fd < 0) {
        return errno == EACCES || errno == EROFS ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_UNKNOWN;
    }
    while (flock(lock_fd, LOCK_EX) != 0) {
        if (errno != EINTR) {
            close(lock_fd);
            lock_fd = -1;
            return NVML_ERROR_UNKNOWN;
        }
    }
    nvmlReturn_t result = state_load();
    if (result != NVML_SUCCESS) {
        state_end(false);
    }
    return result;
}

void state_put(const char *key, const char *value) {
    size_t at = lower_bound(key);
    bool found = at < count && strcmp(entries[at].key, key) == 0;
    if (value == NULL) {
        if (found) {
            free(entries[at].key);
            free(entries[at].value);
            memmove(&entries[at], &entries[at + 1], (count - at - 1) * sizeof *entries);
            count--;
        }
        return;
    }
    if (found) {
        char *copy = strdup(value);
        if (copy != NULL) {
            free(entries[at].value);
            entries[at].value = copy;
        }
    } else if (append(key, strlen(key), value)) {
        struct entry added = entries[count - 1];
        memmove(&entries[at + 1], &entries[at], (count - 1 - at) * sizeof *entries);
        entries[at] = added;
    }
}

void state_remove_prefix(const char *prefix) {
    size_t length = strlen(prefix);
    for (size_t at = lower_bound(prefix); at < count && strncmp(entries[at].key, prefix, length) == 0;) {
        char *key = strdup(entries[at].key);
        if (key == NULL) {
            return;
        }
        state_put(key, NULL);
        free(key);
    }
}

nvmlReturn_t state_end(bool commit) {
    nvmlReturn_t result = NVML_SUCCESS;
    if (commit) {
        char path[4096];
        snprintf(path, sizeof path, "%s.%ld", state_path(), (long)getpid());
        FILE *file = fopen(path, "we");
        result = NVML_ERROR_UNKNOWN;
        if (file != NULL) {
            for (size_t i = 0; i < count; i++) {
                fprintf(file, "%s=%s\n", entries[i].key, entries[i].value);
            }
            bool written = ferror(file) == 0;
            written = fchmod(fileno(file), 0644) == 0 && written;
            written = fclose(file) == 0 && written;
            if (written && rename(path, state_path()) == 0) {
                result = NVML_SUCCESS;
            } else {
                unlink(path);
            }
        }
    }
    forget(); /* memory must never be ahead of the file */
    if (lock_fd >= 0) {
        close(lock_fd);
        lock_fd = -1;
    }
    return commit && result == NVML_SUCCESS ? state_load() : result;
}

/* ---- processes ---------------------------------------------------------------------------- */

/* A zombie holds no device memory any more. `start` (field 22 of /proc/PID/stat) tells a reused pid apart. */
static bool alive(unsigned pid, const char *start) {
    if (pid == 0 || (kill((pid_t)pid, 0) != 0 && errno == ESRCH)) {
        return false;
    }
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return true; /* hidden by hidepid or ProtectProc, but it exists */
    }
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    char *rest = strrchr(text, ')');
    if (rest == NULL || rest[1] == '\0') {
        return false;
    }
    if (rest[2] == 'Z' || rest[2] == 'X') {
        return false;
    }
    if (*start != '\0') {
        int field = 3;
        for (char *word = strtok(rest + 2, " "); word != NULL; word = strtok(NULL, " "), field++) {
            if (field == 22) {
                return strcmp(word, start) == 0;
            }
        }
    }
    return true;
}

struct collector {
    int gpu;
    struct process *out;
    size_t max, used;
};

struct search {
    const char *value;
    int gpu, gi, ci;
};

static bool match_gpu_uuid(const char *key, const char *value, void *arg) {
    struct search *search = arg;
    int gpu, end = 0;
    if (sscanf(key, "gpu.%d.uuid%n", &gpu, &end) == 1 && end > 0 && key[end] == '\0' &&
        strcmp(value, search->value) == 0) {
        search->gpu = gpu;
        return false;
    }
    return true;
}

static bool match_mig_uuid(const char *key, const char *value, void *arg) {
    struct search *search = arg;
    int gpu, gi, ci, end = 0;
    const char *uuid = strrchr(value, ',');
    if (sscanf(key, "gpu.%d.gi.%d.ci.%d%n", &gpu, &gi, &ci, &end) == 3 && key[end] == '\0' && uuid != NULL &&
        strcmp(uuid + 1, search->value) == 0) {
        search->gpu = gpu;
        search->gi = gi;
        search->ci = ci;
        return false;
    }
    return true;
}

/* "3", "GPU-<uuid>" or "MIG-<uuid>" */
static bool parse_device(const char *text, struct process *process) {
    struct search search = {text, -1, -1, -1};
    char *end;
    if (strncmp(text, "MIG-", 4) == 0) {
        state_each("gpu.", match_mig_uuid, &search);
    } else if (strncmp(text, "GPU-", 4) == 0) {
        state_each("gpu.", match_gpu_uuid, &search);
    } else {
        long index = strtol(text, &end, 10);
        search.gpu = *text != '\0' && *end == '\0' && index >= 0 && index < 1024 ? (int)index : -1;
    }
    process->gpu = search.gpu;
    process->gi = search.gi;
    process->ci = search.ci;
    return search.gpu >= 0;
}

static bool parse_size(const char *text, uint64_t *out) {
    char *end;
    double number = strtod(text, &end);
    static const char units[] = "KMGT";
    const char *unit = *end != '\0' ? strchr(units, toupper((unsigned char)*end)) : NULL;
    if (end == text || number < 0) {
        return false;
    }
    if (*end == '\0') {
        *out = strtoull(text, NULL, 10);
        return true;
    }
    if (unit == NULL) {
        return false;
    }
    for (const char *step = units; step <= unit; step++) {
        number *= 1024;
    }
    *out = (uint64_t)number;
    return true;
}

static void collect(struct collector *to, const struct process *process, bool complete, const char *start) {
    if (complete && (to->gpu < 0 || to->gpu == process->gpu) && to->used < to->max && alive(process->pid, start)) {
        to->out[to->used++] = *process;
    }
}

/* Words `key=value` of one allocation; the value of name= runs to the end of the line. */
static void parse_word(struct process *process, const char *key, const char *value, bool *known_gpu, char *start,
                       size_t start_size) {
    if (strcmp(key, "device") == 0) {
        *known_gpu = parse_device(value, process);
    } else if (strcmp(key, "bytes") == 0) {
        if (!parse_size(value, &process->bytes)) {
            process->bytes = 0;
        }
    } else if (strcmp(key, "kind") == 0) {
        process->kind = strcmp(value, "graphics") == 0 ? PROCESS_GRAPHICS
                        : strcmp(value, "mps") == 0    ? PROCESS_MPS
                                                       : PROCESS_COMPUTE;
    } else if (strcmp(key, "name") == 0) {
        snprintf(process->name, sizeof process->name, "%s", value);
    } else if (strcmp(key, "pid") == 0) {
        process->pid = (unsigned)strtoul(value, NULL, 10);
    } else if (strcmp(key, "gi") == 0) {
        process->gi = atoi(value);
    } else if (strcmp(key, "ci") == 0) {
        process->ci = atoi(value);
    } else if (strcmp(key, "start") == 0) {
        snprintf(start, start_size, "%s", value);
    }
}

static bool visit_process(const char *key, const char *value, void *arg) {
    (void)key;
    struct process process = {0, -1, -1, -1, 0, PROCESS_COMPUTE, "unknown"};
    char text[1024], start[32] = "";
    bool known_gpu = false, pinned = false;
    snprintf(text, sizeof text, "%s", value);
    char *at = text;
    while (*at != '\0') {
        while (*at == ' ') {
            at++;
        }
        char *equals = strchr(at, '=');
        if (equals == NULL) {
            break;
        }
        *equals = '\0';
        char *end = strcmp(at, "name") == 0 ? equals + 1 + strlen(equals + 1) : equals + 1 + strcspn(equals + 1, " ");
        bool last = *end == '\0';
        *end = '\0';
        if (strcmp(at, "pinned") == 0) {
            pinned = equals[1] == '1';
        }
        parse_word(&process, at, equals + 1, &known_gpu, start, sizeof start);
        at = last ? end : end + 1;
    }
    struct collector *to = arg;
    if (pinned) { /* shown whether or not such a process exists: one in another pid namespace, say */
        if (known_gpu && (to->gpu < 0 || to->gpu == process.gpu) && to->used < to->max) {
            to->out[to->used++] = process;
        }
    } else {
        collect(to, &process, known_gpu, start);
    }
    return true;
}

static void read_registration(struct collector *to, const char *folder, const char *file_name) {
    char path[4608], line[512], start[32] = "";
    snprintf(path, sizeof path, "%s/%s", folder, file_name);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return;
    }
    struct process process = {(unsigned)strtoul(file_name, NULL, 10), -1, -1, -1, 0, PROCESS_COMPUTE, "unknown"};
    struct process pending[64];
    bool known[64] = {false};
    size_t used = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\r\n")] = '\0';
        char *equals = strchr(line, '=');
        if (equals == NULL || line[0] == '#') {
            continue;
        }
        *equals = '\0';
        if (strcmp(line, "device") == 0 && used < 64) { /* every device= opens an allocation */
            pending[used] = process;
            parse_word(&pending[used], "device", equals + 1, &known[used], start, sizeof start);
            used++;
        } else if (used > 0 && (strcmp(line, "bytes") == 0 || strcmp(line, "kind") == 0)) {
            parse_word(&pending[used - 1], line, equals + 1, &known[used - 1], start, sizeof start);
        } else if (strcmp(line, "name") == 0 || strcmp(line, "start") == 0) {
            bool ignored = false;
            parse_word(&process, line, equals + 1, &ignored, start, sizeof start);
        }
    }
    fclose(file);
    for (size_t i = 0; i < used; i++) {
        memcpy(pending[i].name, process.name, sizeof process.name);
        collect(to, &pending[i], known[i], start);
    }
}

static void read_registrations(struct collector *to, const char *folder) {
    DIR *directory = opendir(folder);
    if (directory == NULL) {
        return;
    }
    struct dirent *item;
    while ((item = readdir(directory)) != NULL) {
        if (strspn(item->d_name, "0123456789") == strlen(item->d_name)) {
            read_registration(to, folder, item->d_name);
        }
    }
    closedir(directory);
}

size_t state_processes(int gpu, struct process *out, size_t max) {
    struct collector to = {gpu, out, max, 0};
    state_each("process.", visit_process, &to);
    char folder[4096];
    beside_state("processes", folder, sizeof folder);
    read_registrations(&to, folder);
    if (getenv("GPUSIM_STATE") == NULL) { /* a unit with ProtectSystem=strict can write below /dev only */
        read_registrations(&to, "/dev/shm/gpusim");
    }
    return to.used;
}
