"""Many Linears over consecutive rows of one x, as one schedule: the experts of a mixture.

    fprop  y_TN[g]   = x_TK[g] @ w_NK[g].T       contracts K
    dgrad  dx_TK[g]  = dy_TN[g] @ w_NK[g]        contracts N
    wgrad  dw_NK[g]  = dy_TN[g].T @ x_TK[g]      contracts the rows of the group

where ``x_TK[g]`` are the rows of group g. Every matrix is quantized alone: blocks never hold rows of two groups, a
tensor amax is that of one group or one expert, and the `batch` word of the random counters is g (docs/numerics.md,
section 5.3). So codes, y, dx and dw are those of a loop of Linears.

A `GroupedSchedule` casts all groups in one launch and multiplies them in another where kernels can: a plan on the
device says where groups stand in operands whose groups begin at tiles of 128 rows (`kernels.casts.groups`), and the
host never reads their sizes. So does the forward of a weight that is stored as codes, for a few rows of each expert
(`decoding`). Elsewhere every group runs a `Schedule` of its own, kept by the number of its rows, and `reason` says why.
Rows behind the last group give zeros in y and in dx.

Legend: T = rows of x, G = groups, K = in features, N = out features.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from microfloat.errors import invalid_type, invalid_value
from microfloat.operands import GEMMS
from microfloat.passes import CastInputs
from microfloat.recipes import Recipe
from microfloat.recipes.core import delayed_of
from microfloat.routes import (
    MOST_DECODED_ROWS,
    Entries,
    Routes,
    entries_of,
    first_delayed,
    routes_of,
    why_not_in_groups,
)
from microfloat.torch import backends, reference
from microfloat.torch._typing import Maybe, Sink
from microfloat.torch.backends.base import NO_PARTS, Backend, Operands, Parts, Saved, record_amax_
from microfloat.torch.context import Ambient
from microfloat.torch.launch import block_gemm as own_gemm
from microfloat.torch.launch.decode import DECODED_BESIDE, Decoding, decoding_of_experts, parts_of_experts
from microfloat.torch.linear.function import apply, begin, end
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import SCHEDULES, CastStep, Inputs, Schedule, as_matrix, autocast_dtype, remember
from microfloat.torch.tensor.checks import check_beside, is_abstract
from microfloat.torch.tensor.custom_ops import refuse_transforms
from microfloat.torch.tensor.dispatch_modes import are_named, multiply
from microfloat.torch.tensor.quantized_tensor import Decoded, QuantizedTensor

if TYPE_CHECKING:
    from types import ModuleType

    from microfloat.torch.launch.program import GroupPlan

_MOST_SCHEDULES = 512
_SIDE = 128


class Groups:
    """Sizes of consecutive groups of rows: `ends`, int32 [G] on the device of x; and the sizes as ints, read once."""

    __slots__ = ("_plans", "_sizes", "ends", "rows")

    def __init__(self, ends: torch.Tensor, rows: int, sizes: tuple[int, ...] | None = None) -> None:
        self.ends, self.rows, self._sizes = ends, rows, sizes
        self._plans: dict[int, GroupPlan] = {}

    def plan(self, tile_rows: int, programs: "ModuleType") -> "GroupPlan":
        """The plan for products whose tiles have so many rows, made once; `programs` starts its kernel."""
        plan = self._plans.get(tile_rows)
        if plan is None:
            plan = self._plans[tile_rows] = programs.plan_groups(self.ends, self.rows, tile_rows)
        return plan

    @property
    def slices(self) -> list[slice]:
        """The rows of each group. On a GPU the host waits for them, once."""
        if self._sizes is None:
            ends = self.ends.tolist()
            self._sizes = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
            _check_sizes(self._sizes, self.rows, exactly=not self.ends.is_cuda)
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
    if isinstance(group_sizes, Groups):
        return group_sizes
    if isinstance(group_sizes, torch.Tensor):
        if group_sizes.dtype not in (torch.int32, torch.int64):
            raise invalid_type("group_sizes", group_sizes.dtype, "torch.int32 or torch.int64")
        if group_sizes.dim() != 1 or group_sizes.shape[0] != number:
            needed = f"shape ({number},): one size for each matrix of the weight"
            raise invalid_value("group_sizes", f"shape {tuple(group_sizes.shape)}", needed)
        if is_abstract(group_sizes) or torch.compiler.is_compiling():
            return Groups(group_sizes.cumsum(0, dtype=torch.int32), x.shape[0])
        if group_sizes.device.type != "cpu":
            check_beside("group_sizes", group_sizes, x, "")
            return Groups(group_sizes.cumsum(0, dtype=torch.int32), x.shape[0])
        sizes = tuple(group_sizes.tolist())
    elif isinstance(group_sizes, Sequence) and all(type(size) is int for size in group_sizes):
        sizes = tuple(group_sizes)
        if len(sizes) != number:
            raise invalid_value("group_sizes", f"{len(sizes)} sizes", f"{number}: one for each matrix of the weight")
    else:
        raise invalid_type("group_sizes", type(group_sizes), "a tensor of ints [G], or a list of ints")
    _check_sizes(sizes, x.shape[0])
    ends = torch.tensor(sizes, dtype=torch.int64, device="cpu").cumsum(0, dtype=torch.int32)
    return Groups(ends if x.is_meta else ends.to(x.device), x.shape[0], sizes)


def _check_sizes(sizes: tuple[int, ...], rows: int, exactly: bool = True) -> None:
    if any(size < 0 for size in sizes):
        raise invalid_value("group_sizes", sizes, "sizes of 0 or more")
    total = sum(sizes)
    if total > rows or (exactly and total != rows):
        needed = f"a sum of {rows}, the rows of x (its dimension 0)"
        remedy = "Give x as many rows as the groups have, in their order, or a last group for the rest."
        raise invalid_value("group_sizes", f"{sizes}, which add up to {total}", needed, remedy)


def grouped_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups) -> torch.Tensor:
    """The same in high precision: torch's grouped matmul in bfloat16 on a GPU, else a loop of ``F.linear``."""
    compute = autocast_dtype(x.device.type) or x.dtype
    if isinstance(weight, QuantizedTensor):
        weight = cast(torch.Tensor, Decoded.apply(weight, compute))
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
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups,
    recipe: Recipe, name: str, state: Ambient | None, is_first_microbatch: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """y under `recipe`; operands and groups are checked. `layer`: the holder of delayed-scaling state, or None."""
    refuse_transforms("forward", x, weight, bias)
    grad = torch.is_grad_enabled()
    schedule = find_grouped(x, weight, bias, recipe, name, grad and x.requires_grad, grad and weight.requires_grad)
    inputs = CastInputs(groups=groups)
    if OBSERVERS:
        schedule = observed(schedule, (layer,))
    run = begin(layer, schedule, weight, state, is_first_microbatch, inputs=(inputs, inputs, inputs))
    if schedule.wants_dx or schedule.wants_dw or (bias is not None and bias.requires_grad and grad):
        y = apply(run, x, weight, bias)
    else:
        y = run.forward(None, x, weight, bias)
    if run.delayed is not None:
        end(run, layer)
    return y


