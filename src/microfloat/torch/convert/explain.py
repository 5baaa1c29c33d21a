"""`explain` and the availability queries: what runs where and why, before anything runs."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from microfloat.arguments import check_shape
from microfloat.chips import Chip, chip_named
from microfloat.errors import invalid_type, invalid_value
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes import Cast, Gemm, NVFP4BlockScaling, Recipe
from microfloat.recipes.explanation import Answer, CastRow, operands_of
from microfloat.recipes.names import as_recipe
from microfloat.routes import UNTRIED, Route, family_of, route_of, routes_of
from microfloat.support import Notes, Printed, Support, text_table, wrapped
from microfloat.torch import backends
from microfloat.torch.backends import BY_KERNELS, check_name, chip_of, resolve
from microfloat.torch.context import ambient
from microfloat.torch.convert.experts import is_experts, shape_of_experts
from microfloat.torch.launch.block_gemm import own_gemm_is_faster, own_gemm_serves
from microfloat.torch.linear.function import backend_name
from microfloat.torch.linear.grouped import why_not_all_at_once
from microfloat.torch.linear.observer import OBSERVERS
from microfloat.torch.linear.weight_cache import fsdp_parameters
from microfloat.torch.nn.experts import ExpertProduct, ExpertsLayer, products_of
from microfloat.torch.nn.grouped_linear import GroupedLinear
from microfloat.torch.nn.linear import Linear
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.torch.nn.linear import RecipeLayer

BY_TORCH = "plain torch ops"


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: what its operands are, which backend and kernel run, and how well the hardware supports it."""

    gemm: str
    operands: str
    backend: str
    kernel: str
    support: Support


def gemm_row(
    recipe: Recipe, name: str, backend: str, device: torch.device, shape: tuple[int, int, int] | None = None,
    chip: Chip | None = None,
) -> GemmRow:  # fmt: skip
    """Backend, kernel and support of a GEMM of `recipe` on `device`, or on `chip` in its place; `shape`: M, K, N."""
    gemm: Gemm = getattr(recipe, name)
    operands = operands_of(gemm)
    if gemm.is_high_precision:
        route = route_of(gemm, None)
        return GemmRow(name, operands, "torch", route.kernel, Support(True, True, route.reason))
    backend, verdict = _backend(backend, device, chip)
    refusal = next((why for cast in gemm.casts if cast is not None and (why := family_of(cast)[1])), "")
    if verdict and backend == "triton" and refusal:
        verdict = Support(False, False, f"the triton backend has no kernel for {refusal}")
    if not verdict:
        return GemmRow(name, operands, backend, "-", verdict)
    if backend != "native":
        route = route_of(gemm, None)
        if "folded" in route.forms:  # NVFP4, whose fold rounds wherever it is made
            verdict = Support(True, False, f"{verdict.reason}; {route.reason}")
        return GemmRow(name, operands, backend, route.kernel, verdict)
    there = chip_of(device) if chip is None else chip
    route = route_of(gemm, there)
    untried = "" if there.is_tried or UNTRIED in route.reason else f"; {UNTRIED}"
    verdict = Support(route.kind != "refused", route.accelerated, route.reason + untried)
    return GemmRow(name, operands, backend, _named(route, gemm, shape, there, None if chip else device), verdict)


def cast_rows(recipe: Recipe, backend: str, device: torch.device, chip: Chip | None = None) -> tuple[CastRow, ...]:
    """A row for each quantized operand of `recipe` under `backend` on `device`, or on `chip`."""
    backend, verdict = _backend(backend, device, chip)
    if not verdict:
        return ()
    forms: dict[tuple[str, str], str] = {operand.key: "codes" for operand in OPERANDS}
    if backend == "native":
        there = chip_of(device) if chip is None else chip
        for name in GEMMS:
            route = route_of(getattr(recipe, name), there)
            forms[name, "lhs"], forms[name, "rhs"] = route.lhs, route.rhs
    rows = []
    for name, side, tensor, *_ in OPERANDS:
        cast = recipe.cast(name, side)
        if cast is None or getattr(recipe, name).from_fprop:  # fprop has made it
            continue
        if backend == "reference":
            rows.append(CastRow(name, tensor, cast.format.name, BY_TORCH, ""))
            continue
        # Both operands of a tensor are cast in one pass where they are wanted in one form.
        together = [
            recipe.casts[other.key]
            for other in OPERANDS
            if other.tensor == tensor and forms[other.key] == forms[name, side]
        ]
        refusal = next((why for one in (cast, *together) if one is not None and (why := family_of(one)[1])), "")
        kernel = BY_TORCH if refusal else _kernel_of(cast, forms[name, side])
        rows.append(CastRow(name, tensor, cast.format.name, kernel, f"no kernel for {refusal}" if refusal else ""))
    return tuple(rows)


def _backend(backend: str, device: torch.device, chip: Chip | None) -> tuple[str, Support]:
    """The name behind "auto", and whether it runs: on this machine, or on a complete one with `chip`."""
    if chip is None or backend == "reference":
        return resolve(backend, device)
    name = "triton" if backend == "triton" else "native"
    return name, BY_KERNELS[name]


def _kernel_of(cast: Cast, form: str) -> str:
    """The fused kernel of a cast, by its module in `microfloat.kernels`, and what it writes where that is not codes."""
    name = f"kernels.{family_of(cast)[0]}"
    if form in ("folded", "tiles"):
        name = name if cast.format.scale.name == "E4M3" else "kernels.fold"
        return f"{name} (FP8, {'128x128' if form == 'tiles' else '1x128'} scales)"
    return f"{name} (decoded to bfloat16)" if form == "values" else name


def _named(
    route: Route, gemm: Gemm, shape: tuple[int, int, int] | None, chip: Chip, device: torch.device | None
) -> str:
    """The kernel of a route; of GEMMs with 1x128 scales, by whom: see `own_gemm_is_faster`."""
    if route.kind != "blocks" or not chip.has_fp8_blocks or "vendor" not in route.kernel:
        return route.kernel
    if shape is None:
        return route.kernel + "; large ones by a kernel of microfloat's (Triton 3.6)"
    m, k, n = shape
    padded = (-(-m // 8) * 8, -(-k // 16) * 16, -(-n // 16) * 16)
    tiles = route.rhs == "tiles" or (route.rhs == "codes" and gemm.casts[1].format.block == (128, 128))  # type: ignore[union-attr]
    serves = own_gemm_is_faster(padded, tiles, chip)
    if device is not None:
        serves = own_gemm_serves(device, padded, tiles, torch.bfloat16)
    own = "microfloat's FP8 GEMM (bfloat16 results)"
    return route.kernel.replace("vendor FP8 GEMM", own) if serves else route.kernel


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """The way of a recipe on a device: a row per GEMM, and what casts each operand; prints as a table with notes."""

    _column = "backend"

    recipe: Recipe
    device: str
    rows: tuple[GemmRow, ...]
    casts: tuple[CastRow, ...] = ()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *wrapped(self.recipe._of_many_rows)])


