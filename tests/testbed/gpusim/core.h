/* What every simulated call shares: lock, state, faults, handles. */
#ifndef GPUSIM_CORE_H
#define GPUSIM_CORE_H

#include "state.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_GI 16
#define MAX_CI 8

struct handle { /* a GPU, or one compute instance of it (gi, ci >= 0) */
    int gpu, gi, ci;
};
struct gpu_instance {
    int gpu, gi;
};
struct compute_instance {
    int gpu, gi, ci;
};

struct call {
    const char *name; /* symbol as called */
    int gpu, gi, ci;  /* -1 when not about a device or not about a MIG device */
    bool changing;    /* holds the state lock */
    bool silent;      /* fault: report success, change nothing */
    int late_code;    /* fault: change, then report this */
};

/* All of these take the global lock; every one is paired with finish(), also after an error. */
nvmlReturn_t begin_system(struct call *call, const char *name);
nvmlReturn_t begin_device(struct call *call, const char *name, nvmlDevice_t device);     /* MIG handles refused */
nvmlReturn_t begin_any_device(struct call *call, const char *name, nvmlDevice_t device); /* MIG handles welcome */
nvmlReturn_t begin_change(struct call *call, const char *name, nvmlDevice_t device);     /* root, for a GPU */
nvmlReturn_t begin_index(struct call *call, const char *name, int gpu, int gi, int ci, bool change);
nvmlReturn_t finish(struct call *call, nvmlReturn_t result);

/* Values below `gpu.<n>.`; a value "!N" stands for "this answers with NVML code N". */
const char *text(const struct call *call, const char *key);
nvmlReturn_t get_text(const struct call *call, const char *key, char *out, unsigned size);
nvmlReturn_t get_u64(const struct call *call, const char *key, unsigned long long *out);
nvmlReturn_t get_uint(const struct call *call, const char *key, unsigned *out);
unsigned long long value_or(const struct call *call, const char *key, unsigned long long otherwise);
void put_uint(const struct call *call, const char *key, unsigned long long value);
void put_text(const struct call *call, const char *key, const char *value);

nvmlReturn_t copy_text(const char *value, char *out, unsigned size);
int gpu_count(void);
nvmlDevice_t gpu_handle(int gpu);
nvmlDevice_t mig_handle(int gpu, int gi, int ci);
nvmlGpuInstance_t gi_handle(int gpu, int gi);
nvmlComputeInstance_t ci_handle(int gpu, int gi, int ci);
bool gi_of(nvmlGpuInstance_t handle, int *gpu, int *gi);
bool ci_of(nvmlComputeInstance_t handle, int *gpu, int *gi, int *ci);

/* mig.c */
int mig_device_at(int gpu, unsigned index, int *gi, int *ci); /* false when there is none */
bool mig_attributes(int gpu, int gi, int ci, nvmlDeviceAttributes_t *out, char *name, size_t name_size, char *uuid,
                    size_t uuid_size);

#endif
