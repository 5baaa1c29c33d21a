"""Kernels that compute a norm, an activation or its gradient and cast the result in the same launch."""
