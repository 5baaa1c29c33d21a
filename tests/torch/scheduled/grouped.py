"""Groups of rows: all in one launch, to the bits of one schedule for each group."""

import contextlib
from unittest import mock

import torch

import microfloat.torch as mf
from microfloat.recipes import RECIPES
from microfloat.torch import gemms, grouped
from microfloat.torch.nn import grouped_linear
from tests.torch.scheduled.setting import block_gemms, native_on

SIZES = (130, 0, 128, 37, 261)
BEHIND = 20


@contextlib.contextmanager
def _products(device):
    """On the CPU, which has no Gluon: the kernel's product of all groups, by its plan, in float32."""
    if device == "cuda":
        yield
        return

    def multiply(a, a_scale, b, b_scale, dtype, tiles, work):
        side = 128
        a, b = a.float() * a_scale.repeat_interleave(side, 1), b.t().float()
        if tiles:
            b_scale = b_scale.t().repeat_interleave(side, 0).repeat_interleave(side, 1)[: len(b), : b.shape[1]]
        else:
            b_scale = b_scale.repeat_interleave(side, 1)
        b, c, n = b * b_scale, torch.full(work.shape, 7.0), work.shape[1]
        if work.kind == 3:
            begins = work.plan[: work.number + 1].tolist()
            for g in range(work.number):
                columns = slice(*begins[g : g + 2])
                c[g * len(a) : (g + 1) * len(a)] = a[:, columns] @ b[:, columns].t()
            return c.to(dtype)
        for a_row, rows, c_row, g in work.plan[1:][: 4 * int(work.plan[0])].view(-1, 4).tolist():
            k = a.shape[1]
            right = b[g * n : (g + 1) * n] if work.kind == 1 else b[:, g * k : (g + 1) * k]
            c[c_row : c_row + rows] = a[a_row : a_row + rows] @ right.t() if g >= 0 else 0
        return c.to(dtype)

    with (
        mock.patch.object(gemms, "own_gemm_is_there", return_value=True),
        mock.patch.object(gemms, "own_block_matmul", multiply),
    ):
        yield


def _results(layer, x, dy, sizes):
    layer.weight.grad = None
    x = x.detach().requires_grad_()
    y = layer(x, sizes)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def all_groups_at_once(device, name, weight_dtype="bfloat16"):
    """features M7, Q15: ragged and empty groups, rows behind the last one, no size read by the host."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(SIZES) + BEHIND
    x, dy = (torch.randn(rows, width, generator=generator).bfloat16().to(device) for width in (256, 384))
    x[-BEHIND:] = float("nan")
    dtype = getattr(torch, weight_dtype)
    layer = mf.GroupedLinear(len(SIZES), 256, 384, device=device, dtype=dtype, recipe=RECIPES[name](), backend="native")
    sizes = torch.tensor(SIZES, device=device)
    ends = sizes.cumsum(0, dtype=torch.int32)
    with native_on(device), _products(device):
        made = layer.schedule(x)
        assert made.reason == ""
        assert "FP8 GEMM of all groups" in str(made)
        groups = grouped.Groups(ends, rows)
        with mock.patch.object(grouped_linear, "groups_of", return_value=groups):
            together = _results(layer, x, dy, sizes)
        assert groups._sizes is None
        apart, begin = [], 0
        for group, size in enumerate(SIZES):
            one = mf.Linear(256, 384, bias=False, device=device, dtype=dtype, recipe=RECIPES[name](), backend="native")
            with torch.no_grad():
                one.weight.copy_(layer.weight[group])
            own, begin = slice(begin, begin + size), begin + size
            apart.append((own, _of_one(device, one, x[own], dy[own])))
    y, dx, dw = together
    assert not y[begin:].any()
    assert not dx[begin:].any()
    for group, (own, (own_y, own_dx, own_dw)) in enumerate(apart):
        # Codes are the same bytes; sums of products differ by their order alone.
        for got, wanted in ((y[own], own_y), (dx[own], own_dx), (dw[group], own_dw)):
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-9 * largest)


def _of_one(device, layer, x, dy):
    if not len(x):
        return x.new_zeros(0, 384), x, torch.zeros_like(layer.weight)
    x = x.detach().clone().requires_grad_()
    with block_gemms(device, []):
        y = layer(x)
        y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad
