// A CUDA device that computes nothing, so that a CUDA build of torch runs on a machine without a card.
//
// It is preloaded and answers for the CUDA runtime, the driver and cuBLAS before the real libraries are asked. Memory is
// address space: it has pages only where a copy writes. Kernels and products return at once. All that torch does on the
// host is real: the caching allocator, streams and events, autograd's device threads, the choice of kernels.
// What the device was asked is counted (null_counts) and can be logged, one line each (null_log).
//
//     NULL_CC=89     compute capability; 80, 86, 89, 90, 100 and 120 are described below
//     NULL_GIB=80    size of the card; beyond it allocations fail, and torch raises its OutOfMemoryError
//     NULL_NAME      its name; by default that of a card of this capability, or "null device" where NULL_GIB is given
//     NULL_REFUSES=NAME   the launch of this kernel of Triton's fails
//     NULL_HANGS=NAME     it never returns
//     NULL_LIES=NAME      the next number that the host reads after it is not zero, as if the kernel were wrong
//
// scripts/test_cuda.sh builds it; device.py is its side in Python.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda.h>
#include <driver_types.h>

typedef cudaError_t E;
enum { OK = cudaSuccess };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// A function that has nothing to do; whatever its arguments are, it succeeds. The C name differs from the symbol's,
// because the headers declare some of them.
#define STUB(name) int null_##name(void) __asm__(#name); int null_##name(void) { return 0; }

// --- The card -----------------------------------------------------------------------------------------------------

// What torch asks of a card to choose kernels and to size their scratch: multiprocessors, shared memory of a block.
static const struct card { int capability, processors, shared; const char *name; } cards[] = {
    {80, 108, 166912, "NVIDIA A100-SXM4-80GB"}, {86, 84, 101376, "NVIDIA RTX A6000"},
    {89, 142, 101376, "NVIDIA L40S"}, {90, 132, 232448, "NVIDIA H100 80GB HBM3"},
    {100, 148, 232448, "NVIDIA B200"}, {120, 170, 101376, "NVIDIA GeForce RTX 5090"}};
static struct card card;
static size_t card_bytes = 80ull << 30, card_used;

__attribute__((constructor)) static void read_environment(void) {
    const char *capability = getenv("NULL_CC"), *gib = getenv("NULL_GIB"), *name = getenv("NULL_NAME");
    int wanted = capability ? atoi(capability) : 89;
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
        if (cards[i].capability == wanted) card = cards[i];
    if (!card.name) fprintf(stderr, "NULL_CC=%d is not described in device.c\n", wanted), exit(2);
    if (gib) card_bytes = (size_t)(atof(gib) * (double)(1ull << 30));
    if (name || gib) card.name = name ? name : "null device";
}

E cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", card.name);
    p->totalGlobalMem = card_bytes;
    p->major = card.capability / 10, p->minor = card.capability % 10;
    p->multiProcessorCount = card.processors;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = card.shared, p->sharedMemPerMultiprocessor = card.shared + 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->warpSize = 32, p->l2CacheSize = 50 << 20;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = card.capability % 10 ? 1536 : 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = 512, p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->computePreemptionSupported = 1;
    return OK;
}

E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = card.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = card.processors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.shared; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.shared + 1024; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.capability % 10 ? 1536 : 2048; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;  // yes, it can
    }
    return OK;
}

E cudaGetDeviceCount(int *count) { return *count = 1, OK; }
E cudaGetDevice(int *device) { return *device = 0, OK; }
E cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
E cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
E cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, OK; }
E cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { return *pool = (cudaMemPool_t)1, OK; }
E cudaDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:00:01.0"), OK; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
STUB(cudaSetDevice) STUB(cudaDeviceEnablePeerAccess) STUB(cudaProfilerStart) STUB(cudaProfilerStop)
STUB(cudaMemPoolGetAttribute) STUB(cudaMemPoolSetAttribute) STUB(cudaMemPoolSetAccess) STUB(cudaMemPoolTrimTo)

// No call above or below fails but for want of memory, which torch learns from the call itself.
STUB(cudaGetLastError) STUB(cudaPeekAtLastError)
const char *cudaGetErrorName(E error) { return "cudaErrorOnTheNullDevice"; }
const char *cudaGetErrorString(E error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "null device"; }

// --- Counts and the log -------------------------------------------------------------------------------------------

static long launches, synchronizations, copies, fills, products, registrations, managed;
static FILE *log_file;

void null_counts(long counts[7]) {
    long now[7] = {launches, synchronizations, copies, fills, products, registrations, managed};
    memcpy(counts, now, sizeof now);
}

// Lines "what stream …" from here on go to the file; a path of NULL ends it.
void null_log(const char *path) {
    pthread_mutex_lock(&lock);
    if (log_file) fclose(log_file);
    log_file = path ? fopen(path, "w") : NULL;
    pthread_mutex_unlock(&lock);
}

static void note(const char *format, ...) {
    if (!log_file) return;
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    if (log_file) vfprintf(log_file, format, arguments);
    pthread_mutex_unlock(&lock);
    va_end(arguments);
}

void null_mark(const char *text) { note("mark %s\n", text); }  // a line of the caller's own

// --- Memory: addresses without pages ------------------------------------------------------------------------------

enum kind { PAGEABLE, DEVICE, PINNED, MANAGED };
static struct range { char *begin; size_t bytes; enum kind kind; } *ranges;
static size_t ranges_used, ranges_room;

static void remember(void *begin, size_t bytes, enum kind kind) {
    pthread_mutex_lock(&lock);
    if (ranges_used == ranges_room) ranges = realloc(ranges, (ranges_room = 2 * ranges_room + 1024) * sizeof *ranges);
    ranges[ranges_used++] = (struct range){begin, bytes, kind};
    pthread_mutex_unlock(&lock);
}

// The range that an address is in, the youngest first; of kind PAGEABLE if it is in none. Forgets it if told so.
static struct range range_of(const void *address, int forget) {
    struct range found = {0};
    pthread_mutex_lock(&lock);
    for (size_t i = ranges_used; i-- > 0;)
        if ((char *)address >= ranges[i].begin && (char *)address < ranges[i].begin + ranges[i].bytes) {
            found = ranges[i];
            if (forget) ranges[i] = ranges[--ranges_used];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

// Whether the card has so many bytes left; they are taken then.
static int take(size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = card_used + bytes <= card_bytes;
    if (fits) card_used += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give_back(size_t bytes) { pthread_mutex_lock(&lock); card_used -= bytes; pthread_mutex_unlock(&lock); }

static void *addresses(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static E allocate(void **p, size_t bytes, enum kind kind) {
    if (!(*p = addresses(bytes))) return cudaErrorMemoryAllocation;
    remember(*p, bytes, kind);
    return OK;
}

static E release(void *p) {
    struct range range = range_of(p, 1);
    if (range.kind == DEVICE) give_back(range.bytes);
    if (range.kind == MANAGED) managed -= range.bytes;
    if (range.bytes) munmap(range.begin, range.bytes);
    return OK;
}

E cudaMalloc(void **p, size_t bytes) {
    bytes = (bytes + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1);  // the driver's pages are of 2 MiB
    return take(bytes) ? allocate(p, bytes, DEVICE) : cudaErrorMemoryAllocation;
}
E cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) { return cudaMalloc(p, bytes); }
E cudaFree(void *p) { return release(p); }
E cudaFreeAsync(void *p, cudaStream_t stream) { return release(p); }
E cudaMallocManaged(void **p, size_t bytes, unsigned flags) { return managed += bytes, allocate(p, bytes, MANAGED); }
E cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return allocate(p, bytes, PINNED); }
E cudaFreeHost(void *p) { return release(p); }
E cudaMemGetInfo(size_t *free, size_t *total) { return *total = card_bytes, *free = card_bytes - card_used, OK; }
STUB(cudaMemPrefetchAsync)

E cudaHostRegister(void *p, size_t bytes, unsigned flags) { return registrations++, remember(p, bytes, PINNED), OK; }
E cudaHostUnregister(void *p) { return range_of(p, 1).kind == PINNED ? OK : cudaErrorHostMemoryNotRegistered; }

E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost,
                                                cudaMemoryTypeManaged};
    enum kind kind = range_of(p, 0).kind;
    *a = (struct cudaPointerAttributes){types[kind], kind == DEVICE || kind == MANAGED ? 0 : -1, (void *)p, (void *)p};
    return OK;
}

