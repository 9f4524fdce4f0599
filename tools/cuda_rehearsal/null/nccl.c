/* NCCL between processes of one machine, with right values: collectives and send / recv through a shared file in
   /dev/shm. NULLCUDA_NCCL=alone: no peers, each call keeps its own part (one process stands for any rank of a world),
   and only of what is small: pages that nobody touches take no memory.
   The host makes each call at once, so an order of calls that only works because NCCL is asynchronous waits here, until
   NULLCUDA_NCCL_TIMEOUT seconds (60) are over; the error then tells what each rank called last, and so it does where
   ranks call different things. */
#define _GNU_SOURCE
#include "null.h"
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 64
#define CHUNK ((size_t)1 << 20)
enum { OK = 0, SYSTEM = 2, INTERNAL = 3, INVALID = 5 };
typedef struct { /* from one rank to another */
  atomic_int is_full;
  size_t bytes;
  char data[CHUNK];
} Box;
typedef struct {
  atomic_int count, sense;   /* a barrier */
  char called[MAX_RANKS][64]; /* last, by each rank */
  char slot[MAX_RANKS][CHUNK];
} Shared;
typedef struct {
  int size, rank, sense, is_aborted, num_splits, is_alone;
  char id[128];
  Shared *shared;
  Box *boxes;
} Comm;
static char last_error[512];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static double deadline(void) { return now() + null_number("NULLCUDA_NCCL_TIMEOUT", 60); }

static int fail(Comm *c, const char *what, int error) {
  int n = snprintf(last_error, sizeof last_error, "null NCCL: %s on rank %d of %d;", what, c->rank, c->size);
  for (int i = 0; i < c->size && n < 440; i++)
    n += snprintf(last_error + n, sizeof last_error - n, " rank %d: %s", i, c->shared->called[i]);
  fprintf(stderr, "%s\n", last_error);
  return error;
}

static int meet(Comm *c) { /* all ranks of the communicator */
  Shared *s = c->shared;
  double end = deadline();
  c->sense = !c->sense;
  if (atomic_fetch_add(&s->count, 1) + 1 == c->size) {
    atomic_store(&s->count, 0);
    atomic_store(&s->sense, c->sense);
    return OK;
  }
  for (long turns = 0; atomic_load(&s->sense) != c->sense; turns++) {
    if (c->is_aborted) return INTERNAL;
    if (turns < 200) sched_yield();
    else usleep(50);
    if (now() > end) return fail(c, "a call waited too long", INTERNAL);
  }
  return OK;
}

static int differ(Comm *c) { /* after a meeting: whether ranks have told different things */
  for (int i = 0; i < c->size; i++)
    if (strcmp(c->shared->called[i], c->shared->called[c->rank])) return fail(c, "ranks differ", INVALID);
  return OK;
}
static const char *setting(const char *name) {
  const char *found = getenv(name);
  return found ? found : "unset";
}

