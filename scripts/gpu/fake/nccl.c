// NCCL between processes of one host. A message is a file in shared memory; a stream's thread sends and awaits.
#include "fake.h"
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE, ALL_TO_ALL };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN, SCALED };
#define PATH 200

struct comm {
  char at[120];
  int rank, size;
  unsigned long *sent, *got, splits;  // messages to and from each rank
  struct stream *last;                // where the latest call was queued, as job number at_last
  unsigned long at_last;
  volatile int aborted;
};
struct call {
  enum kind kind;
  const void *from;
  void *to;
  size_t n;
  int type, op, peer;
  struct comm *comm;
  int grouped;
};
typedef struct {
  char bytes[128];
} unique_id;

static double factors[64];
static int factor_count;

// --- messages
static void name_of(char *out, struct comm *comm, int from, int to, unsigned long number) {
  snprintf(out, PATH, "%s/%d-%d-%lu", comm->at, from, to, number);
}
static void failed(const char *what) {
  perror(what);
  abort();
}
static void put(struct comm *comm, int to, const void *data, size_t n) {
  char name[PATH], part[PATH + 5];
  name_of(name, comm, comm->rank, to, comm->sent[to]++);
  snprintf(part, sizeof part, "%s.part", name);
  int file = open(part, O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file < 0) failed(part);
  for (size_t i = 0; i < n;) {
    ssize_t written = write(file, (char *)data + i, n - i);
    if (written <= 0) failed(part);
    i += written;
  }
  close(file);
  rename(part, name);
}
static void get(struct comm *comm, int from, void *data, size_t n) {
  char name[PATH];
  int file;
  struct stat facts;
  name_of(name, comm, from, comm->rank, comm->got[from]++);
  while ((file = open(name, O_RDONLY)) < 0) {
    if (comm->aborted) return;
    usleep(100);
  }
  fstat(file, &facts);
  if ((size_t)facts.st_size != n) {
    fprintf(stderr, "fake GPU: rank %d awaits %zu bytes of rank %d, which sent %ld\n", comm->rank, n, from,
            (long)facts.st_size);
    abort();
  }
  for (size_t i = 0; i < n;) {
    ssize_t got = read(file, (char *)data + i, n - i);
    if (got <= 0) failed(name);
    i += got;
  }
  close(file);
  unlink(name);
}
static void send_to(struct comm *comm, int to, const void *data, size_t n) {
  char name[PATH];
  name_of(name, comm, comm->rank, to, comm->sent[to]);
  put(comm, to, data, n);
  // a large message leaves when its receiver is there
  while (getenv("MLM_FAKE_GPU_RENDEZVOUS") && !access(name, F_OK) && !comm->aborted) usleep(100);
}

// --- numbers
static size_t bytes_of(int type) {
  static const int widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}
static double load(const void *from, size_t i, int type) {
  _Float16 half;
  float single;
  uint32_t bits;
  switch (type) {
    case INT8: return ((int8_t *)from)[i];
    case UINT8: return ((uint8_t *)from)[i];
    case INT32: return ((int32_t *)from)[i];
    case FLOAT16: memcpy(&half, (uint16_t *)from + i, 2); return half;
    case FLOAT32: return ((float *)from)[i];
    case FLOAT64: return ((double *)from)[i];
    case BFLOAT16:
      bits = (uint32_t)((uint16_t *)from)[i] << 16;
      memcpy(&single, &bits, 4);
      return single;
  }
  return ((int64_t *)from)[i];
}
static void store(void *to, size_t i, int type, double value) {
  _Float16 half = value;
  float single = value;
  uint32_t bits;
  switch (type) {
    case INT8: ((int8_t *)to)[i] = value; break;
    case UINT8: ((uint8_t *)to)[i] = value; break;
    case INT32: ((int32_t *)to)[i] = value; break;
    case FLOAT16: memcpy((uint16_t *)to + i, &half, 2); break;
    case FLOAT32: ((float *)to)[i] = single; break;
    case FLOAT64: ((double *)to)[i] = value; break;
    case BFLOAT16:
      memcpy(&bits, &single, 4);
      ((uint16_t *)to)[i] = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      break;
    default: ((int64_t *)to)[i] = value;
  }
}
static double joined(double a, double b, int op) {
  switch (op) {
    case PRODUCT: return a * b;
    case MAXIMUM: return b > a ? b : a;
    case MINIMUM: return b < a ? b : a;
  }
  return a + b;
}
static void combine(void **parts, int count, size_t first, void *to, size_t n, int type, int op) {
  double factor = op >= SCALED ? factors[op - SCALED] : op == MEAN ? 1.0 / count : 1.0;
  for (size_t i = 0; i < n; i++) {
    double value = load(parts[0], first + i, type);
    for (int k = 1; k < count; k++) value = joined(value, load(parts[k], first + i, type), op);
    store(to, i, type, value * factor);
  }
}

