"""Many Linears over consecutive rows of one x, as one schedule: the experts of a mixture.

    fprop  y_TN[g]   = x_TK[g] @ w_NK[g].T       contracts K
    dgrad  dx_TK[g]  = dy_TN[g] @ w_NK[g]        contracts N
    wgrad  dw_NK[g]  = dy_TN[g].T @ x_TK[g]      contracts the rows of the group

where ``x_TK[g]`` are the rows of group g. Every matrix is quantized alone: blocks never hold rows of two groups, a
tensor amax is that of one group or one expert, and the `batch` word of the random counters is g (docs/numerics.md,
section 5.3). So codes, y, dx and dw are those of a loop of Linears.

A `GroupedSchedule` casts and multiplies each group by the casts and products of a `Schedule`, kept by the number of its
rows: the host reads the group sizes. Rows behind the last group give zeros in y and in dx.

Legend: T = rows of x, G = groups, K = in features, N = out features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.passes import CastInputs
from microfloat.recipes import Recipe
from microfloat.recipes.names import as_recipe
from microfloat.routes import Routes
from microfloat.torch import backends, reference
from microfloat.torch._checks import check_grouped, is_abstract
from microfloat.torch._operators import refuse_transforms
from microfloat.torch.backends.base import Backend, record_amax_
from microfloat.torch.context import Ambient, ambient, canonical
from microfloat.torch.gemms import Product, product
from microfloat.torch.linear import MainGrad, apply, begin, end
from microfloat.torch.schedule import (
    SCHEDULES,
    CastStep,
    Inputs,
    Parts,
    Schedule,
    autocast_dtype,
    entries_of,
    remember,
    saved_parts,
)
from microfloat.torch.seeds import draw_seed

__all__ = ["GroupedSchedule", "Groups", "find_grouped", "grouped_matmul", "grouped_plain", "groups_of", "run_grouped"]

_MOST_STEPS = 4096


class Groups:
    """Sizes of consecutive groups of rows: `ends`, int32 [G] on the device of x; and the sizes as ints, read once."""

    __slots__ = ("_sizes", "ends", "rows")

    def __init__(self, ends: torch.Tensor, rows: int, sizes: tuple[int, ...] | None = None) -> None:
        self.ends, self.rows, self._sizes = ends, rows, sizes

    @property
    def slices(self) -> list[slice]:
        """The rows of each group. On a GPU the host waits for them, once."""
        if self._sizes is None:
            ends = self.ends.tolist()
            self._sizes = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
            _check_sizes(self._sizes, self.rows, exactly=False)
        found, begin = [], 0
        for size in self._sizes:
            found.append(slice(begin, begin + size))
            begin += size
        return found

    def sums(self, dy: torch.Tensor) -> torch.Tensor:
        """float32 [G, N]: the sum of the rows of each group."""
        return torch.stack([dy[rows].sum(0, dtype=torch.float32) for rows in self.slices])


def groups_of(group_sizes: object, x: torch.Tensor, number: int) -> Groups:
    """`group_sizes` as `Groups` of the rows of x. What the host can read without waiting is checked: ints, and tensors
    on the CPU, have to add up to the rows of x.
    """
    if isinstance(group_sizes, torch.Tensor):
        if group_sizes.dtype not in (torch.int32, torch.int64):
            raise invalid_type("group_sizes", group_sizes.dtype, "torch.int32 or torch.int64")
        if group_sizes.dim() != 1 or group_sizes.shape[0] != number:
            needed = f"shape ({number},): one size for each matrix of the weight"
            raise invalid_value("group_sizes", f"shape {tuple(group_sizes.shape)}", needed)
        if is_abstract(group_sizes) or torch.compiler.is_compiling():
            return Groups(group_sizes.cumsum(0, dtype=torch.int32), x.shape[0])
        if group_sizes.device.type != "cpu":
            if group_sizes.device != x.device:
                where = f"one on {x.device}, where x is"
                raise invalid_value("group_sizes", f"a tensor on {group_sizes.device}", where)
            return Groups(group_sizes.cumsum(0, dtype=torch.int32), x.shape[0])
        sizes = tuple(group_sizes.tolist())
    elif isinstance(group_sizes, Sequence) and all(type(size) is int for size in group_sizes):
        sizes = tuple(group_sizes)
        if len(sizes) != number:
            raise invalid_value("group_sizes", f"{len(sizes)} sizes", f"{number}: one for each matrix of the weight")
    else:
        raise invalid_type("group_sizes", type(group_sizes), "a tensor of ints [G], or a list of ints")
    _check_sizes(sizes, x.shape[0])
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0, dtype=torch.int32)
    return Groups(ends if x.is_meta else ends.to(x.device), x.shape[0], sizes)


def _check_sizes(sizes: tuple[int, ...], rows: int, exactly: bool = True) -> None:
    if any(size < 0 for size in sizes):
        raise invalid_value("group_sizes", sizes, "sizes of 0 or more")
    total = sum(sizes)
    if total > rows or (exactly and total != rows):
        needed = f"a sum of {rows}, the rows of x (its dimension 0)"
        remedy = "Give x as many rows as the groups have, in their order, or a last group for the rest."
        raise invalid_value("group_sizes", f"{sizes}, which add up to {total}", needed, remedy)


def grouped_matmul(
    x_TK: torch.Tensor, w_GNK: torch.Tensor, group_sizes: torch.Tensor | Sequence[int], *,
    recipe: Recipe | str | None = None, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """``y[rows of g] = x[rows of g] @ w[g].T`` for consecutive groups of rows; [T, N], differentiable once.

    `group_sizes`: rows of each group, int32 or int64 [G], or a list of ints; 0 is a size. `recipe` None: that of the
    ambient autocast; an ``autocast(enabled=False)`` wins over any. Every group and every expert is quantized alone, as
    in a loop of Linears (docs/numerics.md 5.3). Sizes on the CPU must add up to T; those on a GPU are not read where
    kernels serve, and rows of x behind the last group give zeros in y and dx. Raises InvalidValueError and
    InvalidTypeError for operands and sizes that do not fit, NotSupportedError for delayed scaling, whose state needs a
    module: `GroupedLinear`.
    """
    state = ambient()
    backends.check_name(backend)
    chosen = None if recipe is None else as_recipe(recipe)
    if state is not None:
        chosen = None if not state.enabled else state.recipe if chosen is None else chosen
    check_grouped(x_TK, w_GNK, None)
    groups = groups_of(group_sizes, x_TK, w_GNK.shape[0])
    if chosen is None:
        return grouped_plain(x_TK, w_GNK, None, groups)
    if chosen.is_delayed:
        raise NotSupportedError(
            "recipe: got delayed scaling for a function, needed a module to hold its scales and histories. Use "
            "microfloat.torch.GroupedLinear, or a recipe with current scaling."
        )
    name = backend if backend != "auto" or state is None else state.backend
    return run_grouped(None, x_TK, w_GNK, None, groups, canonical(chosen), name, state)


def grouped_plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups
) -> torch.Tensor:  # fmt: skip
    """The same in high precision: torch's grouped matmul in bfloat16 on a GPU, else a loop of ``F.linear``."""
    compute = autocast_dtype(x.device.type) or x.dtype
    if bias is None and x.is_cuda and compute == torch.bfloat16 and all(size % 8 == 0 for size in weight.shape[1:]):
        behind = torch.arange(x.shape[0], device=x.device)[:, None] >= groups.ends[-1]
        # The rows behind are masked on both sides, so that dx has zeros there too.
        y = F.grouped_mm(x.to(compute).masked_fill(behind, 0), weight.to(compute).transpose(1, 2), offs=groups.ends)
        return y.masked_fill(behind, 0)
    slices = groups.slices
    parts = [
        F.linear(x[rows], weight[g].to(x.dtype), None if bias is None else bias[g].to(x.dtype))
        for g, rows in enumerate(slices)
    ]
    if slices[-1].stop < x.shape[0]:
        parts.append(x.new_zeros((x.shape[0] - slices[-1].stop, weight.shape[1]), dtype=parts[0].dtype))
    return torch.cat(parts)


