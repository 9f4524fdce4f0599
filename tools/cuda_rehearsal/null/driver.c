/* The functions of the CUDA driver that torch and Triton read answers of. */
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

extern int cudaGetDeviceCount(int *), cudaGetDevice(int *), cudaDeviceGetAttribute(int *, int, int);
static void *const CONTEXT = (void *)0x1000;

static int answer(int *out, int value) {
  *out = value;
  return 0;
}
static int object(void **out) { return (*out = null_object()) ? 0 : 2; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { return answer(v, 13000); }
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGet(int *device, int ordinal) { return answer(device, ordinal); }
int cuDeviceGetAttribute(int *v, int what, int device) { return cudaDeviceGetAttribute(v, what, device); }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxGetCurrent(void **context) { return *context = CONTEXT, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = CONTEXT, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  if (flags) *flags = 0;
  return answer(is_active, 1);
}
int cuGetErrorString(int e, const char **s) { return *s = "null CUDA: a kernel that the host does not compute", 0; }
int cuGetErrorName(int e, const char **s) { return *s = "null CUDA", 0; }
int cuModuleLoadData(void **m, const void *image) { return object(m); }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void **v) { return object(m); }
int cuModuleGetFunction(void **f, void *m, const char *name) { return object(f); }
int cuLibraryLoadData(void **m, const void *image) { return object(m); }
int cuLibraryGetKernel(void **k, void *m, const char *name) { return object(k); }
int cuKernelGetFunction(void **f, void *k) { return *f = k, 0; }
int cuFuncGetAttribute(int *v, int what, void *f) { return answer(v, what == 0 ? 1024 : 0); }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *config) { return answer(n, 66); }
int cuLaunchKernel() { return null_kernel(); }
int cuLaunchKernelEx() { return null_kernel(); }
int cuStreamIsCapturing(void *s, int *status) { return answer(status, 0); }
int cuPointerGetAttribute(void *v, int what, unsigned long long p) {
  if (what == 3 || what == 4) memcpy(v, &p, 8); /* device pointer, host pointer */
  else memset(v, 0, 4);
  return 0;
}
int cuMemGetAddressRange_v2(unsigned long long *start, size_t *n, unsigned long long p) {
  if (start) *start = p;
  if (n) *n = 2 << 20;
  return 0;
}
/* Libraries that link cudart statically ask for each function by its name. */
int cuGetProcAddress_v2(const char *name, void **f, int version, unsigned long long flags, int *found) {
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *f = dlsym(RTLD_DEFAULT, newer);
  if (!*f) *f = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *f ? 0 : 1;
  return *f ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **f, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, f, version, flags, NULL);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, int *found) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *f ? 0 : 1;
  return 0;
}
