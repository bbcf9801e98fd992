/* MIG: mode, profiles, GPU instances, compute instances. Figures come from the profile file:
 *   gpu.N.mig.profile.<number>    id,name,compute slices,memory slices,SMs,copy,decoder,encoder,jpeg,ofa,MiB,p2p
 *   gpu.N.mig.placements.<number> start;start;...          (memory slices; the size is that of the profile)
 *   gpu.N.gi.<id>                 profile number,start
 *   gpu.N.gi.<id>.ci.<id>         compute profile number,start,uuid
 */
#define _GNU_SOURCE
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GI_PROFILES 0x12
#define CI_PROFILES 0x9
/* Compute slices of each compute instance profile number; 8 slices, REV1 and NVL variants are not simulated. */
static const unsigned ci_slices[CI_PROFILES] = {1, 2, 3, 4, 7, 0, 6, 0, 0};

struct profile {
    unsigned number, id, slices, memory_slices, sms, copy, decoders, encoders, jpegs, ofas, p2p;
    unsigned long long mib;
    char name[64];
};

static bool read_profile(int gpu, unsigned number, struct profile *out) {
    char key[64];
    snprintf(key, sizeof key, "gpu.%d.mig.profile.%u", gpu, number);
    const char *value = state_get(key);
    *out = (struct profile){.number = number};
    int words = value == NULL ? 0 : sscanf(value, "%u,%63[^,],%u,%u,%u,%u,%u,%u,%u,%u,%llu,%u", &out->id, out->name, &out->slices,
                                   &out->memory_slices, &out->sms, &out->copy, &out->decoders, &out->encoders,
                                   &out->jpegs, &out->ofas, &out->mib, &out->p2p);
    return words == 12 && out->slices >= 1 && out->slices <= 8 && out->memory_slices >= 1 && out->memory_slices <= 8;
}

static bool profile_by_id(int gpu, unsigned id, struct profile *out) {
    for (unsigned number = 0; number < GI_PROFILES; number++) {
        if (read_profile(gpu, number, out) && out->id == id) {
            return true;
        }
    }
    return false;
}

static bool read_gi(int gpu, int gi, struct profile *profile, unsigned *start) {
    char key[64];
    unsigned number;
    snprintf(key, sizeof key, "gpu.%d.gi.%d", gpu, gi);
    const char *value = state_get(key);
    return value != NULL && sscanf(value, "%u,%u", &number, start) == 2 && read_profile(gpu, number, profile) &&
           *start <= 8 - profile->memory_slices;
}

static bool read_ci(int gpu, int gi, int ci, unsigned *number, unsigned *start, char *uuid, size_t size) {
    char key[64], found[96];
    snprintf(key, sizeof key, "gpu.%d.gi.%d.ci.%d", gpu, gi, ci);
    const char *value = state_get(key);
    if (value == NULL || sscanf(value, "%u,%u,%95s", number, start, found) != 3 || *number >= CI_PROFILES ||
        ci_slices[*number] == 0 || *start > 7) {
        return false;
    }
    if (uuid != NULL) {
        snprintf(uuid, size, "%s", found);
    }
    return true;
}

int mig_device_at(int gpu, unsigned index, int *gi_out, int *ci_out) {
    unsigned at = 0, number, start;
    for (int gi = 0; gi < MAX_GI; gi++) {
        for (int ci = 0; ci < MAX_CI; ci++) {
            if (read_ci(gpu, gi, ci, &number, &start, NULL, 0) && at++ == index) {
                *gi_out = gi;
                *ci_out = ci;
                return true;
            }
        }
    }
    return false;
}