def run_grouped(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups, recipe: Recipe,
    name: str, state: Ambient | None,
) -> torch.Tensor:  # fmt: skip
    """y under `recipe`; operands and groups are checked. `layer`: the holder of delayed-scaling state, or None."""
    refuse_transforms("forward", x, weight, bias)
    grad = torch.is_grad_enabled()
    schedule = find_grouped(x, weight, bias, recipe, name, grad and x.requires_grad, grad and weight.requires_grad)
    inputs = CastInputs(groups=groups)
    run = begin(layer, schedule, weight, state, None, inputs=(inputs, inputs, inputs))
    if schedule.wants_dx or schedule.wants_dw or (bias is not None and bias.requires_grad and grad):
        y = apply(run, x, weight, bias)
    else:
        with schedule.scope():
            y = schedule.forward(x, weight, bias, run.x, run.w)[0]
    if run.delayed is not None:
        end(run, layer)
    return y


def find_grouped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, name: str, wants_dx: bool,
    wants_dw: bool,
) -> "GroupedSchedule":  # fmt: skip
    """The schedule of a call, made where there is none yet; the sizes of its groups are no part of it."""
    compute = autocast_dtype(x.device.type) or x.dtype
    key = (
        "grouped", recipe, name, compute, wants_dx, wants_dw, x.shape, x.dtype, x.get_device(), weight.shape,
        weight.dtype, None if bias is None else bias.dtype,
    )  # fmt: skip
    schedule: Any = SCHEDULES.get(key)
    if schedule is None:
        backend = backends.choose(name, x.device)
        routes = backend.routes(recipe, x.device, None)
        made = GroupedSchedule(recipe, backend, routes, x, weight, compute, wants_dx, wants_dw)
        schedule = remember(key, made)
    return schedule