/* ---- communicators ---- */
typedef struct {
  char bytes[128];
} Id;
int ncclGetVersion(int *v) { return *v = NULL_NCCL, OK; } /* that of the installed package */
const char *ncclGetErrorString(int e) { return e ? "null NCCL: an error" : "no error"; }
const char *ncclGetLastError(void *c) { return last_error; }
int ncclGetUniqueId(char *id) {
  static atomic_int made;
  memset(id, 0, 128);
  snprintf(id, 128, "%d.%d.%ld", getpid(), atomic_fetch_add(&made, 1), (long)(now() * 1e6));
  return OK;
}
static int join(void **out, int size, const char *id, int rank) {
  const char *mode = getenv("NULLCUDA_NCCL");
  Comm *c = calloc(1, sizeof(Comm) + 4096); /* torch reads beyond: versions of NCCL put fields there */
  c->size = size;
  c->rank = rank;
  memcpy(c->id, id, 128);
  *out = c;
  c->is_alone = size == 1 || (mode && !strcmp(mode, "alone"));
  if (c->is_alone) return OK;
  if (size > MAX_RANKS) return INVALID;
  uint64_t hash = 1469598103934665603ull;
  for (int i = 0; i < 128; i++) hash = (hash ^ (unsigned char)id[i]) * 1099511628211ull;
  char path[64];
  snprintf(path, sizeof path, "/dev/shm/nullnccl.%016llx", (unsigned long long)hash);
  size_t bytes = sizeof(Shared) + (size_t)size * size * sizeof(Box);
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, bytes)) return SYSTEM;
  c->shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  c->boxes = (Box *)(c->shared + 1);
  /* With these alike or not at all: NCCL hangs or crashes otherwise. */
  snprintf(c->shared->called[rank], 64, "NCCL_CUMEM_ENABLE %s, NCCL_NVLS_ENABLE %s", setting("NCCL_CUMEM_ENABLE"),
           setting("NCCL_NVLS_ENABLE"));
  int error = meet(c);
  if (!error) unlink(path);
  if (!error) error = differ(c);
  return error ? error : meet(c);
}
int ncclCommInitRank(void **c, int n, Id id, int rank) { return join(c, n, id.bytes, rank); }
int ncclCommInitRankConfig(void **c, int n, Id id, int rank, void *config) { return join(c, n, id.bytes, rank); }
int ncclCommInitRankScalable(void **c, int n, int rank, int num_ids, Id *ids, void *config) {
  return join(c, n, ids->bytes, rank);
}
int ncclCommCount(void *c, int *n) { return *n = ((Comm *)c)->size, OK; }
int ncclCommUserRank(void *c, int *rank) { return *rank = ((Comm *)c)->rank, OK; }
int ncclCommGetAsyncError(void *c, int *e) { return *e = OK, OK; }
int ncclCommAbort(void *c) { return ((Comm *)c)->is_aborted = 1, OK; }
extern int cudaMalloc(void **, size_t), cudaFree(void *);
int ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n); }
int ncclMemFree(void *p) { return cudaFree(p); }

/* ---- reductions ---- */
enum Type { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16 };
enum Op { SUM, PRODUCT, MAX, MIN, AVG, SCALED };
static size_t width(int type) {
  static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? bytes[type] : 1;
}
static float of_f16(uint16_t bits) {
  _Float16 f;
  memcpy(&f, &bits, 2);
  return f;
}
static uint16_t to_f16(float v) {
  _Float16 f = v;
  uint16_t bits;
  memcpy(&bits, &f, 2);
  return bits;
}
static float of_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}
static uint16_t to_bf16(float v) { /* rounds to nearest even */
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static double factor = 1; /* of the last operator that was made with one */
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *c) {
  factor = type == F32    ? *(float *)scalar
           : type == F64  ? *(double *)scalar
           : type == BF16 ? of_bf16(*(uint16_t *)scalar)
           : type == F16  ? of_f16(*(uint16_t *)scalar)
                          : 1;
  *op = SCALED;
  return OK;
}
#define PLAIN(x) (x)
#define FOLD(T, A, of, to)                                                                                     \
  for (size_t i = 0; i < n; i++) {                                                                             \
    A v = of(((T *)part[0])[i]);                                                                               \
    for (int k = 1; k < ranks; k++) {                                                                          \
      A w = of(((T *)part[k])[i]);                                                                             \
      v = op == PRODUCT ? v * w : op == MAX ? (v > w ? v : w) : op == MIN ? (v < w ? v : w) : v + w;            \
    }                                                                                                          \
    ((T *)out)[i] = to(op == AVG ? v / ranks : op == SCALED ? v * factor : v);                                  \
  }                                                                                                            \
  break;
static void fold(void *out, char **part, int ranks, size_t n, int type, int op) {
  switch (type) {
    case I8: FOLD(int8_t, int, PLAIN, PLAIN)
    case U8: FOLD(uint8_t, unsigned, PLAIN, PLAIN)
    case I32: FOLD(int32_t, int32_t, PLAIN, PLAIN)
    case U32: FOLD(uint32_t, uint32_t, PLAIN, PLAIN)
    case I64: FOLD(int64_t, int64_t, PLAIN, PLAIN)
    case U64: FOLD(uint64_t, uint64_t, PLAIN, PLAIN)
    case F16: FOLD(uint16_t, float, of_f16, to_f16)
    case F32: FOLD(float, float, PLAIN, PLAIN)
    case F64: FOLD(double, double, PLAIN, PLAIN)
    case BF16: FOLD(uint16_t, float, of_bf16, to_bf16)
  }
}

