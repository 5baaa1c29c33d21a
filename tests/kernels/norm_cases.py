"""Norms of rows longer than are measured at once, of whole tiles, and by clusters: statistics and what follows."""

import contextlib
from unittest import mock

import torch

from microfloat.kernels.device import produce
from microfloat.passes import producers
from microfloat.recipes import Cast, Delayed
from microfloat.torch import program, reference
from microfloat.torch.producers import Norm
from microfloat.torch.program import PlacedKernel, PlacingRefused
from tests.kernels import calls
from tests.kernels.cases import check_operand


def matrix_of(rows, columns, device):
    """Normal values on a slope, which means of parts of a row do not share."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    return (x + torch.linspace(-2, 5, columns)).to(torch.bfloat16).to(device)


def values_of(x, weight, normed):
    """Values of a norm's codes, by the statistics that came with them."""
    shift = 0.0 if normed.mean is None else normed.mean[:, None]
    bias = 0.0 if normed.mean is None else weight.float()
    return ((x.float() - shift) * normed.inverse[:, None] * weight.float() + bias).to(x.dtype)


def clusters_of(index, largest):
    """A context in which a device has clusters of so many programs, or 0; None: of as many as it has."""
    if largest is None:
        return contextlib.nullcontext()
    return mock.patch.dict(program.DEVICES, {index: program.device_of(index)._replace(largest_cluster=largest)})


def one(x, weight, name, kind, at_once, cluster):
    """A norm of rows of which `at_once` columns are measured at once, by clusters as in `clusters_of`."""
    delayed = name == "fp8_tensor"
    cast = Cast(name, scaling=Delayed()) if delayed else Cast(name)
    known, live = {}, torch.zeros(2, device=x.device)
    if delayed:
        known = {"scale_enc": torch.tensor(3.0, device=x.device)}
    recorded = {"record": live} if delayed else {}
    by_clusters = producers.TILES_BY_CLUSTERS
    if program.INTERPRETED:
        by_clusters = by_clusters | {("scaled", produce.LAYER_NORM.value): ("norm_scaled_long",)}  # until it has run

    program.forget_programs()
    with (
        mock.patch.multiple(producers, _MOST_COLUMNS=at_once, TILES_BY_CLUSTERS=by_clusters),
        clusters_of(x.get_device(), cluster),
    ):
        (both,), normed = calls.codes(Norm(x, weight, weight, 1e-5, kind), cast, cast, **known, **recorded)
    values = values_of(x, weight, normed)
    wanted = reference.quantize_both(values, cast, cast, **known)
    for got, want in zip(both, wanted, strict=True):
        check_operand(got, want, f"{kind} norm of {tuple(x.shape)}, {cluster} in a cluster")
    if delayed:
        assert float(live[0]) == float(values.float().abs().max())
    values = x.double()
    if kind == "layer":
        values = values - values.mean(1, keepdim=True)
        assert float((normed.mean - x.double().mean(1)).abs().max()) < 2.0**-18
    want = 1 / (values.square().mean(1) + 1e-5).sqrt()
    assert float(((normed.inverse - want) / want).abs().max()) < 2.0**-20


# Rows and columns: in the interpreter, whose clusters are of one program; clusters of 2, 4, 8 or 16 with pieces missing
# and not, short rows and long ones.
INTERPRETED = {
    ("rms", "mxfp8"): (64, 128), ("layer", "mxfp8"): (32, 256), ("rms", "fp8_tensor"): (64, 384),
    ("layer", "fp8_tensor"): (32, 384),
}  # fmt: skip
COMPILED = ((64, 1024), (64, 1280), (64, 14336))


def refused(device):
    """Two launches give the bytes on a GPU that starts no clusters, and nobody asks again."""
    x = matrix_of(64, 128, device)
    asked, index = mock.Mock(side_effect=PlacingRefused), x.get_device()
    with mock.patch.object(PlacedKernel, "prepared", asked), clusters_of(index, 1):
        for largest in (1, 0):
            assert program.device_of(index).largest_cluster == largest
            one(x, torch.linspace(0.5, 2, 128).to(x), "mxfp8", "rms", 8192, None)
        assert asked.call_count == 1


def check(device, kind, name):
    """Statistics are those of float64 but for the last bits; codes are those of the values that these give."""
    index = torch.zeros(1, device=device).get_device()
    clusters = program.device_of(index).largest_cluster
    shapes = COMPILED if clusters > 1 else (INTERPRETED[kind, name],)
    cases = [(rows, columns, 8192, clusters) for rows, columns in shapes]
    if name == "mxfp8":  # rows that no cluster holds, and squares of values that were measured before
        cases += [(70, 300, 256, clusters)] + ([(128, 64, 8192, 0)] if kind == "rms" else [])
    for rows, columns, at_once, cluster in cases:
        x = matrix_of(rows, columns, device)
        one(x, torch.linspace(0.5, 2, columns).to(x), name, kind, at_once, cluster)
    if (kind, name) == ("rms", "mxfp8"):
        refused(device)
    assert program.device_of(index).largest_cluster == clusters  # nobody has refused one
