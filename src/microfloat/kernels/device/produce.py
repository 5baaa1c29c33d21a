"""Values of a cast: loaded from memory, or computed from loads by a norm, an activation or an activation gradient.

PRODUCER selects the computation, F the activation f. Inputs are a `tiles.Source`. For a norm, y is the pair (shift,
scale) of pointers at the tile's first row, and z the pair (weight, bias) at its first column; RMS_NORM reads neither
shift nor bias. Results are rounded to the dtype of the input, as an unfused operation would round them
(docs/numerics.md, section 6). Exponentials are those of the hardware, so activations have a tolerance.

| PRODUCER | value | inputs |
|---|---|---|
| LOAD | x | x |
| ACTIVATE | f(x) | x |
| GATE | round(f(x)) * y | x = gate, y = up |
| ACTIVATE_GRADIENT | y * f'(x) | x, y = gradient of f(x) |
| GATE_GRADIENTS | round(z * y) * f'(x), and z * round(f(x)) | x = gate, y = up, z = gradient of the product |
| RMS_NORM | x * scale[r] * weight[c] | x, rows' scales, weights |
| LAYER_NORM | (x - shift[r]) * scale[r] * weight[c] + bias[c] | x, rows' means and scales, weights and biases |
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import ELEMENTWISE, WORDS_BF16, bf16_word, high_half, low_half
from microfloat.kernels.device.tiles import load_pair

LOAD = tl.constexpr(0)
ACTIVATE = tl.constexpr(1)
GATE = tl.constexpr(2)
ACTIVATE_GRADIENT = tl.constexpr(3)
GATE_GRADIENTS = tl.constexpr(4)  # of gate and of up: `produce_gradients`
RMS_NORM = tl.constexpr(5)  # from here on: norms
LAYER_NORM = tl.constexpr(6)

# f: the activation.
SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
RELU = tl.constexpr(3)
QUICK_GELU = tl.constexpr(4)  # x * sigmoid(1.702 x)
SQUARED_RELU = tl.constexpr(5)
SIGMOID = tl.constexpr(6)


@triton.jit
def sigmoid(x, HW: tl.constexpr):
    """1 / (1 + exp(-x)), to a few units in the last place; results below 2^-126 may become zero."""
    if HW:
        PTX: tl.constexpr = (
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }"
        )
        return tl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, F: tl.constexpr, HW: tl.constexpr):
    """The activation f(x)."""
    if F == SILU:
        return x * sigmoid(x, HW)
    elif F == GELU_TANH:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), HW)
    elif F == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif F == QUICK_GELU:
        return x * sigmoid(1.702 * x, HW)
    elif F == SQUARED_RELU:
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif F == SIGMOID:
        return sigmoid(x, HW)
    else:
        return tl.where(x <= 0.0, 0.0, x)  # NaN stays


@triton.jit
def activate_gradient(x, F: tl.constexpr, HW: tl.constexpr):
    """The derivative f'(x) of the activation."""
    if F == SILU:
        s = sigmoid(x, HW)
        return s * (1.0 + x * (1.0 - s))
    elif F == GELU_TANH:
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x), HW)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488 * x * x)
    elif F == GELU:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif F == QUICK_GELU:
        s = sigmoid(1.702 * x, HW)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif F == SQUARED_RELU:
        return 2.0 * tl.where(x <= 0.0, 0.0, x)
    elif F == SIGMOID:
        s = sigmoid(x, HW)
        return s * (1.0 - s)
    else:
        return tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def rounded(low, high, OUT: tl.constexpr, HW: tl.constexpr):
    """Two float32 tensors rounded to the dtype OUT: (word of bfloat16, or the first tensor; first; second)."""
    if tl.bfloat16 == OUT:
        word = bf16_word(low, high, HW)
        return word, low_half(word, WORDS_BF16), high_half(word, WORDS_BF16)
    elif tl.float16 == OUT:
        low, high = low.to(tl.float16).to(tl.float32), high.to(tl.float16).to(tl.float32)
        return low, low, high
    else:
        return low, low, high


