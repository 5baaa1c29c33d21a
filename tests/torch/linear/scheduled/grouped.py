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
from tests.torch.linear.scheduled.setting import block_gemms, native_on, recipe_of

SIZES = (130, 0, 128, 37, 261)
BEHIND = 20


@contextlib.contextmanager
def _products(device):
    """On the CPU, which has no Gluon: the kernel's product of all groups, by its plan, in float32."""
    if device == "cuda":
        yield
        return

    def multiply(a, a_scale, b, b_scale, dtype, tiles, work):
        a, b, c, n = a.float(), b.t().float(), torch.full(work.shape, 7.0), work.shape[1]
        if work.scales is None:
            a, b = a * a_scale.repeat_interleave(128, 1), b * _spread(b_scale, b.shape, tiles)

        def scaled(sums, first, g):
            """Sums of a group times scales of rows from `first` on and of columns, or of its matrices."""
            if work.scales is None:
                return sums
            if work.scales == 3:
                return sums * (a_scale[g] if a_scale.dim() else a_scale) * (b_scale[g] if b_scale.dim() else b_scale)
            return sums * a_scale.flatten()[first : first + len(sums), None] * b_scale.flatten()[g * n : (g + 1) * n]

        if work.kind == 3:
            begins = work.plan[: work.number + 1].tolist()
            c.zero_()
            for g in range(work.number):
                columns, first = slice(*begins[g : g + 2]), g * len(a)
                if columns.start == columns.stop:
                    continue  # no scales either
                c[first : first + len(a)] = scaled(a[:, columns] @ b[:, columns].t(), first, g)
            return c.to(dtype)
        for a_row, rows, c_row, g in work.plan[1:][: 4 * int(work.plan[0])].view(-1, 4).tolist():
            k = a.shape[1]
            right = b[g * n : (g + 1) * n] if work.kind == 1 else b[:, g * k : (g + 1) * k]
            c[c_row : c_row + rows] = scaled(a[a_row : a_row + rows] @ right.t(), a_row, g) if g >= 0 else 0
        return c.to(dtype)

    with (
        mock.patch.object(own_gemm, "own_gemm_is_there", return_value=True),
        mock.patch.object(own_gemm, "own_block_matmul", multiply),
    ):
        yield