// Growing segments: addresses are reserved once; what is put behind them counts.
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    return allocate((void **)p, bytes, DEVICE) ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) { return range_of((void *)p, 1), munmap((void *)p, bytes), 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p, unsigned long long f) {
    return take(bytes) ? (*handle = bytes, 0) : CUDA_ERROR_OUT_OF_MEMORY;  // a handle is its size
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return give_back(handle), 0; }
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    return *g = 2 << 20, 0;
}
STUB(cuMemMap) STUB(cuMemUnmap) STUB(cuMemSetAccess)

// --- Copies -------------------------------------------------------------------------------------------------------

// Small ones are done: run state, toy weights and their checkpoints survive the way to the device and back. Large ones
// would give pages to memory that means nothing.
enum { LARGEST_COPY = 4 << 20, LARGEST_NUMBER = 8, LARGEST_FILL = 1 << 16 };

// A number that the host reads (a norm, a flag, a count) comes out of kernels that did not run: it reads zero, whatever
// was at the place before, so that a step is finite and the same every time.
static int lied;  // a kernel has run that is said to be wrong: 0x40 in each byte is 3 in float32, 32 in float64

// Writes only where something differs: memory that nobody has written is zero and takes no page of the host.
static void copy_bytes(char *to, const char *from, size_t bytes) {
    enum { PIECE = 4096 };
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t size = bytes - at < PIECE ? bytes - at : PIECE;
        if (memcmp(to + at, from + at, size)) memcpy(to + at, from + at, size);
    }
}

static void copy(void *to, const void *from, size_t bytes) {
    copies++;
    if (bytes <= LARGEST_NUMBER && range_of(from, 0).kind == DEVICE && range_of(to, 0).kind != DEVICE)
        memset(to, lied ? 0x40 : 0, bytes), lied = 0;
    else if (bytes <= LARGEST_COPY) copy_bytes(to, from, bytes);
}

static const char *place(const void *address) {
    static const char *names[] = {"pageable", "device", "pinned", "managed"};
    return names[range_of(address, 0).kind];
}

E cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (log_file) note("copy %p %s %p %s %p %zu\n", (void *)stream, place(to), to, place(from), from, bytes);
    return copy(to, from, bytes), OK;
}
E cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return synchronizations++, copy(to, from, bytes), OK;
}
E cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                    enum cudaMemcpyKind kind, cudaStream_t stream) {
    copies++;
    for (size_t row = 0; width * height <= LARGEST_COPY && row < height; row++)
        copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return OK;
}
E cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    fills++;
    note("fill %p %p %zu\n", (void *)stream, to, bytes);
    if (bytes <= LARGEST_FILL) memset(to, value, bytes);
    return OK;
}
E cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }
E cudaGetSymbolAddress(void **p, const void *symbol) { static char variable[1 << 16]; return *p = variable, OK; }
STUB(cudaMemcpyToSymbol)

// --- Streams and events: numbers. All that is launched has ended when the call returns ----------------------------

static void *next_handle(void) { static long last; return (void *)(__sync_add_and_fetch(&last, 1) << 4); }

E cudaStreamCreate(cudaStream_t *stream) { return *stream = next_handle(), OK; }
E cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
E cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, OK; }
E cudaEventCreate(cudaEvent_t *event) { return *event = next_handle(), OK; }
E cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
// There is no clock: what is tuned by it stays as it is.
E cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { return *ms = 0.0f, OK; }
STUB(cudaStreamDestroy) STUB(cudaStreamQuery) STUB(cudaEventDestroy)

E cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { note("record %p %p\n", (void *)stream, (void *)event); return OK; }
E cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
E cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    note("wait %p %p\n", (void *)stream, (void *)event);
    return OK;
}
E cudaEventSynchronize(cudaEvent_t event) { synchronizations++; note("sync event %p\n", (void *)event); return OK; }
E cudaEventQuery(cudaEvent_t event) { note("sync event %p\n", (void *)event); return OK; }  // the host knows it is done
E cudaStreamSynchronize(cudaStream_t stream) { synchronizations++; note("sync stream %p\n", (void *)stream); return OK; }
E cudaDeviceSynchronize(void) { synchronizations++; note("sync device\n"); return OK; }

E cudaStreamAddCallback(cudaStream_t stream, void (*call)(cudaStream_t, E, void *), void *data, unsigned flags) {
    return call(stream, OK, data), OK;
}
E cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { return call(data), OK; }

// Nothing captures a graph; torch asks before each allocation whether something does.
E cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { return *status = 0, OK; }
E cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                           cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    return *status = 0, OK;
}
STUB(cudaThreadExchangeStreamCaptureMode) STUB(cudaStreamBeginCapture) STUB(cudaStreamEndCapture)
STUB(cudaGraphDebugDotPrint) STUB(cudaGraphDestroy) STUB(cudaGraphExecDestroy) STUB(cudaGraphGetNodes)
STUB(cudaGraphInstantiateWithFlags) STUB(cudaGraphLaunch) STUB(cudaGraphNodeGetDependencies)
STUB(cudaIpcCloseMemHandle) STUB(cudaIpcGetEventHandle) STUB(cudaIpcGetMemHandle) STUB(cudaIpcOpenEventHandle)
STUB(cudaIpcOpenMemHandle)

// --- Kernels ------------------------------------------------------------------------------------------------------

// Code for the device is registered when a library is loaded: here names are kept, by address, for the log.
enum { NAMES = 1 << 20 };
static struct { const void *kernel; const char *name; } *names;

static size_t slot_of(const void *kernel) {
    size_t i = ((size_t)kernel * 0x9E3779B97F4A7C15ul >> 32) & (NAMES - 1);
    while (names[i].kernel && names[i].kernel != kernel) i = (i + 1) & (NAMES - 1);
    return i;
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle[1]; return handle; }
void __cudaRegisterFunction(void **handle, const char *kernel, char *device_kernel, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *e) {
    if (!names) names = calloc(NAMES, sizeof *names);
    size_t slot = slot_of(kernel);
    names[slot].kernel = kernel, names[slot].name = name;
}
char __cudaInitModule(void **handle) { return 1; }
STUB(__cudaRegisterFatBinaryEnd) STUB(__cudaUnregisterFatBinary) STUB(__cudaRegisterVar)

// `kernel<<<grid, block, shared, stream>>>(…)` compiles to a push, and a pop before the launch.
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } launch_as;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    launch_as.grid = grid, launch_as.block = block, launch_as.shared = shared, launch_as.stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch_as.grid, *block = launch_as.block, *shared = launch_as.shared, *(cudaStream_t *)stream = launch_as.stream;
    return OK;
}

static E launch(const void *kernel, cudaStream_t stream) {
    launches++;
    note("kernel %p %s\n", (void *)stream, names && names[slot_of(kernel)].name ? names[slot_of(kernel)].name : "?");
    return OK;
}
E __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, OK; }
E __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel, stream);
}
E cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel, stream);
}
E cudaLaunchCooperativeKernel(const void *kernel, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(kernel, stream);
}
E cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **a) { return launch(kernel, config->stream); }

// Torch and CUB size launches and scratch by these. Binaries are those that its build has: 8.9 runs 8.6's.
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *kernel) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->maxDynamicSharedSizeBytes = 49152;
    a->ptxVersion = a->binaryVersion = card.capability == 89 ? 86 : card.capability;
    return OK;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    return *blocks = 2, OK;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared,
                                                         unsigned flags) {
    return *blocks = 2, OK;
}
STUB(cudaFuncSetAttribute)

// --- The driver ---------------------------------------------------------------------------------------------------

// torch asks the runtime for entries of the driver: those that are in here, else one that does nothing.
static int nothing(void) { return 0; }
E cudaGetDriverEntryPoint(const char *symbol, void **entry, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
    void *mine = dlsym(RTLD_DEFAULT, symbol);
    if (r) *r = 0;
    return *entry = mine ? mine : (void *)nothing, OK;
}
E cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPoint(symbol, entry, flags, result);
}