@dataclass(frozen=True)
class LayerRow:
    """One linear layer of a model: its name, (in features, out features), and what it runs here and now.

    `explanation` is None for a layer in high precision; `reason` says why it is, or what keeps it from tensor cores.
    """

    name: str
    shape: tuple[int, int]
    explanation: Explanation | None
    reason: str

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that a call would run; None = high precision."""
        return None if self.explanation is None else self.explanation.recipe

    @property
    def backend(self) -> str:
        """The backends of its quantized GEMMs; "torch" in high precision."""
        rows = [] if self.explanation is None else self.explanation.rows
        return "/".join(dict.fromkeys(row.backend for row in rows if row.backend != "torch")) or "torch"

    @property
    def accelerated(self) -> bool:
        """True if every quantized GEMM runs on tensor cores of its format."""
        return self.explanation is not None and self.explanation.accelerated


@dataclass(frozen=True, repr=False)
class ModelExplanation(Printed):
    """A row for each linear layer of a model; prints as a table with notes."""

    rows: tuple[LayerRow, ...]

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def accelerated(self) -> bool:
        """True if there is a layer that runs a recipe, and every such layer is accelerated."""
        quantized = [row for row in self.rows if row.explanation is not None]
        return bool(quantized) and all(row.accelerated for row in quantized)

    def to_dict(self) -> dict:
        """The same as JSON-ready data."""
        return {
            "layers": [
                {
                    "name": row.name, "shape": list(row.shape), "backend": row.backend, "accelerated": row.accelerated,
                    "reason": row.reason, "explanation": row.explanation and row.explanation.to_dict(),
                }
                for row in self.rows
            ]
        }  # fmt: skip

    def __str__(self) -> str:
        notes = Notes()
        cells: list[tuple[str, ...]] = [("layer", "in -> out", "recipe", "backend", "accelerated", "why")]
        for row in self.rows:
            recipe = row.recipe.label if row.recipe is not None else "-"
            cells.append((
                row.name or "(root)", f"{row.shape[0]} -> {row.shape[1]}", recipe, row.backend,
                "-" if row.recipe is None else "yes" if row.accelerated else "no", notes.number(row.reason),
            ))  # fmt: skip
        quantized = sum(row.recipe is not None for row in self.rows)
        total = f"{quantized} of {len(self.rows)} linear layers run in low precision."
        return "\n".join([*text_table(cells), *notes.lines(), total])


@overload
def explain(
    recipe: Recipe | str, device: torch.device | str | None = None, shape: tuple[int, int, int] | None = None, *,
    backend: str = "auto",
) -> Explanation: ...  # fmt: skip
@overload
def explain(
    recipe: nn.Module, device: torch.device | str | torch.Tensor | tuple | dict | None = None, *, backend: str = "auto"
) -> ModelExplanation: ...
def explain(
    recipe: Recipe | str | nn.Module, device: Any = None, shape: tuple[int, int, int] | None = None, *,
    backend: str = "auto",
) -> Explanation | ModelExplanation:  # fmt: skip
    """Explain which backend and kernel each GEMM of `recipe` takes on `device`, if it is accelerated, and why.

    `device` None: CUDA where there is one, else the CPU. A GPU that this machine lacks goes by its name, its generation
    or its architecture: "h200", "ampere", "sm_100"; that answer assumes that all packages are installed there, while
    the answer about this machine names the package that is missing. `shape` (M, K, N) of a Linear: on a CUDA device the
    answer then names the kernel that serves products of that size where it depends on it.

    A model in place of a recipe: a row for each of its linear layers, with what a call here and now would run
    (autocasts that are active included), on the device of its weight unless `device` names another. With an input in
    its place (a tensor, a tuple of arguments or a dictionary of them) the model is called with it once, in evaluation
    and without gradients, and the rows also say what the products of these sizes need, such as padding; no generator
    and no state of scaling changes.

    Nothing is run. For "cuda" on a machine without CUDA the answer is that nothing runs there. Paths that no chip of a
    kind has run yet say so. Raises InvalidTypeError or InvalidValueError for arguments that are none.

    >>> explain("mxfp8", "a100").accelerated
    False
    """
    check_name(backend)
    if isinstance(recipe, nn.Module):
        if shape is not None:
            raise invalid_value("shape", shape, "None for a model", "Ask for the recipe of one layer with a shape.")
        if not isinstance(device, torch.Tensor | tuple | dict):
            return ModelExplanation(tuple(_layer_rows(recipe, device, backend)))
        return ModelExplanation(tuple(_rows_of_input(recipe, device, backend)))
    return _explain(as_recipe(recipe), device, shape, backend)


def _explain(
    recipe: Recipe, device: torch.device | str | None, shape: tuple[int, int, int] | None, backend: str
) -> Explanation:
    chip = chip_named(device) if isinstance(device, str) else None
    target = _device(device) if chip is None else torch.device("cuda")
    if shape is not None:
        shape = check_shape(shape)
    sizes: dict[str, tuple[int, int, int]] = {}  # rows, contraction length and columns
    if shape is not None:
        m, k, n = shape
        sizes = {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}
    there = chip is not None or target.type != "cuda" or torch.cuda.is_available()
    absent = Support(False, False, "torch sees no CUDA device on this machine")
    rows = tuple(
        gemm_row(recipe, name, backend, target, sizes.get(name), chip) if there
        else GemmRow(name, operands_of(getattr(recipe, name)), "-", "-", absent)
        for name in GEMMS
    )  # fmt: skip
    casts = cast_rows(recipe, backend, target, chip) if there else ()
    where = str(target) if chip is None else f"{device} ({chip.name}, {chip.architecture})"
    return Explanation(recipe, where, rows, casts)


def _layer_rows(model: nn.Module, device: torch.device | str | None, backend: str) -> Iterator[LayerRow]:
    """A row for each nn.Linear, as `named_modules` has them. `backend`: where neither layer nor autocast names one."""
    for name, layer in model.named_modules():
        if isinstance(layer, ExpertProduct) or not (isinstance(layer, nn.Linear | GroupedLinear) or is_experts(layer)):
            continue
        rows, columns = shape_of_experts(layer) if is_experts(layer) else (layer.out_features, layer.in_features)
        shape = (columns, rows)
        if not isinstance(layer, Linear | GroupedLinear | ExpertsLayer):
            yield LayerRow(name, shape, None, f"{type(layer).__name__} that was not converted: high precision")  # type: ignore
            continue
        recipe = layer.effective_recipe()
        if recipe is None:
            yield LayerRow(name, shape, None, "pinned to none, or no autocast is active: high precision")  # type: ignore
            continue
        own, first = backend_name(layer, ambient()), products_of(layer)[0]
        answer = _explain(
            recipe, first.weight.device if device is None else device, None, backend if own == "auto" else own
        )
        reasons = dict.fromkeys(row.support.reason for row in answer.rows if not row.support.accelerated)
        if isinstance(first, GroupedLinear) and device is None:
            reasons |= dict.fromkeys(_in_groups(products_of(layer), recipe, own))
        elif isinstance(first.weight, QuantizedTensor) and recipe._of_many_rows:
            kept = vars(first).get("_weight_cache")
            reasons |= dict.fromkeys(filter(None, (recipe._of_many_rows, kept and kept.answer)))
        reasons |= dict.fromkeys(_across_ranks(first))
        yield LayerRow(name, shape, answer, "; ".join(reasons))  # type: ignore


def _in_groups(products: Sequence["RecipeLayer"], recipe: Recipe, backend: str) -> Iterator[str]:
    """Remarks on products whose groups do not all go in one launch."""
    for one in products:
        there = backends.choose(backend, one.weight.device)
        routes = routes_of(recipe, there.chip_of(one.weight.device))
        if why := why_not_all_at_once(recipe, routes, there.name, one.weight, one.added_bias):
            yield why


def _across_ranks(layer: nn.Module) -> Iterator[str]:
    """Remarks on the weight of a layer that ranks share."""
    weight: Any = layer.weight
    shards = layer.__dict__.get("_fsdp_state")
    owners = fsdp_parameters(layer)
    is_cut = hasattr(weight, "placements") and (not owners or any(owner.is_dtensor for owner in owners))  # by a plan
    if hasattr(weight, "placements"):
        as_codes = ", stored and gathered as codes" if isinstance(weight._local_tensor, QuantizedTensor) else ""
        yield f"weight sharded as {weight.placements} of {tuple(weight.device_mesh.shape)} ranks{as_codes}"
    if is_cut:
        yield "overlap of collectives with GEMMs: not provided"
    if is_cut or (shards is not None and not shards.reason):
        yield "under torch.compile it runs in eager mode, between two graphs"
    if shards is not None and shards.reason:
        yield f"gather in high precision: {shards.reason}"


class _Calls:
    """Notes the layers that are called, and asks each for the schedule of a training step with its first x."""

    def __init__(self) -> None:
        self.reasons: dict[nn.Module, dict[str, str]] = {}

    def listener(self, schedule: object, layers: Sequence["RecipeLayer"], weight: object, is_backward: bool) -> Any:
        """A listener to one call, of which x alone matters."""
        others = dict.fromkeys(("see_w", "see_y", "see_dy", "see_gradients"), lambda *_: None)
        return SimpleNamespace(see_x=functools.partial(self._see_x, layers), **others)

    def see_plain(self, layer: nn.Module, x: object, y: object) -> None:
        """Nothing is noted of high precision."""

    def _see_x(self, layers: Sequence[Any], x: torch.Tensor, inputs: object) -> None:
        for layer in layers:
            schedule = layer.schedule(x.detach().requires_grad_()) if hasattr(layer, "schedule") else None
            products = {} if schedule is None else schedule.products
            found = {name: one.reason for name, one in products.items() if one.reason}
            self.reasons[layer] = self.reasons.get(layer, {}) | found


def _rows_of_input(model: nn.Module, given: torch.Tensor | tuple | dict, backend: str) -> Iterator[LayerRow]:
    """The rows of a model, with what its products need for the sizes that an input gives them."""
    calls, modes = _Calls(), {module: module.training for module in model.modules()}
    arguments, options = (given,) if isinstance(given, torch.Tensor) else given, {}
    if isinstance(given, dict):
        arguments, options = (), given
    OBSERVERS.append(calls)
    try:
        model.eval()
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            model(*arguments, **options)
    finally:
        OBSERVERS.remove(calls)
        for module, mode in modes.items():
            module.training = mode
    layers = dict(model.named_modules())
    for row in _layer_rows(model, None, backend):
        found = [calls.reasons[one] for one in products_of(layers[row.name]) if one in calls.reasons]
        reasons = [f"{name}: {why}" for one in found for name, why in one.items()]
        called = "" if row.recipe is None or found else "not called with this input"
        yield replace(row, reason="; ".join(filter(None, [row.reason, called, *dict.fromkeys(reasons)])))


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, torch.device | str):
        raise invalid_type("device", type(device), "a torch.device, its name, or None")
    try:
        return torch.device(device)
    except RuntimeError as error:
        needed = "a device of torch, such as 'cpu' or 'cuda:0', or a GPU by its name, such as 'h200' or 'sm_100'"
        raise invalid_value("device", repr(device), needed) from error


def _availability(recipe: Recipe | str, device: torch.device | str | None) -> Support:
    answer = _explain(as_recipe(recipe), device, None, "auto")
    return Support(answer.available, answer.accelerated, answer.rows[0].support.reason)


def is_fp8_available(device: torch.device | str | None = None) -> Support:
    """Support of per-tensor FP8 on `device`: it runs everywhere, on tensor cores where they take it.

    The answer unpacks into ``(available, reason)``; its truth value is `available`.
    """
    return _availability("fp8_current", device)


def is_mxfp8_available(device: torch.device | str | None = None) -> Support:
    """The same for MXFP8."""
    return _availability("mxfp8", device)


def is_fp8_block_scaling_available(device: torch.device | str | None = None) -> Support:
    """The same for FP8 with 1x128 and 128x128 blocks."""
    return _availability("fp8_block", device)


def is_nvfp4_available(device: torch.device | str | None = None) -> Support:
    """The same for NVFP4."""
    return _availability(NVFP4BlockScaling(False, False, False), device)


# Of the rows that one operand's kernels of GPUs like best, by its scales; any size runs.
_ALIGN_SIZES = {"FP32": 16, "E8M0": 32, "E4M3": 128}


def get_align_size_for_quantization(recipe: Recipe | str) -> int:
    """The multiple of sizes that suits the GEMMs of `recipe` best: 16 for FP8, 32 for MX formats, 128 for NVFP4.

    For code that pads the groups of its tokens, as TransformerEngine's needs it. It informs about speed and is never a
    requirement: here any size runs, and padding never shows in values. Raises InvalidTypeError and InvalidValueError
    for what is no recipe.
    """
    casts = as_recipe(recipe).casts.values()
    return max((_ALIGN_SIZES.get(cast.format.scale.name, 1) for cast in casts if cast is not None), default=1)
