/* What the files of the null CUDA library share. */
#pragma once
#include <stdatomic.h>
#include <stddef.h>

/* What has happened in this process; `nullcuda_count` reads them. */
extern atomic_long null_kernels, null_products, null_collectives, null_waits, null_to_host, null_to_device, null_opened;
extern atomic_long null_bytes; /* device memory that is held */

#define NULL_SMALL ((size_t)1 << 20) /* bytes; where kernels do nothing, what is larger is not moved on the device either */
int null_skips(void); /* whether kernels do nothing */
int null_number(const char *name, int otherwise); /* an environment variable */
int null_kernel(void);                            /* a kernel that nobody computes: 0, or the error to return */
void *null_object(void);                          /* a handle that is different from others */
int null_device(void);                            /* the calling thread's */
