"""Which recipes give a row the same bits whatever stands in the other rows of the call, in docs/recipes.md: tried.

python tools/neighbours_table.py --write   # rewrite the block in the page
"""

import sys

import torch
from marked_block import ROOT, command, table
from torch import Tensor, nn

import microfloat.torch as mf
from microfloat.recipes import RECIPES, Recipe

PAGE, BLOCK = ROOT / "docs" / "recipes.md", "rows and neighbours"
SERVING = (
    ("WeightOnly(...)", mf.WeightOnly("nvfp4")),
    *(
        (f'WeightActivation("{name}")', mf.WeightActivation(name))
        for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4_row")
    ),
    ('WeightActivation("nvfp4", activation="fp8_row")', mf.WeightActivation("nvfp4", activation="fp8_row")),
    *(
        (f'WeightActivation("{name}", scales="static")', mf.WeightActivation(name, scales="static"))
        for name in ("fp8_tensor", "nvfp4")
    ),
)
ROWS, WIDTH, OWN = 20, 96, 7  # rows of a call, features, the row that is looked at


def outcomes(recipe: Recipe, rows: int = ROWS, width: int = WIDTH) -> tuple[bool, bool | None]:
    """True where y, and dx, of a row keep their bits whatever the other rows of x and dy hold; None: a plain dx."""
    torch.manual_seed(0)
    layer = nn.Linear(width, width, bias=False)
    x_MK, dy_MN = torch.randn(rows, width), torch.randn(rows, width)
    calls = [call(layer, recipe, x_MK, dy_MN)]
    others = torch.arange(rows) != OWN % rows
    for factor in (1e3, 0.0):  # much larger than the row, and nothing
        x_MK[others] *= factor
        dy_MN[others] *= factor
        calls.append(call(layer, recipe, x_MK, dy_MN))
    kept = [all(torch.equal(one, parts[0]) for one in parts) for parts in zip(*calls, strict=True)]
    return kept[0], None if recipe.dgrad.lhs is None else kept[1]


def call(layer: nn.Linear, recipe: Recipe, x_MK: Tensor, dy_MN: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx of the row."""
    model = nn.Sequential(nn.Linear(layer.in_features, layer.out_features, bias=False))
    model.load_state_dict({"0.weight": layer.weight})
    x_MK = x_MK.clone().requires_grad_()
    if recipe.is_static or isinstance(recipe, mf.WeightOnly | mf.WeightActivation):
        with mf.calibrate(model):
            model(torch.ones(1, layer.in_features))
        mf.quantize_(model, recipe)
    else:
        mf.convert(model, recipe)
    torch.manual_seed(1)  # of stochastic rounding
    with mf.autocast(recipe=recipe):  # scales of earlier steps: there are none, and both calls have the same
        y_MN = model(x_MK)
    (dx_MK,) = torch.autograd.grad(y_MN, x_MK, dy_MN)
    own = OWN % len(x_MK)
    return y_MN[own].detach().clone(), dx_MK[own].clone()


def neighbours_table() -> str:
    """A row for each recipe for training, then for each config for serving."""
    words = {True: "yes", False: "no", None: "-"}
    found = [(f'"{name}"', recipe()) for name, recipe in RECIPES.items()]
    lines = [[f"`{name}`", *(words[kept] for kept in outcomes(recipe))] for name, recipe in (*found, *SERVING)]
    return table(["recipe or config", "y", "dx"], lines)


BLOCKS = ((PAGE, BLOCK, neighbours_table),)

if __name__ == "__main__":
    sys.exit(command("The table of rows and their neighbours.", BLOCKS))
