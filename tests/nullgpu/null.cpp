// The null GPU: a CUDA runtime, driver, cuBLAS and NCCL that accept everything and compute nothing, and pose as H200s,
// as many as NULL_CUDA_DEVICES says. Memory is host memory, given when it is touched; small copies and memsets are real;
// kernels are counted by name. Stream capture is tracked: what CUDA forbids meanwhile fails here, too.
#include <cuda_runtime_api.h>
#include <cuda.h>
#include <sys/mman.h>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
#include <algorithm>
#define API extern "C" __attribute__((visibility("default")))
static std::recursive_mutex& mu() {
  static auto* m = new std::recursive_mutex;
  return *m;
}
typedef std::lock_guard<std::recursive_mutex> Lock;
// Larger tensors are not written on the device, which would take time of the host.
static const size_t WRITTEN = 1 << 16;
static std::unordered_map<const void*, std::string>& names() {
  static auto* m = new std::unordered_map<const void*, std::string>;
  return *m;
}
static std::unordered_map<std::string, long>& counts() {
  static auto* m = new std::unordered_map<std::string, long>;
  return *m;
}
struct Block {
  size_t size;
  int kind;
};  // kind 2 device, 1 pinned host
static std::map<char*, Block>& blocks() {
  static auto* m = new std::map<char*, Block>;
  return *m;
}
static int devices() {
  const char* n = getenv("NULL_CUDA_DEVICES");
  return n ? atoi(n) : 1;
}
static thread_local int device = 0;
static thread_local cudaError_t last = cudaSuccess;
static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static thread_local int own_captures = 0;  // begun by this thread
static std::atomic<int> global_captures{0};
struct Capture {
  unsigned long long id;
  long nodes;
  cudaStreamCaptureMode mode;
};
static std::map<cudaStream_t, Capture>& captures() {
  static auto* m = new std::map<cudaStream_t, Capture>;
  return *m;
}
static unsigned long long next_id = 1;
static void count(const std::string& what) {
  Lock l(mu());
  counts()[what]++;
}
static cudaError_t fail(cudaError_t e, const char* what) {
  last = e;
  count(std::string("ERROR in capture: ") + what);
  if (getenv("NULL_CUDA_TRACE")) fprintf(stderr, "[null] %s refused in capture\n", what);
  return e;
}
// What is unsafe while this thread captures (any mode but relaxed), or any thread captures in global mode.
static bool forbidden() {
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  return own_captures > 0 || global_captures > 0;
}
static void node(cudaStream_t s, const char* what) {
  Lock l(mu());
  auto it = captures().find(s);
  if (it != captures().end()) {
    it->second.nodes++;
    counts()[std::string("captured")]++;
    (void)what;
  }
}
API void null_reset() {
  Lock l(mu());
  counts().clear();
}
API void null_dump(const char* path) {
  Lock l(mu());
  FILE* f = fopen(path, "w");
  for (auto& p : counts()) fprintf(f, "%ld\t%s\n", p.second, p.first.c_str());
  fclose(f);
}

// ---- registration
API void** __cudaRegisterFatBinary(void*) {
  static void* h;
  return &h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 0; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  Lock l(mu());
  names().emplace(host, name);
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
static thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>> stack;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void* st) {
  stack.emplace_back(g, b, s, st);
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  auto t = stack.back();
  stack.pop_back();
  *g = std::get<0>(t);
  *b = std::get<1>(t);
  *s = std::get<2>(t);
  *(void**)st = std::get<3>(t);
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(void** k, const void* f) {
  *k = (void*)f;
  return cudaSuccess;
}
static cudaError_t launch(const void* f, cudaStream_t s) {
  {
    Lock l(mu());
    auto it = names().find(f);
    counts()[std::string("kernel:") + (it == names().end() ? "?" : it->second)]++;
  }
  node(s, "launch");
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(void* k, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(k, s); }
extern "C" cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launch(f, s);
}
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->stream);
}
extern "C" cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) {
  f(d);
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) {
  f(s, cudaSuccess, d);
  return cudaSuccess;
}
// ---- device
extern "C" cudaError_t cudaGetDeviceCount(int* n) {
  *n = devices();
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetDevice(int* d) {
  *d = device;
  return cudaSuccess;
}
extern "C" cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
  device = d;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 1;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
extern "C" cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
extern "C" cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
static int attribute(int a) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxRegistersPerBlock:
      return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 6144;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrL2CacheSize:
      return 62914560;
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrConcurrentKernels:
      return 1;
    default:
      return 0;
  }
}
extern "C" cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = attribute(a);
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = 150754820096ull;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 62914560;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->memoryBusWidth = 6144;
  p->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d);
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  *a = 0;
  *b = -5;
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = (cudaMemPool_t)1;
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) {
  *(unsigned long long*)v = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
extern "C" cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
extern "C" cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
extern "C" cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *t = 150754820096ull;
  Lock l(mu());
  size_t used = 0;
  for (auto& b : blocks())
    if (b.second.kind == 2) used += b.second.size;
  *f = *t - used;
  return cudaSuccess;
}
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int block, size_t,
                                                                              unsigned) {
  *n = std::max(1, 2048 / std::max(1, block));
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetSymbolAddress(void** p, const void* s) {
  *p = (void*)s;
  return cudaSuccess;
}
extern "C" cudaError_t cudaProfilerStart() { return cudaSuccess; }
extern "C" cudaError_t cudaProfilerStop() { return cudaSuccess; }
// ---- errors
extern "C" cudaError_t cudaGetLastError() {
  auto e = last;
  last = cudaSuccess;
  return e;
}
extern "C" cudaError_t cudaPeekAtLastError() { return last; }
extern "C" const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorStreamCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported" : "cudaError";
}
extern "C" const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char t[64];
  snprintf(t, 64, "null CUDA error %d", (int)e);
  return e == cudaSuccess                         ? "no error"
         : e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
                                                  : t;
}
// ---- memory
static void* take(size_t n, int kind) {
  n = (n + 4095) & ~4095ull;
  if (!n) n = 4096;
  void* p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  Lock l(mu());
  blocks()[(char*)p] = {n, kind};
  return p;
}
static void give(void* p) {
  Lock l(mu());
  auto it = blocks().find((char*)p);
  if (it != blocks().end()) {
    munmap(p, it->second.size);
    blocks().erase(it);
  }
}
static int kind_of(const void* p) {
  Lock l(mu());
  auto it = blocks().upper_bound((char*)p);
  if (it == blocks().begin()) return 0;
  --it;
  return (char*)p < it->first + it->second.size ? it->second.kind : 0;
}
extern "C" cudaError_t cudaMalloc(void** p, size_t n) {
  count("cudaMalloc");
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaMalloc");
  {
    size_t f, t;
    cudaMemGetInfo(&f, &t);
    if (n > f) return cudaErrorMemoryAllocation;
  }
  *p = take(n, 2);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
extern "C" cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
extern "C" cudaError_t cudaFree(void* p) {
  count("cudaFree");
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaFree");
  if (p) give(p);
  return cudaSuccess;
}
extern "C" cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
  if (p) give(p);
  return cudaSuccess;
}
extern "C" cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  count("cudaHostAlloc");
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaHostAlloc");
  *p = take(n, 1);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
