// Device facts and memory. "Device" memory is host memory whose pages exist once they are written.
#include "fake.h"
#include <sys/mman.h>

#define LARGE (16UL << 20)
#define TOTAL (139UL << 30)
#define RESERVED (600UL << 20)

struct range {
  char *at;
  size_t size;
  int kind, device;  // kind: 1 page-locked host memory, 2 device memory
  struct range *next;
};
static struct range *ranges;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device;

static int setting(const char *name, int otherwise) {
  char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}
static int devices(void) { return setting("MLM_FAKE_GPUS", 1); }
static int capability(void) { return setting("MLM_FAKE_GPU_CAPABILITY", 90); }
static int computes(void) { return setting("MLM_FAKE_GPU_ARITHMETIC", 0); }

static void note(void *at, size_t size, int kind) {
  struct range *range = malloc(sizeof *range);
  *range = (struct range){at, size, kind, device, 0};
  pthread_mutex_lock(&lock);
  range->next = ranges;
  ranges = range;
  used += kind == 2 ? size : 0;
  pthread_mutex_unlock(&lock);
}
static size_t forget(void *at) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (struct range **place = &ranges; *place; place = &(*place)->next) {
    struct range *range = *place;
    if (range->at != at) continue;
    size = range->size;
    used -= range->kind == 2 ? size : 0;
    *place = range->next;
    free(range);
    break;
  }
  pthread_mutex_unlock(&lock);
  return size;
}
static struct range find(const void *at) {
  struct range found = {0};
  pthread_mutex_lock(&lock);
  for (struct range *range = ranges; range; range = range->next)
    if ((char *)at >= range->at && (char *)at < range->at + range->size) {
      found = *range;
      break;
    }
  pthread_mutex_unlock(&lock);
  return found;
}
static cudaError_t map(void **out, size_t size, int kind) {
  if (kind == 2 && used + size > TOTAL - RESERVED) return cudaErrorMemoryAllocation;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *at = mmap(0, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (at == MAP_FAILED) return cudaErrorMemoryAllocation;
  note(at, size, kind);
  *out = at;
  return 0;
}
static cudaError_t unmap(void *at) {
  size_t size = at ? forget(at) : 0;
  if (size) munmap(at, size);
  return 0;
}

// --- the device
cudaError_t cudaGetDeviceCount(int *count) { return *count = devices(), 0; }
cudaError_t cudaGetDevice(int *number) { return *number = device, 0; }
cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= devices()) return cudaErrorInvalidDevice;
  return device = number, 0;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Fake NVIDIA H200");
  p->totalGlobalMem = TOTAL;
  p->major = capability() / 10, p->minor = capability() % 10;
  p->multiProcessorCount = 132, p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472, p->reservedSharedMemPerBlock = 1024;
  p->l2CacheSize = 60 << 20, p->memoryBusWidth = 6144, p->memPitch = 2147483647, p->textureAlignment = 512;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->canMapHostMemory = 1;
  p->cooperativeLaunch = 1, p->asyncEngineCount = 3;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 1;
  }
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int number) {
  return snprintf(text, room, "0000:%02x:00.0", number + 1), 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, 0; }

// --- memory
cudaError_t cudaMalloc(void **out, size_t size) { return map(out, size, 2); }
cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) { return map(out, size, 2); }
cudaError_t cudaFree(void *at) { return settle_all(), unmap(at); }  // messages under way may use it
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) { return unmap(at); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) { return map(out, size, 1); }
cudaError_t cudaFreeHost(void *at) { return unmap(at); }
cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) { return note(at, size, 1), 0; }
cudaError_t cudaHostUnregister(void *at) { return forget(at) ? 0 : cudaErrorHostMemoryNotRegistered; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  return *total = TOTAL, *unused = TOTAL - RESERVED - used, 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  struct range range = find(at);
  memset(a, 0, sizeof *a);
  a->type = range.kind;
  a->device = range.kind ? range.device : -1;
  a->devicePointer = range.kind ? (void *)at : 0;
  a->hostPointer = range.kind == 1 ? (void *)at : 0;
  return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
  fake_settle(s);
  // kernels that do nothing need no inputs: so a model larger than this host's memory can be rehearsed
  if (computes() || n < LARGE || find(to).kind != 2) memmove(to, from, n);
  return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, n, kind, 0);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch_to, const void *from, size_t pitch_from, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  fake_settle(stream);
  for (size_t i = 0; i < height; i++) memmove((char *)to + i * pitch_to, (char *)from + i * pitch_from, width);
  return 0;
}
cudaError_t cudaMemset(void *to, int value, size_t n) {
  if (computes() || n < LARGE) memset(to, value, n);
  return 0;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t stream) {
  return fake_settle(stream), cudaMemset(to, value, n);
}
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static char area[1 << 16];
  return *out = area, 0;
}