def find_grouped(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, name: str, wants_dx: bool,
    wants_dw: bool, compute: torch.dtype | None = None,
) -> "GroupedSchedule":  # fmt: skip
    """The schedule of a call, kept for all sizes of groups."""
    recipe = recipe._keeping_nothing()
    compute = compute or autocast_dtype(x.device.type) or x.dtype
    key = (
        "grouped", recipe, name, compute, wants_dx, wants_dw, x.shape, x.dtype, x.get_device(), weight.shape,
        _kind_of_stored(weight) if isinstance(weight, QuantizedTensor) else weight.dtype,
        None if bias is None else bias.dtype,
    )  # fmt: skip
    schedule: Any = SCHEDULES.get(key)
    if schedule is None:
        backend = backends.choose(name, x.device)
        routes = routes_of(recipe, backend.chip_of(x.device))
        options = recipe, backend, routes, x, weight
        decoding = _decoding(recipe, routes, weight, x.shape[0], compute, bias)
        if isinstance(decoding, Decoding):
            made: GroupedSchedule = _Decoded(*options, "", compute, wants_dx, wants_dw)
            made.decode = decoding
        else:
            is_bfloat16 = x.shape[0] > 0 and compute == x.dtype == torch.bfloat16
            reason = decoding or why_one_by_one(recipe, routes, backend.name, weight, bias is not None, is_bfloat16)
            reason = reason or backend.no_programs
            one = GroupedSchedule if reason else _AllAtOnce
            made = one(*options, reason, compute, wants_dx, wants_dw)
        schedule = remember(key, made)
    return schedule


