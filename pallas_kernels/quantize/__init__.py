"""The kernels that quantize rows and pack their codes."""