@triton.jit
def parameters(
    pointers, r, w, cols, OUT: tl.constexpr, PRODUCER: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Weights, and biases of LAYER_NORM, of both columns of words, in the layout of the values."""
    weight, bias = pointers
    WKIND: tl.constexpr = KIND if weight.dtype.element_ty == OUT else ELEMENTWISE
    _w, w_low, w_high = load_pair(weight, r * 0, w, 1, cols, 0, 1, WKIND, EVEN, ALIGN)
    b_low, b_high = w_low, w_high
    if PRODUCER == LAYER_NORM:
        _b, b_low, b_high = load_pair(bias, r * 0, w, 1, cols, 0, 1, WKIND, EVEN, ALIGN)
    return w_low, w_high, b_low, b_high


@triton.jit
def normalized(values, statistics, weights, inside, OUT: tl.constexpr, PRODUCER: tl.constexpr, HW: tl.constexpr):
    """Normalized `values`, with (shift, scale) of their rows in `statistics` and the result of `parameters`."""
    _raw, low, high = values
    shift, scale = statistics
    w_low, w_high, b_low, b_high = weights
    if PRODUCER == RMS_NORM:
        return rounded(low * scale * w_low, high * scale * w_high, OUT, HW)
    else:
        low = tl.where(inside, (low - shift) * scale * w_low + b_low, 0.0)
        high = tl.where(inside, (high - shift) * scale * w_high + b_high, 0.0)
        return rounded(low, high, OUT, HW)


@triton.jit
def row_statistics(pointers, r, rows, PRODUCER: tl.constexpr, EVEN: tl.constexpr):
    """Shift and scale of rows, zero beyond the last row; RMS_NORM returns the scale twice."""
    shift_ptr, scale_ptr = pointers
    scale = tl.load(scale_ptr + r) if EVEN else tl.load(scale_ptr + r, mask=r < rows, other=0.0)
    shift = scale
    if PRODUCER == LAYER_NORM:
        shift = tl.load(shift_ptr + r) if EVEN else tl.load(shift_ptr + r, mask=r < rows, other=0.0)
    return shift, scale


@triton.jit
def produce_pair(
    source, r, w, rows, cols, PRODUCER: tl.constexpr, F: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    """Values (r, 2w) and (r, 2w + 1) of a tile: (raw, first, second), zeros outside `rows` x `cols`.

    `raw` is a word of bfloat16 for bfloat16 inputs; for LOAD it is that of `load_pair`.
    """
    x_tile, y_tile, z_tile, stride_r, stride_c = source
    raw, low, high = load_pair(x_tile, r, w, rows, cols, stride_r, stride_c, KIND, EVEN, ALIGN)
    OUT: tl.constexpr = x_tile.dtype.element_ty
    if PRODUCER == LOAD:
        return raw, low, high
    elif PRODUCER >= RMS_NORM:
        statistics = row_statistics(y_tile, r, rows, PRODUCER, EVEN)
        weights = parameters(z_tile, r, w, cols, OUT, PRODUCER, KIND, EVEN, ALIGN)
        return normalized((raw, low, high), statistics, weights, r < rows, OUT, PRODUCER, HW)
    elif PRODUCER == ACTIVATE:
        return rounded(activate(low, F, HW), activate(high, F, HW), OUT, HW)
    else:
        _y, y_low, y_high = load_pair(y_tile, r, w, rows, cols, stride_r, stride_c, KIND, EVEN, ALIGN)
        if PRODUCER == ACTIVATE_GRADIENT:
            low, high = y_low * activate_gradient(low, F, HW), y_high * activate_gradient(high, F, HW)
            return rounded(low, high, OUT, HW)
        else:
            _f, low, high = rounded(activate(low, F, HW), activate(high, F, HW), OUT, HW)
            return rounded(low * y_low, high * y_high, OUT, HW)


@triton.jit
def produce_gradients(
    source, r, w, rows, cols, F: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    HW: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, each (raw, first, second) as from `produce_pair`, from one load of the inputs."""
    x_tile, y_tile, z_tile, stride_r, stride_c = source
    OUT: tl.constexpr = x_tile.dtype.element_ty
    _x, low, high = load_pair(x_tile, r, w, rows, cols, stride_r, stride_c, KIND, EVEN, ALIGN)
    _y, y_low, y_high = load_pair(y_tile, r, w, rows, cols, stride_r, stride_c, KIND, EVEN, ALIGN)
    _z, z_low, z_high = load_pair(z_tile, r, w, rows, cols, stride_r, stride_c, KIND, EVEN, ALIGN)
    _p, p_low, p_high = rounded(z_low * y_low, z_high * y_high, OUT, HW)
    gate = rounded(p_low * activate_gradient(low, F, HW), p_high * activate_gradient(high, F, HW), OUT, HW)
    _f, f_low, f_high = rounded(activate(low, F, HW), activate(high, F, HW), OUT, HW)
    return gate, rounded(z_low * f_low, z_high * f_high, OUT, HW)


@triton.jit
def produce_rows(
    source, r, w, rows, cols, COUNT: tl.constexpr, PRODUCER: tl.constexpr, F: tl.constexpr, ALIGN: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Values (`produce_pair`) of the COUNT rows r, r + 1, ...; for GATE_GRADIENTS those of gate and those of up."""
    if PRODUCER == GATE_GRADIENTS:
        gate, up = (), ()
        for p in tl.static_range(COUNT):
            a, b = produce_gradients(source, r + p, w, rows, cols, F, HOW.LOADS, HOW.EVEN, ALIGN, HOW.HW)
            gate, up = gate + (a,), up + (b,)
        return gate, up
    else:
        made = ()
        for p in tl.static_range(COUNT):
            pair = produce_pair(source, r + p, w, rows, cols, PRODUCER, F, HOW.LOADS, HOW.EVEN, ALIGN, HOW.HW)
            made = made + (pair,)
        return made