/* ---- collectives: the ranks show `bytes` of theirs, chunk by chunk, and each uses what it needs of all ---- */
typedef void (*Use)(Comm *c, char **parts, size_t offset, size_t bytes, void *what);
static int show(Comm *c, const char *name, const char *mine, size_t bytes, size_t told, Use use, void *what) {
  char *parts[MAX_RANKS];
  for (int i = 0; i < c->size; i++) parts[i] = c->shared->slot[i];
  snprintf(c->shared->called[c->rank], 64, "%s of %zu B", name, told);
  for (size_t o = 0; o < bytes || (o == 0 && bytes == 0); o += CHUNK) {
    size_t n = bytes - o < CHUNK ? bytes - o : CHUNK;
    if (mine) memcpy(parts[c->rank], mine + o, n);
    int error = meet(c);
    if (!error && o == 0) error = differ(c);
    if (!error) use(c, parts, o, n, what);
    if (error || (error = meet(c))) return error;
  }
  return OK;
}
typedef struct {
  char *out;
  size_t bytes; /* of a rank */
  int type, op, root;
} Job;
static void use_reduced(Comm *c, char **parts, size_t offset, size_t n, void *what) {
  Job *j = what;
  if (j->root < 0 || j->root == c->rank) fold(j->out + offset, parts, c->size, n / width(j->type), j->type, j->op);
}
static void use_root(Comm *c, char **parts, size_t offset, size_t n, void *what) {
  Job *j = what;
  memmove(j->out + offset, parts[j->root], n);
}
static void use_all(Comm *c, char **parts, size_t offset, size_t n, void *what) {
  Job *j = what;
  for (int i = 0; i < c->size; i++) memcpy(j->out + i * j->bytes + offset, parts[i], n);
}
static int keep_own(void *out, const void *in, size_t bytes) {
  if (bytes <= NULL_SMALL) memmove(out, in, bytes);
  return OK;
}
int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  Job j = {out, bytes, type, op, -1};
  null_collectives++;
  return c->is_alone ? keep_own(out, in, bytes) : show(c, "all_reduce", in, bytes, bytes, use_reduced, &j);
}
int ncclReduce(const void *in, void *out, size_t n, int type, int op, int root, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  Job j = {out, bytes, type, op, root};
  null_collectives++;
  return c->is_alone ? keep_own(out, in, bytes) : show(c, "reduce", in, bytes, bytes, use_reduced, &j);
}
int ncclBroadcast(const void *in, void *out, size_t n, int type, int root, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  Job j = {out, bytes, type, SUM, root};
  null_collectives++;
  if (c->is_alone) return keep_own(out, in, bytes);
  return show(c, "broadcast", c->rank == root ? in : NULL, bytes, bytes, use_root, &j);
}
int ncclBcast(void *p, size_t n, int type, int root, void *c, void *s) { return ncclBroadcast(p, p, n, type, root, c, s); }
int ncclAllGather(const void *in, void *out, size_t n, int type, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  Job j = {out, bytes, type, SUM, -1};
  null_collectives++;
  if (!c->is_alone) return show(c, "all_gather", in, bytes, bytes, use_all, &j);
  for (int i = 0; i < c->size; i++) keep_own((char *)out + i * bytes, in, bytes);
  return OK;
}
int ncclReduceScatter(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  null_collectives++;
  if (c->is_alone) return keep_own(out, (char *)in + c->rank * bytes, bytes);
  char *mine = malloc(bytes + 1); /* `out` may be a part of `in` */
  int error = OK;
  for (int owner = 0; owner < c->size && !error; owner++) {
    Job j = {mine, bytes, type, op, owner};
    error = show(c, "reduce_scatter", (char *)in + owner * bytes, bytes, bytes, use_reduced, &j);
  }
  if (!error) memcpy(out, mine, bytes);
  free(mine);
  return error;
}