def _kind_of_stored(weight: QuantizedTensor) -> tuple:
    """All that a schedule depends on besides the sizes of a stored weight."""
    parts = weight.part_list()
    return weight.cast, weight.axis, *[part.dim() for part in parts], all(part.is_contiguous() for part in parts)


def _decoding(
    recipe: Recipe, routes: Routes, weight: torch.Tensor, rows: int | None, compute: torch.dtype,
    bias: torch.Tensor | None,
) -> Decoding | str:  # fmt: skip
    """The product of all groups with the stored codes of experts, or why there is none; "" where nobody asks for one.

    `rows` None: of any number of them that is few enough.
    """
    if routes.fprop.kind != "stored":
        return ""
    if not isinstance(weight, QuantizedTensor):
        return "the kernel that multiplies all groups reads a weight that is stored as codes"
    if compute not in DECODED_BESIDE:
        return f"the kernel that multiplies all groups takes x in bfloat16 or float16, not in {compute}"
    chosen = recipe.for_call(rows or 0, weight.cast)
    if chosen.fprop.lhs is not None or chosen.fprop.rhs != weight.cast:
        return "the weight is stored in another format, or groups of many rows are multiplied in another one"
    if rows == 0 or not weight.numel():
        return "there is nothing to multiply"
    return decoding_of_experts(weight, rows or 0, compute, None if bias is None else bias.dtype)


def why_not_all_at_once(
    recipe: Recipe, routes: Routes, backend: str, weight: torch.Tensor, bias: torch.Tensor | None
) -> str:
    """Remark on a layer whose groups do not all go in one launch, whatever the number of its rows; "" without one."""
    decoding = _decoding(recipe, routes, weight, None, weight.dtype, bias)
    if isinstance(decoding, Decoding):
        few = f"up to {MOST_DECODED_ROWS} rows for each group on average, all groups in one launch"
        return f"{few}; more, one group after the other"
    why = decoding or why_one_by_one(recipe, routes, backend, weight, bias is not None, is_bfloat16=True)
    return f"one group after the other: {why}" if why else ""


def why_one_by_one(
    recipe: Recipe, routes: Routes, backend: str, weight: torch.Tensor, has_bias: bool, is_bfloat16: bool
) -> str:
    """Reason for a schedule of its own in each group of a call, "" where launches serve all groups."""
    kinds = [route.kind for route in routes if route.kind not in ("blocks", "fp8")]
    if kinds:
        return f"no kernel multiplies all groups by the route {kinds[0]!r} of the {backend} backend"
    products = [getattr(recipe, name) for name in GEMMS]
    casts = [cast for gemm in products for cast in gemm.casts if cast is not None]
    if len(casts) < 6 or any(gemm.from_fprop for gemm in products):
        return "the kernel that multiplies all groups reads quantized operands alone"
    for gemm in products:
        scales = {(cast.format.block, cast.is_delayed) for cast in gemm.casts}
        if len(scales) > 1 and any(None in block for block, _ in scales):
            return "the kernel that multiplies all groups takes scales of one kind for both operands"
        if any(cast.is_static for cast in gemm.casts):
            return "static scales are those of one matrix"
    lacks = next((why for cast in casts if (why := why_not_in_groups(cast))), "")
    if lacks:
        return lacks
    if isinstance(weight, QuantizedTensor):
        return "the kernel that casts all experts at once reads plain weights"
    if any(size % _SIDE for size in weight.shape[1:]):
        return f"in_features and out_features are no multiples of {_SIDE}"
    if has_bias:
        return "the kernel that multiplies all groups adds no bias"
    if not is_bfloat16:
        return "the kernel that multiplies all groups gives bfloat16"
    if backends.chip_of(weight.device).capability != (9, 0) or not own_gemm.own_gemm_is_there():
        return "the kernel that multiplies all groups needs a Hopper and Triton 3.6"
    return ""


