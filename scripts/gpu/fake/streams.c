// Streams, events, captures and launches. A kernel is counted and does nothing; what communicates is queued.
#include "fake.h"
#include <time.h>
#include <unistd.h>

struct event {
  struct timespec when;
  struct stream *stream;
  unsigned long at;  // jobs of the stream that come before
};
static struct stream of_device = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static struct stream *workers[4096];
static pthread_mutex_t workers_lock = PTHREAD_MUTEX_INITIALIZER;
static int worker_count, captured;
static unsigned long long captures;

struct stream *stream_of(cudaStream_t handle) {  // 0, 1 and 2 name the stream of the device
  return (size_t)handle < 4096 ? &of_device : (struct stream *)handle;
}

// --- queues
void settle(struct stream *stream, unsigned long until) {
  if (!stream || !stream->has_worker) return;
  pthread_mutex_lock(&stream->mutex);
  while (stream->done < until) pthread_cond_wait(&stream->changed, &stream->mutex);
  pthread_mutex_unlock(&stream->mutex);
}
void settle_all(void) {
  for (int i = 0; i < worker_count; i++) settle(workers[i], workers[i]->asked);
}
static void *work(void *what) {
  struct stream *stream = what;
  for (;;) {
    pthread_mutex_lock(&stream->mutex);
    while (!stream->first) pthread_cond_wait(&stream->changed, &stream->mutex);
    struct job *job = stream->first;
    stream->first = job->next;
    if (!stream->first) stream->last = 0;
    pthread_mutex_unlock(&stream->mutex);
    job->run(job->what);
    free(job);
    pthread_mutex_lock(&stream->mutex);
    stream->done++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
  }
  return 0;
}
void enqueue(struct stream *stream, void (*run)(void *), void *what) {
  struct job *job = calloc(1, sizeof *job);
  job->run = run, job->what = what;
  pthread_mutex_lock(&stream->mutex);
  if (!stream->has_worker) {
    pthread_t thread;
    stream->has_worker = 1;
    pthread_mutex_lock(&workers_lock);
    workers[worker_count++] = stream;
    pthread_mutex_unlock(&workers_lock);
    pthread_create(&thread, 0, work, stream);
    pthread_detach(thread);
  }
  *(stream->last ? &stream->last->next : &stream->first) = job;
  stream->last = job, stream->asked++;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->mutex);
}
static void await_event(void *what) {
  struct event *event = what;
  settle(event->stream, event->at);
  free(event);
}
void follow(struct stream *stream, struct stream *before, unsigned long at) {  // what is queued next waits
  struct event *copy = calloc(1, sizeof *copy);
  copy->stream = before, copy->at = at;
  enqueue(stream, await_event, copy);
}
void fake_settle(cudaStream_t handle) {  // called before an operator is computed on a stream
  settle(stream_of(handle), stream_of(handle)->asked);
}

// --- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  struct stream *stream = calloc(1, sizeof *stream + 4096);
  stream->priority = priority;
  pthread_mutex_init(&stream->mutex, 0);
  pthread_cond_init(&stream->changed, 0);
  return *out = (cudaStream_t)stream, 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *out) { return *out = stream_of(handle)->priority, 0; }
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return stream_of(handle)->done < stream_of(handle)->asked ? cudaErrorNotReady : 0;
}
static cudaError_t waited_in_capture(void) {  // an error on a device, too
  fprintf(stderr, "fake GPU: waited for the device while a graph was captured\n");
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (stream_of(handle)->capturing) return waited_in_capture();
  return fake_settle(handle), 0;
}
cudaError_t cudaDeviceSynchronize(void) {
  if (captured) return waited_in_capture();
  return settle_all(), 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *what) { return run(what), 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t run, void *what, unsigned flags) {
  return run(s, 0, what), 0;
}

// --- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  return *out = calloc(1, sizeof(struct event) + 4096), 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  struct event *event = (struct event *)handle;
  clock_gettime(CLOCK_MONOTONIC, &event->when);
  event->stream = stream_of(stream), event->at = event->stream->asked;
  return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
static int is_past(const struct event *event) { return !event->stream || event->stream->done >= event->at; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return is_past((struct event *)event) ? 0 : cudaErrorNotReady; }
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  return settle(event->stream, event->at), 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t second) {
  struct event *begin = (struct event *)first, *end = (struct event *)second;
  struct timespec a = begin->when, b = end->when;
  if (!begin->stream || !end->stream) return cudaErrorInvalidResourceHandle;  // never recorded
  if (!is_past(begin) || !is_past(end)) return cudaErrorNotReady;
  return *ms = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f, 0;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned flags) {
  struct event *event = (struct event *)waited;
  struct stream *stream = stream_of(handle);
  if (event->stream == stream || is_past(event)) return 0;
  if (!stream->has_worker) return settle(event->stream, event->at), 0;  // its operators compute at once
  return follow(stream, event->stream, event->at), 0;
}

// --- captures: a graph holds nothing, for its kernels do nothing
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  return stream_of(handle)->capturing = 1, captured++, captures++, 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out) {
  return stream_of(handle)->capturing = 0, captured--, *out = calloc(1, 64), 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *out) {
  return *out = stream_of(handle)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  cudaStreamIsCapturing(handle, status);
  if (id) *id = captures;
  if (graph) *graph = (void *)8;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return 0;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static __thread enum cudaStreamCaptureMode kept;
  enum cudaStreamCaptureMode before = kept;
  return kept = *mode, *mode = before, 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
  return *out = calloc(1, 64), 0;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  if (nodes) nodes[0] = (void *)8;
  return *count = 1, 0;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *out, cudaGraphEdgeData *edges,
                                         size_t *count) {
  return *count = 0, 0;
}

// --- launches
struct kernel {
  const void *at;
  char *name;
  long count;
};
static struct kernel *kernels;
static size_t kernel_count, kernel_room, sorted;
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static long launches;
long products;

void name_kernel(const void *at, const char *name) {
  pthread_mutex_lock(&kernels_lock);
  if (kernel_count == kernel_room)
    kernels = realloc(kernels, (kernel_room = 2 * kernel_room + 1024) * sizeof *kernels);
  kernels[kernel_count++] = (struct kernel){at, strdup(name), 0};
  pthread_mutex_unlock(&kernels_lock);
}
static int by_address(const void *a, const void *b) {
  const void *x = ((struct kernel *)a)->at, *y = ((struct kernel *)b)->at;
  return x < y ? -1 : x > y;
}
void launched(const void *at) {
  launches++;
  if (!getenv("MLM_FAKE_GPU_KERNELS")) return;
  pthread_mutex_lock(&kernels_lock);
  if (sorted != kernel_count) qsort(kernels, sorted = kernel_count, sizeof *kernels, by_address);
  struct kernel key = {at}, *found = bsearch(&key, kernels, kernel_count, sizeof key, by_address);
  if (found) found->count++;
  pthread_mutex_unlock(&kernels_lock);
}
long fake_launches(void) { return launches; }
long fake_products(void) { return products; }
void fake_forget(void) {
  for (size_t i = 0; i < kernel_count; i++) kernels[i].count = 0;
}
void fake_list(const char *path) {  // a line for each kernel that was launched: how often, and its name
  FILE *file = fopen(path, "w");
  for (size_t i = 0; file && i < kernel_count; i++)
    if (kernels[i].count) fprintf(file, "%ld %s\n", kernels[i].count, kernels[i].name);
  if (file) fclose(file);
}
void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e) {
  name_kernel(host, name);
}
int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, 0; }
int __cudaLaunchKernel(const void *kernel) { return launched(kernel), 0; }
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
  return launched(f), 0;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *f, void **args) {
  return launched(f), 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return launches++, 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
  int major, minor;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 64, a->maxDynamicSharedSizeBytes = 232448;
  a->ptxVersion = a->binaryVersion = 10 * major + minor;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *f, int size, size_t shared) {
  return *out = 2, 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int size,
                                                                   size_t shared, unsigned flags) {
  return *out = 2, 0;
}
const char *cudaGetErrorString(cudaError_t code) { return code ? "error of the stub" : "no error"; }
const char *cudaGetErrorName(cudaError_t code) { return code ? "cudaErrorFake" : "cudaSuccess"; }
__attribute__((destructor)) static void list_at_exit(void) {
  char *file = getenv("MLM_FAKE_GPU_KERNELS"), path[4096];
  if (!file || !launches) return;
  snprintf(path, sizeof path, "%s.%d", file, getpid());
  fake_list(path);
}
