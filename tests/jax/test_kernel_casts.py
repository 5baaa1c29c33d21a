"""Casts by Triton kernels from JAX: what a program is told on a machine that has them, and their bytes on a GPU."""

import functools
import inspect
import json
import os
import re
import sys
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import recipes, reference
from microfloat.jax import scaling
from microfloat.jax.backends import casts, cuda, gemms, kernels
from microfloat.recipes import Cast, Delayed, Hadamard, as_cast
from microfloat.routes import WRITES_VALUES, OperandSpec, family_of
from tests import processes
from tests.contract.cases import cast_id
from tests.jax.compare import relative_error, to_numpy
from tests.jax.test_every_cast import random_inputs

DENSE = (((1,), (0,)), ((), ()))
HAS_GPU = cuda.capability() is not None
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")

SEED = 0x0123456789ABCDEF
# docs/numerics.md 8.3: bfloat16 results of the same operands, whose sums may be taken in another order.
ROUNDED = 2.5e-3


@pytest.fixture
def small(monkeypatch):
    """Matrices of any size go by kernels; what was traced before is forgotten."""
    monkeypatch.setattr(kernels, "SMALLEST", 1)
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


def spread_values(shape, dtype, seed):
    """Normal numbers over some binades, with rows and columns of their own, and every special value."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (shape[0], 1))) * np.exp2(rng.integers(-3, 4, shape))
    x = x.astype(np.float32)
    if min(shape) > 40:
        x[3, 5], x[8] = np.nan, 0
        x[12, :4] = (-0.0, 1e-42, -3e-39, 1e-30)
        x[40, 20] = 6e4
    return jnp.asarray(x).astype(dtype)


NEAREST = [
    "fp8_tensor", "fp8_tensor_e5m2", "fp8_row", "fp8_row_e5m2", "fp8_1x128", "fp8_1x128_e5m2", "fp8_128x128", "mxfp8",
    "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_row", "nvfp4_2d",
]  # fmt: skip
STOCHASTIC = ["fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d"]
CASES = [as_cast(name) for name in NEAREST]
CASES += [Cast(name, rounding="stochastic") for name in STOCHASTIC]
CASES += [
    Cast("fp8_tensor", "amax_pow2"), Cast("fp8_1x128", "amax_pow2"), Cast("fp8_128x128", "amax_pow2"),
    Cast("mxfp8", "floor"), Cast("nvfp4", "four_over_six_mae_256"), Cast("nvfp4", "two_level_torchao"),
    Cast("nvfp4", hadamard=Hadamard()), Cast("nvfp4", rounding="stochastic", hadamard=Hadamard()),
    Cast("mxfp8", hadamard=Hadamard()),
]  # fmt: skip


SHAPES = [((256, 512), "bfloat16"), ((200, 332), "bfloat16"), ((77, 131), "float32"), ((64, 96), "float16")]


def oracle(x, cast, axis, stream):
    given = {"seed": SEED, "stream": stream} if cast.is_stochastic else {}
    return reference.quantize(np.asarray(x.astype(jnp.float32)), cast, axis=axis, **given)


def words():
    return jnp.asarray([SEED & 0xFFFFFFFF, SEED >> 32], jnp.uint32)


def assert_bytes(matrix, expected, context):
    for field in ("codes", "scale", "tensor_scale"):
        actual, wanted = getattr(matrix, field), getattr(expected, field)
        assert (actual is None) == (wanted is None), (context, field)
        if wanted is not None:
            actual, wanted = to_numpy(actual), to_numpy(wanted)
            assert actual.dtype == wanted.dtype, (context, field)
            assert actual.size == wanted.size, (context, field, actual.shape, wanted.shape)
            differing = int(
                (actual.ravel().view(np.uint8) != np.ascontiguousarray(wanted).ravel().view(np.uint8)).sum()
            )
            assert not differing, f"{context} {field}: {differing} of {wanted.nbytes} bytes differ"


EVERY_RUN = ("mxfp8", "stored nvfp4")  # one process starts once for both, which tests of one group ask for
one_process = pytest.mark.xdist_group("lowering")


def program(repository, what):
    """Output of tests/jax/lowering.py, from a process in which Triton compiles (other tests need its interpreter)."""
    return _programs(repository, *(EVERY_RUN if what in EVERY_RUN else (what,)))[what]


@functools.cache
def _programs(repository, *names):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(repository / "src"), str(repository)]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(repository / "tests/jax/lowering.py"), *names]
    done = processes.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow("Triton kernels of a JAX program, compiled")
@one_process
def test_one_kernel_for_each_tensor(repository):
    """MXFP8 on Hopper: what a GEMM reads now is decoded, in the order of the matrix; what waits is kept as codes."""
    found = program(repository, "mxfp8")
    assert found["cuda"]["calls"] == [
        ["quantize_blocks", ["512x1024xbf16"], ["512x1024xbf16", "1024x512xf8E4M3FN", "1024x16xui8"]],
        ["quantize_blocks", ["1024x2048xbf16"], ["1024x2048xf8E4M3FN", "1024x64xui8", "1024x2048xbf16"]],
        ["quantize_blocks", ["512x2048xbf16"], ["512x2048xbf16", "512x2048xbf16"]],
    ]
    assert [results for _, results in found["cuda"]["dots"]] == [
        ["512x2048xbf16"],
        ["512x1024xbf16"],
        ["2048x1024xbf16"],
    ]
    assert found["cpu"] == [], "no other platform sees a kernel"
    assert found["batch"] == [], "matrices of a batch go by XLA's operations"
    assert found["inside"] == found["cuda"]["calls"], "inside shard_map an operand is local"
    told = " ".join(found["explained"].split())
    assert "cast by kernels.blocks (decoded to bfloat16): fprop x, fprop w, dgrad dy, wgrad dy" in told
    assert "cast by kernels.blocks: dgrad w, wgrad x" in told


@pytest.mark.slow("the FP8 GEMM of a JAX program, compiled")
def test_codes_of_blocks_go_into_the_gemm_of_microfloat(repository):
    """Its own memory, for descriptors, is an array among the results; in its place stands a pointer nobody reads.

    The process of this recipe switches the GEMM on (`lowering.pretend`). wgrad's product comes in the weight's order.
    """
    found = program(repository, "fp8_block")
    assert found["cuda"]["dots"] == []
    gemms = [call for call in found["cuda"]["calls"] if call[0] == "block_gemm_of_pointers"]
    sizes = ["512x2048xbf16", "512x1024xbf16", "1024x2048xbf16"]
    assert [results[0] for _, _, results in gemms] == sizes
    started = [one for one in found["started"] if one["name"] == "block_gemm_of_pointers"]
    for one, (_, operands, results) in zip(started[:3], gemms, strict=True):
        programs, size = one["grid"][0], int(results[1].removesuffix("xui8"))
        assert size // programs >= 4 * 128  # descriptors of 128 bytes
        assert size % programs == 0
        arrays = len(operands) + len(results)
        assert one["declared"] == ["u64"] * arrays + ["u32"] * 4 + ["u64"] * 2
        assert one["warps"] in (12, 16)  # those that multiply, and those that copy
    assert found["batch"] == []


@pytest.mark.slow("further JAX programs of a checked kind")
def test_delayed_scaling_records_in_the_cast(repository):
    found = program(repository, "delayed")
    layouts = {"x": ("512x1024", "1024x512"), "w": ("1024x2048", "2048x1024"), "dy": ("512x2048", "2048x512")}
    for (name, operands, results), (tensor, (rows, columns)) in zip(
        found["cuda"]["calls"], layouts.items(), strict=True
    ):
        element = "f8E5M2" if tensor == "dy" else "f8E4M3FN"
        assert (name, operands) == ("cast_scaled", [f"{rows}xbf16", "f32"])
        assert results == [f"{rows}x{element}", f"{columns}x{element}", "f32", "f32", "f32", "16xui32"]
    assert all("xf8" in kind for kinds, _ in found["cuda"]["dots"] for kind in kinds)


@pytest.mark.slow("Triton kernels of a JAX program, compiled")
def test_parameters_are_declared_as_jaxlib_passes_them(repository):
    """Arrays first, inputs before outputs; the words that programs meet in are cleared, and nothing else."""
    started = program(repository, "nvfp4")["started"]
    assert {one["name"] for one in started} == {"amax_transformed", "quantize_nvfp4", "dequantize"}
    for one in started:
        kinds = [kind for kind, *_ in one["parameters"]]
        arrays = kinds.count("array")
        assert kinds == ["array"] * arrays + ["i32"] * (len(kinds) - arrays)
        # Two more for Triton's scratch memory, which jaxlib adds.
        assert one["declared"] == ["u64"] * arrays + ["u32"] * (len(kinds) - arrays) + ["u64"] * 2
        cleared = [size for kind, size, *_ in one["parameters"] if kind == "array" and size]
        assert cleared == ([64] if one["name"] == "amax_transformed" else [])
        assert one["grid"][1:] == [1, 1]
        assert one["capability"] == 90


@pytest.mark.slow("further JAX programs of a checked kind")
@pytest.mark.parametrize("name", ["fp8_current", "nvfp4", "delayed"])
def test_kernels_inside_shard_map(repository, name):
    """Scales of whole tensors, maxima over the mesh, have one type by either way."""
    found = program(repository, name)
    assert [call[0] for call in found["inside"]].count("cast_scaled") == (0 if name == "nvfp4" else 3)
    assert len(found["inside"]) == len(found["cuda"]["calls"])


def signatures(monkeypatch, row, column, records=False):
    """For every kernel that casts start, the types of its arrays by name; memory by its size in bytes."""
    pytest.importorskip("triton", reason="triton is not installed")
    from microfloat.jax.backends import program
    from microfloat.passes import CastInputs

    found = {}

    def call(kernel, *arguments):
        declared = inspect.signature(kernel.fn).parameters.values()
        params = [SimpleNamespace(is_constexpr="constexpr" in str(one), do_not_specialize=False) for one in declared]
        stand_in = SimpleNamespace(arg_names=kernel.arg_names, params=params, __name__=kernel.__name__)
        return kernels.call(stand_in, *arguments)

    def opaque(kernel, programs, capability, signature, warps):
        arrays = {name: one for name, one in zip(kernel.arg_names, signature, strict=True) if one.kind in ("in", "out")}
        found[kernel.__name__] = {name: (one.type, one.value) for name, one in arrays.items()}
        return b"", 0

    monkeypatch.setattr(program, "call", call)
    monkeypatch.setattr(kernels, "message_to", opaque)
    monkeypatch.setattr(
        jax.ffi, "ffi_call", lambda _, made: lambda *a, **b: [jnp.zeros(one.shape, one.dtype) for one in made]
    )
    given = CastInputs(jnp.float32(1), words())
    program.cast_by_kernel(jnp.ones((128, 256), jnp.bfloat16), row, column, given, frozenset(), records, (9, 0))
    return found


@pytest.mark.parametrize(
    ("name", "strides"),
    [("fp8_1x128", [(1, 256), (1, 512)]), ("mxfp8", [(16, 1), (8, 1)]), ("nvfp4", [(32, 1), (16, 1)])],
)
def test_scales_lie_in_memory_as_their_product_reads_them(name, strides):
    """Those of microfloat's GEMM column by column, those of XLA's operations row by row."""
    pytest.importorskip("triton", reason="triton is not installed")
    from microfloat.passes.casts import cast_passes
    from microfloat.passes.matrix import Device, Matrix

    device, spec = Device(0, 132, True, measures=False, orders_scales=False), OperandSpec(Cast(name))
    matrix = Matrix(256, 512, 512, 1, "bfloat16", 16, device)
    layouts = cast_passes(matrix, spec, spec, records=False, given_amax=False).layouts
    assert [layouts[at].strides for at in (1, 4)] == strides


WORDS = ("*i64", 64)


def test_programs_meet_in_words_that_are_cleared(monkeypatch):
    """Of a cast that measures or counts, each its own; a GEMM asks for memory of the compiler's by name alike."""
    delayed, nvfp4 = OperandSpec(Cast("fp8_tensor", scaling=Delayed())), OperandSpec(Cast("nvfp4", hadamard=Hadamard()))
    found = signatures(monkeypatch, delayed, delayed, records=True)
    assert found["cast_scaled"]["scratch_ptr"] == WORDS
    assert found["cast_scaled"]["record_ptr"] == ("*fp32", 4)
    found = signatures(monkeypatch, None, nvfp4)
    assert found["amax_transformed"]["scratch_ptr"] == WORDS
    assert "scratch_ptr" not in found["quantize_nvfp4"], "codes are not counted"
    for cast, kernel in ((nvfp4.cast, "quantize_nvfp4"), (Cast("mxfp8"), "fold_blocks")):
        found = signatures(monkeypatch, OperandSpec(cast, "folded"), OperandSpec(cast, "tiles"))[kernel]
        assert found["scratch_ptr"] == WORDS
        assert found["lossy_ptr"] == ("*i64", 0)
        assert found["row_out"] == found["column_out"] == ("*u8", 0)
        assert found["row_scale"] == found["column_scale"] == ("*fp32", 0)


def test_why_xla_casts(monkeypatch):
    cast = as_cast("mxfp8")
    monkeypatch.setattr(cuda, "capability", lambda: None)
    assert kernels.why_no_kernel(cast) == "no CUDA device"
    monkeypatch.setattr(cuda, "capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "is_local", lambda: True)
    monkeypatch.setattr(kernels, "why_unavailable", lambda capability: "triton is not installed")
    assert kernels.why_no_kernel(cast) == "triton is not installed"
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(kernels, "why_unavailable", lambda capability: "")
    assert kernels.why_no_kernel(cast) == ""
    assert kernels.why_no_kernel(cast, (64, 64)) == "fewer than 65536 elements"
    assert kernels.why_no_kernel(cast, backend="reference") == "backend='reference'"
    assert "Hadamard" in kernels.why_no_kernel(Cast("mxfp8", hadamard=Hadamard()))


@pytest.mark.slow("further JAX programs of a checked kind")
def test_another_triton_leaves_the_casts_to_xla(repository):
    """Another form of Triton's output is no reason to fail."""
    found = program(repository, "another triton")
    assert found["calls"] == []
    told = " ".join(found["explained"].split())
    assert "XLA's operations, triton 3" in told
    assert "does not compile for JAX: Triton's PTX has no entry of the form that microfloat knows" in told


def test_where_a_matrix_is_whole(monkeypatch):
    """One device, a mesh of one, or inside shard_map over the whole mesh."""
    devices, auto = jax.devices("cpu"), jax.sharding.AxisType.Auto
    spec = jax.sharding.PartitionSpec("data")

    def is_local_inside(mesh, axes):
        seen = []
        function = jax.shard_map(
            lambda x: seen.append(kernels.is_local()) or x, mesh=mesh, axis_names=axes, in_specs=spec, out_specs=spec
        )
        jax.make_jaxpr(function)(np.ones(4, np.float32))
        return seen == [True]

    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not kernels.is_local()
    for shape, whole in (((1, 1), True), ((2, 1), False)):
        mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(auto, auto), devices=devices[: shape[0]])
        with jax.set_mesh(mesh):
            assert kernels.is_local() is whole
        assert is_local_inside(mesh, {"data"}) is whole
        assert is_local_inside(mesh, {"data", "model"})
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert kernels.is_local()