_SUM: Any = SimpleNamespace(add=lambda dw: dw)  # takes dw of one group in float32, as a `MainGrad` does, and returns it


class _Words(NamedTuple):
    """A cast or a product in words, as ``print`` reads it of a step that exists."""

    names: str
    reason: str
    entries: Entries


class _Gradient(NamedTuple):
    """A gradient after its cast: the groups, and the operands of each group; one element for all in `_AllAtOnce`."""

    groups: Groups
    operands: list


def _of_expert(inputs: CastInputs, g: int) -> CastInputs:
    """The inputs of the cast of one weight; amaxes that experts share with others are one for each."""
    return inputs if inputs.amax is None else inputs._replace(amax=inputs.amax[g])


class GroupedSchedule(Schedule):
    """fprop, dgrad and wgrad of G Linears over the groups of one x. ``print(schedule)`` shows every cast and product.

    Each group runs a `Schedule` of its own, and `reason` says why; "" where launches serve all groups, as `_AllAtOnce`
    runs them. The groups of a call come with the inputs of its casts.
    """

    folds = False  # nothing is counted: what folding one group has changed says nothing of the next

    def __init__(
        self, recipe: Recipe, backend: Backend, routes: Routes, x: torch.Tensor, weight: torch.Tensor,
        reason: str, compute: torch.dtype, wants_dx: bool, wants_dw: bool,
    ) -> None:  # fmt: skip
        self.recipe, self.backend, self.routes, self.reason = recipe, backend, routes, reason
        self.wants_dx, self.wants_dw = wants_dx, wants_dw
        self.dtype, self.x_dtype, self.w_dtype = compute, x.dtype, weight.dtype
        self.device, self.shields = x.get_device(), True
        self.number, self.out_features, self.in_features = weight.shape
        self.rows = x.shape[0]
        self.is_delayed, self.is_stochastic = recipe.is_delayed, recipe.is_stochastic
        self.is_static, self.is_joint = recipe.is_static, recipe.is_joint
        self.keeps_weight = False
        self.delayed_scaling = delayed_of(recipe) if recipe.is_delayed else None
        self._programs = backend.programs
        self._entries = {
            "x": entries_of(recipe, routes, "x", True, wants_dw),
            "w": entries_of(recipe, routes, "w", True, wants_dx),
        }
        x_delayed, w_delayed = (first_delayed(one and one.cast for one in self._entries[name]) for name in ("x", "w"))
        self.delayed = x_delayed, w_delayed
        self._schedules: dict[tuple, Schedule] = {}
        self.weight_key = (recipe, backend.name, compute, routes.fprop.rhs, routes.dgrad.rhs, self.reason)
        # What ``print`` reads of a schedule besides its recipe and its routes.
        made = {tensor: CastStep.described(self.backend, entries) for tensor, entries in self._entries.items()}
        self.x_cast, self.w_cast = (_Words(*made[name], self._entries[name]) for name in ("x", "w"))  # type: ignore
        wanted = {"fprop": True, "dgrad": self.wants_dx, "wgrad": self.wants_dw}
        why = f"one group after the other, whose sizes the host reads: {self.reason}" if self.reason else ""
        self.products = {name: _Words("", why, (None, None)) for name in GEMMS if wanted[name]}  # type: ignore
        self.reads_x_row, self.reads_w_row = wants_dw and recipe.wgrad.from_fprop, wants_dx and recipe.dgrad.from_fprop
        self._pair = None, None

    def seeded(self, inputs: Inputs, apart: bool) -> Inputs:
        """The same with a call seed; `apart` changes nothing, since no launch draws it."""
        return self._with_seed(inputs)

    # --------------------------------------------------------------------------------------------------- running

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and the operands of x and w that backward reads, of one group after the other."""
        x, groups = as_matrix(x, self.dtype), x_inputs.groups
        y, saved = torch.empty((self.rows, self.out_features), dtype=self.dtype, device=x.device), []
        x_inputs, w_inputs = x_inputs._replace(groups=None), w_inputs._replace(groups=None)
        for g, rows in enumerate(groups.slices):
            own, own_bias = weight[g].detach(), None if bias is None else bias[g]
            if rows.start == rows.stop or not own.numel():
                if kept is None and w_inputs.record is not None and own.numel():
                    values = own.dequantize() if isinstance(own, QuantizedTensor) else own
                    record_amax_(w_inputs.record, reference.amax(values))  # delayed scaling: one scale for all experts
                y[rows] = 0 if own_bias is None else own_bias
                saved += [None] * 6
                continue
            schedule = self._of_group(x[rows], own, own_bias, g)
            # A launch that casts x and w together would draw a seed.
            own_inputs = _of_expert(w_inputs, g)
            w_made = schedule.quantize_weight(own, own_inputs) if self.is_stochastic and kept is None else None
            if kept is not None:
                w_made = Operands.of([part if part is None else part[g] for part in kept.flat()])
            y[rows], made = schedule.forward(x[rows], own, own_bias, x_inputs, own_inputs, w_made)
            saved += made
        y[groups.slices[-1].stop :] = 0
        return y, tuple(saved)

    def quantize_weight(self, weight: torch.Tensor, inputs: CastInputs) -> Operands:
        """Both operands of the weights of all experts, also of experts without rows; a part is a tuple over experts."""
        made, inputs = [], inputs._replace(groups=None)
        row = torch.empty((1, self.in_features), dtype=self.dtype, device=weight.device)
        for g, own in enumerate(weight.detach()):
            made.append(self._of_group(row, own, None, g).quantize_weight(own, _of_expert(inputs, g)).flat())
        return Operands.of([None if parts[0] is None else parts for parts in zip(*made, strict=True)])

    def saved_anew(
        self, x: torch.Tensor, weight: torch.Tensor, x_inputs: CastInputs, w_inputs: CastInputs
    ) -> list[Maybe]:
        """The tensors that `forward` would save, cast again."""
        x, groups = as_matrix(x, self.dtype), x_inputs.groups
        saved: list[Maybe] = []
        x_inputs, w_inputs = x_inputs._replace(groups=None), w_inputs._replace(groups=None)
        for g, rows in enumerate(groups.slices):
            own = weight[g].detach()
            if rows.start == rows.stop or not own.numel():
                saved += [None] * 6
                continue
            schedule = self._of_group(x[rows], own, None, g)
            saved += schedule.saved_again("x", x[rows], x_inputs) if self.wants_dw else NO_PARTS
            saved += schedule.saved_again("w", own, _of_expert(w_inputs, g)) if self.wants_dx else NO_PARTS
        return saved

    def saved_operands(self, saved: Sequence[Maybe], inputs: CastInputs) -> list[Saved]:  # type: ignore[override]
        """The operands that backward reads, of each group."""
        return [Schedule.saved_operands(self, saved[at : at + 6], inputs) for at in range(0, len(saved), 6)]

    def cast_dy(  # type: ignore[override]
        self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool
    ) -> _Gradient:
        """The groups, and both operands of a gradient, of one group after the other."""
        dy, groups = as_matrix(dy, self.dtype), inputs.groups
        made, inputs = [], inputs._replace(groups=None)
        for g, rows in enumerate(groups.slices):
            schedule = self._of_backward(g, rows)
            made.append(None if schedule is None else schedule.cast_dy(dy[rows], inputs, wants_dx, wants_dw))
        return _Gradient(groups, made)

    def gradients(  # type: ignore[override]
        self, dy: _Gradient, saved: list[Saved], wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw, each if it is asked for; `into` as in `Schedule`."""
        groups, shape, dx, dw = dy.groups, (self.number, self.out_features, self.in_features), None, None
        dw_dtype = self.w_dtype if into is None else torch.float32
        device = groups.ends.device
        if wants_dx:
            dx = torch.zeros((self.rows, self.in_features), dtype=self.x_dtype, device=device)
        if wants_dw:
            dw = torch.zeros(shape, dtype=dw_dtype, device=device)
        for g, rows in enumerate(groups.slices):
            schedule = self._of_backward(g, rows)
            if schedule is None:
                continue
            own = dy.operands[g], saved[g]
            own_dx, own_dw = schedule.gradients(*own, wants_dx, wants_dw, None if into is None else _SUM)
            if dx is not None and own_dx is not None:
                dx[rows] = own_dx
            if dw is not None and own_dw is not None:
                dw[g] = own_dw
        return dx, dw if into is None or dw is None else into.add(dw)

    def _of_group(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: int) -> Schedule:
        """The schedule of one group; that of its backward is found by the group and its number of rows alone."""
        batch = group if self.is_stochastic else 0
        codes = weight.codes if isinstance(weight, QuantizedTensor) else weight
        aligned = *(t if t is None else t.data_ptr() & 15 for t in (x, codes, bias)), x.stride(), weight.stride()
        schedule = self._schedules.get((batch, len(x), *aligned))
        if schedule is None:
            if len(self._schedules) >= _MOST_SCHEDULES:  # sizes made anew for every call must not pile up
                self._schedules.clear()
            options = self.dtype, self.wants_dx, self.wants_dw, batch
            # x is in the compute dtype, dx is in that of x as it came.
            schedule = Schedule(self.recipe, self.backend, self.routes, x.to(self.x_dtype), weight, bias, *options)
            self._schedules[(batch, len(x), *aligned)] = schedule
        self._schedules[batch, len(x)] = schedule
        return schedule

    def _of_backward(self, group: int, rows: slice) -> Schedule | None:
        return self._schedules.get((group if self.is_stochastic else 0, rows.stop - rows.start))