// --- operations
static void reduce_or_gather(struct call *call, size_t n) {
  struct comm *comm = call->comm;
  int size = comm->size, rank = comm->rank;
  size_t whole = call->kind == REDUCE_SCATTER ? n * size : n;
  void **parts = calloc(size, sizeof *parts);
  for (int i = 0; i < size; i++)
    if (i != rank) put(comm, i, call->from, whole);
  for (int i = 0; i < size; i++) {
    parts[i] = malloc(whole + 1);
    if (i == rank) memcpy(parts[i], call->from, whole);
    else get(comm, i, parts[i], whole);
  }
  if (call->kind == ALL_GATHER)
    for (int i = 0; i < size; i++) memcpy((char *)call->to + i * n, parts[i], n);
  else if (call->kind == REDUCE_SCATTER)
    combine(parts, size, rank * call->n, call->to, call->n, call->type, call->op);
  else if (call->kind == ALL_REDUCE || rank == call->peer)
    combine(parts, size, 0, call->to, call->n, call->type, call->op);
  for (int i = 0; i < size; i++) free(parts[i]);
  free(parts);
}
static void perform(void *what) {
  struct call *call = what;
  struct comm *comm = call->comm;
  size_t n = call->n * bytes_of(call->type);
  char *from = (char *)call->from, *to = call->to, *late = getenv("MLM_FAKE_GPU_LATE_MS");
  if (late) usleep(1000 * atoi(late));  // what does not wait reads too early
  // the calls of a group progress together: none of its sends waits for a receiver
  if (call->kind == SEND) (call->grouped ? put : send_to)(comm, call->peer, from, n);
  else if (call->kind == RECEIVE) get(comm, call->peer, to, n);
  else if (call->kind == BROADCAST && comm->rank != call->peer) get(comm, call->peer, to, n);
  else if (call->kind == BROADCAST) {
    for (int i = 0; i < comm->size; i++)
      if (i != comm->rank) put(comm, i, from, n);
    memmove(to, from, n);
  } else if (call->kind == ALL_TO_ALL) {
    for (int i = 0; i < comm->size; i++)
      if (i != comm->rank) put(comm, i, from + i * n, n);
    for (int i = 0; i < comm->size; i++)
      if (i != comm->rank) get(comm, i, to + i * n, n);
      else memmove(to + i * n, from + i * n, n);
  } else reduce_or_gather(call, n);
  free(call);
}

// --- calls, alone or in groups
static __thread int depth, waiting;
static __thread struct {
  struct call *call;
  struct stream *stream;
} group[4096];

static void launch(struct call *call, struct stream *stream) {  // in host order, whatever their streams
  struct comm *comm = call->comm;
  if (comm->last && comm->last != stream) follow(stream, comm->last, comm->at_last);
  enqueue(stream, perform, call);
  comm->last = stream, comm->at_last = stream->asked;
}
static int ask(enum kind kind, const void *from, void *to, size_t n, int type, int op, int peer,
               struct comm *comm, cudaStream_t stream) {
  struct call *call = malloc(sizeof *call);
  *call = (struct call){kind, from, to, n, type, op, peer, comm, 0};
  if (depth) {
    if (waiting == sizeof group / sizeof *group) failed("too many calls in a group");
    group[waiting].call = call;
    group[waiting++].stream = stream_of(stream);
  } else launch(call, stream_of(stream));
  return 0;
}
int ncclGroupStart(void) { return depth++, 0; }
int ncclGroupEnd(void) {
  if (--depth) return 0;
  for (int i = 0; i < waiting; i++) group[i].call->grouped = waiting > 1;
  for (int sends = 1; sends >= 0; sends--)
    for (int i = 0; i < waiting; i++)
      if (group[i].call && (!sends || group[i].call->kind == SEND)) {
        launch(group[i].call, group[i].stream);
        group[i].call = 0;
      }
  return waiting = 0, 0;
}
int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, struct comm *c, cudaStream_t s) {
  return ask(ALL_REDUCE, a, b, n, t, op, 0, c, s);
}
int ncclReduce(const void *a, void *b, size_t n, int t, int op, int root, struct comm *c, cudaStream_t s) {
  return ask(REDUCE, a, b, n, t, op, root, c, s);
}
int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, struct comm *c, cudaStream_t s) {
  return ask(BROADCAST, a, b, n, t, 0, root, c, s);
}
int ncclBcast(void *a, size_t n, int t, int root, struct comm *c, cudaStream_t s) {
  return ask(BROADCAST, a, a, n, t, 0, root, c, s);
}
int ncclAllGather(const void *a, void *b, size_t n, int t, struct comm *c, cudaStream_t s) {
  return ask(ALL_GATHER, a, b, n, t, 0, 0, c, s);
}
int ncclReduceScatter(const void *a, void *b, size_t n, int t, int op, struct comm *c, cudaStream_t s) {
  return ask(REDUCE_SCATTER, a, b, n, t, op, 0, c, s);
}
int ncclAlltoAll(const void *a, void *b, size_t n, int t, struct comm *c, cudaStream_t s) {
  return ask(ALL_TO_ALL, a, b, n, t, 0, 0, c, s);
}
int ncclSend(const void *a, size_t n, int t, int peer, struct comm *c, cudaStream_t s) {
  return ask(SEND, a, 0, n, t, 0, peer, c, s);
}
int ncclRecv(void *b, size_t n, int t, int peer, struct comm *c, cudaStream_t s) {
  return ask(RECEIVE, 0, b, n, t, 0, peer, c, s);
}