bool mig_attributes(int gpu, int gi, int ci, nvmlDeviceAttributes_t *out, char *name, size_t name_size, char *uuid,
                    size_t uuid_size) {
    struct profile profile;
    unsigned gi_start, number, start;
    if (!read_gi(gpu, gi, &profile, &gi_start) || !read_ci(gpu, gi, ci, &number, &start, uuid, uuid_size)) {
        return false;
    }
    unsigned slices = ci_slices[number];
    if (out != NULL) {
        *out = (nvmlDeviceAttributes_t){profile.sms / profile.slices * slices,
                                        profile.copy,
                                        profile.decoders,
                                        profile.encoders,
                                        profile.jpegs,
                                        profile.ofas,
                                        profile.slices,
                                        slices,
                                        profile.mib};
    }
    if (name != NULL) {
        if (slices == profile.slices) {
            snprintf(name, name_size, "%s", profile.name);
        } else {
            snprintf(name, name_size, "%uc.%s", slices, profile.name);
        }
    }
    return true;
}

static bool mig_on(const struct call *call) { return value_or(call, "mig.mode", 0) == 1; }

static nvmlReturn_t need_mig(const struct call *call) {
    if (text(call, "mig.mode") == NULL) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return mig_on(call) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* ---- placement of GPU instances ----------------------------------------------------------- */

static unsigned occupied(int gpu) { /* bit per memory slice */
    unsigned bits = 0, start;
    struct profile profile;
    for (int gi = 0; gi < MAX_GI; gi++) {
        if (read_gi(gpu, gi, &profile, &start)) {
            bits |= ((1U << profile.memory_slices) - 1) << start;
        }
    }
    return bits;
}

static unsigned compute_used(int gpu) {
    unsigned used = 0, start;
    struct profile profile;
    for (int gi = 0; gi < MAX_GI; gi++) {
        if (read_gi(gpu, gi, &profile, &start)) {
            used += profile.slices;
        }
    }
    return used;
}

/* Media profiles (+me) exist once per GPU: an engine-carrying variant fits only while none of its kind is there. */
static bool variant_taken(int gpu, const struct profile *wanted) {
    struct profile profile;
    unsigned start;
    if (strstr(wanted->name, "+me") == NULL || strstr(wanted->name, "-me") != NULL) {
        return false;
    }
    for (int gi = 0; gi < MAX_GI; gi++) {
        if (read_gi(gpu, gi, &profile, &start) && profile.id == wanted->id) {
            return true;
        }
    }
    return false;
}

static unsigned possible_starts(int gpu, const struct profile *profile, unsigned *starts, unsigned max) {
    char key[64];
    unsigned found = 0;
    snprintf(key, sizeof key, "gpu.%d.mig.placements.%u", gpu, profile->number);
    const char *at = state_get(key);
    while (at != NULL && *at != '\0' && found < max) {
        char *end;
        starts[found] = (unsigned)strtoul(at, &end, 10);
        if (end == at) {
            break;
        }
        found += starts[found] <= 8 - profile->memory_slices;
        at = *end == ';' ? end + 1 : end;
    }
    return found;
}

static bool free_at(int gpu, const struct profile *profile, unsigned start) {
    unsigned bits = ((1U << profile->memory_slices) - 1) << start;
    return (occupied(gpu) & bits) == 0 && compute_used(gpu) + profile->slices <= 7 && !variant_taken(gpu, profile);
}

/* How many more of this profile fit, one after the other at its own places. */
static unsigned capacity(int gpu, const struct profile *profile, bool empty) {
    unsigned starts[16], found = possible_starts(gpu, profile, starts, 16);
    unsigned bits = empty ? 0 : occupied(gpu), slices = empty ? 0 : compute_used(gpu), fit = 0;
    if (!empty && variant_taken(gpu, profile)) {
        return 0;
    }
    for (unsigned i = 0; i < found; i++) {
        unsigned mine = ((1U << profile->memory_slices) - 1) << starts[i];
        if ((bits & mine) == 0 && slices + profile->slices <= 7) {
            bits |= mine;
            slices += profile->slices;
            fit++;
        }
    }
    return strstr(profile->name, "+me") != NULL && fit > 1 ? 1 : fit;
}

/* ---- mode --------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "mig.mode", current);
    }
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "mig.pending", pending);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation) {
    struct call call;
    nvmlReturn_t result = begin_change(&call, __func__, device);
    if (result == NVML_SUCCESS && (mode > 1 || activation == NULL)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS && text(&call, "mig.mode") == NULL) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        struct process process;
        bool changes = value_or(&call, "mig.mode", 0) != mode;
        *activation = NVML_SUCCESS;
        if (mode == 0 && occupied(call.gpu) != 0) {
            result = NVML_ERROR_IN_USE;
        } else {
            put_uint(&call, "mig.pending", mode);
            if (!changes) {
            } else if (value_or(&call, "mig.activation", 0) != 0) {
                *activation = (nvmlReturn_t)value_or(&call, "mig.activation", 0); /* 16 in a pass-through VM */
            } else if (state_processes(call.gpu, &process, 1) > 0) {
                *activation = NVML_ERROR_IN_USE;
            } else {
                put_uint(&call, "mig.mode", mode);
            }
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        *count = text(&call, "mig.mode") == NULL ? 0 : 7;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *out) {
    struct call call;
    int gi, ci;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = text(&call, "mig.mode") == NULL ? NVML_ERROR_NOT_SUPPORTED
                 : index >= 7                    ? NVML_ERROR_INVALID_ARGUMENT
                                                 : NVML_SUCCESS;
    }
    if (result == NVML_SUCCESS) {
        if (mig_on(&call) && mig_device_at(call.gpu, index, &gi, &ci)) {
            *out = mig_handle(call.gpu, gi, ci);
        } else {
            result = NVML_ERROR_NOT_FOUND;
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *out) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, mig);
    if (result == NVML_SUCCESS) {
        result = call.gi < 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
    }
    if (result == NVML_SUCCESS) {
        *out = gpu_handle(call.gpu);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_mig) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        *is_mig = call.gi >= 0;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && call.gi < 0) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *id = (unsigned)call.gi;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && call.gi < 0) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *id = (unsigned)call.ci;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *out) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = call.gi >= 0 && mig_attributes(call.gpu, call.gi, call.ci, out, NULL, 0, NULL, 0)
                     ? NVML_SUCCESS
                     : NVML_ERROR_NOT_SUPPORTED;
    }
    return finish(&call, result);
}

