// The driver, cuBLAS and cuDNN, as far as PyTorch and Triton ask for answers; all else returns 0 (build.py).
#include "fake.h"
#include <dlfcn.h>

static int nothing(void) { return 0; }

// --- driver
int cuDriverGetVersion(int *version) { return *version = CUDART_VERSION, 0; }
int cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
int cuDeviceGetName(char *text, int room, int device) { return snprintf(text, room, "Fake"), 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)64, 0; }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)64, 0; }
int cuGetErrorString(int code, const char **text) { return *text = "error of the stub", 0; }
int cuModuleLoad(void **module, const char *path) { return *module = (void *)64, 0; }
int cuModuleLoadData(void **module, const void *image) { return *module = (void *)64, 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *options, void *values) {
  return *module = (void *)64, 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = calloc(1, 64);
  return name_kernel(*function, name), 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0, 0;  // threads of a block, registers
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *f, int size, size_t shared) {
  return *out = 2, 0;
}
int cuOccupancyMaxActiveClusters(int *out, void *function, void *how) { return *out = 2, 0; }
int cuPointerGetAttribute(void *out, int attribute, unsigned long long pointer) {
  if (attribute == 3) *(unsigned long long *)out = pointer;  // its device address
  else *(int *)out = attribute == 9 ? 0 : 2;                 // its device; memory of a device
  return 0;
}
int cuLaunchKernel(void *function) { return launched(function), 0; }
int cuLaunchKernelEx(void *how, void *function) { return launched(function), 0; }
int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags, int *status) {
  void *found = dlsym(RTLD_DEFAULT, name);
  *out = found ? found : (void *)nothing;
  if (status) *status = 0;
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
  return cuGetProcAddress_v2(name, out, version, flags, (int *)status);
}

// --- cuBLAS
static int made(void **out) { return *out = calloc(1, 4096), 0; }
int cublasCreate_v2(void **out) { return made(out); }
int cublasLtCreate(void **out) { return made(out); }
int cublasLtMatmulDescCreate(void **out) { return made(out); }
int cublasLtMatrixLayoutCreate(void **out) { return made(out); }
int cublasLtMatmulPreferenceCreate(void **out) { return made(out); }
int cublasGetPointerMode_v2(void *handle, int *out) { return *out = 0, 0; }
int cublasGetMathMode(void *handle, int *out) { return *out = 0, 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *a, void *b, void *c, void *d, void *e, void *f, int want,
                                   void *results, int *count) {
  return *count = 1, 0;
}
size_t cublasLtGetVersion(void) { return 130100; }
int cublasGemmEx(void) { return products++, 0; }
int cublasSgemm_v2(void) { return products++, 0; }
int cublasDgemm_v2(void) { return products++, 0; }
int cublasGemmStridedBatchedEx(void) { return products++, 0; }
int cublasLtMatmul(void) { return products++, 0; }

// --- cuDNN: its graph API, as far as attention asks
int cudnnCreate(void **out) { return made(out); }
size_t cudnnGetVersion(void) { return 10000 * MLM_FAKE_GPU_CUDNN_MAJOR + 100 * MLM_FAKE_GPU_CUDNN_MINOR; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
int cudnnGetProperty(int what, int *value) {
  return *value = what == 0 ? MLM_FAKE_GPU_CUDNN_MAJOR : what == 1 ? MLM_FAKE_GPU_CUDNN_MINOR : 0, 0;
}
const char *cudnnGetErrorString(int code) { return code ? "error of the stub" : "no error"; }
void cudnnGetLastErrorString(char *text, size_t room) {
  if (room) text[0] = 0;
}
int cudnnBackendCreateDescriptor(int type, void **out) { return made(out); }
int cudnnBackendGetAttribute(void *handle, int name, int type, long want, long *count, void *out) {
  if (count) *count = 1;
  if (out && want > 0 && type != 15) memset(out, 0, type == 3 || type == 6 ? 8 : 4);  // 15: a descriptor
  return 0;
}
int cudnnBackendExecute(void) { return products++, 0; }

// --- CUPTI: refused (build.py)
int cuptiGetResultString(int code, const char **text) { return *text = "the stub has no CUPTI", 0; }