// --- communicators
int ncclGetUniqueId(unique_id *out) {
  static int count;
  char *folder = getenv("MLM_FAKE_GPU_MESSAGES");
  memset(out, 0, sizeof *out);
  snprintf(out->bytes, 90, "%s/%d-%d", folder ? folder : "/dev/shm", getpid(), count++);
  return 0;
}
static int join(struct comm **out, int size, const char *at, int rank) {
  struct comm *comm = calloc(1, sizeof *comm);
  char here = 1, there;
  snprintf(comm->at, sizeof comm->at, "%s", at);
  comm->rank = rank, comm->size = size;
  comm->sent = calloc(size, sizeof *comm->sent), comm->got = calloc(size, sizeof *comm->got);
  mkdir(comm->at, 0700);
  for (int i = 0; i < size; i++)  // rendezvous of all ranks
    if (i != rank) put(comm, i, &here, 1);
  for (int i = 0; i < size; i++)
    if (i != rank) get(comm, i, &there, 1);
  return *out = comm, 0;
}
int ncclCommInitRank(struct comm **out, int size, unique_id id, int rank) { return join(out, size, id.bytes, rank); }
int ncclCommInitRankConfig(struct comm **out, int size, unique_id id, int rank, void *how) {
  return join(out, size, id.bytes, rank);
}
int ncclCommInitRankScalable(struct comm **out, int size, int rank, int ids, unique_id *id, void *how) {
  return join(out, size, id->bytes, rank);
}
int ncclCommSplit(struct comm *comm, int color, int key, struct comm **out, void *how) {
  int mine[2] = {color, key}, (*all)[2] = calloc(comm->size, sizeof mine), size = 0, rank = 0;
  char at[120];
  for (int i = 0; i < comm->size; i++)
    if (i != comm->rank) put(comm, i, mine, sizeof mine);
  memcpy(all[comm->rank], mine, sizeof mine);
  for (int i = 0; i < comm->size; i++)
    if (i != comm->rank) get(comm, i, all[i], sizeof mine);
  for (int i = 0; i < comm->size; i++)
    if (all[i][0] == color) {
      size++;
      rank += all[i][1] < key || (all[i][1] == key && i < comm->rank);
    }
  snprintf(at, sizeof at, "%.80s.%lu.%d", comm->at, comm->splits++, color);
  free(all);
  if (color < 0) return *out = 0, 0;
  return join(out, size, at, rank);
}
int ncclCommAbort(struct comm *comm) { return comm->aborted = 1, 0; }
int ncclCommUserRank(struct comm *comm, int *out) { return *out = comm->rank, 0; }
int ncclCommCount(struct comm *comm, int *out) { return *out = comm->size, 0; }
int ncclCommGetAsyncError(struct comm *comm, int *out) { return *out = 0, 0; }
int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int where, struct comm *comm) {
  factors[factor_count % 64] = load(factor, 0, type);
  return *op = SCALED + factor_count++ % 64, 0;
}
int ncclGetVersion(int *version) { return *version = 22809, 0; }
const char *ncclGetErrorString(int code) { return code ? "error of the stub" : "no error"; }
const char *ncclGetLastError(void *comm) { return ""; }
