/* In place of the compiler's crt/host_defines.h, which the runtime's wheel lacks. */
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDAAPI
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __no_return__ __attribute__((noreturn))
