/* The driver's calls that convtools makes, over malloc: what cuda.h declares, and who still holds what. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { void *at; size_t size; int opened; } Block;

static Block blocks[16];
static int depth, context;
int stub_fail, stub_mig, stub_depth, stub_live, stub_open;

static Block *find(uint64_t at) {
    for (int i = 0; i < 16; i++)
        if (at && (uint64_t)blocks[i].at == at) return &blocks[i];
    return 0;
}

static CUresult in_context(void) { return depth ? stub_fail : 201; }

CUresult cuInit(unsigned int flags) { return flags ? 1 : 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return ordinal ? 101 : 0; }
CUresult cuDeviceGetUuid(CUuuid *uuid, int device) { memset(uuid, device, 16); return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, int device) { memset(uuid, device + stub_mig, 16); return 0; }
CUresult cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return device != 40; }
CUresult cuCtxPushCurrent_v2(void *of) { stub_depth = ++depth; return of != &context; }
CUresult cuCtxPopCurrent_v2(void **was) { *was = &context; stub_depth = --depth; return 0; }
CUresult cuCtxSynchronize(void) { return in_context(); }

CUresult cuMemAlloc_v2(uint64_t *made, size_t size) {
    if (in_context()) return in_context();
    for (int i = 0; i < 16; i++)
        if (!blocks[i].at) {
            blocks[i] = (Block){malloc(size), size, 0};
            *made = (uint64_t)blocks[i].at;
            stub_live++;
            return 0;
        }
    return 2;
}

CUresult cuMemFree_v2(uint64_t at) {
    Block *of = find(at);
    if (in_context() || !of || of->opened) return in_context() ? in_context() : 1;
    free(of->at);
    of->at = 0;
    stub_live--;
    return 0;
}

CUresult cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at) {
    Block *of = find(at);
    if (in_context() || !of || base) return in_context() ? in_context() : 1;
    *size = of->size;
    return 0;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, uint64_t at) {
    if (in_context() || !find(at)) return in_context() ? in_context() : 1;
    memset(handle, 7, sizeof *handle);
    memcpy(handle->reserved + 56, &at, 8);
    return 0;
}

CUresult cuIpcOpenMemHandle_v2(uint64_t *made, CUipcMemHandle handle, unsigned int flags) {
    uint64_t at;
    memcpy(&at, handle.reserved + 56, 8);
    Block *of = find(at);
    if (in_context()) return in_context();
    if (!of || handle.reserved[0] != 7 || flags != 1) return 400;
    of->opened++;
    stub_open++;
    *made = at;
    return 0;
}

CUresult cuIpcCloseMemHandle(uint64_t at) {
    Block *of = find(at);
    if (in_context() || !of || !of->opened) return in_context() ? in_context() : 1;
    of->opened--;
    stub_open--;
    return 0;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == 400 ? "CUDA_ERROR_INVALID_HANDLE" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : error == 101 ? "CUDA_ERROR_INVALID_DEVICE" : 0;
    return *name ? 0 : 1;
}