def test_reordered_parameters():
    declared = [f"\n\t.param .u{64 - 32 * (place == 1)} name_param_{place}" for place in range(3)]
    ptx = f".visible .entry name({','.join(declared)}\n)\n{{}}"
    moved = kernels.reordered(ptx, [1, 0])
    assert re.findall(r"name_param_\d", moved) == ["name_param_1", "name_param_0", "name_param_2"]
    with pytest.raises(RuntimeError, match="declares 3 parameters, 4 were expected"):
        kernels.reordered(ptx, [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="no entry"):
        kernels.reordered("", [])


@needs_gpu
@pytest.mark.parametrize("cast", CASES, ids=cast_id)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_both_operands_have_the_bytes_of_the_oracle(small, cast, shape, dtype):
    x = spread_values(shape, dtype, zlib.crc32(cast_id(cast).encode()))
    given = casts.CastInputs(words() if cast.is_stochastic else None)

    @jax.jit
    def both(x, given):
        return casts.cast_both(x, OperandSpec(cast, stream=2), OperandSpec(cast, stream=3), given)

    if cast.hadamard is None or cast.format.name == "NVFP4":
        assert "triton_kernel_call" in both.lower(x, given).as_text()
    made = both(x, given)
    assert_bytes(made.row, oracle(x, cast, -1, 2), "row")
    assert_bytes(made.column, oracle(x, cast, -2, 3), "column")
    alone = jax.jit(lambda x, given: casts.cast_both(x, None, OperandSpec(cast, stream=3), given))(x, given)
    assert alone.row is None
    assert_bytes(alone.column, oracle(x, cast, -2, 3), "column alone")


@needs_gpu
@pytest.mark.parametrize("cast", CASES, ids=cast_id)
def test_any_bits_have_the_bytes_of_the_oracle(small, cast):
    """NaN, infinities and subnormal numbers everywhere, ties, every exponent: one compiled kernel for all."""
    rng = np.random.default_rng(zlib.crc32(cast_id(cast).encode()))
    given = casts.CastInputs(words() if cast.is_stochastic else None)
    both = jax.jit(lambda x, given: casts.cast_both(x, OperandSpec(cast, stream=2), OperandSpec(cast, stream=3), given))
    for name, x in random_inputs(rng, 90 if "mse" in str(cast.scale_rule) else 0).items():
        made, x = both(x, given), jnp.asarray(x)
        assert_bytes(made.row, oracle(x, cast, -1, 2), f"{name} row")
        assert_bytes(made.column, oracle(x, cast, -2, 3), f"{name} column")


# What a bfloat16 GEMM reads: block scales that are powers of two, or short.
DECODED = [
    cast for cast in CASES
    if family_of(cast)[0] in WRITES_VALUES and (cast.format.scale.name != "FP32" or cast.rule.power_of_two)
]  # fmt: skip


def test_only_casts_whose_kernels_write_values_are_decoded(monkeypatch):
    """A weight in tiles of 128x128 is not: its GEMM decodes the codes."""
    monkeypatch.setattr(cuda, "capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "why_no_kernel", lambda *_, **__: "")
    for recipe in (recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()):
        for side in ("lhs", "rhs"):
            cast = getattr(recipe.fprop, side)
            form = casts.form_of(recipe.fprop, side, cast, (256, 512), "auto", at_once=True)
            assert form == ("codes" if cast.format.block == (128, 128) else "values")


@pytest.mark.parametrize("recipe", [recipes.MXFP8BlockScaling(path="folded"), recipes.NVFP4BlockScaling(path="folded")])
def test_operands_of_folded_gemms_are_folded_as_they_are_cast(monkeypatch, recipe):
    """Those that wait for the backward too; where no GEMM of microfloat takes them they stay codes."""

    def forms():
        found = {}
        for name in ("fprop", "dgrad", "wgrad"):
            gemm = getattr(recipe, name)
            sides = (("lhs", gemm.lhs), ("rhs", gemm.rhs))
            found[name] = [casts.form_of(gemm, *one, (256, 512), "auto", at_once=False) for one in sides]
        return found

    monkeypatch.setattr(cuda, "capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "why_no_kernel", lambda *_, **__: "")
    monkeypatch.setattr(gemms, "library", lambda: "jax")
    assert list(forms().values()) == [["folded", "tiles"]] * 3
    monkeypatch.setattr(gemms, "library", lambda: "xla")
    assert list(forms().values()) == [["codes", "codes"]] * 3


@needs_gpu
@pytest.mark.parametrize("cast", DECODED, ids=cast_id)
@pytest.mark.parametrize("shape", [(256, 512), (200, 332)])
def test_decoded_operands_are_the_codes_decoded(small, cast, shape):
    x = spread_values(shape, "bfloat16", 7)
    given = casts.CastInputs(words() if cast.is_stochastic else None)
    for decoded in ((True, True), (True, False), (False, True)):
        forms = ["values" if flag else "codes" for flag in decoded]
        row, column = (OperandSpec(cast, form, stream=2 + use) for use, form in enumerate(forms))
        made = jax.jit(lambda x, given, row=row, column=column: casts.cast_both(x, row, column, given))(x, given)
        both = OperandSpec(cast, stream=2), OperandSpec(cast, stream=3)
        codes = jax.jit(lambda x, given, both=both: casts.cast_both(x, *both, given, backend="reference"))(x, given)
        for side, flag, cols in (("row", decoded[0], shape[1]), ("column", decoded[1], shape[0])):
            one, wanted = getattr(made, side), getattr(codes, side)
            if not flag:
                assert_bytes(one, wanted, f"{decoded} {side}")
                continue
            kind = gemms.reference.Kind(cast.format, cast.hadamard, cols, cast.rule.power_of_two)
            values, outer = jax.jit(lambda matrix, kind=kind: gemms.bf16_values(matrix, kind))(wanted)
            np.testing.assert_array_equal(np.asarray(one.values, np.float32), np.asarray(values, np.float32))
            assert (one.outer is None) == (outer is None)
            if outer is not None:
                np.testing.assert_array_equal(one.outer, outer)


@needs_gpu
def test_a_delayed_cast_records_its_amax(small):
    cast = Cast("fp8_tensor", scaling=Delayed())
    x = spread_values((256, 384), "bfloat16", 3)
    given = casts.CastInputs(scale_enc=jnp.float32(3.5))
    made = jax.jit(
        lambda x, given: casts.cast_both(x, OperandSpec(cast), OperandSpec(cast), given, records=True)
    )(x, given)  # fmt: skip
    expected = reference.quantize(np.asarray(x.astype(jnp.float32)), cast, scale_enc=3.5)
    assert_bytes(made.row, expected, "row")
    assert made.amax == np.nanmax(np.abs(np.asarray(x, np.float32)))


RECIPES = [
    recipes.DelayedScaling(amax_history_len=4), recipes.Float8CurrentScaling(), recipes.Float8RowScaling(),
    recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(), recipes.MXFP4BlockScaling(),
    recipes.NVFP4BlockScaling(),
]  # fmt: skip


def step_of(recipe):
    op = mj.dot_general(recipe)
    extra = {"key": jax.random.key(3)} if recipe.is_stochastic else {}

    def step(x, w, dy, state):
        def apply(x, w, state):
            return op(x, w, DENSE, **extra, **({"state": state} if recipe.is_delayed else {}))

        y, backward = jax.vjp(apply, x, w, state)
        return y, *backward(dy)

    return step, scaling.init(recipe) if recipe.is_delayed else None


def arrays(rows, inputs, outputs):
    keys = jax.random.split(jax.random.key(5), 3)
    shapes = ((rows, inputs), (inputs, outputs), (rows, outputs))
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=["delayed", "current", "row", "block", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("sizes", [(256, 384, 512), (100, 52, 130)])
def test_a_layer_is_the_same_by_either_route(small, recipe, sizes):
    step, state = step_of(recipe)
    given = (*arrays(*sizes), state)
    text = jax.jit(step).lower(*given).as_text()
    assert text.count("triton_kernel_call") >= 3
    by_kernels = jax.jit(step)(*given)
    small.setattr(kernels, "why_none_here", lambda *_: "switched off")
    jax.clear_caches()
    assert "triton_kernel_call" not in jax.jit(step).lower(*given).as_text()
    plain = jax.jit(step)(*given)
    for actual, expected in zip(by_kernels[:3], plain[:3], strict=True):
        assert relative_error(actual.astype(jnp.float32), expected.astype(jnp.float32)) < ROUNDED
    for actual, expected in zip(jax.tree.leaves(by_kernels[3]), jax.tree.leaves(plain[3]), strict=True):
        np.testing.assert_array_equal(actual, expected)


@needs_gpu
def test_transformations_with_kernels(small):
    """jit, vmap, scan, remat and shard_map of one cast and of one layer."""
    x = spread_values((128, 256), "bfloat16", 9)
    expected = np.asarray(oracle(x, as_cast("nvfp4"), -1, 0).codes)
    batch = jnp.stack([x, 2 * x])
    batched = jax.jit(jax.vmap(lambda x: mj.quantize(x, "nvfp4").codes))(batch)
    np.testing.assert_array_equal(batched[0], expected)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, mj.quantize(x, "nvfp4").codes), 0, x))(batch)
    np.testing.assert_array_equal(scanned, batched)
    given = arrays(128, 256, 384)
    # A global amax and random bytes are a shard's own; MX blocks are the same wherever their rows lie.
    for recipe, devices in ((recipes.NVFP4BlockScaling(), 1), (recipes.MXFP8BlockScaling(), jax.device_count())):
        step, _ = step_of(recipe)
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
        )  # fmt: skip
        spec = jax.sharding.PartitionSpec("data")
        mapped = jax.shard_map(
            lambda x, w, dy, step=step: step(x, w, dy, None)[:2], mesh=mesh,
            in_specs=(spec, jax.sharding.PartitionSpec(), spec), out_specs=(spec, spec),
        )  # fmt: skip
        assert "triton_kernel_call" in jax.jit(mapped).lower(*given).as_text()
        for actual, expected in zip(jax.jit(mapped)(*given), jax.jit(step)(*given, None), strict=False):
            assert relative_error(actual.astype(jnp.float32), expected.astype(jnp.float32)) < ROUNDED
    op = mj.dot_general(recipes.MXFP8BlockScaling())
    loss = lambda w: jnp.sum(jnp.tanh(op(given[0], w, DENSE).astype(jnp.float32)))  # noqa: E731
    saving = jax.checkpoint(loss, policy=mj.checkpoint_policies.save_codes)
    plain, remat = (jax.jit(jax.grad(function))(given[1]) for function in (loss, saving))
    assert relative_error(remat.astype(jnp.float32), plain.astype(jnp.float32)) < ROUNDED


