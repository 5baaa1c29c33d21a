"""Requests to the CUDA driver itself: launches with more shared memory than their kernel declares, and its refusals."""

import ctypes
import threading

import torch

from microfloat.passes.tables import SHARED_BYTES, SYSTEM_BYTES

# CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, which a kernel declares, and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_DECLARED, _MOST_ASKED = 1, 8
# CUDA_ERROR_INVALID_VALUE, _LAUNCH_OUT_OF_RESOURCES and _NOT_SUPPORTED: what the driver says of
# launches that it does not begin. It says others of a kernel that has failed, perhaps an earlier one.
_REFUSALS = 1, 701, 801
_asked: dict[tuple[int, int], int] = {}  # device and function: the most that was allowed
_LOCK = threading.Lock()


def shared_memory(function: int, needed: int, spread: int) -> int | None:
    """Bytes of shared memory that launches of a loaded kernel may now ask for; None where the driver refuses.

    They are `needed`, or as many more that a multiprocessor takes `spread` programs at most (0: as many as fit).
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, declared = ctypes.c_void_p(function), ctypes.c_int()
    if library.cuFuncGetAttribute(ctypes.byref(declared), _DECLARED, handle):
        return None
    apart = SHARED_BYTES // spread - SYSTEM_BYTES - declared.value if spread else 0
    size, key = max(needed, apart), (torch.cuda.current_device(), function)
    with _LOCK:
        most = max(size, _asked.get(key, 0))  # other launches of the kernel may ask for more
        if library.cuFuncSetAttribute(handle, _MOST_ASKED, most):
            return None
        _asked[key] = most
    return size


def is_refusal(error: RuntimeError) -> bool:
    """True for an error of Triton's launcher by which the driver refuses to begin a launch, and nothing is broken."""
    library, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
    for code in _REFUSALS:  # Triton reports an error in the driver's own words
        known = library.cuGetErrorString(code, ctypes.byref(text)) == 0
        if known and text.value and str(error).endswith(text.value.decode()):
            return True
    return False