class _Decoded(GroupedSchedule):
    """A `GroupedSchedule` whose forward decodes the stored codes of experts, for all groups in one launch.

    Backward, for adapters, goes by groups.
    """

    decode: Decoding

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y of all groups, and the operands of x and w that backward reads, of one group after the other."""
        assert isinstance(weight, QuantizedTensor)
        matrix, parts, groups = as_matrix(x, self.dtype), parts_of_experts(weight), x_inputs.groups
        plan = groups.plan(self.decode.rows_of_tile(matrix, parts.scale, bias), self._programs).table
        y = self.decode(matrix, parts, bias, plan)
        assert y is not None, "rows of experts come in tiles"
        if not (self.wants_dx or self.wants_dw):
            return y, ()
        return y, tuple(self.saved_anew(x, weight, x_inputs, w_inputs))


class _AllAtOnce(GroupedSchedule):
    """A `GroupedSchedule` whose casts and products are launches that serve all groups."""

    def __init__(self, recipe: Recipe, backend: Backend, routes: Routes, x: torch.Tensor, *options: Any) -> None:
        own = "microfloat's FP8 GEMM of all groups"
        named = (route._replace(kernel=route.kernel.replace("vendor FP8 GEMM", own)) for route in routes)
        super().__init__(recipe, backend, Routes(*named), x, *options)
        self._steps: dict[tuple, CastStep] = {}
        self._counts = torch.zeros(2, dtype=torch.int64, device=x.device)  # of folding, which nobody reads

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x_inputs: CastInputs,
        w_inputs: CastInputs, kept: Operands | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:  # fmt: skip
        """y, and the operands of x and w that backward reads, of all groups."""
        x_made = self._cast("x", as_matrix(x, self.dtype), x_inputs)
        w_made = self.quantize_weight(weight, w_inputs) if kept is None else kept
        y = self._multiply("fprop", x_made.row, w_made.row, x_inputs.groups, self.dtype)
        return y, (*x_made.column, *w_made.column)

    def quantize_weight(self, weight: torch.Tensor, inputs: CastInputs) -> Operands:
        """Both operands of the weights of all experts."""
        return self._cast("w", self._experts(weight), inputs)

    def saved_anew(
        self, x: torch.Tensor, weight: torch.Tensor, x_inputs: CastInputs, w_inputs: CastInputs
    ) -> list[Maybe]:
        """The tensors that `forward` would save, cast again."""
        x_made = self._cast("x", as_matrix(x, self.dtype), x_inputs, False, True) if self.wants_dw else Operands()
        w_made = self._cast("w", self._experts(weight), w_inputs, False, True) if self.wants_dx else Operands()
        return [*x_made.column, *w_made.column]

    def saved_operands(self, saved: Sequence[Maybe], inputs: CastInputs) -> Saved:  # type: ignore[override]
        """The operands that backward reads, of all groups."""
        return Schedule.saved_operands(self, saved, inputs)

    def cast_dy(self, dy: torch.Tensor, inputs: CastInputs, wants_dx: bool, wants_dw: bool) -> _Gradient:
        """The groups, and both operands of a gradient, of all groups."""
        return _Gradient(inputs.groups, [self._cast("dy", as_matrix(dy, self.dtype), inputs, wants_dx, wants_dw)])

    def gradients(  # type: ignore[override]
        self, dy: _Gradient, saved: Saved, wants_dx: bool, wants_dw: bool, into: Sink | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx and dw, each if it is asked for; `into` as in `Schedule`."""
        groups, shape, dx, dw = dy.groups, (self.number, self.out_features, self.in_features), None, None
        (operands,) = dy.operands
        if wants_dx:
            dx = self._multiply("dgrad", operands.row, saved.w, groups, self.x_dtype)
        if wants_dw:
            dw_dtype = self.w_dtype if into is None else torch.float32
            dw = self._multiply("wgrad", operands.column, saved.x, groups, dw_dtype).view(shape)
        return dx, dw if into is None or dw is None else into.add(dw)

    def _experts(self, weight: torch.Tensor) -> torch.Tensor:
        """[G * N, K]: the weights of all experts, one below the other."""
        weight = weight.detach().resolve_neg()
        weight = weight if weight.dtype == self.dtype else weight.to(self.dtype)
        return weight.reshape(-1, self.in_features)

    def _cast(self, tensor: str, matrix: torch.Tensor, inputs: CastInputs, *which: bool) -> Operands:
        """The operands of a tensor: all that forward reads, or the row and the column operand as `which` says."""
        if not matrix.is_contiguous() or matrix.data_ptr() & 15:
            matrix = matrix.clone(memory_format=torch.contiguous_format)
        plan = None if tensor == "w" else inputs.groups.plan(self._rows_of_tile("fprop"), self._programs).whole
        step = self._steps.get((tensor, *which))
        if step is None:
            entries = entries_of(self.recipe, self.routes, tensor, *which) if which else self._entries[tensor]
            number = self.number if tensor == "w" and not self.is_delayed else 0
            groups = 0 if tensor == "w" else self.number
            step = self._steps[tensor, *which] = CastStep(self.backend, matrix, entries, 0, groups, experts=number)
        inputs = inputs._replace(groups=plan, folded=self._counts, tiles=self._counts)
        return step(matrix, *self.resources(), inputs)

    def _has_tiles(self, name: str) -> bool:
        route, cast = getattr(self.routes, name), getattr(self.recipe, name).rhs
        return route.rhs == "tiles" or (route.rhs == "codes" and cast.format.block == (_SIDE, _SIDE))

    def _rows_of_tile(self, name: str) -> int:
        return own_gemm.OWN_GEMMS[self._has_tiles(name)].tile[0]

    def _multiply(self, name: str, a: Parts, b: Parts, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
        """The GEMM `name` of all groups in one launch."""
        t, n, k = self.rows, self.out_features, self.in_features
        shape = {"fprop": (t, n), "dgrad": (t, k), "wgrad": (self.number * n, k)}[name]
        plan = groups.plan(self._rows_of_tile("fprop" if name == "wgrad" else name), self._programs)
        part = plan.padded_begins if name == "wgrad" else plan.table
        gemm = getattr(self.recipe, name)
        scales = own_gemm.SCALES_OF.get(gemm.lhs.format.block)
        fast = scales is not None and gemm.accumulate == "fast"
        work = own_gemm.GroupedWork(1 + GEMMS.index(name), self.number, part, shape, scales, fast)
        tiles = self._has_tiles(name)

        def product(a: Parts, b: Parts, _: None) -> torch.Tensor:
            return own_gemm.own_block_matmul(a.codes, a.scale, b.codes, b.scale, dtype, tiles, work)

        if not are_named():
            return product(a, b, None)
        return multiply(product, a, b, None, self.flops)
