"""Lower layers for an H200 on a machine without one, and print a line for each program; run in its own process.

jaxlib's way to start kernels comes with its CUDA plugin, which such a machine lacks: a stand-in writes down what it is
given.
"""

import json
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import triton

import microfloat.jax as mj
from microfloat import recipes
from microfloat.jax.backends import cuda, gemms, kernels
from tests.jax.effort import cheaper_passes

DENSE = (((1,), (0,)), ((), ()))
SIZES = (512, 1024, 2048)

STARTED = []


class _Kernel(SimpleNamespace):
    def __init__(self, name, warps, ctas, shared, ptx, ttir, capability):
        super().__init__(name=name, warps=warps, ctas=ctas, shared=shared, ptx=ptx, ttir=ttir, capability=capability)


class _Call:
    def __init__(self, kernel, *rest):
        self.kernel, self.grid, self.parameters = kernel, rest[:3], rest[3]

    def to_proto(self, name, metadata):
        declared = re.search(r"\.entry\s+\w+\((.*?)\)", self.kernel.ptx, re.DOTALL)[1].split(",")
        STARTED.append(
            {
                "name": self.kernel.name, "warps": self.kernel.warps, "grid": self.grid, "parameters": self.parameters,
                "declared": [line.split()[1].lstrip(".") for line in declared], "capability": self.kernel.capability,
            }
        )  # fmt: skip
        return f"{name} {len(STARTED)}".encode() + metadata


STAND_IN = SimpleNamespace(
    TritonKernel=_Kernel, TritonKernelCall=_Call,
    create_array_parameter=lambda cleared, alignment: ["array", cleared, alignment],
    create_scalar_parameter=lambda value, kind: [kind, value],
)  # fmt: skip


def pretend():
    """One H200, and a jaxlib that starts kernels."""
    cuda.capability = gemms.capability = lambda: (9, 0)
    kernels._library = lambda: STAND_IN
    kernels.is_local = lambda: True
    cuda.is_alone = lambda: True


def step_of(recipe):
    op = mj.dot_general(recipe)
    extra = {"key": jax.random.key(3)} if recipe.is_stochastic else {}
    state = mj.scaling.init(recipe) if recipe.is_delayed else None

    def step(x, w, dy, state):
        def apply(x, w, state):
            return op(x, w, DENSE, **extra, **({} if state is None else {"state": state}))

        y, backward = jax.vjp(apply, x, w, state)
        return y, *backward(dy)

    return step, state


def mapped(step):
    """The step inside shard_map, x and dy cut along their rows."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:1])
    cut, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    return jax.shard_map(step, mesh=mesh, in_specs=(cut, whole, cut, whole), out_specs=(cut, cut, whole, whole))


def lowered(recipe, platform, batch=False, inside=False):
    """(kernel, operands, results) of every call of a kernel, and the operands and result of every dot."""
    step, state = step_of(recipe)
    rows, inputs, outputs = SIZES
    arguments = [
        jax.ShapeDtypeStruct((2, *sizes) if batch else sizes, jnp.bfloat16)
        for sizes in ((rows, inputs), (inputs, outputs), (rows, outputs))
    ]
    step = jax.vmap(step, in_axes=(0, 0, 0, None)) if batch else mapped(step) if inside else step
    text = jax.jit(step).trace(*arguments, state).lower(lowering_platforms=(platform,)).as_text()
    calls, dots = [], []
    for line in text.splitlines():
        operands, _, results = line.rpartition(" : ")[2].partition(" -> ")
        if "@triton_kernel_call_ffi" in line:
            name = re.search(r'name = "(\w+)"', line)[1]
            calls.append([name, re.findall(r"tensor<(\S+)>", operands), re.findall(r"tensor<([^>]+)>", results)])
        elif "stablehlo.dot_general" in line:
            dots.append([re.findall(r"tensor<([^>]+)>", operands), re.findall(r"tensor<([^>]+)>", results)])
    return {"calls": calls, "dots": dots}


def calls_of(function, *arguments, platform="cuda"):
    """Names of the kernels that a program starts, in order."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r'@triton_kernel_call_ffi.*name = "(\w+)"', text)


