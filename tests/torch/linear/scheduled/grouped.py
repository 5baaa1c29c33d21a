"""Groups of rows: all in one launch, to the bits of one schedule for each group."""

import contextlib
from unittest import mock

import torch

import microfloat.torch as mf
from microfloat.passes import CastInputs
from microfloat.recipes import RECIPES
from microfloat.routes import entries_of, routes_of
from microfloat.torch import backends
from microfloat.torch.launch import block_gemm as own_gemm
from microfloat.torch.launch import program
from microfloat.torch.linear import grouped, schedule
from microfloat.torch.nn import grouped_linear
from tests.torch.linear.scheduled.setting import block_gemms, native_on

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
        mock.patch.object(own_gemm, "own_gemm_is_there", return_value=True),
        mock.patch.object(own_gemm, "own_block_matmul", multiply),
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
    every, width = (SIZES, 384) if device == "cuda" else (SIZES[:4], 128)
    rows = sum(every) + BEHIND
    x, dy = (torch.randn(rows, size, generator=generator).bfloat16().to(device) for size in (256, width))
    x[-BEHIND:] = float("nan")
    dtype = getattr(torch, weight_dtype)
    layer = mf.GroupedLinear(
        len(every), 256, width, device=device, dtype=dtype, recipe=RECIPES[name](), backend="native"
    )
    sizes = torch.tensor(every, device=device)
    ends = sizes.cumsum(0, dtype=torch.int32)
    with native_on(device), _products(device):
        made = layer.schedule(x)
        assert made.reason == ""
        assert "FP8 GEMM of all groups" in str(made)
        groups = grouped.Groups(ends, rows)
        with mock.patch.object(grouped_linear, "groups_of", return_value=groups):
            together = _results(layer, x, dy, sizes)
        assert groups._sizes is None
        # What compiled code casts again in backward is what forward saves.
        inputs, weight = CastInputs(groups=groups), layer.weight.detach()
        wanted = layer.schedule(x.requires_grad_())
        _, saved = wanted.forward(x.detach(), weight, None, inputs, inputs)
        for first, again in zip(saved, wanted.saved_anew(x.detach(), weight, inputs, inputs), strict=True):
            assert first is again is None or torch.equal(first.float(), again.float())
        x = x.detach()
        apart, begin = [], 0
        for group, size in enumerate(every):
            one = mf.Linear(
                256, width, bias=False, device=device, dtype=dtype, recipe=RECIPES[name](), backend="native"
            )
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


def every_group_is_cast_alone(device, name):
    """features Q15: codes and scales of padded groups are, byte for byte, those of each group's own cast."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES) + BEHIND, 256, generator=generator).bfloat16().to(device)
    ends = torch.tensor(SIZES, device=device).cumsum(0, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    recipe = RECIPES[name]()
    with native_on(device):
        backend = backends.choose("native", x.device)
        entries = entries_of(recipe, routes_of(recipe, backend.chip_of(x.device)), "x", True, True)
        plan = program.plan_groups(ends, len(x), 192)
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0

        def cast(matrix, in_groups=0, groups=None):
            step = schedule.CastStep(backend, matrix, entries, 0, in_groups)
            inputs = CastInputs(folded=counts, tiles=counts, groups=groups)
            return step(matrix, stream, program.scratch(x.get_device()), inputs).flat()

        row, row_scale, _, column, column_scale, _ = cast(x, len(SIZES), plan.whole)
        begins = plan.padded_begins[: len(SIZES) + 1].tolist()
        assert begins == [0, 256, 256, 384, 512, 896]  # tiles of 128
        begin = 0
        for size, first, last in zip(SIZES, begins, begins[1:], strict=False):
            own, begin = x[begin : begin + size].clone(), begin + size
            if not size:
                continue
            want_row, want_row_scale, _, want_column, want_column_scale, _ = cast(own)
            assert torch.equal(row[first : first + size].view(torch.uint8), want_row.view(torch.uint8))
            assert torch.equal(row_scale[first : first + size], want_row_scale)
            codes, wanted = column[first:last].view(torch.uint8), want_column.view(torch.uint8)  # turned
            assert torch.equal(codes[:size], wanted)
            assert not codes[size:].any()
            blocks = slice(first // 128, last // 128)
            scales = column_scale[blocks] if name == "mxfp8" else column_scale[:, blocks]
            wanted = want_column_scale[: len(scales)] if name == "mxfp8" else want_column_scale
            assert torch.equal(scales, wanted)


def _of_one(device, layer, x, dy):
    if not len(x):
        return x.new_zeros(0, layer.out_features), x, torch.zeros_like(layer.weight)
    x = x.detach().clone().requires_grad_()
    with block_gemms(device, []):
        y = layer(x)
        y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad
