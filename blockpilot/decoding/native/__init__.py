"""Few-row forwards in C++ for CPUs: the kernels, their compilation, the target that runs them."""
