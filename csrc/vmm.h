/* Pages of GPU memory behind a range of device addresses, by the virtual memory management of CUDA's driver.
 *
 * libcuda is loaded when it is asked for, never linked: the library is built, and loaded, where there is no CUDA. The few types
 * and numbers of the driver's interface that are needed stand in vmm.c (tests compare them with NVIDIA's own).
 */
#ifndef RLC_VMM_H
#define RLC_VMM_H

#include <stdint.h>

enum {
    RLC_CUDA_MISSING = -30, /* no libcuda, or one without a function that is needed */
    RLC_CUDA_NONE = -31,    /* no such device, or one that cannot do it */
    RLC_CUDA_SIZE = -32,    /* a page size that the driver does not map */
    RLC_CUDA_MEMORY = -33,  /* the device has no room; nothing was done */
    RLC_CUDA_DRIVER = -34   /* the driver refused; nothing was done, or what rlc_cuda_why() says */
};

typedef struct rlc_cuda rlc_cuda;

#endif