def _spread(b_scale, shape, tiles):
    """Scales of 128 columns or of 128x128 for every element of B."""
    if not tiles:
        return b_scale.repeat_interleave(128, 1)
    return b_scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


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
        len(every), 256, width, device=device, dtype=dtype, recipe=recipe_of(name), backend="native"
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
        scale_enc = torch.tensor(3.0, device=device) if recipe_of(name).is_delayed else None
        inputs, weight = CastInputs(scale_enc=scale_enc, groups=groups), layer.weight.detach()
        full = torch.tensor([size > 0 for size in every])  # other groups of x have scales that nobody writes
        wanted = layer.schedule(x.requires_grad_())
        _, saved = wanted.forward(x.detach(), weight, None, inputs, inputs)
        for first, again in zip(saved, wanted.saved_anew(x.detach(), weight, inputs, inputs), strict=True):
            if first is not None and first.shape[:1] == (len(every) + 1,):
                first, again = first[:-1][full], again[:-1][full]
            assert first is again is None or torch.equal(first.float(), again.float())
        x = x.detach()
        apart, begin = [], 0
        for group, size in enumerate(every):
            one = mf.Linear(
                256, width, bias=False, device=device, dtype=dtype, recipe=recipe_of(name), backend="native"
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

        scale_enc = torch.tensor(3.0, device=device) if recipe.is_delayed else None

        def cast(matrix, in_groups=0, groups=None):
            step = schedule.CastStep(backend, matrix, entries, 0, in_groups)
            inputs = CastInputs(scale_enc=scale_enc, folded=counts, tiles=counts, groups=groups)
            return step(matrix, stream, program.scratch(x.get_device()), inputs).flat()

        row, row_scale, _, column, column_scale, _ = cast(x, len(SIZES), plan.whole)
        begins = plan.padded_begins[: len(SIZES) + 1].tolist()
        assert begins == [0, 256, 256, 384, 512, 896]  # tiles of 128
        begin = 0
        for g, (size, first, last) in enumerate(zip(SIZES, begins, begins[1:], strict=False)):
            own, begin = x[begin : begin + size].clone(), begin + size
            if not size:
                continue
            want_row, want_row_scale, _, want_column, want_column_scale, _ = cast(own)
            assert torch.equal(row[first : first + size].view(torch.uint8), want_row.view(torch.uint8))
            codes, wanted = column[first:last].view(torch.uint8), want_column.view(torch.uint8)  # turned
            assert torch.equal(codes[:size], wanted)
            assert not codes[size:].any()
            if name in ("delayed", "fp8_current"):
                of_group = row_scale if name == "delayed" else row_scale[g]
                assert of_group == want_row_scale == want_column_scale
                assert torch.equal(column_scale, row_scale)
                continue
            assert torch.equal(row_scale[first : first + size], want_row_scale)
            if name == "fp8_row":
                assert torch.equal(column_scale[g], want_column_scale.flatten())
                continue
            blocks = slice(first // 128, last // 128)
            scales = column_scale[blocks] if name == "mxfp8" else column_scale[:, blocks]
            wanted = want_column_scale[: len(scales)] if name == "mxfp8" else want_column_scale
            assert torch.equal(scales, wanted)


def groups_of_nvfp4(device):
    """Features R26: amaxes, random counters and transforms are those of each group, all of them in one launch."""
    generator, recipe = torch.Generator().manual_seed(2), recipe_of("nvfp4_folded")
    x = torch.randn(sum(SIZES) + BEHIND, 256, generator=generator)
    x *= torch.exp2(torch.arange(len(x)) // 50)[:, None]  # amaxes of their own
    x, ends = x.bfloat16().to(device), torch.tensor(SIZES, device=device).cumsum(0, dtype=torch.int32)
    seed = torch.tensor([5, 6], device=device)
    with native_on(device):
        backend = backends.choose("native", x.device)
        routes = routes_of(recipe, backend.chip_of(x.device))
        plan = program.plan_groups(ends, len(x), 192)
        begins = plan.padded_begins[: len(SIZES) + 1].tolist()
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
        for tensor in ("x", "dy"):
            entries = entries_of(recipe, routes, tensor, True, True)

            def cast(matrix, group, in_groups=0, groups=None, entries=entries):
                step, counts = schedule.CastStep(backend, matrix, entries, group, in_groups), torch.zeros(2).long()
                counts = counts.to(device)
                inputs = CastInputs(seed=seed, folded=counts, tiles=counts, groups=groups)
                made = step(matrix, stream, program.scratch(x.get_device()), inputs)
                return *made.row[:2], *made.column[:2], counts

            row, row_scale, column, column_scale, counts = cast(x, 0, len(SIZES), plan.whole)
            column, turned = (column.t(), True) if tensor == "x" else (column, False)
            begin, total = 0, 0
            for g, (size, first, last) in enumerate(zip(SIZES, begins, begins[1:], strict=False)):
                own, begin = x[begin : begin + size].clone(), begin + size
                if not size:
                    continue
                one_row, one_row_scale, one_column, one_column_scale, changed = cast(own, g)
                total = total + changed
                assert torch.equal(row[first : first + size].float(), one_row.float())
                assert torch.equal(row_scale[first : first + size], one_row_scale)
                one_column = one_column.t() if turned else one_column
                length, blocks = one_column.shape[1], slice(first // 128, last // 128)
                assert torch.equal(column[:, first : first + length].float(), one_column.float())
                assert not column[:, first + length : last].float().any()
                scales = column_scale[blocks] if turned else column_scale[:, blocks]
                assert torch.equal(scales, one_column_scale[: len(scales)])
            assert torch.equal(counts, total)


def groups_of_nvfp4_at_once(device):
    """Features R26: y, dx and dw of one launch for all groups are those of one group after the other, at one seed."""
    generator = torch.Generator().manual_seed(0)
    every, length, width = (SIZES, 256, 384) if device == "cuda" else ((40, 0, 20), 128, 128)
    x, dy = (torch.randn(sum(every), size, generator=generator).bfloat16().to(device) for size in (length, width))
    sizes, recipe = torch.tensor(every, device=device), recipe_of("nvfp4_folded")
    layer = mf.GroupedLinear(
        len(every), length, width, device=device, dtype=torch.bfloat16, recipe=recipe, backend="native"
    )
    with torch.no_grad():
        layer.weight *= torch.exp2(torch.arange(len(every), device=device))[:, None, None]
    made = []
    for apart in (False, True):
        asked = (
            mock.patch.object(grouped, "why_one_by_one", return_value="asked") if apart else contextlib.nullcontext()
        )
        with (
            native_on(device),
            _products(device),
            asked,
            block_gemms(device, []) if apart else contextlib.nullcontext(),
        ):
            assert layer.schedule(x).reason == ("asked" if apart else "")
            torch.manual_seed(3)
            made.append(_results(layer, x, dy, sizes))
    for got, wanted in zip(*made, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-9 * float(wanted.abs().max()))


def _of_one(device, layer, x, dy):
    if not len(x):
        return x.new_zeros(0, layer.out_features), x, torch.zeros_like(layer.weight)
    x = x.detach().clone().requires_grad_()
    with block_gemms(device, []):
        y = layer(x)
        y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad
