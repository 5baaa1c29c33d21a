"""Predict from measured figures, the same on every machine, which Linears are large enough for low precision to pay.

    time = max(time of the GPU, time of the host that feeds it);  speed-up = time in bfloat16 / time under the recipe

for a forward and backward of one Linear, M rows, K in features, N out features, weights cast in every step. The rates
are those of an NVIDIA H200 (docs/performance.md); they do not depend on the machine at hand, so that what a rule made
of them leaves in high precision on a laptop is what it leaves there on a GPU.
"""

from dataclasses import dataclass

from microfloat.arguments import check_shape
from microfloat.operands import GEMMS
from microfloat.recipes import Cast, Recipe

__all__ = ["Prediction", "predict"]

# FLOP per microsecond of the GEMMs, by how their operands are scaled; the sum of a step's three (docs/performance.md).
_BF16_RATE = 700e6
_RATES = {(None, None): 1320e6, (1, None): 1255e6, (1, 128): 1110e6}
_FOLDED_RATE = 1250e6  # MX and NVFP4: 1x128 by 128x128 scales in all three
# Bytes per microsecond that a fused cast moves, and the shortest time of a GEMM and of another kernel, in microseconds.
_CAST_RATE = 3.6e6
_SHORTEST_GEMM, _SHORTEST_KERNEL = 6.0, 3.0
# Shape at which neither launches nor the host count.
_LARGE = (1 << 17, 16384, 16384)
# Host time of an eager forward + backward: nn.Linear's, and that of a Linear under a recipe.
_HOST, _HOST_UNDER_RECIPE = 140.0, 2.4 * 140.0


@dataclass(frozen=True)
class Prediction:
    """Speed of one Linear's forward + backward under a recipe, in multiples of bfloat16's speed: in eager mode, in a
    CUDA graph, and at any size that is large enough."""

    shape: tuple[int, int, int]
    eager: float
    graph: float
    limit: float

    @property
    def is_small(self) -> bool:
        """True where bfloat16 is faster in eager mode, though a larger Linear would gain from the recipe."""
        return self.eager < 1.0 <= self.limit

    def __str__(self) -> str:
        rows, in_features, out_features = self.shape
        verdict = "large enough for eager mode"
        if self.limit < 1.0:
            verdict = "no size makes this recipe faster than bfloat16"
        elif self.is_small:
            verdict = "small: bfloat16 is faster in eager mode"
        return (
            f"{rows} x {in_features} -> {out_features}: {verdict} (predicted from an H200's figures: "
            f"{self.eager:.2f} x bfloat16's speed, {self.graph:.2f} x in a CUDA graph)"
        )


def predict(recipe: Recipe, shape: tuple[int, int, int]) -> Prediction:
    """The prediction for ``y = x @ w.T``, x [M, K], w [N, K], and both gradients. Source: docs/performance.md."""
    shape = check_shape(shape)
    bf16, ours = _gpu_times(recipe, shape)
    large_bf16, large_ours = _gpu_times(recipe, _LARGE)
    eager = max(bf16, _HOST) / max(ours, _HOST_UNDER_RECIPE)
    return Prediction(shape, eager, bf16 / ours, large_bf16 / large_ours)


def _gpu_times(recipe: Recipe, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Microseconds of the GPU in bfloat16 and under the recipe."""
    rows, in_features, out_features = shape
    flop = 2 * rows * in_features * out_features
    elements = {"x": rows * in_features, "w": in_features * out_features, "dy": rows * out_features}
    bf16 = len(GEMMS) * max(flop / _BF16_RATE, _SHORTEST_GEMM)
    ours = sum(max(flop / _rate(recipe, name), _SHORTEST_GEMM) for name in GEMMS)
    for slot, (gemm, side) in {"x": ("fprop", "lhs"), "w": ("fprop", "rhs"), "dy": ("dgrad", "lhs")}.items():
        cast = getattr(getattr(recipe, gemm), side)
        if cast is not None:
            passes, width = _passes(cast)
            ours += max(elements[slot] * width / _CAST_RATE, passes * _SHORTEST_KERNEL)
    return bf16, ours


def _rate(recipe: Recipe, name: str) -> float:
    """Of one GEMM: FP8 where Hopper multiplies it, operands folded to FP8 included, else that of bfloat16."""
    gemm = getattr(recipe, name)
    lhs, rhs = gemm.casts
    if lhs is None or rhs is None:
        return _BF16_RATE
    if lhs.format.scale.name == "E8M0":
        folds = gemm.path != "exact" and lhs.format.block == rhs.format.block == (1, 32) and lhs.hadamard is None
        return _FOLDED_RATE if folds else _BF16_RATE
    if lhs.format.scale.name == "E4M3" and gemm.path == "folded":
        return _FOLDED_RATE
    if lhs.format.element.bits != 8:
        return _BF16_RATE
    return _RATES.get(lhs.format.block, _BF16_RATE)


def _passes(cast: Cast) -> tuple[int, float]:
    """(kernels, bytes per element) of a cast to both operands of a tensor."""
    if cast.format.scale.name == "FP32":
        whole = cast.format.block[1] is None
        return (1, 4.0) if cast.is_delayed or not whole else (2, 6.0)
    return (2, 8.0) if cast.format.element.bits == 4 and cast.format.scale.name == "E4M3" else (1, 4.1)
