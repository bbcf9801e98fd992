/* System calls, device identity, memory, settings, health, topology. */
#define _GNU_SOURCE
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/time.h>
#include <unistd.h>

#define MAX_PROCESSES 512

/* ---- small calls that hand out one value -------------------------------------------------- */

#define GET_UINT(function, key)                                                                                        \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *out) {                                                 \
        struct call call;                                                                                              \
        nvmlReturn_t result = begin_device(&call, __func__, device);                                                   \
        return finish(&call, result == NVML_SUCCESS ? get_uint(&call, key, out) : result);                             \
    }

/* The same for calls that accept MIG devices and answer for their parent. */
#define GET_UINT_ANY(function, key)                                                                                    \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *out) {                                                 \
        struct call call;                                                                                              \
        nvmlReturn_t result = begin_any_device(&call, __func__, device);                                               \
        return finish(&call, result == NVML_SUCCESS ? get_uint(&call, key, out) : result);                             \
    }

#define GET_U64(function, key)                                                                                         \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned long long *out) {                                       \
        struct call call;                                                                                              \
        nvmlReturn_t result = begin_device(&call, __func__, device);                                                   \
        return finish(&call, result == NVML_SUCCESS ? get_u64(&call, key, out) : result);                              \
    }

#define GET_TEXT(function, key)                                                                                        \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned size) {                                      \
        struct call call;                                                                                              \
        nvmlReturn_t result = begin_device(&call, __func__, device);                                                   \
        return finish(&call, result == NVML_SUCCESS ? get_text(&call, key, out, size) : result);                       \
    }

#define GET_PAIR(function, first, second)                                                                              \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *a, unsigned *b) {                                      \
        struct call call;                                                                                              \
        nvmlReturn_t result = begin_device(&call, __func__, device);                                                   \
        if (result == NVML_SUCCESS) {                                                                                  \
            result = get_uint(&call, first, a);                                                                        \
        }                                                                                                              \
        return finish(&call, result == NVML_SUCCESS ? get_uint(&call, second, b) : result);                            \
    }

/* ---- system ------------------------------------------------------------------------------- */

static nvmlReturn_t system_text(const char *function, const char *key, char *out, unsigned size) {
    struct call call;
    nvmlReturn_t result = begin_system(&call, function);
    return finish(&call, result == NVML_SUCCESS ? copy_text(state_get(key), out, size) : result);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return system_text(__func__, "system.driver_version", out, size);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    return system_text(__func__, "system.nvml_version", out, size);
}

EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *out, unsigned size) {
    if (out == NULL || out->version != STRUCT_VERSION(nvmlSystemDriverBranchInfo_v1_t, 1)) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return system_text(__func__, "system.driver_branch", out->branch, size);
}

static nvmlReturn_t cuda_version(const char *function, int *out) {
    struct call call;
    nvmlReturn_t result = begin_system(&call, function);
    if (result == NVML_SUCCESS) {
        const char *value = state_get("system.cuda_driver_version");
        result = value == NULL        ? NVML_ERROR_NOT_SUPPORTED
                 : value[0] == '!'    ? (nvmlReturn_t)atoi(value + 1)
                 : out == NULL        ? NVML_ERROR_INVALID_ARGUMENT
                                      : NVML_SUCCESS;
        if (result == NVML_SUCCESS) {
            *out = atoi(value);
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out) { return cuda_version(__func__, out); }
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda_version(__func__, out); }

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    static struct process processes[MAX_PROCESSES];
    struct call call;
    nvmlReturn_t result = begin_system(&call, __func__);
    if (result == NVML_SUCCESS) {
        size_t found = state_processes(-1, processes, MAX_PROCESSES);
        result = NVML_ERROR_NOT_FOUND;
        for (size_t i = 0; i < found && result == NVML_ERROR_NOT_FOUND; i++) {
            if (processes[i].pid == pid) {
                result = copy_text(processes[i].name, out, size);
            }
        }
        if (result == NVML_ERROR_NOT_FOUND) { /* any process of the host has a name, with or without a GPU */
            char path[64], name[1024];
            snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
            FILE *file = fopen(path, "re");
            if (file != NULL) {
                size_t length = fread(name, 1, sizeof name - 1, file);
                fclose(file);
                name[length] = '\0';
                if (length > 0) {
                    result = copy_text(name, out, size);
                }
            }
        }
    }
    return finish(&call, result);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
    static const char *const names[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "GPU access blocked by the operating system",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
        "vGPU ECC not supported", "Insufficient Resources", "Requested frequency is not supported",
        "Argument version mismatch", "Deprecated", "Not ready", "GPU not found", "Invalid state",
        "Reset type not supported"};
    return code >= 0 && code < (int)(sizeof names / sizeof *names) ? names[code] : "Unknown Error";
}

/* ---- finding a device --------------------------------------------------------------------- */

