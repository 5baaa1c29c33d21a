"""A recipe in Equinox: an op of `microfloat.jax.dot_general` is a static field, and `tree_at` swaps layers.

Needs equinox, which microfloat does not depend on: ``pip install equinox && python examples/equinox_linear.py``.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import microfloat.jax as mj
from microfloat.recipes import MXFP8BlockScaling


class Linear(eqx.nn.Linear):
    """`equinox.nn.Linear` whose product runs under a recipe, forward and backward; takes a batch [..., in_features]."""

    dot_general: mj.DotGeneral = eqx.field(static=True)

    def __init__(self, layer: eqx.nn.Linear, dot_general: mj.DotGeneral):
        self.weight, self.bias, self.use_bias = layer.weight, layer.bias, layer.use_bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dot_general = dot_general

    def __call__(self, x, *, key=None):
        y = self.dot_general(x, self.weight, (((x.ndim - 1,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias


def main():
    """Swap every layer of an MLP and take one gradient."""
    model = eqx.nn.MLP(32, 8, width_size=64, depth=2, key=jax.random.key(0))
    op = mj.dot_general(MXFP8BlockScaling())
    model = eqx.tree_at(lambda m: m.layers, model, tuple(Linear(layer, op) for layer in model.layers))
    x = jax.random.normal(jax.random.key(1), (16, 32))
    loss, gradient = eqx.filter_value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
    print(f"loss {loss:.4f}, |dw| of the first layer {jnp.linalg.norm(gradient.layers[0].weight):.4f}")


if __name__ == "__main__":
    main()
