"""`GroupedLinear` and `grouped_matmul`: the Linears of many experts, each over its own rows of one input."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.types import Device

from microfloat.arguments import check_bool, check_int
from microfloat.errors import MicrofloatError
from microfloat.recipes import Recipe
from microfloat.torch import backends
from microfloat.torch._typing import InitMethod, WithBias
from microfloat.torch.compile.linear import compiled_grouped
from microfloat.torch.context import HIGH_PRECISION, ambient, recipe_of, token_of_high_precision
from microfloat.torch.linear.function import backend_name
from microfloat.torch.linear.grouped import GroupedSchedule, find_grouped, grouped_plain, groups_of, run_grouped
from microfloat.torch.nn.linear import UNPINNED, RecipeLayer, check_first_microbatch, pinned_to, recipe_of_call
from microfloat.torch.nn.options import names_moved
from microfloat.torch.nn.quantized_init import draw_parameters, quantize_parameter
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.tensor.checks import check_grouped, with_path


class GroupedLinear(RecipeLayer):
    """``y[rows of g] = x[rows of g] @ weight[g].T + bias[g]`` for consecutive groups of rows, under a recipe.

    weight [G, N, K], bias [G, N] or None, each drawn as nn.Linear draws them. ``layer(x, group_sizes)``: x [T, K], the
    rows of group 0 first; `group_sizes` int32 or int64 [G], or a list of ints; 0 is a size. The recipe is found as
    `Linear` finds it; without one the layer multiplies in high precision. Every group and every expert is quantized
    alone, so that results are those of a loop of Linears; delayed scaling has one state for all experts, whose amax is
    the largest of theirs. `return_bias` and `init_method`, which draws each expert's [N, K], are those of `Linear`.

    Sizes on the CPU must add up to T. Those on a GPU are not read where kernels serve the recipe (``print(schedule)``);
    rows behind the last group then give zeros. Under `quantized_model_init` every expert is stored as codes and scales
    of its own. Raises InvalidTypeError and InvalidValueError for operands and sizes that do not fit. Source:
    docs/numerics.md, 5.3 and 6.
    """

    @names_moved
    def __init__(
        self, num_groups: int, in_features: int, out_features: int, bias: bool = False, *, device: Device = None,
        dtype: torch.dtype | None = None, recipe: Recipe | str | None = None, backend: str = "auto",
        fuse_wgrad_accumulation: bool = False, return_bias: bool = False,
        init_method: InitMethod | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._set_options(fuse_wgrad_accumulation, return_bias, init_method)
        check_bool("bias", bias)
        self.num_groups = check_int("num_groups", num_groups, 1, 2**31 - 1)
        self.in_features = check_int("in_features", in_features, 0, 2**31 - 1)
        self.out_features = check_int("out_features", out_features, 0, 2**31 - 1)
        options = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty((num_groups, out_features, in_features), **options))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty((num_groups, out_features), **options)) if bias else None
        )
        layer_state.state_of(self)  # gives it a number
        self.backend = backends.check_name(backend)
        self.reset_parameters()
        quantize_parameter(self)
        if recipe is not None:
            self.pin(recipe)

    def reset_parameters(self) -> None:
        """Draw fresh parameters, those of each group as Linear does, and start delayed scaling afresh."""
        if self.init_method is not None:
            draw_parameters(self, self.init_method)
        else:
            bound = self.in_features**-0.5 if self.in_features else 0.0
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        scaling.reset_scaling(self)

    def forward(
        self, input: torch.Tensor, group_sizes: torch.Tensor | Sequence[int], is_first_microbatch: bool | None = None
    ) -> WithBias:
        """y [T, N] in the compute dtype, or with `return_bias` (y, bias). `is_first_microbatch`: as in `Linear`."""
        if torch.compiler.is_compiling():
            arguments = input, self.weight, self.added_bias, group_sizes, self._pin_token, self.backend
            return self._with_bias(compiled_grouped(self, *arguments))
        x, state = input, ambient()
        recipe = self._resolve(state)
        try:
            self._check_input(x)
            groups = groups_of(group_sizes, x, self.num_groups)
            check_first_microbatch(is_first_microbatch)
            if recipe is None:
                self._note_plain(state)
                if state is not None and state.calibrating:
                    self._calibrate(x, state)
                if not self.fuse_wgrad_accumulation:
                    return self._with_bias(grouped_plain(x, self.weight, self.added_bias, groups))
                recipe, state = HIGH_PRECISION, None
            elif self._pinned is UNPINNED:
                self.__dict__["_followed"] = True
            name = backend_name(self, state)
            arguments = x, self.weight, self.added_bias, groups, recipe, name, state, is_first_microbatch
            return self._with_bias(run_grouped(self, *arguments))
        except MicrofloatError as error:
            raise self._with_path(error) from None

    def schedule(self, x: torch.Tensor) -> GroupedSchedule:
        """The schedule of a call with `x` here and now, whatever the sizes of its groups; ``print`` shows it."""
        self._check_input(x)
        recipe, weight = self.effective_recipe(), self.weight
        options = HIGH_PRECISION if recipe is None else recipe, backend_name(self, ambient())
        return find_grouped(x, weight, self.added_bias, *options, x.requires_grad, weight.requires_grad)

    def _check_input(self, x: torch.Tensor) -> None:
        check_grouped(x, self.weight, self.bias)

    def _with_path(self, error: MicrofloatError) -> MicrofloatError:
        return with_path(error, self._path or f"GroupedLinear({self.extra_repr()})")

    def extra_repr(self) -> str:
        """The sizes, and the pinned recipe."""
        sizes = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}{super().extra_repr()}"


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
    if torch.compiler.is_compiling():
        pin_token = None if recipe is None else pinned_to(recipe)[1]
        return compiled_grouped(None, x_TK, w_GNK, None, group_sizes, pin_token, backend)
    backends.check_name(backend)
    token, _, asked = recipe_of_call(recipe, "grouped_matmul")
    check_grouped(x_TK, w_GNK, None)
    groups = groups_of(group_sizes, x_TK, w_GNK.shape[0])
    if token == token_of_high_precision():
        return grouped_plain(x_TK, w_GNK, None, groups)
    name = asked if backend == "auto" else backend
    return run_grouped(None, x_TK, w_GNK, None, groups, recipe_of(token), name, None)