extern "C" cudaError_t cudaFreeHost(void* p) {
  give(p);
  return cudaSuccess;
}
extern "C" cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  Lock l(mu());
  blocks()[(char*)p] = {n, 1};
  return cudaSuccess;
}
extern "C" cudaError_t cudaHostUnregister(void* p) {
  Lock l(mu());
  blocks().erase((char*)p);
  return cudaSuccess;
}
extern "C" cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  int k = kind_of(p);
  a->type = k == 2 ? cudaMemoryTypeDevice : k == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = device;
  a->devicePointer = (void*)p;
  a->hostPointer = k == 2 ? 0 : (void*)p;
  return cudaSuccess;
}
static const char* way(const void* d, const void* s) {
  int a = kind_of(d), b = kind_of(s);
  return a == 2 ? (b == 2   ? "D2D"
                   : b == 1 ? "H2D pinned"
                            : "H2D pageable")
                : (b == 2 ? (a == 1 ? "D2H pinned" : "D2H pageable") : "H2H");
}
extern "C" cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  count(std::string("SYNC cudaMemcpy ") + way(d, s));
  if (forbidden()) return fail(cudaErrorStreamCaptureImplicit, "cudaMemcpy");
  memcpy(d, s, n);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  std::string w = way(d, s);
  count("memcpy " + w);
  {
    Lock l(mu());
    counts()["bytes " + w] += n;
  }
  node(st, "memcpy");
  if (w != "D2D" || n < WRITTEN) memmove(d, s, n);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h,
                                         cudaMemcpyKind, cudaStream_t st) {
  count("memcpy2D");
  node(st, "memcpy");
  for (size_t i = 0; i < h; i++) memmove((char*)d + i * dp, (char*)s + i * sp, w);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t) {
  memmove(d, s, n);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemset(void* d, int v, size_t n) {
  memset(d, v, n);
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t s) {
  count("memset");
  node(s, "memset");
  if (n < WRITTEN) memset(d, v, n);
  return cudaSuccess;
}
// ---- streams, events
extern "C" cudaError_t cudaStreamCreate(cudaStream_t* s) {
  *s = (cudaStream_t)calloc(1, 64);
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  *s = (cudaStream_t)calloc(1, 64);
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
extern "C" cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
static bool capturing(cudaStream_t s) {
  Lock l(mu());
  return captures().count(s) > 0;
}
extern "C" cudaError_t cudaStreamQuery(cudaStream_t s) {
  if (capturing(s) || forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  count("SYNC cudaStreamSynchronize");
  if (capturing(s) || forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  return cudaSuccess;
}
extern "C" cudaError_t cudaDeviceSynchronize() {
  count("SYNC cudaDeviceSynchronize");
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  return cudaSuccess;
}
struct Event {
  cudaStream_t stream;
  unsigned long long capture;
};
extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  count("cudaStreamWaitEvent");
  Lock l(mu());
  auto* ev = (Event*)e;
  if (ev && ev->capture && !captures().count(s)) {
    auto it = captures().find(ev->stream);
    if (it == captures().end()) return cudaSuccess;
    if (!s) return fail(cudaErrorStreamCaptureImplicit, "the legacy stream, which waits for a captured one");
    captures()[s] = it->second;
  }
  return cudaSuccess;
}
extern "C" cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = (cudaEvent_t)calloc(1, sizeof(Event));
  return cudaSuccess;
}
extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
extern "C" cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
extern "C" cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  count("cudaEventRecord");
  Lock l(mu());
  auto* ev = (Event*)e;
  auto it = captures().find(s);
  ev->stream = s;
  ev->capture = it == captures().end() ? 0 : it->second.id;
  return cudaSuccess;
}
extern "C" cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
extern "C" cudaError_t cudaEventQuery(cudaEvent_t e) {
  count("cudaEventQuery");
  if (((Event*)e)->capture || forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventQuery");
  return cudaSuccess;
}
extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t) {
  count("SYNC cudaEventSynchronize");
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventSynchronize");
  return cudaSuccess;
}
extern "C" cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) {
  *t = 1.0f;
  return cudaSuccess;
}
// ---- graphs
struct Graph {
  long nodes;
};
extern "C" cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  std::swap(*m, mode);
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode m) {
  count("cudaStreamBeginCapture");
  if (!s) return fail(cudaErrorStreamCaptureUnsupported, "capture of the legacy stream");
  Lock l(mu());
  captures()[s] = {next_id++, 0, m};
  if (m != cudaStreamCaptureModeRelaxed) own_captures++;
  if (m == cudaStreamCaptureModeGlobal) global_captures++;
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  Lock l(mu());
  auto it = captures().find(s);
  if (it == captures().end()) return cudaErrorIllegalState;
  auto c = it->second;
  long n = 0;
  for (auto i = captures().begin(); i != captures().end();) {
    if (i->second.id == c.id) {
      n = std::max(n, i->second.nodes);
      i = captures().erase(i);
    } else ++i;
  }
  if (c.mode != cudaStreamCaptureModeRelaxed) own_captures--;
  if (c.mode == cudaStreamCaptureModeGlobal) global_captures--;
  auto* r = new Graph{n};
  *g = (cudaGraph_t)r;
  counts()["graph nodes captured"] += n;
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  *st = capturing(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
extern "C" cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id,
                                                cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e,
                                                size_t* n) {
  Lock l(mu());
  auto it = captures().find(s);
  *st = it == captures().end() ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (id) *id = it == captures().end() ? 0 : it->second.id;
  static Graph none{1};
  if (g) *g = (cudaGraph_t)&none;
  if (d) *d = 0;
  if (e) *e = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
  count("cudaGraphInstantiate");
  *x = (cudaGraphExec_t) new Graph(*(Graph*)g);
  return cudaSuccess;
}
extern "C" cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  count("cudaGraphLaunch");
  return cudaSuccess;
}
extern "C" cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
extern "C" cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
extern "C" cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) {
  *n = ((Graph*)g)->nodes;
  return cudaSuccess;
}
extern "C" cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
extern "C" cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
extern "C" cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void*) {
  memset(h, 0, sizeof *h);
  return cudaSuccess;
}
extern "C" cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
extern "C" cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
extern "C" cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaSuccess; }
extern "C" cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return cudaErrorNotSupported; }
// ---- driver
static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** p, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* r) {
  *p = (void*)&unsupported;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#define OK_              \
  {                      \
    return CUDA_SUCCESS; \
  }
API CUresult cuInit(unsigned) OK_ API CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext)
OK_ API CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 0;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetLimit(CUlimit, size_t)
OK_ API CUresult cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = devices();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = attribute((int)a);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)1;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) OK_ API CUresult
    cuFuncSetCacheConfig(CUfunction, CUfunc_cache)