static nvmlReturn_t device_count(const char *function, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_system(&call, function);
    if (result == NVML_SUCCESS) {
        if (out == NULL) {
            result = NVML_ERROR_INVALID_ARGUMENT;
        } else {
            *out = (unsigned)gpu_count();
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *out) { return device_count(__func__, out); }
EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out) { return device_count(__func__, out); }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
    struct call call;
    nvmlReturn_t result = begin_index(&call, __func__, index < MAX_GPUS ? (int)index : MAX_GPUS, -1, -1, false);
    if (result == NVML_SUCCESS) {
        *out = gpu_handle((int)index);
    }
    return finish(&call, result);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out) {
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

/* Finds a GPU by a predicate, then starts the call again as one about that GPU, so that its faults apply. */
static nvmlReturn_t find_device(const char *function, bool (*is_it)(const struct call *, const char *), const char *wanted,
                                nvmlDevice_t *out) {
    struct call call;
    int found = -1, found_gi = -1, found_ci = -1;
    nvmlReturn_t result = begin_system(&call, function);
    if (result == NVML_SUCCESS && (wanted == NULL || out == NULL)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int gpu = 0; result == NVML_SUCCESS && found < 0 && gpu < gpu_count(); gpu++) {
        struct call about = {.name = function, .gpu = gpu, .gi = -1, .ci = -1};
        if (is_it(&about, wanted)) {
            found = gpu;
        }
        for (unsigned index = 0; strncmp(wanted, "MIG-", 4) == 0 && found < 0 && index < 7; index++) {
            char uuid[96];
            if (mig_device_at(gpu, index, &found_gi, &found_ci) &&
                mig_attributes(gpu, found_gi, found_ci, NULL, NULL, 0, uuid, sizeof uuid) && strcmp(uuid, wanted) == 0) {
                found = gpu;
            }
        }
    }
    if (result == NVML_SUCCESS && found < 0) {
        result = NVML_ERROR_NOT_FOUND;
    }
    result = finish(&call, result);
    if (result != NVML_SUCCESS) {
        return result;
    }
    bool mig = strncmp(wanted, "MIG-", 4) == 0;
    result = begin_index(&call, function, found, mig ? found_gi : -1, mig ? found_ci : -1, false);
    if (result == NVML_SUCCESS) {
        *out = mig ? mig_handle(found, found_gi, found_ci) : gpu_handle(found);
    }
    return finish(&call, result);
}

static bool has_uuid(const struct call *call, const char *wanted) {
    const char *value = text(call, "uuid");
    return value != NULL && strcasecmp(value, wanted) == 0;
}

static bool has_serial(const struct call *call, const char *wanted) {
    const char *value = text(call, "serial");
    return value != NULL && strcmp(value, wanted) == 0;
}

struct bdf {
    unsigned domain, bus, device, function;
};

static bool parse_bdf(const char *address, struct bdf *out) {
    int end = 0;
    if (sscanf(address, "%x:%x:%x.%u%n", &out->domain, &out->bus, &out->device, &out->function, &end) == 4 &&
        address[end] == '\0') {
        return true;
    }
    out->domain = 0;
    return sscanf(address, "%x:%x.%u%n", &out->bus, &out->device, &out->function, &end) == 3 && address[end] == '\0';
}

static bool has_address(const struct call *call, const char *wanted) {
    struct bdf mine, theirs;
    const char *value = text(call, "pci.address");
    return value != NULL && parse_bdf(value, &mine) && parse_bdf(wanted, &theirs) && mine.domain == theirs.domain &&
           mine.bus == theirs.bus && mine.device == theirs.device;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
    return find_device(__func__, has_uuid, uuid, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_v1_t *uuid, nvmlDevice_t *out) {
    if (uuid == NULL || uuid->version != STRUCT_VERSION(nvmlUUID_v1_t, 1)) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return uuid->type == 1 ? find_device(__func__, has_uuid, uuid->value.str, out) : NVML_ERROR_NOT_SUPPORTED;
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *out) {
    return find_device(__func__, has_serial, serial, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *out) {
    return find_device(__func__, has_address, address, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *address, nvmlDevice_t *out) {
    return find_device(__func__, has_address, address, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && out == NULL) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        *out = (unsigned)call.gpu;
        int gi, ci;
        for (unsigned index = 0; call.gi >= 0 && mig_device_at(call.gpu, index, &gi, &ci); index++) {
            if (gi == call.gi && ci == call.ci) { /* a slice's index counts inside its parent */
                *out = index;
                break;
            }
        }
    }
    return finish(&call, result);
}

/* ---- identity ----------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned size) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && call.gi >= 0 && text(&call, "name") != NULL) {
        char profile[64], name[192];
        mig_attributes(call.gpu, call.gi, call.ci, NULL, profile, sizeof profile, NULL, 0);
        snprintf(name, sizeof name, "%.96s MIG %s", text(&call, "name"), profile);
        result = copy_text(name, out, size);
    } else if (result == NVML_SUCCESS) {
        result = get_text(&call, "name", out, size);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned size) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && call.gi >= 0) {
        char uuid[96];
        mig_attributes(call.gpu, call.gi, call.ci, NULL, NULL, 0, uuid, sizeof uuid);
        result = copy_text(uuid, out, size);
    } else if (result == NVML_SUCCESS) {
        result = get_text(&call, "uuid", out, size);
    }
    return finish(&call, result);
}

static nvmlReturn_t pci_ids(const struct call *call, struct bdf *at, unsigned *device_id, unsigned *subsystem) {
    const char *address = text(call, "pci.address");
    if (address == NULL || address[0] == '!') {
        return address == NULL ? NVML_ERROR_NOT_SUPPORTED : (nvmlReturn_t)atoi(address + 1);
    }
    if (!parse_bdf(address, at)) {
        return NVML_ERROR_UNKNOWN;
    }
    *device_id = (unsigned)value_or(call, "pci.device_id", 0) << 16 | 0x10de;
    *subsystem = (unsigned)value_or(call, "pci.subsystem_id", 0) << 16 | 0x10de;
    return NVML_SUCCESS;
}

static nvmlReturn_t pci_info(const char *function, nvmlDevice_t device, nvmlPciInfo_t *out) {
    struct call call;
    struct bdf at;
    unsigned device_id, subsystem;
    nvmlReturn_t result = begin_any_device(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = out == NULL ? NVML_ERROR_INVALID_ARGUMENT : pci_ids(&call, &at, &device_id, &subsystem);
    }
    if (result == NVML_SUCCESS) {
        *out = (nvmlPciInfo_t){.domain = at.domain,
                               .bus = at.bus,
                               .device = at.device,
                               .pciDeviceId = device_id,
                               .pciSubSystemId = subsystem};
        snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", at.domain & 0xffff, at.bus & 0xff,
                 at.device & 0xff);
        snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", at.domain, at.bus, at.device);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out) {
    return pci_info(__func__, device, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *out) {
    struct call call;
    struct bdf at;
    unsigned device_id, subsystem;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        result = pci_ids(&call, &at, &device_id, &subsystem);
    }
    if (result == NVML_SUCCESS) {
        out->domain = at.domain;
        out->bus = at.bus;
        out->device = at.device;
        out->pciDeviceId = device_id;
        out->pciSubSystemId = subsystem;
        out->baseClass = 3;
        out->subClass = (unsigned)value_or(&call, "pci.subclass", 2);
        snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", at.domain, at.bus, at.device);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        const char *value = text(&call, "compute_capability");
        result = value == NULL                                ? NVML_ERROR_NOT_SUPPORTED
                 : value[0] == '!'                            ? (nvmlReturn_t)atoi(value + 1)
                 : sscanf(value, "%d.%d", major, minor) == 2  ? NVML_SUCCESS
                                                              : NVML_ERROR_UNKNOWN;
    }
    return finish(&call, result);
}

GET_UINT_ANY(nvmlDeviceGetArchitecture, "architecture")
GET_UINT_ANY(nvmlDeviceGetBrand, "brand")
GET_UINT_ANY(nvmlDeviceGetMinorNumber, "minor")
GET_UINT_ANY(nvmlDeviceGetNumGpuCores, "cores")
GET_UINT_ANY(nvmlDeviceGetMemoryBusWidth, "memory.bus_width")
GET_UINT(nvmlDeviceGetBoardId, "board_id")
GET_UINT(nvmlDeviceGetModuleId, "module_id")
GET_UINT(nvmlDeviceGetMultiGpuBoard, "multi_gpu_board")
GET_UINT(nvmlDeviceGetBusType, "pci.bus_type")
GET_UINT(nvmlDeviceGetIrqNum, "pci.irq")
GET_UINT(nvmlDeviceGetVirtualizationMode, "virtualization_mode")
GET_UINT(nvmlDeviceGetHostVgpuMode, "host_vgpu_mode")
GET_TEXT(nvmlDeviceGetSerial, "serial")
GET_TEXT(nvmlDeviceGetBoardPartNumber, "board_part_number")
GET_TEXT(nvmlDeviceGetVbiosVersion, "vbios_version")
GET_TEXT(nvmlDeviceGetInforomImageVersion, "inforom_image_version")
GET_PAIR(nvmlDeviceGetGspFirmwareMode, "gsp.enabled", "gsp.default")
GET_UINT(nvmlDeviceGetNumaNodeId, "gpu_numa_node") /* only where GPU memory is a NUMA node of its own */
GET_UINT(nvmlDeviceGetDisplayMode, "display.mode")
GET_UINT(nvmlDeviceGetDisplayActive, "display.active")
GET_UINT(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
GET_UINT(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_generation")
GET_UINT(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie.max_generation")
GET_UINT(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
GET_UINT(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width")
GET_UINT(nvmlDeviceGetPcieReplayCounter, "pcie.replays")

EXPORT nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    return finish(&call, result == NVML_SUCCESS ? get_text(&call, "gsp.version", out, 64) : result);
}

static nvmlReturn_t versioned(const char *function, nvmlDevice_t device, const char *key, versioned_uint_t *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, function, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(versioned_uint_t, 1))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return finish(&call, result == NVML_SUCCESS ? get_uint(&call, key, &out->value) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, versioned_uint_t *out) {
    return versioned(__func__, device, "addressing_mode", out);
}
EXPORT nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, versioned_uint_t *out) {
    return versioned(__func__, device, "health.unrepairable_memory", out);
}
GET_UINT(nvmlDeviceGetC2cModeInfoV, "c2c_enabled")

/* ---- memory and processes ----------------------------------------------------------------- */

/* The driver's own part plus what the processes hold. On a MIG parent only root may look. */
static nvmlReturn_t memory(const struct call *call, unsigned long long *total, unsigned long long *reserved,
                           unsigned long long *used) {
    static struct process processes[MAX_PROCESSES];
    nvmlReturn_t result = get_u64(call, "memory.total", total);
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (call->gi < 0 && value_or(call, "mig.mode", 0) == 1 && geteuid() != 0) {
        return NVML_ERROR_NO_PERMISSION;
    }
    *reserved = value_or(call, "memory.reserved", 0);
    *used = value_or(call, "memory.foreign", 0);
    if (call->gi >= 0) {
        nvmlDeviceAttributes_t attributes;
        mig_attributes(call->gpu, call->gi, call->ci, &attributes, NULL, 0, NULL, 0);
        *total = attributes.memorySizeMB << 20;
        *reserved = 0;
        *used = 0;
    }
    size_t found = state_processes(call->gpu, processes, MAX_PROCESSES);
    for (size_t i = 0; i < found; i++) {
        if (call->gi < 0 || processes[i].gi == call->gi) {
            *used += processes[i].bytes;
        }
    }
    if (*reserved > *total) {
        *reserved = *total;
    }
    if (*used > *total - *reserved) {
        *used = *total - *reserved;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out) {
    struct call call;
    unsigned long long total, reserved, used;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = out == NULL ? NVML_ERROR_INVALID_ARGUMENT : memory(&call, &total, &reserved, &used);
    }
    if (result == NVML_SUCCESS) { /* version 1 counts the reserved part as used */
        *out = (nvmlMemory_t){total, total - reserved - used, reserved + used};
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out) {
    struct call call;
    unsigned long long total, reserved, used;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(nvmlMemory_v2_t, 2))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        result = memory(&call, &total, &reserved, &used);
    }
    if (result == NVML_SUCCESS) {
        out->total = total;
        out->reserved = reserved;
        out->free = total - reserved - used;
        out->used = used;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *out) {
    struct call call;
    unsigned long long total = 0;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = out == NULL ? NVML_ERROR_INVALID_ARGUMENT : get_u64(&call, "bar1.total", &total);
    }
    if (result == NVML_SUCCESS) {
        unsigned long long used = value_or(&call, "bar1.used", 0);
        *out = (nvmlBAR1Memory_t){total, total - used, used};
    }
    return finish(&call, result);
}

/* Processes that the handle may see. */
static nvmlReturn_t processes_of(const struct call *call, int kind, struct process *out, size_t *count) {
    if (call->gi < 0 && value_or(call, "mig.mode", 0) == 1 && geteuid() != 0) {
        return NVML_ERROR_NO_PERMISSION;
    }
    const char *refused = text(call, "processes");
    if (refused != NULL && refused[0] == '!') {
        return (nvmlReturn_t)atoi(refused + 1);
    }
    size_t found = state_processes(call->gpu, out, MAX_PROCESSES), kept = 0;
    for (size_t i = 0; i < found; i++) {
        bool right_kind = kind < 0 || out[i].kind == (enum process_kind)kind;
        if (right_kind && (call->gi < 0 || (out[i].gi == call->gi && (out[i].ci < 0 || out[i].ci == call->ci)))) {
            out[kept++] = out[i];
        }
    }
    *count = kept;
    return NVML_SUCCESS;
}

static nvmlReturn_t list_processes(const char *function, nvmlDevice_t device, int kind, unsigned *count,
                                   nvmlProcessInfo_t *out) {
    static struct process processes[MAX_PROCESSES];
    struct call call;
    size_t found = 0;
    nvmlReturn_t result = begin_any_device(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : processes_of(&call, kind, processes, &found);
    }
    if (result == NVML_SUCCESS) {
        if (found > 0 && (out == NULL || *count < found)) {
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        }
        for (size_t i = 0; result == NVML_SUCCESS && i < found; i++) {
            out[i] = (nvmlProcessInfo_t){processes[i].pid, processes[i].bytes, (unsigned)processes[i].gi,
                                         (unsigned)processes[i].ci};
        }
        *count = (unsigned)found;
    }
    return finish(&call, result);
}

#define LIST(function, kind)                                                                                           \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out) {                       \
        return list_processes(__func__, device, kind, count, out);                                                     \
    }
LIST(nvmlDeviceGetComputeRunningProcesses_v2, PROCESS_COMPUTE)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, PROCESS_COMPUTE)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, PROCESS_GRAPHICS)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, PROCESS_GRAPHICS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, PROCESS_MPS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, PROCESS_MPS)

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *out) {
    static struct process processes[MAX_PROCESSES];
    struct call call;
    size_t found = 0;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS && out->mode > 3) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        result = processes_of(&call, out->mode == 3 ? -1 : (int)out->mode, processes, &found);
    }
    if (result == NVML_SUCCESS) {
        if (found > 0 && (out->procArray == NULL || out->numProcArrayEntries < found)) {
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        }
        for (size_t i = 0; result == NVML_SUCCESS && i < found; i++) {
            out->procArray[i] = (nvmlProcessDetail_v1_t){processes[i].pid, processes[i].bytes, (unsigned)processes[i].gi,
                                                         (unsigned)processes[i].ci, 0};
        }
        out->numProcArrayEntries = (unsigned)found;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = value_or(&call, "mig.mode", 0) == 1 ? NVML_ERROR_NOT_SUPPORTED
                                                     : get_uint(&call, "utilization.gpu", &out->gpu);
    }
    return finish(&call, result == NVML_SUCCESS ? get_uint(&call, "utilization.memory", &out->memory) : result);
}