CUresult cuDriverGetVersion(int *version) { return *version = 13000, 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 0, 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device), 0;  // both number them alike
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    return *active = 1, 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, 0; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, 0; }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr p) { return *(int *)value = 0, 0; }
CUresult cuGetErrorString(CUresult result, const char **text) {
    return *text = result == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : result ? "launch failed" : "none", 0;
}
// Triton loads what it has compiled, and asks how many threads it may have. A kernel is its name.
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    return *function = (CUfunction)strdup(name), 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, 0;
}
static int is(const char *variable, CUfunction function) {
    const char *name = getenv(variable);
    return name && !strcmp(name, (const char *)function);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    if (is("NULL_REFUSES", function)) return CUDA_ERROR_LAUNCH_FAILED;
    while (is("NULL_HANGS", function)) pause();
    if (is("NULL_LIES", function)) lied = 1;
    launches++;
    note("kernel %p %s\n", (void *)config->hStream, (const char *)function);
    return 0;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, 0; }
STUB(cuInit) STUB(cuDeviceGetCount) STUB(cuDeviceGetName) STUB(cuCtxSetCurrent) STUB(cuCtxGetLimit) STUB(cuCtxSetLimit)
STUB(cuFuncSetAttribute) STUB(cuFuncSetCacheConfig) STUB(cuLaunchKernel)
STUB(cuLaunchCooperativeKernel) STUB(cuLinkCreate_v2) STUB(cuLinkAddData_v2) STUB(cuLinkComplete) STUB(cuLinkDestroy)
STUB(cuModuleLoad) STUB(cuModuleLoadData) STUB(cuModuleLoadDataEx) STUB(cuModuleUnload)
STUB(cuOccupancyMaxActiveBlocksPerMultiprocessor) STUB(cuOccupancyMaxActiveClusters) STUB(cuTensorMapEncodeTiled)

// --- NVML: torch 2.14 asks whether the card is on a fabric before it maps memory, every torch who else uses a full one ----

#define REFUSED(name) int name(void) { return 3; }  // NVML_ERROR_NOT_SUPPORTED

STUB(nvmlInit_v2) STUB(nvmlDeviceGetHandleByPciBusId_v2)
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { return *count = 0, 0; }
REFUSED(nvmlDeviceGetGpuFabricInfoV) REFUSED(nvmlSystemGetCudaDriverVersion_v2)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType) REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)

// --- cuBLAS: products count as launches, on whichever stream; torch gives it the workspaces -----------------------

#define PRODUCT(name) int null_##name(void) __asm__(#name); \
    int null_##name(void) { launches++, products++; note("product %s\n", #name); return 0; }

int cublasCreate_v2(void **handle) { return *handle = calloc(64, 4), 0; }
int cublasDestroy_v2(void *handle) { return free(handle), 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
const char *cublasGetStatusString(int status) { return "null device"; }
STUB(cublasSetStream_v2) STUB(cublasSetWorkspace_v2) STUB(cublasSetMathMode) STUB(cublasSetPointerMode_v2)
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemmEx) PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2) PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasDotEx) PRODUCT(cublasStrsm_v2)
PRODUCT(cublasStrsmBatched)

size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void **handle) { static int one; return *handle = &one, 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return *made = malloc(8), 0; }
int cublasLtMatmulDescDestroy(void *made) { return free(made), 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = malloc(8), 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { return free(made), 0; }
int cublasLtMatrixLayoutCreate(void **made) { return *made = malloc(8), 0; }
int cublasLtMatrixLayoutDestroy(void *made) { return free(made), 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    return memset(results, 0, 96), *found = 1, 0;  // one way to do it, without scratch; 96 bytes describe it
}
STUB(cublasLtDestroy) STUB(cublasLtMatmulDescSetAttribute) STUB(cublasLtMatmulPreferenceSetAttribute)
STUB(cublasLtMatrixLayoutSetAttribute)
PRODUCT(cublasLtMatmul)
