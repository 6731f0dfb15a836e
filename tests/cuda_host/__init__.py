"""The CUDA kernels, compiled for the host and run there, every shared access checked.

``cuda_on_host.h`` supplies what ``csrc/cuda/device.cuh`` declares.
"""
