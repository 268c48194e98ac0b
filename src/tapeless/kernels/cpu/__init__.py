"""The ops for CPUs: Numba kernels around torch's matrix products, in float32 and bfloat16."""
