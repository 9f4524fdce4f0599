/* "Device memory" is host memory: each block is a memfd, which another process can map (CUDA IPC). The driver's address
   ranges and physical blocks are reserved mappings and memfds, so that a memory saver really gives memory back. */
#define _GNU_SOURCE
#include "null.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum Kind { UNKNOWN, DEVICE, HOST, OTHERS, MAPPED }; /* OTHERS: opened by a handle; MAPPED: by cuMemMap */
typedef struct Block {
  char *start;
  size_t size, asked;
  int device, fd;
  enum Kind kind;
  struct Block *next;
} Block;
static Block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const size_t PAGE = 2 << 20;
static const size_t TOTAL = 85029158912ull; /* an H100's */

static size_t whole_pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

static char *reserve(size_t size, int access) { /* at a multiple of PAGE; nothing is taken until it is written */
  char *raw = mmap(NULL, size + PAGE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  char *start = (char *)whole_pages((uintptr_t)raw);
  if (start > raw) munmap(raw, start - raw);
  munmap(start + size, raw + PAGE - start);
  return start;
}

static int map(char *start, size_t size, int fd, size_t offset) {
  int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  return mmap(start, size, PROT_READ | PROT_WRITE, flags, fd, offset) == MAP_FAILED;
}

static void keep(char *start, size_t size, size_t asked, enum Kind kind, int fd) {
  Block *b = malloc(sizeof *b);
  *b = (Block){start, size, asked, null_device(), fd, kind, NULL};
  pthread_mutex_lock(&lock);
  b->next = blocks;
  blocks = b;
  pthread_mutex_unlock(&lock);
}

static Block forget(const void *start) { /* a block of kind UNKNOWN where there is none */
  Block found = {0};
  pthread_mutex_lock(&lock);
  for (Block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->start == start) {
      Block *it = *b;
      found = *it;
      *b = it->next;
      free(it);
      break;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

static Block find(const void *p) {
  Block found = {0};
  pthread_mutex_lock(&lock);
  for (Block *b = blocks; b; b = b->next)
    if ((char *)p >= b->start && (char *)p < b->start + b->size) {
      found = *b;
      break;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

static int take(void **out, size_t asked, enum Kind kind) {
  size_t size = whole_pages(asked ? asked : 1);
  char *start = reserve(size, PROT_READ | PROT_WRITE);
  int fd = -1;
  *out = start;
  if (!start) return cudaErrorMemoryAllocation;
  if (kind == DEVICE) {
    fd = memfd_create("nullcuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size) || map(start, size, fd, 0)) return cudaErrorMemoryAllocation;
    null_bytes += asked;
  }
  keep(start, size, asked, kind, fd);
  return 0;
}

static int give(void *start) {
  Block b = forget(start);
  if (b.kind == UNKNOWN) return 0;
  if (b.kind == DEVICE) null_bytes -= b.asked;
  munmap(b.start, b.size);
  if (b.fd >= 0) close(b.fd);
  return 0;
}

cudaError_t cudaMalloc(void **p, size_t n) { return take(p, n, DEVICE); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return take(p, n, DEVICE); }
cudaError_t cudaMallocHost(void **p, size_t n) { return take(p, n, HOST); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return take(p, n, HOST); }
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { return take(p, 4096, DEVICE); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return give(p); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
  keep(p, n, n, HOST, -1);
  return 0;
}
cudaError_t cudaHostUnregister(void *p) {
  forget(p);
  return 0;
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = TOTAL;
  size_t used = null_bytes + (1ull << 30);
  *available = used < TOTAL ? TOTAL - used : 0;
  return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
  Block b = find(p);
  memset(out, 0, sizeof *out);
  out->type = b.kind == UNKNOWN ? cudaMemoryTypeUnregistered : b.kind == HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->device = b.kind == UNKNOWN ? -2 : b.device;
  if (b.kind != UNKNOWN) out->devicePointer = (void *)p;
  if (b.kind == HOST) out->hostPointer = (void *)p;
  return 0;
}

/* ---- copies: made at once, whatever the stream ---- */
static int copy(void *to, const void *from, size_t n) {
  int is_to_device = find(to).kind == DEVICE, is_from_device = find(from).kind == DEVICE;
  null_to_host += is_from_device && !is_to_device;
  null_to_device += is_to_device && !is_from_device;
  if (is_to_device && is_from_device && n > NULL_SMALL && null_skips()) return 0; /* untouched pages take no memory */
  memmove(to, from, n);
  return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { return copy(to, from, n); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  return copy(to, from, n);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
  return copy(to, from, n);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_row, const void *from, size_t from_row, size_t width, size_t height,
                              enum cudaMemcpyKind k, cudaStream_t s) {
  for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_row, (char *)from + i * from_row, width);
  return 0;
}
cudaError_t cudaMemset(void *p, int value, size_t n) {
  if (n <= NULL_SMALL || !null_skips()) memset(p, value, n);
  return 0;
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return cudaMemset(p, value, n); }

/* ---- IPC: a handle names the owner's memfd ---- */
typedef struct {
  int pid, fd;
  size_t size;
} Handle;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *p) {
  Block b = find(p);
  if (b.kind != DEVICE) return cudaErrorInvalidValue;
  memset(out, 0, sizeof *out);
  *(Handle *)out = (Handle){getpid(), b.fd, b.size};
  return 0;
}
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
  Handle h;
  char path[64];
  memcpy(&h, &handle, sizeof h);
  if (h.pid == getpid()) return cudaErrorInvalidValue; /* as on a GPU: not in the process that made it */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path, O_RDWR);
  char *start = fd < 0 ? NULL : reserve(h.size, PROT_NONE);
  if (!start || map(start, h.size, fd, 0)) return cudaErrorInvalidValue;
  keep(start, h.size, h.size, OTHERS, fd);
  null_opened++;
  *out = start;
  return 0;
}
cudaError_t cudaIpcCloseMemHandle(void *p) { return give(p); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, cudaEvent_t e) {
  memset(out, 0, sizeof *out);
  return 0;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t handle) {
  *e = null_object();
  return 0;
}

/* ---- the driver's virtual memory: torch_memory_saver, expandable segments ---- */
typedef struct {
  int fd;
  size_t size;
} Physical;
CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
  *out = PAGE;
  return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr at, unsigned long long flags) {
  *p = (uintptr_t)reserve(whole_pages(n), PROT_NONE);
  return *p ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { return munmap((void *)p, whole_pages(n)); }
CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t n, const CUmemAllocationProp *p,
                     unsigned long long flags) {
  Physical *made = malloc(sizeof *made);
  *made = (Physical){memfd_create("nullcuda", MFD_CLOEXEC), whole_pages(n)};
  if (ftruncate(made->fd, made->size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = (uintptr_t)made;
  null_bytes += made->size;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical *it = (Physical *)handle;
  null_bytes -= it->size;
  close(it->fd);
  free(it);
  return 0;
}
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (map((char *)p, n, ((Physical *)handle)->fd, offset)) return CUDA_ERROR_OUT_OF_MEMORY;
  keep((char *)p, n, n, MAPPED, -1);
  return 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  forget((void *)p);
  mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return 0;
}
