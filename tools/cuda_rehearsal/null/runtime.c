/* Devices, streams, kernels and matrix products of a CUDA without a GPU: an H100 is reported, streams and events are
   names, a kernel does nothing. Where numbers count (NULLCUDA_KERNELS=refuse) a kernel that the host has not computed
   is an error of the call that launched it. What torch needs of these libraries and is not written out here or in the
   other files is a function that returns 0 (build.py). */
#define _GNU_SOURCE
#include "null.h"
#include <cuda_runtime_api.h>
#include <execinfo.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

atomic_long null_kernels, null_products, null_collectives, null_waits, null_to_host, null_to_device, null_opened;
atomic_long null_bytes;
static __thread int current_device;
static __thread cudaError_t last_error;

int null_number(const char *name, int otherwise) {
  const char *found = getenv(name);
  return found ? atoi(found) : otherwise;
}
int null_device(void) { return current_device; }
void *null_object(void) { return calloc(1, 64); }
int null_skips(void) {
  const char *what = getenv("NULLCUDA_KERNELS");
  return !what || !strcmp(what, "skip");
}
int null_kernel(void) {
  null_kernels++;
  return null_skips() ? 0 : cudaErrorLaunchFailure;
}
/* A kernel of a library that is linked in: who launched it stands in the output of the process. */
static cudaError_t launch(void) {
  int error = null_kernel();
  if (error) {
    void *frames[16];
    int n = backtrace(frames, 16);
    fprintf(stderr, "null CUDA: a kernel that nobody computes:\n");
    backtrace_symbols_fd(frames, n, 2);
    last_error = error;
  }
  return error;
}
long nullcuda_count(int what) {
  atomic_long *counters[] = {&null_kernels, &null_products, &null_collectives, &null_waits,
                             &null_to_host, &null_to_device, &null_opened,     &null_bytes};
  return *counters[what];
}

/* ---- devices ---- */
static int num_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"); /* empty: none, as the driver has it; names are not read */
  return visible && !*visible ? 0 : null_number("NULLCUDA_DEVICES", 1);
}
static int capability(void) { return null_number("NULLCUDA_SM", 90); }
cudaError_t cudaGetDeviceCount(int *n) {
  *n = num_devices();
  return *n ? 0 : 100; /* cudaErrorNoDevice */
}
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return 0;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return last_error = cudaErrorInvalidDevice;
  current_device = device;
  return 0;
}
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return 0;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "NVIDIA H100 80GB HBM3 (null CUDA)");
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = (char)(16 + i + device);
  p->totalGlobalMem = 85029158912ull;
  p->major = capability() / 10;
  p->minor = capability() % 10;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 52428800;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = device;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr what, int device) {
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrL2CacheSize: *v = 52428800; break;
    case cudaDevAttrComputeCapabilityMajor: *v = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = capability() % 10; break;
    default: *v = 1;
  }
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int device) {
  snprintf(s, n, "0000:%02x:00.0", device);
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) {
  *v = 1;
  return 0;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int device) {
  *p = (void *)1;
  return 0;
}
const char *cudaGetErrorString(cudaError_t e) {
  if (e == cudaErrorLaunchFailure) return "null CUDA: a kernel that the host does not compute";
  return e ? "null CUDA: this call has no answer" : "no error";
}
const char *cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorNull" : "cudaSuccess"; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
  cudaError_t found = last_error;
  last_error = 0;
  return found;
}

/* ---- streams and events ---- */
static int object(void *out) {
  *(void **)out = null_object();
  return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return object(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return object(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return object(s); }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return object(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return object(e); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  null_waits++;
  return 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  null_waits++;
  return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
  null_waits++;
  return 0;
}
cudaError_t cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) {
  *t = 1;
  return 0;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
  *priority = 0;
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
  if (status) *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  return 0;
}

/* ---- kernels ---- */
void **__cudaRegisterFatBinary(void *code) { return null_object(); }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st *s) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) {
  memset(g, 0, sizeof *g);
  memset(b, 0, sizeof *b);
  *m = 0;
  *(void **)s = NULL;
  return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (void *)f;
  return 0;
}
#define LAUNCH(name, ...) \
  cudaError_t name(__VA_ARGS__) { return launch(); }
LAUNCH(cudaLaunchKernel, const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s)
LAUNCH(__cudaLaunchKernel, cudaKernel_t f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s)
LAUNCH(cudaLaunchKernelExC, const cudaLaunchConfig_t *c, const void *f, void **a)
LAUNCH(cudaLaunchCooperativeKernel, const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = capability();
  a->maxDynamicSharedSizeBytes = 232448;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) {
  *n = 2;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m,
                                                                   unsigned flags) {
  *n = 2;
  return 0;
}

/* ---- cuBLAS and cuDNN ---- */
int cublasCreate_v2(void **h) { return object(h); }
int cublasLtCreate(void **h) { return object(h); }
int cublasLtMatmulDescCreate(void **d, int a, int b) { return object(d); }
int cublasLtMatrixLayoutCreate(void **d, int t, uint64_t rows, uint64_t columns, int64_t ld) { return object(d); }
int cublasLtMatmulPreferenceCreate(void **d) { return object(d); }
int cublasGetMathMode(void *h, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { return *mode = 0; }
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *results,
                                   int *found) {
  memset(results, 0, 64);
  *found = 1;
  return 0;
}
static int product(void) {
  null_products++;
  int error = null_kernel() ? 13 : 0; /* CUBLAS_STATUS_EXECUTION_FAILED */
  null_kernels--;
  return error;
}
#define PRODUCT(name) \
  int name() { return product(); }
PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
size_t cudnnGetVersion(void) { return NULL_CUDNN; } /* that of the installed package: torch compares */
int cudnnGetProperty(int what, int *v) {
  *v = what == 0 ? NULL_CUDNN / 10000 : what == 1 ? NULL_CUDNN / 100 % 100 : NULL_CUDNN % 100;
  return 0;
}