/* ---- send and recv: kept between ncclGroupStart and ncclGroupEnd, then moved along together ---- */
typedef struct {
  Comm *c;
  char *p;
  size_t left;
  int peer, is_send;
} Move;
static __thread Move moves[4096];
static __thread int num_moves, depth;
static Box *box_of(Move *m) {
  int from = m->is_send ? m->c->rank : m->peer, to = m->is_send ? m->peer : m->c->rank;
  return &m->c->boxes[from * m->c->size + to];
}
static int is_behind(int i) { /* another one between the same ranks comes first */
  for (int j = 0; j < i; j++)
    if (moves[j].left && moves[j].c == moves[i].c && moves[j].peer == moves[i].peer &&
        moves[j].is_send == moves[i].is_send)
      return 1;
  return 0;
}
static int move_on(Move *m) { /* 1: a chunk went, 0: the box is not ready, -1: lengths differ */
  Box *box = box_of(m);
  if (atomic_load(&box->is_full) == m->is_send) return 0;
  size_t n = m->is_send ? (m->left < CHUNK ? m->left : CHUNK) : box->bytes;
  if (n > m->left) return -1;
  memcpy(m->is_send ? box->data : m->p, m->is_send ? m->p : box->data, n);
  box->bytes = n;
  m->p += n;
  m->left -= n;
  atomic_store(&box->is_full, m->is_send);
  return 1;
}
static int run_moves(void) {
  double end = deadline();
  int error = OK, num_left = 1;
  for (long idle = 0; num_left && !error;) {
    int has_moved = num_left = 0;
    for (int i = 0; i < num_moves && !error; i++) {
      if (!moves[i].left) continue;
      int moved = is_behind(i) ? 0 : move_on(&moves[i]);
      if (moved < 0) error = fail(moves[i].c, "a message is longer than was asked for", INVALID);
      has_moved |= moved > 0;
      num_left += moves[i].left > 0;
    }
    if (has_moved || !num_left) idle = 0;
    else if (now() > end) error = fail(moves[0].c, "send / recv waited too long", INTERNAL);
    else if (++idle < 100) sched_yield();
    else usleep(50);
  }
  num_moves = 0;
  return error;
}
static int send_or_recv(const void *p, size_t n, int type, int peer, void *comm, int is_send) {
  Comm *c = comm;
  null_collectives++;
  if (c->is_alone) return OK;
  snprintf(c->shared->called[c->rank], 64, "%s rank %d, %zu B", is_send ? "send to" : "recv from", peer, n * width(type));
  if (num_moves == 4096) return INTERNAL;
  moves[num_moves++] = (Move){c, (char *)p, n * width(type), peer, is_send};
  return depth ? OK : run_moves();
}
int ncclSend(const void *p, size_t n, int type, int peer, void *c, void *s) { return send_or_recv(p, n, type, peer, c, 1); }
int ncclRecv(void *p, size_t n, int type, int peer, void *c, void *s) { return send_or_recv(p, n, type, peer, c, 0); }
int ncclGroupStart(void) { return depth++, OK; }
int ncclGroupEnd(void) {
  if (--depth > 0) return OK;
  depth = 0;
  return num_moves ? run_moves() : OK;
}
int ncclAlltoAll(const void *in, void *out, size_t n, int type, void *comm, void *stream) {
  Comm *c = comm;
  size_t bytes = n * width(type);
  if (c->is_alone) return keep_own(out, in, bytes * c->size);
  ncclGroupStart();
  for (int i = 0; i < c->size; i++) {
    if (i == c->rank) memmove((char *)out + i * bytes, (char *)in + i * bytes, bytes);
    else ncclSend((char *)in + i * bytes, n, type, i, c, stream), ncclRecv((char *)out + i * bytes, n, type, i, c, stream);
  }
  return ncclGroupEnd();
}
int ncclGather() { return INVALID; }
int ncclCommSplit(void *comm, int color, int key, void **out, void *config) {
  Comm *c = comm;
  int mine[2] = {color, key}, all[2 * MAX_RANKS], rank = 0, size = 0;
  char id[128];
  if (c->is_alone) return join(out, c->size, c->id, c->rank);
  int error = ncclAllGather(mine, all, 2, I32, c, NULL);
  if (error) return error;
  c->num_splits++;
  *out = NULL;
  if (color < 0) return OK;
  for (int i = 0; i < c->size; i++)
    if (all[2 * i] == color) {
      size++;
      rank += all[2 * i + 1] < key || (all[2 * i + 1] == key && i < c->rank);
    }
  memcpy(id, c->id, 128);
  int n = strlen(id);
  snprintf(id + n, 128 - n, "/%d.%d", c->num_splits, color);
  return join(out, size, id, rank);
}
