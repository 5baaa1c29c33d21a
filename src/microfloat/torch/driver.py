"""Requests to the CUDA driver itself: launches with more shared memory than their kernel declares."""

import ctypes
import threading

import torch

__all__ = ["shared_memory"]

# Bytes of shared memory of a Hopper's multiprocessor, of which each program takes some for the system (CUDA C++
# Programming Guide, compute capability 9.0).
_OF_MULTIPROCESSOR, _OF_SYSTEM = 228 << 10, 1 << 10
# CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, which a kernel declares, and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_DECLARED, _MOST_ASKED = 1, 8
_asked: dict[tuple[int, int], int] = {}  # device and function: the most that was allowed
_LOCK = threading.Lock()


def shared_memory(function: int, needed: int, spread: int) -> int | None:
    """Bytes that launches of a loaded kernel on the current device may now ask for; None where the driver refuses.

    They are `needed`, or as many more that a multiprocessor takes `spread` programs at most (0: as many as fit).
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, declared = ctypes.c_void_p(function), ctypes.c_int()
    if library.cuFuncGetAttribute(ctypes.byref(declared), _DECLARED, handle):
        return None
    apart = _OF_MULTIPROCESSOR // spread - _OF_SYSTEM - declared.value if spread else 0
    size, key = max(needed, apart), (torch.cuda.current_device(), function)
    with _LOCK:
        most = max(size, _asked.get(key, 0))  # other launches of the kernel may ask for more
        if library.cuFuncSetAttribute(handle, _MOST_ASKED, most):
            return None
        _asked[key] = most
    return size