OK_ API CUresult cuGetErrorString(CUresult, const char** s) {
  *s = "null";
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule)calloc(1, 8);
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)calloc(1, 8);
  count("cuModuleLoadData");
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
  *m = (CUmodule)calloc(1, 8);
  return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule)
OK_ API CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* n) {
  auto* p = calloc(1, 8);
  Lock l(mu());
  names()[p] = std::string("triton:") + n;
  *f = (CUfunction)p;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream s, void**, void**) {
  launch(f, (cudaStream_t)s);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  launch(f, (cudaStream_t)c->hStream);
  return CUDA_SUCCESS;
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                       unsigned, CUstream s, void**) {
  launch(f, (cudaStream_t)s);
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 4;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 66;
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)v = p;
  else *(int*)v = 0;
  return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
OK_
    // ---- cuBLAS: by name only; the matmuls that torch calls are counted as kernels on the handle's stream.
    struct Handle {
  cudaStream_t stream;
};
#define NONE(n) \
  API int n() { return 0; }
API int cublasCreate_v2(void** h) {
  *h = calloc(1, sizeof(Handle));
  return 0;
}
API int cublasSetStream_v2(void* h, cudaStream_t s) {
  ((Handle*)h)->stream = s;
  return 0;
}
static int gemm(void* h, const char* n) {
  count(std::string("kernel:") + n);
  node(((Handle*)h)->stream, n);
  return 0;
}
static std::string shape(const char* n, int a, int b, long m, long nn, long k) {
  char t[128];
  snprintf(t, 128, "%s %c%c %ldx%ldx%ld", n, a ? 'T' : 'N', b ? 'T' : 'N', m, nn, k);
  return t;
}
API int cublasGemmEx(void* h, int a, int b, int m, int n, int k) {
  return gemm(h, shape("cublasGemmEx", a, b, m, n, k).c_str());
}
API int cublasGemmStridedBatchedEx(void* h, int a, int b, int m, int n, int k) {
  return gemm(h, shape("cublasGemmStridedBatchedEx", a, b, m, n, k).c_str());
}
API int cublasSgemm_v2(void* h, int a, int b, int m, int n, int k) {
  return gemm(h, shape("cublasSgemm", a, b, m, n, k).c_str());
}
API int cublasSgemmStridedBatched(void* h, int a, int b, int m, int n, int k) {
  return gemm(h, shape("cublasSgemmStridedBatched", a, b, m, n, k).c_str());
}
API int cublasSgemv_v2(void* h) { return gemm(h, "cublasSgemv"); }
API int cublasSgemmEx(void* h) { return gemm(h, "cublasSgemmEx"); }
API int cublasDotEx(void* h) { return gemm(h, "cublasDotEx"); }
API int cublasSdot_v2(void* h) { return gemm(h, "cublasSdot"); }
API int cublasGetPointerMode_v2(void*, int* m) {
  *m = 0;
  return 0;
}
API int cublasGetMathMode(void*, int* m) {
  *m = 0;
  return 0;
}
NONE(cublasDestroy_v2)
NONE(cublasSetMathMode) NONE(cublasSetPointerMode_v2) NONE(cublasSetWorkspace_v2) API size_t cublasLtGetVersion() {
  return 130100;
}
API int cublasLtMatmulDescCreate(void** d) {
  *d = calloc(1, 64);
  return 0;
}
API int cublasLtMatmulPreferenceCreate(void** d) {
  *d = calloc(1, 64);
  return 0;
}
API int cublasLtMatrixLayoutCreate(void** d, int, unsigned long long r, unsigned long long c, long long) {
  auto* p = (unsigned long long*)calloc(1, 64);
  p[0] = r;
  p[1] = c;
  *d = p;
  return 0;
}
NONE(cublasLtMatmulDescDestroy)
NONE(cublasLtMatmulDescSetAttribute) NONE(cublasLtMatmulPreferenceDestroy) NONE(cublasLtMatmulPreferenceSetAttribute)
    NONE(cublasLtMatrixLayoutDestroy) NONE(cublasLtMatrixLayoutSetAttribute) API
    int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* n) {
  memset(result, 0, 96);
  *n = 1;
  return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void* A, const void*, void*, const void*, const void*,
                       void*, void*, void* D, void*, void*, size_t, cudaStream_t s) {
  auto* d = (unsigned long long*)D;
  auto* a = (unsigned long long*)A;
  char t[96];
  snprintf(t, 96, "kernel:cublasLtMatmul D %llux%llu A %llux%llu", d[0], d[1], a[0], a[1]);
  count(t);
  node(s, "lt");
  return 0;
}
// ---- NCCL: one process pretends; collectives leave what is there.
API int ncclGetVersion(int* v) {
  *v = 22809;
  return 0;
}
API int ncclGetUniqueId(void* id) {
  memset(id, 0, 128);
  return 0;
}
API int ncclCommInitRankConfig(void** c, int n, char[128], int r, void*) {
  *c = calloc(1, 64);
  return 0;
}
// The id is passed by value (128 bytes): on x86-64 it lies on the stack, so registers hold (comm, nranks, rank,
// config).
API int ncclCommInitRankScalable(void** c) {
  *c = calloc(1, 64);
  return 0;
}
API int ncclCommInitRank(void** c) {
  *c = calloc(1, 64);
  return 0;
}
API int ncclCommSplit(void*, int, int, void** c, void*) {
  *c = calloc(1, 64);
  return 0;
}
API int ncclCommGetAsyncError(void*, int* e) {
  *e = 0;
  return 0;
}
API const char* ncclGetErrorString(int) { return "null"; }
API const char* ncclGetLastError(void*) { return "null"; }
static int coll(const char* n, cudaStream_t s) {
  count(std::string("nccl:") + n);
  node(s, n);
  return 0;
}
API int ncclAllReduce(const void* a, void* b, size_t n, int, int, void*, cudaStream_t s) {
  return coll("AllReduce", s);
}
API int ncclReduce(const void* a, void* b, size_t n, int, int, int, void*, cudaStream_t s) { return coll("Reduce", s); }
API int ncclBroadcast(const void* a, void* b, size_t n, int, int, void*, cudaStream_t s) {
  return coll("Broadcast", s);
}
API int ncclBcast(void* b, size_t n, int, int, void*, cudaStream_t s) { return coll("Bcast", s); }
API int ncclAllGather(const void* a, void* b, size_t n, int, void*, cudaStream_t s) { return coll("AllGather", s); }
API int ncclReduceScatter(const void* a, void* b, size_t n, int, int, void*, cudaStream_t s) {
  return coll("ReduceScatter", s);
}
API int ncclSend(const void*, size_t, int, int, void*, cudaStream_t s) { return coll("Send", s); }
API int ncclRecv(void*, size_t, int, int, void*, cudaStream_t s) { return coll("Recv", s); }
NONE(ncclGroupStart)
NONE(ncclGroupEnd) NONE(ncclCommAbort) NONE(ncclCommDestroy) NONE(ncclCommFinalize) NONE(ncclCommRegister)
    NONE(ncclCommDeregister)