/* ---- settings ----------------------------------------------------------------------------- */

static nvmlReturn_t set_uint(const char *function, nvmlDevice_t device, const char *must_exist, const char *key,
                             unsigned value, unsigned maximum) {
    struct call call;
    nvmlReturn_t result = begin_change(&call, function, device);
    if (result == NVML_SUCCESS) {
        const char *current = text(&call, must_exist);
        result = current == NULL       ? NVML_ERROR_NOT_SUPPORTED
                 : current[0] == '!'   ? (nvmlReturn_t)atoi(current + 1)
                 : value > maximum     ? NVML_ERROR_INVALID_ARGUMENT
                                       : NVML_SUCCESS;
    }
    if (result == NVML_SUCCESS) {
        put_uint(&call, key, value);
    }
    return finish(&call, result);
}

GET_UINT(nvmlDeviceGetPersistenceMode, "persistence_mode")
EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode) {
    return set_uint(__func__, device, "persistence_mode", "persistence_mode", mode, 1);
}

GET_UINT(nvmlDeviceGetComputeMode, "compute_mode")
EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode) {
    /* 1, exclusive thread, was removed from the driver */
    return set_uint(__func__, device, "compute_mode", "compute_mode", mode == 1 ? 99 : mode, 3);
}

GET_UINT(nvmlDeviceGetAccountingMode, "accounting_mode")
EXPORT nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, unsigned mode) {
    return set_uint(__func__, device, "accounting_mode", "accounting_mode", mode, 1);
}
GET_UINT(nvmlDeviceGetAccountingBufferSize, "accounting_buffer_size")