/* ---- GPU instances ------------------------------------------------------------------------ */

static nvmlReturn_t profile_checks(const struct call *call, unsigned number, struct profile *profile) {
    if (text(call, "mig.mode") == NULL) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (number >= GI_PROFILES) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return read_profile(call->gpu, number, profile) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned number,
                                                        nvmlGpuInstanceProfileInfo_t *out) {
    struct call call;
    struct profile p;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = profile_checks(&call, number, &p);
    }
    if (result == NVML_SUCCESS) {
        *out = (nvmlGpuInstanceProfileInfo_t){p.id,       p.p2p,      p.slices, capacity(call.gpu, &p, true),
                                              p.sms,      p.copy,     p.decoders, p.encoders,
                                              p.jpegs,    p.ofas,     p.mib};
    }
    return finish(&call, result);
}

static nvmlReturn_t profile_info_v2(const struct call *call, const struct profile *p,
                                    nvmlGpuInstanceProfileInfo_v2_t *out) {
    if (out->version != STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    out->id = p->id;
    out->isP2pSupported = p->p2p;
    out->sliceCount = p->slices;
    out->instanceCount = capacity(call->gpu, p, true);
    out->multiprocessorCount = p->sms;
    out->copyEngineCount = p->copy;
    out->decoderCount = p->decoders;
    out->encoderCount = p->encoders;
    out->jpegCount = p->jpegs;
    out->ofaCount = p->ofas;
    out->memorySizeMB = p->mib;
    snprintf(out->name, sizeof out->name, "MIG %s", p->name);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned number,
                                                         nvmlGpuInstanceProfileInfo_v2_t *out) {
    struct call call;
    struct profile profile;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = profile_checks(&call, number, &profile);
    }
    if (result == NVML_SUCCESS) {
        result = profile_info_v2(&call, &profile, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned id,
                                                             nvmlGpuInstanceProfileInfo_v2_t *out) {
    struct call call;
    struct profile profile;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS && !profile_by_id(call.gpu, id, &profile)) {
        result = text(&call, "mig.mode") == NULL ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        result = profile_info_v2(&call, &profile, out);
    }
    return finish(&call, result);
}

static nvmlReturn_t with_profile_id(struct call *call, unsigned id, struct profile *profile) {
    nvmlReturn_t result = need_mig(call);
    if (result == NVML_SUCCESS && !profile_by_id(call->gpu, id, profile)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned id, unsigned *out) {
    struct call call;
    struct profile profile;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = with_profile_id(&call, id, &profile);
    }
    if (result == NVML_SUCCESS) {
        *out = capacity(call.gpu, &profile, false);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned id, nvmlPlacement_t *out,
                                                                  unsigned *count) {
    struct call call;
    struct profile profile;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = with_profile_id(&call, id, &profile);
    }
    if (result == NVML_SUCCESS) {
        unsigned starts[16], found = possible_starts(call.gpu, &profile, starts, 16);
        if (out == NULL) {
            *count = found;
        } else if (*count < found) {
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        } else {
            for (unsigned i = 0; i < found; i++) {
                out[i] = (nvmlPlacement_t){starts[i], profile.memory_slices};
            }
            *count = found;
        }
    }
    return finish(&call, result);
}

/* Ids start at 1, and at 0 for the profile that takes the whole GPU, as real ones do. */
static int unused_gi(int gpu, const struct profile *profile) {
    struct profile other;
    unsigned start;
    for (int gi = profile->memory_slices == 8 ? 0 : 1; gi < MAX_GI; gi++) {
        if (!read_gi(gpu, gi, &other, &start)) {
            return gi;
        }
    }
    return -1;
}

static nvmlReturn_t create_gi(struct call *call, unsigned id, const nvmlPlacement_t *placement, nvmlGpuInstance_t *out) {
    struct profile profile;
    nvmlReturn_t result = with_profile_id(call, id, &profile);
    if (result != NVML_SUCCESS) {
        return result;
    }
    unsigned starts[16], found = possible_starts(call->gpu, &profile, starts, 16);
    bool known = false;
    for (unsigned i = found; i-- > 0;) { /* like the driver: from the back, so that big ones keep the front */
        if (placement != NULL && placement->start != starts[i]) {
            continue;
        }
        known = true;
        if (free_at(call->gpu, &profile, starts[i])) {
            int gi = unused_gi(call->gpu, &profile);
            if (gi < 0) {
                break;
            }
            char key[32], value[32];
            snprintf(key, sizeof key, "gi.%d", gi);
            snprintf(value, sizeof value, "%u,%u", profile.number, starts[i]);
            put_text(call, key, value);
            *out = gi_handle(call->gpu, gi);
            return NVML_SUCCESS;
        }
    }
    return placement != NULL && !known ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out) {
    struct call call;
    nvmlReturn_t result = begin_change(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = create_gi(&call, id, NULL, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned id,
                                                             const nvmlPlacement_t *placement, nvmlGpuInstance_t *out) {
    struct call call;
    nvmlReturn_t result = begin_change(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = placement == NULL ? NVML_ERROR_INVALID_ARGUMENT : create_gi(&call, id, placement, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out, unsigned *count) {
    struct call call;
    struct profile profile, other;
    unsigned start, found = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = with_profile_id(&call, id, &profile);
    }
    for (int gi = 0; result == NVML_SUCCESS && gi < MAX_GI; gi++) {
        if (read_gi(call.gpu, gi, &other, &start) && other.id == id) {
            out[found++] = gi_handle(call.gpu, gi);
        }
    }
    if (result == NVML_SUCCESS) {
        *count = found;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = need_mig(&call);
    }
    if (result == NVML_SUCCESS) {
        if (id < MAX_GI && read_gi(call.gpu, (int)id, &profile, &start)) {
            *out = gi_handle(call.gpu, (int)id);
        } else {
            result = NVML_ERROR_NOT_FOUND;
        }
    }
    return finish(&call, result);
}

/* Starts a call about a GPU instance that must exist. */
static nvmlReturn_t begin_gi(struct call *call, const char *name, nvmlGpuInstance_t handle, bool change,
                             struct profile *profile, unsigned *start) {
    int gpu, gi;
    if (!gi_of(handle, &gpu, &gi)) {
        nvmlReturn_t result = begin_system(call, name);
        return result == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : result;
    }
    nvmlReturn_t result = begin_index(call, name, gpu, gi, -1, change);
    if (result == NVML_SUCCESS && !read_gi(gpu, gi, profile, start)) {
        result = NVML_ERROR_NOT_FOUND;
    }
    return result;
}

static bool slice_busy(const struct call *call, int gi, int ci) {
    struct process processes[256];
    size_t found = state_processes(call->gpu, processes, 256);
    for (size_t i = 0; i < found; i++) {
        if (processes[i].gi == gi && (ci < 0 || processes[i].ci == ci)) {
            return true;
        }
    }
    return false;
}

EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t handle) {
    struct call call;
    struct profile profile;
    unsigned start, number;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, true, &profile, &start);
    for (int ci = 0; result == NVML_SUCCESS && ci < MAX_CI; ci++) {
        if (read_ci(call.gpu, call.gi, ci, &number, &start, NULL, 0)) {
            result = NVML_ERROR_IN_USE;
        }
    }
    if (result == NVML_SUCCESS) {
        char key[32];
        snprintf(key, sizeof key, "gi.%d", call.gi);
        put_text(&call, key, NULL);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t handle, nvmlGpuInstanceInfo_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        *out = (nvmlGpuInstanceInfo_t){
            gpu_handle(call.gpu), (unsigned)call.gi, profile.id, {start, profile.memory_slices}};
    }
    return finish(&call, result);
}

/* ---- compute instances -------------------------------------------------------------------- */

static unsigned ci_bits(int gpu, int gi) {
    unsigned bits = 0, number, start;
    for (int ci = 0; ci < MAX_CI; ci++) {
        if (read_ci(gpu, gi, ci, &number, &start, NULL, 0)) {
            bits |= ((1U << ci_slices[number]) - 1) << start;
        }
    }
    return bits;
}

static unsigned ci_capacity(int gpu, int gi, const struct profile *profile, unsigned number) {
    unsigned bits = gi < 0 ? 0 : ci_bits(gpu, gi), size = ci_slices[number], fit = 0;
    for (unsigned start = 0; start + size <= profile->slices; start += size) {
        fit += (bits & (((1U << size) - 1) << start)) == 0;
    }
    return fit;
}

static nvmlReturn_t ci_checks(const struct profile *profile, unsigned number) {
    if (number >= CI_PROFILES) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return ci_slices[number] == 0 || ci_slices[number] > profile->slices ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static nvmlComputeInstanceProfileInfo_t ci_info(const struct profile *profile, unsigned number) {
    return (nvmlComputeInstanceProfileInfo_t){number,
                                              ci_slices[number],
                                              ci_capacity(-1, -1, profile, number),
                                              profile->sms / profile->slices * ci_slices[number],
                                              profile->copy,
                                              profile->decoders,
                                              profile->encoders,
                                              profile->jpegs,
                                              profile->ofas};
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t handle, unsigned number,
                                                                 unsigned engine, nvmlComputeInstanceProfileInfo_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = engine != 0 ? NVML_ERROR_INVALID_ARGUMENT : ci_checks(&profile, number);
    }
    if (result == NVML_SUCCESS) {
        *out = ci_info(&profile, number);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t handle, unsigned number,
                                                                  unsigned engine,
                                                                  nvmlComputeInstanceProfileInfo_v2_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = engine != 0 ? NVML_ERROR_INVALID_ARGUMENT : ci_checks(&profile, number);
    }
    if (result == NVML_SUCCESS && out->version != STRUCT_VERSION(nvmlComputeInstanceProfileInfo_v2_t, 2)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        nvmlComputeInstanceProfileInfo_t info = ci_info(&profile, number);
        out->id = info.id;
        out->sliceCount = info.sliceCount;
        out->instanceCount = info.instanceCount;
        out->multiprocessorCount = info.multiprocessorCount;
        out->sharedCopyEngineCount = info.sharedCopyEngineCount;
        out->sharedDecoderCount = info.sharedDecoderCount;
        out->sharedEncoderCount = info.sharedEncoderCount;
        out->sharedJpegCount = info.sharedJpegCount;
        out->sharedOfaCount = info.sharedOfaCount;
        if (info.sliceCount == profile.slices) {
            snprintf(out->name, sizeof out->name, "MIG %s", profile.name);
        } else {
            snprintf(out->name, sizeof out->name, "MIG %uc.%s", info.sliceCount, profile.name);
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t handle, unsigned number,
                                                                       unsigned *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = ci_checks(&profile, number);
    }
    if (result == NVML_SUCCESS) {
        *out = ci_capacity(call.gpu, call.gi, &profile, number);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t handle, unsigned number,
                                                                        nvmlPlacement_t *out, unsigned *count) {
    struct call call;
    struct profile profile;
    unsigned start, found = 0;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = ci_checks(&profile, number);
    }
    if (result == NVML_SUCCESS) {
        unsigned size = ci_slices[number], places = profile.slices / size;
        if (out != NULL && *count < places) {
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        }
        for (; out != NULL && result == NVML_SUCCESS && found < places; found++) {
            out[found] = (nvmlPlacement_t){found * size, size};
        }
        *count = places;
    }
    return finish(&call, result);
}

/* Same GPU, instance ids and epoch, same UUID. `mig.epoch` moves when a profile wants new ones after a reboot. */
static void make_uuid(const struct call *call, int ci, char *out, size_t size) {
    char seed[256];
    const char *uuid = text(call, "uuid");
    snprintf(seed, sizeof seed, "%s/%d/%d/%llu", uuid == NULL ? "" : uuid, call->gi, ci, value_or(call, "mig.epoch", 0));
    unsigned long long hash[2] = {14695981039346656037ULL, 1099511628211ULL * 7919};
    for (int half = 0; half < 2; half++) {
        for (const char *at = seed; *at != '\0'; at++) {
            hash[half] = (hash[half] ^ (unsigned char)*at) * 1099511628211ULL;
        }
    }
    snprintf(out, size, "MIG-%08llx-%04llx-5%03llx-8%03llx-%012llx", hash[0] >> 32, hash[0] >> 16 & 0xffff,
             hash[0] & 0xfff, hash[1] >> 52, hash[1] & 0xffffffffffffULL);
}

static nvmlReturn_t create_ci(struct call *call, const struct profile *profile, unsigned number,
                              const nvmlPlacement_t *placement, nvmlComputeInstance_t *out) {
    nvmlReturn_t result = ci_checks(profile, number);
    if (result != NVML_SUCCESS) {
        return result;
    }
    unsigned size = ci_slices[number], bits = ci_bits(call->gpu, call->gi), other, other_start;
    for (unsigned start = 0; start + size <= profile->slices; start += size) {
        if ((placement != NULL && placement->start != start) || (bits & (((1U << size) - 1) << start)) != 0) {
            continue;
        }
        for (int ci = 0; ci < MAX_CI; ci++) {
            if (!read_ci(call->gpu, call->gi, ci, &other, &other_start, NULL, 0)) {
                char key[48], value[128], uuid[64];
                make_uuid(call, ci, uuid, sizeof uuid);
                snprintf(key, sizeof key, "gi.%d.ci.%d", call->gi, ci);
                snprintf(value, sizeof value, "%u,%u,%s", number, start, uuid);
                put_text(call, key, value);
                *out = ci_handle(call->gpu, call->gi, ci);
                return NVML_SUCCESS;
            }
        }
    }
    return NVML_ERROR_INSUFFICIENT_RESOURCES;
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t handle, unsigned number,
                                                         nvmlComputeInstance_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, true, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = create_ci(&call, &profile, number, NULL, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t handle, unsigned number,
                                                                      const nvmlPlacement_t *placement,
                                                                      nvmlComputeInstance_t *out) {
    struct call call;
    struct profile profile;
    unsigned start;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, true, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = placement == NULL ? NVML_ERROR_INVALID_ARGUMENT : create_ci(&call, &profile, number, placement, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t handle, unsigned wanted,
                                                       nvmlComputeInstance_t *out, unsigned *count) {
    struct call call;
    struct profile profile;
    unsigned start, number, found = 0;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        result = ci_checks(&profile, wanted);
    }
    for (int ci = 0; result == NVML_SUCCESS && ci < MAX_CI; ci++) {
        if (read_ci(call.gpu, call.gi, ci, &number, &start, NULL, 0) && number == wanted) {
            out[found++] = ci_handle(call.gpu, call.gi, ci);
        }
    }
    if (result == NVML_SUCCESS) {
        *count = found;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t handle, unsigned id,
                                                          nvmlComputeInstance_t *out) {
    struct call call;
    struct profile profile;
    unsigned start, number;
    nvmlReturn_t result = begin_gi(&call, __func__, handle, false, &profile, &start);
    if (result == NVML_SUCCESS) {
        if (id < MAX_CI && read_ci(call.gpu, call.gi, (int)id, &number, &start, NULL, 0)) {
            *out = ci_handle(call.gpu, call.gi, (int)id);
        } else {
            result = NVML_ERROR_NOT_FOUND;
        }
    }
    return finish(&call, result);
}

static nvmlReturn_t begin_ci(struct call *call, const char *name, nvmlComputeInstance_t handle, bool change,
                             unsigned *number, unsigned *start) {
    int gpu, gi, ci;
    if (!ci_of(handle, &gpu, &gi, &ci)) {
        nvmlReturn_t result = begin_system(call, name);
        return result == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : result;
    }
    nvmlReturn_t result = begin_index(call, name, gpu, gi, ci, change);
    if (result == NVML_SUCCESS && !read_ci(gpu, gi, ci, number, start, NULL, 0)) {
        result = NVML_ERROR_NOT_FOUND;
    }
    return result;
}

EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t handle) {
    struct call call;
    unsigned number, start;
    nvmlReturn_t result = begin_ci(&call, __func__, handle, true, &number, &start);
    if (result == NVML_SUCCESS && slice_busy(&call, call.gi, call.ci)) {
        result = NVML_ERROR_IN_USE;
    }
    if (result == NVML_SUCCESS) {
        char key[48];
        snprintf(key, sizeof key, "gi.%d.ci.%d", call.gi, call.ci);
        put_text(&call, key, NULL);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t handle, nvmlComputeInstanceInfo_t *out) {
    struct call call;
    unsigned number, start;
    nvmlReturn_t result = begin_ci(&call, __func__, handle, false, &number, &start);
    if (result == NVML_SUCCESS) {
        *out = (nvmlComputeInstanceInfo_t){gpu_handle(call.gpu),
                                           gi_handle(call.gpu, call.gi),
                                           (unsigned)call.ci,
                                           number,
                                           {start, ci_slices[number]}};
    }
    return finish(&call, result);
}
