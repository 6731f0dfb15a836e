"""How fast conv2d_ext is beside F.conv2d and Python unfold + matmul: python -m benchmarks."""
