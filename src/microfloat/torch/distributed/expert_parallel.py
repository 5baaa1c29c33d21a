"""Expert parallelism: tokens travel to the ranks that own their experts, and results travel back.

    sent = dispatch(x_TK, group_sizes, recipe=recipe)        rows sorted by expert, over all experts of all ranks
    y_TN = sent.combine(experts(sent.x, sent.group_sizes))   `experts`: a GroupedLinear, or several, of this rank alone

Every rank owns as many experts as every other: of E experts and R ranks, rank r has those from ``r * E / R`` on. With a
recipe the rows of x travel forward, and those of dy backward, as the codes and scales that the recipe makes of them,
in two messages. A scale covers one row at most, so that a row has the same bytes wherever it is cast. What arrives is
decoded; an expert's weight gradient is computed from these values too.

Legend: T = rows of this rank, A = rows that arrive, E = experts of all ranks, G = those of this rank, K = features.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from microfloat.errors import NotSupportedError, invalid_value
from microfloat.recipes import Cast, Current, Recipe
from microfloat.recipes.names import as_recipe
from microfloat.torch.linear.gathered_weight import Through
from microfloat.torch.linear.grouped import groups_of
from microfloat.torch.linear.schedule import autocast_dtype
from microfloat.torch.scaling.amax_reduction import Group
from microfloat.torch.scaling.rank_errors import agree, in_collective
from microfloat.torch.tensor.checks import check_tensor
from microfloat.torch.tensor.ops import quantize
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

_CALL = "the all-to-all of tokens"


class _Route:
    """Numbers of rows to and from each rank, and the order that sorts arriving rows by expert."""

    def __init__(self, sizes: list[int], device: torch.device, group: Group) -> None:
        self.group, self.sizes, world = group, sizes, dist.get_world_size(group)
        sent = torch.tensor(sizes, dtype=torch.int64, device=device)
        arriving = torch.empty_like(sent)
        with in_collective(_CALL, group):
            dist.all_to_all_single(arriving, sent, group=group)
            by_rank = arriving.cpu().view(world, -1)
        self.sent = torch.tensor(sizes, device="cpu").view(world, -1).sum(1).tolist()
        self.arriving = by_rank.sum(1).tolist()
        self.group_sizes = by_rank.sum(0).tolist()
        experts = torch.arange(by_rank.shape[1], device="cpu").repeat(world).repeat_interleave(by_rank.flatten())
        order = torch.argsort(experts, stable=True)
        self.order, self.inverse = order.to(device), torch.argsort(order).to(device)

    def outward(self, x: torch.Tensor, cast: Cast | None) -> torch.Tensor:
        """The rows that arrive at this rank's experts, [A, K]: the rows sent, or decoded from the codes of `cast`."""
        if cast is None:
            return self.exchange(x, self.sent, self.arriving)[0].index_select(0, self.order)
        return self.outward_codes(x, cast).dequantize(x.dtype)

    def outward_codes(self, x: torch.Tensor, cast: Cast) -> QuantizedTensor:
        """The rows that arrive at this rank's experts, as codes and scales."""
        own = quantize(x, cast)
        sent = own.codes.view(torch.uint8), own.scale.view(torch.uint8)
        made = self.exchange(sent[0], self.sent, self.arriving, sent[1])
        codes, scale = (part.index_select(0, self.order) for part in made)
        codes, scale = codes.view(own.codes.dtype), scale.view(own.scale.dtype)
        return QuantizedTensor(codes, scale, None, cast, axis=1, shape=(len(codes), x.shape[1]), dtype=x.dtype)

    def inward(self, y: torch.Tensor) -> torch.Tensor:
        """The rows that come back to this rank, [T, N]."""
        return self.exchange(y.index_select(0, self.inverse), self.arriving, self.sent)[0]

    def exchange(
        self, x: torch.Tensor, sent: list[int], arriving: list[int], *more: torch.Tensor
    ) -> list[torch.Tensor]:
        """The rows that arrive of each matrix, in the order of the ranks that they come from."""
        made = [part.new_empty((sum(arriving), part.shape[1])) for part in (x, *more)]
        with in_collective(_CALL, self.group):
            works: list[Any] = [
                dist.all_to_all_single(out, part.contiguous(), arriving, sent, group=self.group, async_op=True)
                for out, part in zip(made, (x, *more), strict=True)
            ]
            for work in works:
                work.wait()
        return made


