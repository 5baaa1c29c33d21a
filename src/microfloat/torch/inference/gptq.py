"""GPTQ: codes of a weight whose errors make up for each other in the products with inputs like those of a calibration.

    H = sum of x.T @ x over the inputs x of a layer, in `calibrate`
    for each column k of W:  Q[:, k] = value of the codes of W[:, k];  W[:, k+1:] -= (W[:, k] - Q[:, k]) U[k, k+1:]

U is the factor of ``inverse(H + damping) = U.T @ D @ U`` with ones on its diagonal. Codes and scales are those of the
cast: the scale of a block along K is made from the columns as they are when its first one is reached, scales of rows
and of the whole tensor from the weight as it was. Source: Frantar et al. 2022, "GPTQ", arXiv:2210.17323.

Legend: T = tokens, N = out features, K = in features, E = experts.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from microfloat.errors import invalid_value
from microfloat.recipes import Cast
from microfloat.recipes.placement import ConversionRow
from microfloat.torch.convert.experts import turned_in
from microfloat.torch.linear.grouped import groups_of
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.reference._elements import code_values, encode_integer, pack_fp4
from microfloat.torch.reference._grid import Workspace
from microfloat.torch.reference._scales import encode_factor, tensor_level
from microfloat.torch.reference._values import block_scale_values, full_float32
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

_COLUMNS = 128  # whose errors reach the columns behind them in one product; a multiple of every block along K
_DAMPING = 0.01  # of the mean of H's diagonal


class Hessians:
    """Sums of ``x.T @ x``, float32 [K, K] or [E, K, K]: one for each set of layers that read the same tensors."""

    def __init__(self) -> None:
        self._sums: dict[frozenset[nn.Module], torch.Tensor] = {}
        # The last input, the readers that it has had so far, and its product, which is not in the sums yet.
        self._last: tuple[Callable[[], object], int, object] = (lambda: None, 0, None)
        self._readers: set[nn.Module] = set()
        self._product: torch.Tensor | None = None

    def see(self, layer: nn.Module, x: torch.Tensor, sizes: object) -> None:
        """Add an input of a layer; `sizes`: the rows of each expert."""
        last, version, rows = self._last
        is_same = last() is x and rows is sizes and not x.is_inference() and version == x._version
        if is_same and layer not in self._readers:
            self._readers.add(layer)
            return
        self._add()
        x_TK = x.detach().reshape(-1, x.shape[-1]).float()
        parts = groups_of(sizes, x, layer.num_groups).slices if isinstance(layer, GroupedLinear) else [slice(None)]
        with full_float32(x.device), torch.inference_mode(False), torch.no_grad():
            products = [x_TK[rows].t() @ x_TK[rows] for rows in parts]
        self._product = torch.stack(products) if isinstance(layer, GroupedLinear) else products[0]
        # A tensor of inference mode does not tell of writes in place, and its product is never shared.
        self._last, self._readers = (weakref.ref(x), 0 if x.is_inference() else x._version, sizes), {layer}

    def _add(self) -> None:
        """Add the product of the last input to the sum of its readers."""
        if self._product is not None:
            readers, product = frozenset(self._readers), self._product
            self._sums[readers] = self._sums[readers].add_(product) if readers in self._sums else product
        self._product = None

    def by_layer(self) -> dict[nn.Module, torch.Tensor]:
        """The sum of each layer that was called."""
        self._add()
        found: dict[nn.Module, torch.Tensor] = {}
        for layers, total in self._sums.items():
            found |= {one: found[one] + total if one in found else total for one in layers}
        return found


def hessians_of(layers: Mapping[str, nn.Module]) -> dict[int, torch.Tensor]:
    """By the id of a weight the sum of all layers that hold it. Raises InvalidValueError for none, or NaN."""
    made, spoiled = dict[int, torch.Tensor](), []
    for name, layer in layers.items():
        for key, total in vars(layer).get("_hessians", {}).items():
            held = layer._parameters[key]
            length = held.shape[1 if turned_in(layer).get(key) else -1]  # type: ignore[union-attr]
            if length != total.shape[-1]:
                got = f"'gptq' for {name}, whose {key} has {length} inputs and had {total.shape[-1]} in calibrate"
                raise invalid_value("method", got, "the inputs of the weight as it is", "Call calibrate again.")
            weight = id(held)
            made[weight] = made[weight] + total if weight in made else total
            spoiled += [] if made[weight].isfinite().all() else [name]
    if not made:
        remedy = "Call the model on some text first: with microfloat.torch.calibrate(model): model(batch)."
        raise invalid_value("method", "'gptq' for layers whose inputs were not measured", "their inputs", remedy)
    if spoiled:
        names = ", ".join(dict.fromkeys(spoiled))
        got = f"'gptq' after a calibration in which inputs of {names} or sums of their squares were not finite"
        raise invalid_value("method", got, "batches, and a dtype, that give neither NaN nor infinity")
    return made


def with_method(row: ConversionRow, layer: nn.Module, hessians: Mapping[int, torch.Tensor]) -> ConversionRow:
    """The row of a layer that is to be stored, whose reason says by which method."""
    reasons = [row.reason] if row.reason else []
    for weight in [layer._parameters[key] for key in turned_in(layer) or ("weight",)]:
        total = hessians.get(id(weight))
        empty = [str(e) for e, one in enumerate(() if total is None else total) if one.dim() > 1 and not one.any()]
        if total is not None:
            reasons.append(f"gptq; nearest for experts without tokens: {', '.join(empty)}" if empty else "gptq")
            reasons += [] if weight.isfinite().all() else ["nearest for matrices that are not finite"]  # type: ignore
        elif not isinstance(weight, QuantizedTensor):
            reasons.append("nearest: calibrate has seen no input of it")
    return replace(row, reason="; ".join(dict.fromkeys(reasons)))


@torch.no_grad()
def compensated(
    weight: torch.Tensor, hessian: torch.Tensor, rhs: Cast, amax: torch.Tensor | None,
    quantized: Callable[[torch.Tensor], QuantizedTensor],
) -> QuantizedTensor:  # fmt: skip
    """The codes of a weight [N, K] by GPTQ. `quantized`: the cast of the weight, or of a block of its columns.

    `amax`: that behind the tensor scale, where the cast has one, float32 () or [N, 1]; `hessian`: float32 [K, K]. A
    column whose inputs were zero gets its nearest codes.
    """
    made, fmt, constants = quantized(weight), rhs.format, rhs.rule.two_level
    width, level = fmt.block[1], None if amax is None or constants is None else tensor_level(amax, constants)
    (rows, length), device = weight.shape, weight.device
    values_KN = weight.detach().t().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    codes_KN = torch.empty((length, rows), dtype=torch.uint8, device=device)
    factor_KK, table, workspace = _factor(hessian.to(device)), code_values(fmt.element, device), Workspace(device)

    def factors(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row of one column of blocks: the factor of values before they are encoded, and after."""
        scales = block_scale_values(q.to_operand())
        encode = encode_factor(scales, level)
        decode = scales if q.tensor_scale is None else scales * q.tensor_scale
        if fmt.is_tile:
            encode, decode = (one.repeat_interleave(fmt.block[0] or 1, 0)[:rows] for one in (encode, decode))
        return encode.reshape(-1), decode.reshape(-1)

    encode, decode = factors(made)  # for all columns where a scale is that of whole rows
    for start in range(0, length, _COLUMNS):
        block = values_KN[start : start + _COLUMNS]
        errors = torch.empty_like(block)
        for k in range(len(block)):
            column = start + k
            if width and column % width == 0:
                part = quantized(block[k : k + width].t())
                made.scale[:, column // width] = part.scale[:, 0]
                encode, decode = factors(part)
            codes = encode_integer(block[k] * encode, fmt.element, None, workspace)
            codes_KN[column] = codes
            torch.sub(block[k], table.index_select(0, codes.int()) * decode, out=errors[k])
            block[k + 1 :].addr_(factor_KK[column, column + 1 : start + len(block)], errors[k], alpha=-1)
        behind = start + len(block)
        with full_float32(device):
            values_KN[behind:].addmm_(factor_KK[start:behind, behind:].t(), errors, alpha=-1)
    stored = made.codes.view(torch.uint8)
    if fmt.element.codes_per_byte == 2:
        pack_fp4(codes_KN.t(), stored, 1)
    else:
        stored.copy_(codes_KN.t())
    return made


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """U of the module's equation, float32 [K, K]; more damping where rounding has left less than a positive H."""
    # A Cholesky factor from the last row on: H = R @ R.T with an upper R, whose inverse is U but for the diagonal.
    turned = hessian.double().flip(0, 1)
    damping = _DAMPING * turned.diagonal().mean()
    turned.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(turned)
    while failed:
        turned.diagonal().add_(damping := 10 * damping)
        lower, failed = torch.linalg.cholesky_ex(turned)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(len(turned), out=turned), upper=True)
    return (upper / upper.diagonal()[:, None]).float()
