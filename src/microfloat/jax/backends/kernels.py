"""The kernels of `microfloat.kernels` in JAX: where one may be called, and how an XLA program calls it.

Kernels serve matrices that lie on one CUDA device, and shards that are whole blocks (`shards`). jaxlib starts them by
the foreign function of Pallas, from the PTX, the grid and the parameters: inputs, outputs, numbers. All that depends
on private parts of jaxlib and on Triton's version is in this file. Source: docs/jax.md, "What casts on a GPU".
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType
from jax.typing import DTypeLike

from microfloat.errors import install_hint
from microfloat.jax.backends import cuda
from microfloat.jax.backends.shards import why_not_whole
from microfloat.jax.transformations import batched_by, in_common_variance, like_in_variance
from microfloat.recipes import Cast
from microfloat.routes import family_of

Shape = Sequence[int] | None
Warps = tuple[int, int | None]

# Smaller matrices are left to XLA's operations: compiling a kernel for them takes longer than they ever cost.
SMALLEST = 1 << 16


def why_none_here(shape: Shape = None) -> str:
    """Reason against a kernel for a matrix of this shape (None: one large enough), "" if there is none."""
    capability = cuda.capability()
    if capability is None:
        return "no CUDA device"
    if missing := why_unavailable(capability):
        return missing
    mesh = jax.sharding.get_abstract_mesh()
    if not (is_local() or all(kind == AxisType.Auto for kind in mesh.axis_types)):
        return "a mesh with explicit axes or with some manual ones: XLA shards its own operations only"
    return _why_too_small(shape)


def why_no_gemm() -> str:
    """Reason against microfloat's FP8 GEMM where this is traced, "" if there is none: it is written for one chip, in a
    language that changes from one Triton to the next."""
    missing = "" if cuda.capability() == (9, 0) else "no Hopper GPU"
    if missing := missing or why_none_here() or ("" if is_local() else "jit cuts arrays over several devices"):
        return missing
    return "" if version("triton").startswith("3.6.") else "triton is not 3.6"


def _why_too_small(shape: Shape) -> str:
    is_small = shape is not None and int(np.prod(shape, dtype=np.int64)) < SMALLEST
    return f"fewer than {SMALLEST} elements" if is_small else ""


def why_no_kernel(cast: Cast, shape: Shape = None, backend: str = "auto", *, elsewhere: bool = False) -> str:
    """The reason why no kernel casts a matrix, "" if one does; `elsewhere`: on a GPU that this machine lacks."""
    if backend == "reference":
        return "backend='reference'"
    if reason := _why_too_small(shape) if elsewhere else why_none_here(shape):
        return reason
    if not elsewhere and not is_local() and (reason := why_not_whole(cast, shape)):
        return reason
    family, refusal = family_of(cast)
    if refusal:
        return f"no kernel for {refusal}"
    return "its Hadamard transform has no kernel" if cast.hadamard is not None and family != "nvfp4" else ""


def is_local() -> bool:
    """True if arrays lie on one device as a whole where this is traced: one device, or all of a mesh is manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return jax.device_count() == 1
    if mesh.size == 1:
        return True
    return all(kind == AxisType.Manual for kind in mesh.axis_types)


