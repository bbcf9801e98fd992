/* The part of NVML's binary interface that the simulator serves: codes and struct layouts. */
#ifndef GPUSIM_NVML_ABI_H
#define GPUSIM_NVML_ABI_H

#include <stdint.h>

typedef int nvmlReturn_t;
typedef struct handle *nvmlDevice_t;
typedef struct gpu_instance *nvmlGpuInstance_t;
typedef struct compute_instance *nvmlComputeInstance_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999
};

#define STRUCT_VERSION(type, n) ((unsigned)(sizeof(type) | ((unsigned)(n) << 24)))

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version, domain, bus, device, pciDeviceId, pciSubSystemId, baseClass, subClass;
    char busId[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long bar1Total, bar1Free, bar1Used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t; /* layout of _v2 and _v3 */

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_v1_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef union {
    double dVal;
    unsigned uiVal;
    unsigned long long ullVal;
    long long sllVal;
    int siVal;
} nvmlValue_t;

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned version, sensorType;
    int temperature;
} nvmlTemperature_v1_t;

typedef struct {
    unsigned version;
    int marginTemperature;
} nvmlMarginTemperature_v1_t;

typedef struct {
    unsigned version, value;
} versioned_uint_t; /* C2C mode excepted: addressing mode, unrepairable memory, capabilities */

typedef struct {
    unsigned version, bChannelRepairPending, bTpcRepairPending;
} nvmlRepairStatus_v1_t;

typedef struct {
    unsigned version, powerScope, powerValueMw;
} nvmlPowerValue_v2_t;

typedef struct {
    unsigned version;
    char branch[80];
} nvmlSystemDriverBranchInfo_v1_t;

typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
} nvmlGpuFabricInfo_t;

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
} nvmlGpuFabricInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;

typedef struct {
    unsigned corrActiveRemaps, corrInactiveRemaps, uncActiveRemaps, uncInactiveRemaps, bPending, bfailureOccurred;
} nvmlRemappedRowsInfo_v2_t;

typedef struct {
    unsigned version, type;
    union {
        char str[41];
        unsigned char bytes[16];
    } value;
} nvmlUUID_v1_t;

typedef struct {
    nvmlPciInfo_t pci;
    char uuid[80];
} nvmlExcludedDeviceInfo_t;

typedef struct {
    unsigned start, size;
} nvmlPlacement_t;

typedef struct {
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
        encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
        decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
    nvmlDevice_t device;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    unsigned id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount,
        sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpuInstance;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
        sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

/* The numbers that callers put into `version` (size | number << 24), as NVML publishes them. */
_Static_assert(STRUCT_VERSION(nvmlMemory_v2_t, 2) == 0x02000028, "nvmlMemory_v2");
_Static_assert(STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1) == 0x01000040, "nvmlPciInfoExt_v1");
_Static_assert(STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1) == 0x01000018, "nvmlProcessDetailList_v1");
_Static_assert(STRUCT_VERSION(nvmlTemperature_v1_t, 1) == 0x0100000c, "nvmlTemperature_v1");
_Static_assert(STRUCT_VERSION(nvmlRepairStatus_v1_t, 1) == 0x0100000c, "nvmlRepairStatus_v1");
_Static_assert(STRUCT_VERSION(nvmlPowerValue_v2_t, 2) == 0x0200000c, "nvmlPowerValue_v2");
_Static_assert(STRUCT_VERSION(nvmlGpuFabricInfo_v2_t, 2) == 0x02000024, "nvmlGpuFabricInfo_v2");
_Static_assert(STRUCT_VERSION(nvmlGpuFabricInfo_v3_t, 3) == 0x03000028, "nvmlGpuFabricInfo_v3");
_Static_assert(STRUCT_VERSION(nvmlUUID_v1_t, 1) == 0x01000034, "nvmlUUID_v1");
_Static_assert(STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2) == 0x02000098, "nvmlGpuInstanceProfileInfo_v2");
_Static_assert(STRUCT_VERSION(nvmlComputeInstanceProfileInfo_v2_t, 2) == 0x02000088, "nvmlComputeInstanceProfileInfo_v2");
_Static_assert(STRUCT_VERSION(nvmlSystemDriverBranchInfo_v1_t, 1) == 0x01000054, "nvmlSystemDriverBranchInfo_v1");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "nvmlProcessInfo_t");
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "nvmlFieldValue_t");

#endif