def stored(name):
    """Products of a weight stored as codes: kernels by rows, what the passes are told, and the gradient."""
    from microfloat.passes import products

    told, decode_passes = [], products.decode_passes

    def watched(*arguments):
        told.append(arguments[:-1])
        return decode_passes(*arguments)

    products.decode_passes = watched
    columns, length = 256, 512
    keys = jax.random.split(jax.random.key(1))
    w = mj.quantize(jax.random.normal(keys[0], (columns, length), jnp.bfloat16), name, backend="reference")
    op, last = mj.dot_general(recipes.WeightOnly(name)), (((1,), (1,)), ((), ()))

    def multiply(x):
        return op(x, w, last)

    def gradients(backend):
        # Of a product that is not a custom rule itself.
        product = lambda x, w: mj.scaled_matmul(x, w, out_dtype=jnp.float32, backend=backend).sum()  # noqa: E731
        return jax.jit(jax.grad(product, (0, 1), allow_int=True))(x, w)

    x = jax.random.normal(keys[1], (3, length), jnp.bfloat16)
    rows = {count: jnp.ones((count, length), jnp.bfloat16) for count in (20, 64, 65)}
    small = mj.quantize(jnp.ones((16, length)), name, backend="reference")
    made = {
        "few": calls_of(multiply, x),
        "bias": calls_of(lambda x: mj.scaled_matmul(x, w, bias=jnp.ones(columns), out_dtype=jnp.float32), x),
        "told": told[:2],
        "more": calls_of(multiply, rows[20]), "most": calls_of(multiply, rows[64]),
        "many": calls_of(multiply, rows[65]), "wide": calls_of(multiply, x.astype(jnp.float32)),
        "batch": calls_of(jax.vmap(multiply), x[None]), "cpu": calls_of(multiply, x, platform="cpu"),
        "small": calls_of(lambda x: op(x, small, last), x),
        "empty": calls_of(multiply, x[:0]),
    }  # fmt: skip
    made["parameters"] = [one["parameters"] for one in STARTED[:1]]
    same = jax.tree.map(lambda one, other: one.tobytes() == other.tobytes(), *map(gradients, ("auto", "reference")))
    made["gradients agree"] = jax.tree.leaves(same)
    made["explained"] = str(mj.explain(recipes.WeightOnly(name), "cuda"))
    # Casts of a recipe that leaves a tensor as it is, and strictly native products of one that reads fprop's operands.
    plain = recipes.Float8CurrentScaling(backward="dequantized")
    made["native"] = str(mj.explain(plain, "cuda", backend="native"))
    step, _ = step_of(plain)
    shapes = [jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((512, 1024), (1024, 2048), (512, 2048))]
    made["casts"] = calls_of(step, *shapes, None)
    return made


def main(what):
    STARTED.clear()
    if what == "another triton":
        compile_ptx = triton.compile

        def compile_otherwise(*arguments, **options):
            ptx = compile_ptx(*arguments, **options).asm["ptx"].replace(".entry", ".begin")
            return SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(name="", shared=0))

        triton.compile = compile_otherwise
        print(json.dumps({"calls": lowered(recipes.MXFP8BlockScaling(), "cuda")["calls"],
                          "explained": str(mj.explain("mxfp8", "cuda"))}))  # fmt: skip
        return
    if what.startswith("stored "):
        print(json.dumps(stored(what.removeprefix("stored "))))
        return
    recipe = recipes.from_name(what)
    found = {"cuda": lowered(recipe, "cuda"), "started": STARTED[:]}
    found["cpu"] = lowered(recipe, "cpu")["calls"]
    found["batch"] = lowered(recipe, "cuda", batch=True)["calls"]
    found["inside"] = lowered(recipe, "cuda", inside=True)["calls"]
    found["explained"] = str(mj.explain(recipe, "cuda", SIZES))
    print(json.dumps(found))


if __name__ == "__main__":
    pretend()
    with cheaper_passes():
        for name in sys.argv[1:]:
            main(name)