class Dispatched:
    """Tokens at their experts: `x` [A, K], sorted by expert, and `group_sizes`, the rows of each of this rank's."""

    __slots__ = ("_cast", "_route", "group_sizes", "x")

    def __init__(self, x: torch.Tensor, route: _Route, cast: Cast | None) -> None:
        self.x, self._route, self._cast = x, route, cast
        self.group_sizes: list[int] = route.group_sizes

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The experts' results [A, N] as rows of the ranks that sent the tokens, in their order: [T, N].

        All ranks call it. In backward dy travels as the recipe of `dispatch` says. Raises InvalidValueError for a y
        that has not the rows of `x`.
        """
        check_tensor("y", y)
        if y.dim() != 2 or len(y) != len(self.x):
            raise invalid_value("y", f"shape {tuple(y.shape)}", f"[{len(self.x)}, N]: a row for each of x")
        back = functools.partial(self._route.outward, cast=self._cast)
        return Through.apply(y, self._route.inward, back)  # type: ignore[return-value]


def dispatch(
    x: torch.Tensor, group_sizes: torch.Tensor | Sequence[int], *, group: Group = None,
    recipe: Recipe | str | None = None,
) -> Dispatched:  # fmt: skip
    """Send rows to the ranks that own their experts; all ranks of `group` (None: all) call it, with 0 rows or more.

    x [T, K]: the rows of expert 0 first. `group_sizes`: rows for each of the E experts of all ranks, as ints or int32
    or int64 [E]; 0 is a size, and E a multiple of the number of ranks. `recipe` None: x and dy travel in their own
    dtype. Otherwise x travels as the operand fprop.lhs of the recipe, dy as dgrad.lhs, which a `GroupedLinear` under
    that recipe casts to the same codes again; y and dx travel as they are. The host reads the sizes.

    Raises InvalidValueError and InvalidTypeError for operands that do not fit, NotSupportedError for a recipe whose
    scales rows cannot carry along (delayed scaling, scales of tensors and tiles, a Hadamard transform of x) and where
    the ranks were found to disagree, RankError where a rank fails. Source: docs/distributed.md.
    """
    check_tensor("x", x)
    if x.dim() != 2:
        raise invalid_value("x", f"shape {tuple(x.shape)}", "a matrix [rows, features]", "Flatten its leading axes.")
    world = dist.get_world_size(group)
    number = len(group_sizes) if isinstance(group_sizes, torch.Tensor | Sequence) else 0
    if not number or number % world:
        raise invalid_value(
            "group_sizes", f"{number} sizes",
            f"a multiple of {world}: one for each expert, of which every rank owns as many as the others",
        )  # fmt: skip
    sizes = [rows.stop - rows.start for rows in groups_of(group_sizes, x, number).slices]
    if sum(sizes) != len(x):
        raise invalid_value(
            "group_sizes", f"{sizes}, which add up to {sum(sizes)}", f"a sum of {len(x)}, the rows of x"
        )
    chosen = None if recipe is None else as_recipe(recipe)
    forward, backward = (
        None if chosen is None else _checked(name, chosen.cast(name, "lhs")) for name in ("fprop", "dgrad")
    )
    x = x.to(autocast_dtype(x.device.type) or x.dtype)
    facts = {"experts": number, "features": x.shape[1], "dtype": x.dtype, "requires_grad": x.requires_grad}
    agree(group, "dispatch", {**facts, "recipe": chosen})
    route = _Route(sizes, x.device, group)
    arrived = Through.apply(x, functools.partial(route.outward, cast=forward), route.inward)
    return Dispatched(arrived, route, backward)  # type: ignore[arg-type]


def _checked(gemm: str, cast: Cast | None) -> Cast | None:
    """The cast; raises where a row cannot travel with its scales."""
    if cast is None:
        return None
    lacks = ""
    if not isinstance(cast.scaling, Current):
        lacks = "has a scale from a layer's state"
    elif cast.format.block[0] is None or cast.tensor_scale is not None:
        lacks = "has a scale of the whole tensor, whose rows lie on several ranks"
    elif cast.hadamard is not None:
        lacks = "transforms x first"
    elif cast.format.block[0] != 1:
        lacks = f"has scales of {cast.format.block[0]} rows, axis 0 of x, which may come from several ranks"
    if lacks:
        raise NotSupportedError(
            f"recipe: got the cast {cast.format} for {gemm}.lhs, which {lacks}, needed scales that travel with a row. "
            "Give a recipe with current scaling and blocks of one row (mxfp8, mxfp4, fp8_row), or recipe=None."
        )
    return cast
