"""The Pallas Triton kernels of KDA; the operator is kernels/kda/pallas_triton.py."""
