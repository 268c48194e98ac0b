"""The ops for CPUs: Numba kernels around torch's matmuls, in float32 and bfloat16."""