@pytest.mark.skipif(not HAS_GPU or jax.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["fp8_tensor", "mxfp8", "nvfp4", "nvfp4_2d"])
def test_shards_that_jit_cuts(small, name):
    """Features D13 on GPUs: the kernels cast shards where they lie, to the bytes of the whole matrix."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    x = spread_values((512, 1024), "bfloat16", 4)
    quantize = jax.jit(lambda x: mj.quantize(x, name, axis=(-1, -2)))
    for spec in (("data", None), (None, "data"), (None, None)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        placed = jax.device_put(x, sharding)
        compiled = quantize.lower(placed).compile()
        assert "triton_kernel_call" in compiled.as_text()
        assert "all-gather" not in compiled.as_text()
        for axis, q in zip((-1, -2), compiled(placed), strict=True):
            expected = oracle(x, as_cast(name), axis, 0)
            assert np.asarray(q.codes).tobytes() == expected.codes.tobytes(), (spec, axis)
            assert np.asarray(q.scale).tobytes() == expected.scale.tobytes(), (spec, axis)


@needs_gpu
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_overflow_of_dy_shows_where_kernels_cast(small, name):
    """An infinity in dy: non-finite dx and dw by kernels as by XLA's operations (docs/numerics.md 8.4)."""
    recipe = recipes.RECIPES[name]()
    x, w, dy = (spread_values(shape, jnp.bfloat16, seed) for seed, shape in enumerate(((32, 256), (256, 32), (32, 32))))
    arguments = {"key": jax.random.key(0)} if recipe.is_stochastic else {}
    if recipe.is_delayed:
        arguments["state"] = scaling.init(recipe)
    backward = jax.jit(lambda dy: jax.vjp(lambda x, w: mj.dot_general(recipe)(x, w, DENSE, **arguments), x, w)[1](dy))
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in backward(dy))
    dx, dw = backward(dy.at[3, 5].set(jnp.inf))
    assert not bool(jnp.isfinite(dx[3]).any())
    assert not bool(jnp.isfinite(dw[:, 5]).any())