GET_PAIR(nvmlDeviceGetEccMode, "ecc.current", "ecc.pending")
GET_UINT(nvmlDeviceGetDefaultEccMode, "ecc.default")
EXPORT nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, unsigned mode) {
    return set_uint(__func__, device, "ecc.pending", "ecc.pending", mode, 1); /* current follows at the reboot */
}

EXPORT nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, unsigned api, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = api > 1 ? NVML_ERROR_INVALID_ARGUMENT
                         : get_uint(&call, api == 0 ? "api_restriction.0" : "api_restriction.1", out);
    }
    return finish(&call, result);
}
EXPORT nvmlReturn_t nvmlDeviceSetAPIRestriction(nvmlDevice_t device, unsigned api, unsigned restricted) {
    const char *key = api == 0 ? "api_restriction.0" : "api_restriction.1";
    return set_uint(__func__, device, key, key, api > 1 ? 99 : restricted, 1);
}

/* ---- power and clocks --------------------------------------------------------------------- */

GET_UINT(nvmlDeviceGetPowerManagementMode, "power.management")
GET_UINT(nvmlDeviceGetPowerManagementLimit, "power.limit")
GET_UINT(nvmlDeviceGetPowerManagementDefaultLimit, "power.default")
GET_PAIR(nvmlDeviceGetPowerManagementLimitConstraints, "power.min", "power.max")
GET_U64(nvmlDeviceGetTotalEnergyConsumption, "power.energy")
GET_UINT(nvmlDeviceGetPowerSource, "power.source")
GET_UINT(nvmlDeviceGetPerformanceState, "pstate")
GET_UINT(nvmlDeviceGetPowerState, "pstate")

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, text(&call, "power.enforced") != NULL ? "power.enforced" : "power.limit", out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "power.draw", out);
    }
    if (result == NVML_SUCCESS && *out > value_or(&call, "power.limit", *out)) {
        *out = (unsigned)value_or(&call, "power.limit", *out);
    }
    return finish(&call, result);
}

