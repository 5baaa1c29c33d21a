"""On a GPU only: CUDA graphs, streams, threads."""

import threading

import torch

from microfloat.recipes import Float8CurrentScaling
from tests import processes
from tests.torch.linear.scheduled.setting import assert_same, inputs, make, recipe_of


def graphs_and_streams(device):  # features G4
    """GPU only: a captured forward + backward replays to the same bits; a side stream gives the same."""
    for name in ("fp8_current", "delayed", "fp8_row", "fp8_block", "mxfp8", "mxfp8_exact"):
        recipe = recipe_of(name)
        x, dy = inputs(device)
        layer, twin = make(recipe, device), make(recipe, device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                x.grad = layer.weight.grad = None
                y = layer(x)
                y.backward(dy)
        torch.cuda.current_stream().wait_stream(side)
        del y  # its graph of another stream must not live on
        graph = torch.cuda.CUDAGraph()
        x.grad = layer.weight.grad = None
        with torch.cuda.graph(graph):
            y = layer(x)
            y.backward(dy)
        twin_x = x.detach().clone().requires_grad_()
        for _ in range(3):
            twin_x.grad = twin.weight.grad = None
            want = twin(twin_x)
            want.backward(dy)
        for step in range(3):
            fresh = torch.randn_like(x)
            with torch.no_grad():
                x.copy_(fresh)
                twin_x.copy_(fresh)
            graph.replay()
            twin_x.grad = twin.weight.grad = None
            want = twin(twin_x)
            want.backward(dy)
            torch.cuda.synchronize()
            what = (type(recipe).__name__, step)
            assert_same((want, twin_x.grad, twin.weight.grad), (y, x.grad, layer.weight.grad), what)


def threads(device):
    """GPU only: two threads with layers of one shape, hence one schedule, on one stream and on two."""
    recipe = Float8CurrentScaling()
    pairs = [(make(recipe, device), *inputs(device, seed=seed)) for seed in range(2)]
    expected = []
    for layer, x, dy in pairs:
        y = layer(x)
        y.backward(dy)
        expected.append((y.detach(), x.grad, layer.weight.grad))
        del y  # its graph belongs to this stream
    torch.cuda.synchronize()
    faults = []

    def work(layer, x, dy, want, stream):
        with torch.cuda.stream(stream):
            for _ in range(50):
                twin = x.detach().clone().requires_grad_()
                y = layer(twin)
                dx, dw = torch.autograd.grad(y, (twin, layer.weight), dy)
                stream.synchronize()
                if not all(map(torch.equal, (y, dx, dw), want)):
                    faults.append(layer)

    for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream() for _ in range(2)]):
        runs = [threading.Thread(target=work, args=(*pairs[i], expected[i], streams[i]), daemon=True) for i in range(2)]
        # Each thread's step may run on another stream than the latest before it: torch would remark on that.
        warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda enabled: None)
        warns(False)
        for thread in runs:
            thread.start()
        for thread in runs:
            processes.join(thread)
        warns(True)
    assert not faults