def on_either(by_kernel: Callable[..., Any], by_xla: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a kernel where the program is lowered for CUDA, and does the same by XLA's operations
    elsewhere and for a batch of matrices. Arguments and results are pytrees of arrays.
    """

    def marked(way: Callable[..., Any], *arguments: Any) -> Any:
        # Inside shard_map both functions must return arrays that vary alike: over all mesh axes of the arguments.
        leaves = jax.tree.leaves(arguments)
        return jax.tree.map(lambda leaf: like_in_variance(leaf, *leaves), way(*arguments))

    @custom_vmap
    def function(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, cuda=partial(marked, by_kernel), default=partial(marked, by_xla))

    function.def_vmap(batched_by(by_xla))
    return cast(Callable[..., Any], function)


# Calling a kernel

_TARGET = "triton_kernel_call_ffi"
_ALIGNED = (("tt.divisibility", 16),)
_INT32_MAX = 2**31 - 1


class Output(NamedTuple):
    """An array that a kernel writes. `zeroed`: cleared before the kernel starts. `pointer`: Triton's name of the type
    that the kernel takes it for, where that is another.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    zeroed: bool = False
    pointer: str = ""


# The argument in whose place a kernel is given the memory that its compiler takes for itself: jaxlib gives none.
SCRATCH = Output((), jnp.uint8)


@lru_cache(maxsize=4)
def why_unavailable(capability: tuple[int, int]) -> str:
    """Reason against kernels on a CUDA device of this capability, "" if there is none. Compiles a small one."""
    try:
        import triton
    except ImportError:
        return f"triton is not installed ({install_hint('triton')})"
    release = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if release < (3, 6):
        return f"triton {triton.__version__} is older than 3.6"
    from microfloat.kernels.device import convert

    if not isinstance(convert.bits_of, triton.JITFunction):
        return "triton runs in its interpreter"
    if missing := [name for name in _NEEDED if not hasattr(_library(), name)]:
        return f"this jaxlib cannot start Triton kernels ({missing[0]} is missing)"
    from microfloat.kernels.casts.amax import amax_contiguous

    arguments = ("in", "*bf16", None), ("out", "*fp32", None), ("out", "*i64", None), ("number", "i32", True)
    constants = (0, False, capability >= (8, 9), 128, 1)  # KIND, EVEN, HW, BLOCK, UNROLL
    signature = (*arguments, *(("constant", "constexpr", value) for value in constants))
    try:
        _compiled(amax_contiguous, capability, signature, (4, None))
    except Exception as error:  # whatever another version of Triton raises: then XLA's operations cast
        return f"triton {triton.__version__} does not compile for JAX: {error}"
    return ""


_NEEDED = ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter")


def _library() -> Any:
    """The part of jaxlib that starts kernels; importing it registers the foreign function."""
    try:
        from jaxlib import gpu_triton
    except ImportError:
        return None
    return gpu_triton


def call(kernel: Any, programs: int, capability: tuple[int, int], arguments: Mapping, warps: Warps) -> dict[str, Array]:
    """Start `programs` programs of `kernel`; returns the arrays it writes, by parameter name. `arguments`: for each
    parameter an array, a number, a constant, an `Output`, SCRATCH, or None for a pointer that is not read."""
    names = tuple(kernel.arg_names)
    inputs = [name for name in names if isinstance(arguments[name], jax.Array)]
    outputs = [name for name in names if isinstance(arguments[name], Output)]
    outputs.sort(key=lambda name: arguments[name] is SCRATCH)  # as in `_order`
    signature = tuple(_parameter(arguments[name], param) for name, param in zip(names, kernel.params, strict=True))
    opaque, scratch = message_to(kernel, programs, capability, signature, warps)
    shapes = [
        jax.ShapeDtypeStruct((programs * scratch,) if one is SCRATCH else one.shape, one.dtype)
        for one in map(arguments.__getitem__, outputs)
    ]
    operands = in_common_variance(*(arguments[name] for name in inputs))
    started = jax.ffi.ffi_call(_TARGET, shapes)
    results = started(*operands, name=kernel.__name__, opaque=opaque)
    return {name: like_in_variance(result, operands[0]) for name, result in zip(outputs, results, strict=True)}


class _Parameter(NamedTuple):
    """One parameter as compiling and starting see it: hashable."""

    kind: str  # "in", "out", "scratch", "number" or "constant"
    type: str  # Triton's name of it
    value: Any = None  # of numbers and constants; of an output the bytes to clear


def _parameter(value: Any, declared: Any) -> _Parameter:
    if declared.is_constexpr or value is None:
        return _Parameter("constant", "constexpr", value)
    if value is SCRATCH:
        return _Parameter("scratch", _pointer(value.dtype))
    if isinstance(value, Output):
        size = int(np.prod(value.shape, dtype=np.int64)) * jnp.dtype(value.dtype).itemsize
        return _Parameter("out", value.pointer or _pointer(value.dtype), size if value.zeroed else 0)
    if isinstance(value, jax.Array):
        return _Parameter("in", _pointer(value.dtype))
    if isinstance(value, float):
        return _Parameter("number", "fp32", value)
    if value == 1 and not declared.do_not_specialize:
        return _Parameter("constant", "constexpr", 1)
    return _Parameter("number", "i32" if abs(value) <= _INT32_MAX else "i64", int(value))


_POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32", "uint32": "*u32"}


def _pointer(dtype: DTypeLike) -> str:
    """Codes of every kind are plain bytes to a kernel."""
    return _POINTERS.get(jnp.dtype(dtype).name, "*u8")


@lru_cache(maxsize=1024)
def message_to(
    kernel: Any, programs: int, capability: tuple[int, int], signature: tuple, warps: Warps
) -> tuple[bytes, int]:
    """The message to the foreign function: kernel, grid and every parameter; and the memory of `_compiled`."""
    name, ptx, shared, number, scratch = _compiled(kernel, capability, tuple(map(_compiled_form, signature)), warps)
    library = _library()
    parameters = []
    for part in map(signature.__getitem__, _order(signature)):
        if part.kind == "number":
            value = float(part.value) if part.type == "fp32" else int(part.value)
            parameters.append(library.create_scalar_parameter(value, part.type))
        else:
            parameters.append(library.create_array_parameter(part.value or 0, 16))
    started = library.TritonKernel(name, number, 1, shared, ptx, "", 10 * capability[0] + capability[1])
    message = library.TritonKernelCall(started, programs, 1, 1, parameters).to_proto(kernel.__name__, b"")
    return zlib.compress(message), scratch


def _order(signature: tuple[_Parameter, ...]) -> list[int]:
    """Parameters that exist at run time, inputs first, then outputs, then numbers: arrays come in that order."""
    return [at for kind in ("in", "out", "scratch", "number") for at, part in enumerate(signature) if part.kind == kind]


def _compiled_form(part: _Parameter) -> tuple[str, str, Any]:
    """The parameter as the compiler needs it: for a number, only if it is a multiple of 16."""
    if part.kind == "number":
        return part.kind, part.type, part.type != "fp32" and part.value % 16 == 0
    return part.kind, part.type, part.value if part.kind == "constant" else None


@lru_cache(maxsize=1024)
def _compiled(
    kernel: Any, capability: tuple[int, int], signature: tuple, warps: Warps
) -> tuple[str, str, int, int, int]:
    """The kernel's name, its PTX with parameters in the order of `_order`, its bytes of shared memory, all of its
    warps, and the bytes of memory that the compiler takes for each program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource

    types, constants, attributes = {}, {}, {}
    for index, (name, (kind, spelled, value)) in enumerate(zip(kernel.arg_names, signature, strict=True)):
        types[name] = spelled
        if kind == "constant":
            constants[(index,)] = value
        elif kind != "number" or value:
            attributes[(index,)] = [list(pair) for pair in _ALIGNED]
    options = {"num_warps": warps[0], "maxnreg": warps[1], "enable_fp_fusion": False}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    compiled = triton.compile(ASTSource(kernel, types, constants, attributes), target=target, options=options)
    present = [index for index, part in enumerate(signature) if part[0] != "constant"]
    wanted = _order(tuple(_Parameter(kind, spelled) for kind, spelled, _ in signature))
    places = [present.index(index) for index in wanted]
    for own in [place for place, index in enumerate(present) if signature[index][0] == "scratch"]:
        # Stands where the array is given, and its own place is one that nobody reads.
        places[places.index(own)] = len(present)
        places.append(own)
    about = compiled.metadata
    ptx = reordered(compiled.asm["ptx"], places)
    return about.name, ptx, about.shared, about.num_warps, about.global_scratch_size


def reordered(ptx: str, places: list[int]) -> str:
    """The PTX of a kernel with its first parameters declared in the order `places`; its body names them."""
    entry = re.search(r"(\.entry\s+\w+\()(.*?)(\n?\))", ptx, re.DOTALL)
    if entry is None:
        raise RuntimeError("Triton's PTX has no entry of the form that microfloat knows")
    declared = entry[2].split(",")
    if len(declared) < len(places):
        raise RuntimeError(f"Triton's PTX declares {len(declared)} parameters, {len(places)} were expected")
    moved = [declared[place] for place in places] + declared[len(places) :]
    return ptx[: entry.start(2)] + ",".join(moved) + ptx[entry.end(2) :]