static nvmlReturn_t set_power(const char *function, nvmlDevice_t device, unsigned milliwatts) {
    struct call call;
    unsigned low = 0, high = 0;
    nvmlReturn_t result = begin_change(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "power.min", &low);
    }
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "power.max", &high);
    }
    if (result == NVML_SUCCESS && (milliwatts < low || milliwatts > high)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        put_uint(&call, "power.limit", milliwatts);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts) {
    return set_power(__func__, device, milliwatts);
}
EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, const nvmlPowerValue_v2_t *value) {
    if (value == NULL || value->version != STRUCT_VERSION(nvmlPowerValue_v2_t, 2)) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return value->powerScope == 0 ? set_power(__func__, device, value->powerValueMw) : NVML_ERROR_NOT_SUPPORTED;
}

static const char *const clock_names[] = {"graphics", "sm", "memory", "video"};

static nvmlReturn_t clock_of(const struct call *call, const char *group, unsigned type, unsigned *out) {
    char key[64];
    if (type > 3) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    snprintf(key, sizeof key, "%s.%s", group, clock_names[type]);
    return get_uint(call, key, out);
}

/* What runs is what is locked: there is no call that reads a lock back. */
static nvmlReturn_t current_clock(const char *function, nvmlDevice_t device, unsigned type, unsigned *out) {
    struct call call;
    unsigned low, high;
    nvmlReturn_t result = begin_device(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = clock_of(&call, "clocks", type, out);
    }
    if (result == NVML_SUCCESS) {
        const char *locked = text(&call, type == 2 ? "clocks.locked_memory" : "clocks.locked_gpu");
        if (locked != NULL && type != 3 && sscanf(locked, "%u,%u", &low, &high) == 2) {
            *out = *out < low ? low : *out > high ? high : *out;
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *out) {
    return current_clock(__func__, device, type, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned id, unsigned *out) {
    return id == 0 ? current_clock(__func__, device, type, out) : NVML_ERROR_NOT_SUPPORTED;
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    return finish(&call, result == NVML_SUCCESS ? clock_of(&call, "max_clocks", type, out) : result);
}

static nvmlReturn_t lock_clocks(const char *function, nvmlDevice_t device, const char *key, const char *maximum,
                                unsigned low, unsigned high, bool reset) {
    struct call call;
    unsigned max = 0;
    nvmlReturn_t result = begin_change(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, maximum, &max);
    }
    if (result == NVML_SUCCESS && !reset && (low > high || low > max)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        char value[32];
        snprintf(value, sizeof value, "%u,%u", low, high > max ? max : high);
        put_text(&call, key, reset ? NULL : value);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned low, unsigned high) {
    return lock_clocks(__func__, device, "clocks.locked_gpu", "max_clocks.graphics", low, high, false);
}
EXPORT nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) {
    return lock_clocks(__func__, device, "clocks.locked_gpu", "max_clocks.graphics", 0, 0, true);
}
EXPORT nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned low, unsigned high) {
    return lock_clocks(__func__, device, "clocks.locked_memory", "max_clocks.memory", low, high, false);
}
EXPORT nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device) {
    return lock_clocks(__func__, device, "clocks.locked_memory", "max_clocks.memory", 0, 0, true);
}

static nvmlReturn_t clock_list(const char *function, nvmlDevice_t device, const char *key, unsigned *count,
                               unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, function, device);
    const char *list = result == NVML_SUCCESS ? text(&call, key) : NULL;
    if (result == NVML_SUCCESS) {
        result = list == NULL        ? NVML_ERROR_NOT_SUPPORTED
                 : list[0] == '!'    ? (nvmlReturn_t)atoi(list + 1)
                 : count == NULL     ? NVML_ERROR_INVALID_ARGUMENT
                                     : NVML_SUCCESS;
    }
    if (result == NVML_SUCCESS) {
        unsigned found = 0;
        for (const char *at = list; *at != '\0'; found++) {
            char *end;
            unsigned value = (unsigned)strtoul(at, &end, 10);
            if (end == at) {
                break;
            }
            if (out != NULL && found < *count) {
                out[found] = value;
            }
            at = *end == ',' ? end + 1 : end;
        }
        if (found > 0 && (out == NULL || *count < found)) {
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        }
        *count = found;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned *count, unsigned *out) {
    return clock_list(__func__, device, "supported_clocks.memory", count, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned memory_clock, unsigned *count,
                                                         unsigned *out) {
    (void)memory_clock;
    return clock_list(__func__, device, "supported_clocks.graphics", count, out);
}

GET_U64(nvmlDeviceGetCurrentClocksEventReasons, "clocks.event_reasons")
GET_U64(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.event_reasons")
GET_U64(nvmlDeviceGetSupportedClocksEventReasons, "clocks.supported_event_reasons")
GET_U64(nvmlDeviceGetSupportedClocksThrottleReasons, "clocks.supported_event_reasons")

/* ---- temperature -------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = sensor == 0 ? get_uint(&call, "temperature.gpu", out) : NVML_ERROR_INVALID_ARGUMENT;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *out) {
    struct call call;
    unsigned celsius = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(nvmlTemperature_v1_t, 1))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        result = out->sensorType == 0 ? get_uint(&call, "temperature.gpu", &celsius) : NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        out->temperature = (int)celsius;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned type, unsigned *out) {
    static const char *const keys[] = {"temperature.shutdown", "temperature.slowdown", "temperature.memory_max",
                                       "temperature.gpu_max"};
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = type < 4 ? get_uint(&call, keys[type], out) : NVML_ERROR_NOT_SUPPORTED;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_v1_t *out) {
    struct call call;
    unsigned margin = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "temperature.margin", &margin);
    }
    if (result == NVML_SUCCESS) {
        out->marginTemperature = (int)margin;
    }
    return finish(&call, result);
}

GET_UINT(nvmlDeviceGetFanSpeed, "fan.speed")
GET_UINT(nvmlDeviceGetNumFans, "fan.count")

/* ---- health ------------------------------------------------------------------------------- */

static nvmlReturn_t ecc_count(const struct call *call, unsigned uncorrected, unsigned aggregate,
                              unsigned long long *out) {
    char key[64];
    if (uncorrected > 1 || aggregate > 1 || out == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (value_or(call, "ecc.current", 0) != 1) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    snprintf(key, sizeof key, "ecc.%s.%s", aggregate ? "aggregate" : "volatile",
             uncorrected ? "uncorrected" : "corrected");
    return get_u64(call, key, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                                unsigned long long *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    return finish(&call, result == NVML_SUCCESS ? ecc_count(&call, type, counter, out) : result);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter,
                                                    unsigned location, unsigned long long *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) { /* every error of the simulation is one of device memory (2) */
        result = location == 2 ? ecc_count(&call, type, counter, out) : NVML_ERROR_NOT_SUPPORTED;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, unsigned counter) {
    struct call call;
    nvmlReturn_t result = begin_change(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = counter > 1 ? NVML_ERROR_INVALID_ARGUMENT
                 : value_or(&call, "ecc.current", 0) != 1 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
    }
    if (result == NVML_SUCCESS) {
        put_uint(&call, counter ? "ecc.aggregate.corrected" : "ecc.volatile.corrected", 0);
        put_uint(&call, counter ? "ecc.aggregate.uncorrected" : "ecc.volatile.uncorrected", 0);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable,
                                              unsigned *pending, unsigned *failure) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "remapped.correctable", correctable);
    }
    if (result == NVML_SUCCESS) {
        *uncorrectable = (unsigned)value_or(&call, "remapped.uncorrectable", 0);
        *pending = (unsigned)value_or(&call, "remapped.pending", 0);
        *failure = (unsigned)value_or(&call, "remapped.failure", 0);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *out) {
    struct call call;
    unsigned correctable = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = out == NULL ? NVML_ERROR_INVALID_ARGUMENT : get_uint(&call, "remapped.correctable", &correctable);
    }
    if (result == NVML_SUCCESS) {
        *out = (nvmlRemappedRowsInfo_v2_t){correctable,
                                           0,
                                           (unsigned)value_or(&call, "remapped.uncorrectable", 0),
                                           0,
                                           (unsigned)value_or(&call, "remapped.pending", 0),
                                           (unsigned)value_or(&call, "remapped.failure", 0)};
    }
    return finish(&call, result);
}

GET_UINT(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending")

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count,
                                              unsigned long long *addresses) {
    struct call call;
    unsigned pages = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = cause > 1 ? NVML_ERROR_INVALID_ARGUMENT
                           : get_uint(&call, cause == 0 ? "retired.single_bit" : "retired.double_bit", &pages);
    }
    pages = pages > 1024 ? 1024 : pages;
    if (result == NVML_SUCCESS && pages > 0 && (addresses == NULL || *count < pages)) {
        result = NVML_ERROR_INSUFFICIENT_SIZE;
        *count = pages;
    } else if (result == NVML_SUCCESS) {
        for (unsigned i = 0; i < pages; i++) {
            addresses[i] = 0x1000ULL * (i + 1);
        }
        *count = pages;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_v1_t *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (out == NULL || out->version != STRUCT_VERSION(nvmlRepairStatus_v1_t, 1))) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "repair.channel_pending", &out->bChannelRepairPending);
    }
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "repair.tpc_pending", &out->bTpcRepairPending);
    }
    return finish(&call, result);
}

/* Field values: id, key, and whether the value is 64 bits wide. `field.<id>` overrides or adds one. */
static const struct {
    unsigned id;
    const char *key;
    bool wide;
} fields[] = {
    {1, "ecc.current", false},
    {2, "ecc.pending", false},
    {3, "ecc.volatile.corrected", true},
    {4, "ecc.volatile.uncorrected", true},
    {5, "ecc.aggregate.corrected", true},
    {6, "ecc.aggregate.uncorrected", true},
    {29, "retired.single_bit", false},
    {30, "retired.double_bit", false},
    {31, "retired.pending", false},
    {82, "temperature.memory", false},
    {83, "power.energy", true},
    {90, "nvlink.speed_mbps", false},
    {91, "nvlink.count", false},
    {94, "pcie.replays", false},
    {142, "remapped.correctable", false},
    {143, "remapped.uncorrectable", false},
    {144, "remapped.pending", false},
    {145, "remapped.failure", false},
    {164, "nvlink.speed_mbps", false},
    {166, "nvlink.version", false},
    {184, "mig.resetless", false},
    {185, "power.draw", false},
    {186, "power.draw", false},
    {187, "power.min", false},
    {188, "power.max", false},
    {189, "power.default", false},
    {190, "power.limit", false},
    {191, "power.energy", true},
    {192, "power.limit", false},
    {230, "health.recovery_action", false},
};

static nvmlReturn_t field_value(const struct call *call, nvmlFieldValue_t *field) {
    char own[32];
    unsigned long long number = 0;
    bool wide = false;
    snprintf(own, sizeof own, "field.%u", field->fieldId);
    const char *key = text(call, own) != NULL ? own : NULL;
    for (size_t i = 0; key == NULL && i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].id == field->fieldId) {
            key = fields[i].key;
            wide = fields[i].wide;
        }
    }
    nvmlReturn_t result = key == NULL ? NVML_ERROR_NOT_SUPPORTED : get_u64(call, key, &number);
    if (result == NVML_SUCCESS) {
        field->valueType = wide ? 3 : 1;
        if (wide) {
            field->value.ullVal = number;
        } else {
            field->value.ullVal = 0;
            field->value.uiVal = (unsigned)number;
        }
    }
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    struct call call;
    nvmlReturn_t result = begin_any_device(&call, __func__, device);
    if (result == NVML_SUCCESS && (count <= 0 || values == NULL)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    struct timeval now = {0, 0};
    gettimeofday(&now, NULL);
    for (int i = 0; result == NVML_SUCCESS && i < count; i++) {
        values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_usec;
        values[i].latencyUsec = 1;
        values[i].nvmlReturn = field_value(&call, &values[i]);
    }
    return finish(&call, result);
}

/* ---- topology, links, fabric -------------------------------------------------------------- */

/* "0-3,8" to a bit mask of 64-bit words. */
static void list_to_mask(const char *list, unsigned words, unsigned long *mask) {
    memset(mask, 0, words * sizeof *mask);
    for (const char *at = list; *at != '\0';) {
        char *end;
        unsigned long low = strtoul(at, &end, 10), high = low;
        if (end == at) {
            return;
        }
        if (*end == '-') {
            high = strtoul(end + 1, &end, 10);
        }
        for (unsigned long cpu = low; cpu <= high && cpu / 64 < words; cpu++) {
            mask[cpu / 64] |= 1UL << (cpu % 64);
        }
        at = *end == ',' ? end + 1 : end;
    }
}

static nvmlReturn_t affinity(const char *function, nvmlDevice_t device, const char *key, unsigned words,
                             unsigned long *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, function, device);
    if (result == NVML_SUCCESS) {
        const char *list = text(&call, key);
        result = list == NULL                    ? NVML_ERROR_NOT_SUPPORTED
                 : list[0] == '!'                ? (nvmlReturn_t)atoi(list + 1)
                 : words == 0 || out == NULL     ? NVML_ERROR_INVALID_ARGUMENT
                                                 : NVML_SUCCESS;
        if (result == NVML_SUCCESS) {
            list_to_mask(list, words, out);
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *out) {
    return affinity(__func__, device, "cpus", words, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words, unsigned long *out,
                                                        unsigned scope) {
    return scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : affinity(__func__, device, "cpus", words, out);
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *out,
                                                unsigned scope) {
    return scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : affinity(__func__, device, "numa_node", words, out);
}

/* Both handles must be GPUs; the call's faults are those of the first. */
static nvmlReturn_t begin_two(struct call *call, const char *function, nvmlDevice_t one, nvmlDevice_t two, int *other) {
    struct call second;
    nvmlReturn_t result = finish(&second, begin_device(&second, function, two));
    nvmlReturn_t first = begin_device(call, function, one);
    *other = second.gpu;
    return first == NVML_SUCCESS ? result : first;
}

static const char *pair_value(const char *group, int one, int two, const char *what) {
    char key[96];
    snprintf(key, sizeof key, "%s.%d.%d%s", group, one, two, what);
    const char *value = state_get(key);
    if (value == NULL) {
        snprintf(key, sizeof key, "%s.%d.%d%s", group, two, one, what);
        value = state_get(key);
    }
    return value;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t two, unsigned *out) {
    struct call call;
    int other = -1;
    nvmlReturn_t result = begin_two(&call, __func__, one, two, &other);
    if (result == NVML_SUCCESS) {
        const char *value = pair_value("topology", call.gpu, other, "");
        struct call second = {.gpu = other};
        bool same_node = value_or(&call, "numa_node", 0) == value_or(&second, "numa_node", 0);
        if (value != NULL && value[0] == '!') {
            result = (nvmlReturn_t)atoi(value + 1);
        } else {
            *out = value != NULL ? (unsigned)strtoul(value, NULL, 10) : call.gpu == other ? 0 : same_node ? 40 : 50;
        }
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, unsigned level, unsigned *count,
                                                     nvmlDevice_t *out) {
    struct call call;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        unsigned found = 0;
        for (int other = 0; other < gpu_count(); other++) {
            const char *value = pair_value("topology", call.gpu, other, "");
            struct call second = {.gpu = other};
            bool same_node = value_or(&call, "numa_node", 0) == value_or(&second, "numa_node", 0);
            unsigned ancestor = value != NULL ? (unsigned)strtoul(value, NULL, 10) : same_node ? 40 : 50;
            if (other != call.gpu && ancestor <= level) {
                if (out != NULL && found < *count) {
                    out[found] = gpu_handle(other);
                }
                found++;
            }
        }
        *count = found;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t two, unsigned capability, unsigned *out) {
    static const char *const names[] = {"read", "write", "nvlink", "atomics", "pci"};
    struct call call;
    int other = -1;
    nvmlReturn_t result = begin_two(&call, __func__, one, two, &other);
    if (result == NVML_SUCCESS && (capability > 4 || out == NULL || call.gpu == other)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        char what[32];
        snprintf(what, sizeof what, ".%s", names[capability]);
        const char *value = pair_value("p2p", call.gpu, other, what);
        snprintf(what, sizeof what, "p2p.%s", names[capability]);
        *out = value != NULL ? (unsigned)strtoul(value, NULL, 10) : (unsigned)value_or(&call, what, 5);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t two, int *out) {
    struct call call;
    int other = -1;
    nvmlReturn_t result = begin_two(&call, __func__, one, two, &other);
    if (result == NVML_SUCCESS) {
        struct call second = {.gpu = other};
        *out = value_or(&call, "board_id", 0) == value_or(&second, "board_id", 1);
    }
    return finish(&call, result);
}

/* One value of one link: `nvlink.<link>.<what>`, else `nvlink.<what>`. Links beyond `nvlink.count` are invalid. */
static nvmlReturn_t link_value(const char *function, nvmlDevice_t device, unsigned link, const char *what,
                               unsigned *out) {
    struct call call;
    unsigned links = 0;
    nvmlReturn_t result = begin_device(&call, function, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "nvlink.count", &links);
    }
    if (result == NVML_SUCCESS && link >= links) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        char key[64];
        snprintf(key, sizeof key, "nvlink.%u.%s", link, what);
        if (text(&call, key) == NULL) {
            snprintf(key, sizeof key, "nvlink.%s", what);
        }
        result = get_uint(&call, key, out);
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *out) {
    return link_value(__func__, device, link, "state", out);
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *out) {
    return link_value(__func__, device, link, "version", out);
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned *out) {
    return link_value(__func__, device, link, "remote_type", out);
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, unsigned capability,
                                                  unsigned *out) {
    nvmlReturn_t result = link_value(__func__, device, link, "state", out);
    if (result == NVML_SUCCESS && capability > 5) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        *out = capability != 4; /* all but the SLI bridge */
    }
    return result;
}

/* `nvlink.remote` is a list of PCI addresses that the links take in turn; `nvlink.<link>.remote` names one. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *out) {
    struct call call;
    unsigned links = 0;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = get_uint(&call, "nvlink.count", &links);
    }
    if (result == NVML_SUCCESS && (link >= links || out == NULL)) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        char key[64], list[512], *rest = list, *chosen = NULL;
        snprintf(key, sizeof key, "nvlink.%u.remote", link);
        const char *value = text(&call, key) != NULL ? text(&call, key) : text(&call, "nvlink.remote");
        struct bdf at;
        snprintf(list, sizeof list, "%s", value == NULL ? "" : value);
        unsigned size = 1;
        for (const char *c = list; *c != '\0'; c++) {
            size += *c == ';';
        }
        for (unsigned i = 0; i <= link % size; i++) {
            chosen = strsep(&rest, ";");
        }
        if (chosen == NULL || !parse_bdf(chosen, &at)) {
            result = NVML_ERROR_NOT_SUPPORTED;
        } else {
            *out = (nvmlPciInfo_t){.domain = at.domain,
                                   .bus = at.bus,
                                   .device = at.device,
                                   .pciDeviceId = (unsigned)value_or(&call, "nvlink.remote_device_id", 0) << 16 | 0x10de};
            snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", at.domain & 0xffff, at.bus & 0xff,
                     at.device & 0xff);
            snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", at.domain, at.bus, at.device);
        }
    }
    return finish(&call, result);
}

static nvmlReturn_t fabric(const struct call *call, nvmlGpuFabricInfo_v3_t *out) {
    unsigned state = 0;
    nvmlReturn_t result = get_uint(call, "fabric.state", &state);
    const char *uuid = text(call, "fabric.cluster_uuid");
    memset(out, 0, sizeof *out);
    for (size_t i = 0, at = 0; uuid != NULL && uuid[at] != '\0' && i < 16; at++) {
        unsigned byte;
        if (uuid[at] != '-' && sscanf(&uuid[at], "%2x", &byte) == 1) {
            out->clusterUuid[i++] = (unsigned char)byte;
            at++;
        }
    }
    out->state = (unsigned char)state;
    out->status = (nvmlReturn_t)value_or(call, "fabric.status", 0);
    out->cliqueId = (unsigned)value_or(call, "fabric.clique", 0);
    out->healthMask = (unsigned)value_or(call, "fabric.health_mask", 0);
    out->healthSummary = (unsigned char)value_or(call, "fabric.health_summary", 0);
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *out) {
    struct call call;
    nvmlGpuFabricInfo_v3_t info;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    if (result == NVML_SUCCESS) {
        result = fabric(&call, &info);
    }
    if (result == NVML_SUCCESS) {
        memcpy(out->clusterUuid, info.clusterUuid, sizeof info.clusterUuid);
        out->status = info.status;
        out->cliqueId = info.cliqueId;
        out->state = info.state;
    }
    return finish(&call, result);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, void *out) {
    struct call call;
    nvmlGpuFabricInfo_v3_t info;
    nvmlReturn_t result = begin_device(&call, __func__, device);
    unsigned version = out == NULL ? 0 : *(unsigned *)out;
    bool v3 = version == STRUCT_VERSION(nvmlGpuFabricInfo_v3_t, 3);
    if (result == NVML_SUCCESS && !v3 && version != STRUCT_VERSION(nvmlGpuFabricInfo_v2_t, 2)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        result = fabric(&call, &info);
    }
    if (result == NVML_SUCCESS) { /* version 2 is the front part of version 3 */
        info.version = version;
        memcpy(out, &info, v3 ? sizeof(nvmlGpuFabricInfo_v3_t) : sizeof(nvmlGpuFabricInfo_v2_t));
    }
    return finish(&call, result);
}

/* ---- devices that the driver was told to leave alone -------------------------------------- */

EXPORT nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned *out) {
    struct call call;
    nvmlReturn_t result = begin_system(&call, __func__);
    if (result == NVML_SUCCESS) {
        const char *value = state_get("system.excluded");
        *out = value == NULL ? 0 : (unsigned)strtoul(value, NULL, 10);
    }
    return finish(&call, result);
}
