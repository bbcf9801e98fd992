/* State of the simulated host: a flat file of dotted keys, processes, faults. */
#ifndef GPUSIM_STATE_H
#define GPUSIM_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml_abi.h"

enum process_kind { PROCESS_COMPUTE, PROCESS_GRAPHICS, PROCESS_MPS };

struct process {
    unsigned pid;
    int gpu, gi, ci; /* gi and ci are -1 outside MIG */
    uint64_t bytes;
    enum process_kind kind;
    char name[128];
};

/* Everything below is called with the library's global lock held. */

/* Brings the cached copy up to date. Returns an NVML code. */
nvmlReturn_t state_load(void);

/* Value of a dotted key or NULL. The pointer is valid until the next load. */
const char *state_get(const char *key);

/* Calls visit for every key that starts with prefix, in sorted order. */
void state_each(const char *prefix, bool (*visit)(const char *key, const char *value, void *arg), void *arg);

/* A change is: begin (exclusive lock, reload), put..., end (write when commit). */
nvmlReturn_t state_begin(void);
void state_put(const char *key, const char *value); /* NULL removes the key */
void state_remove_prefix(const char *prefix);
nvmlReturn_t state_end(bool commit);

/* Live processes of one GPU (or all with gpu = -1). Returns how many were written to out. */
size_t state_processes(int gpu, struct process *out, size_t max);

#endif