class GroupedSchedule(Schedule):
    """fprop, dgrad and wgrad of G Linears over the groups of one x. ``print(schedule)`` shows every cast and product.

    Casts and products of one group are those of a `Schedule`. Sizes of groups come with the inputs of the casts.
    """

    folds = False  # nothing is counted: a fold of a group cannot tell what the next group needs

    def __init__(
        self, recipe: Recipe, backend: Backend, routes: Routes, x: torch.Tensor, weight: torch.Tensor,
        compute: torch.dtype, wants_dx: bool, wants_dw: bool,
    ) -> None:  # fmt: skip
        self.recipe, self.backend, self.routes = recipe, backend, routes
        self.wants_dx, self.wants_dw = wants_dx, wants_dw
        self.dtype, self.x_dtype, self.w_dtype = compute, x.dtype, weight.dtype
        self.device, self.shields = x.get_device(), True
        self.number, self.out_features, self.in_features = weight.shape
        self.rows = x.shape[0]
        casts = [cast for cast in recipe.casts.values() if cast is not None]
        self.is_delayed, self.is_stochastic = recipe.is_delayed, recipe.is_stochastic
        self.delayed_scaling: Any = next((cast.scaling for cast in casts if cast.is_delayed), None)
        self._programs = backend.programs
        self._entries = {
            "x": entries_of(recipe, routes, "x", True, wants_dw),
            "w": entries_of(recipe, routes, "w", True, wants_dx),
        }
        delayed = [
            next((one.cast for one in self._entries[name] if one and one.cast and one.cast.is_delayed), None)
            for name in ("x", "w")
        ]
        self.delayed = delayed[0], delayed[1]
        self.x_saved, self.w_saved = saved_parts(recipe, wants_dx, wants_dw)
        self._steps: dict[tuple, CastStep] = {}
        self._products: dict[tuple, Product] = {}

    def seeded(self, inputs: Inputs, apart: bool) -> Inputs:
        """The same with a call seed; `apart` changes nothing, since no launch draws it."""
        words = draw_seed(torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device))
        x, w, dy = (one._replace(seed=words) for one in inputs)
        return x, w, dy

    # --------------------------------------------------------------------------------------------------- one group

    def _cast(self, tensor: str, matrix: torch.Tensor, group: int, inputs: CastInputs, *which: bool) -> Parts:
        """Both operands of one group's matrix. `which` of dy is wanted: the row operand, the column operand."""
        key = (
            tensor, group if self.is_stochastic else 0, matrix.shape, matrix.stride(), matrix.data_ptr() & 15, *which
        )  # fmt: skip
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _MOST_STEPS:  # sizes made anew for every call must not pile up
                self._steps.clear()
            entries = self._entries[tensor] if not which else entries_of(self.recipe, self.routes, tensor, *which)
            step = self._steps[key] = CastStep(self.backend, matrix, entries, key[1])
        return step(matrix, *self.resources(), inputs._replace(groups=None))[:6]

    def _multiply(self, name: str, rows: int, parts: Sequence, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
        """The GEMM `name` of one group of so many rows, of the parts of both operands."""
        key = (name, rows, dtype, None if bias is None else (bias.dtype, bias.data_ptr() & 15))
        multiply = self._products.get(key)
        if multiply is None:
            if len(self._products) >= _MOST_STEPS:
                self._products.clear()
            k, n = self.in_features, self.out_features
            shape = {"fprop": (rows, k, n), "dgrad": (rows, n, k), "wgrad": (n, rows, k)}[name]
            device = torch.device("cpu") if self.device < 0 else torch.device("cuda", self.device)
            gemm, route = getattr(self.recipe, name), getattr(self.routes, name)
            multiply = self._products[key] = product(gemm, route, shape, bias, dtype, device)
        return multiply(*parts, bias)  # type: ignore[call-arg]

    # --------------------------------------------------------------------------------------------------- running

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Parts | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and what backward needs: the operands x.T and w.T of one group after the other."""
        x, weight = self._matrix(x), self._weights(weight)
        slices, saved = x_inputs.groups.slices, []
        y = torch.empty((self.rows, self.out_features), dtype=self.dtype, device=x.device)
        for g, rows in enumerate(slices):
            if rows.start == rows.stop or not weight[g].numel():
                self._measure_unused(weight[g], w_inputs)
                y[rows] = 0 if bias is None else bias[g]
                saved += [None] * 6
                continue
            x_made, w_made = self._cast("x", x[rows], g, x_inputs), self._cast("w", weight[g], g, w_inputs)
            own = None if bias is None else bias[g]
            y[rows] = self._multiply("fprop", len(x[rows]), (*x_made[:3], *w_made[:3]), own, self.dtype)
            saved += [*x_made[self.x_saved], *w_made[self.w_saved]]
        y[slices[-1].stop :] = 0
        return y, tuple(saved)

    def cast_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> Parts:
        """dy and the inputs of its casts: `gradients` casts one group after the other."""
        return [self._matrix(dy), inputs]

    def gradients(
        self, dy: Parts, saved: Sequence[torch.Tensor | None], wants_dx: bool, wants_dw: bool,
        into: MainGrad | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """dx and dw, each if it is asked for; `saved` is what `forward` returned."""
        dy_TN, inputs = dy
        slices = inputs.groups.slices
        shape, dx, dw = (self.number, self.out_features, self.in_features), None, None
        if wants_dx:
            dx = torch.zeros((self.rows, self.in_features), dtype=self.x_dtype, device=dy_TN.device)
        if wants_dw:
            dw_dtype = self.w_dtype if into is None else torch.float32
            dw = torch.zeros(shape, dtype=dw_dtype, device=dy_TN.device)
        for g, rows in enumerate(slices):
            if rows.start == rows.stop or not self.out_features * self.in_features:
                continue
            size, x_made, w_made = rows.stop - rows.start, saved[6 * g : 6 * g + 3], saved[6 * g + 3 : 6 * g + 6]
            made = self._cast("dy", dy_TN[rows], g, inputs, wants_dx, wants_dw)
            if dx is not None:
                dx[rows] = self._multiply("dgrad", size, (*made[:3], *w_made), None, self.x_dtype)
            if dw is not None:
                dw[g] = self._multiply("wgrad", size, (*made[3:], *x_made), None, dw.dtype)
        return dx, dw if into is None or dw is None else into.add(dw)

    def _weights(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.detach().resolve_neg()
        return weight if weight.dtype == self.dtype else weight.to(self.dtype)

    def _measure_unused(self, weight: torch.Tensor, inputs: CastInputs) -> None:
        """Record the amax of an expert without rows: the scale of delayed scaling is one for all experts."""
        if inputs.record is not None and weight.numel():
            record_amax_(inputs.record, reference.amax(weight))
