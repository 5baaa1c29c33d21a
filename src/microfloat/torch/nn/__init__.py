"""Modules: nn layers whose GEMMs run under a recipe, and compositions of them; all are names of `microfloat.torch`.

`functional` holds the functions that fuse norms and activations with Linears; `microfloat.torch.fused` is its public
name. `fused` holds the modules on top of them. `merged` makes several Linears on one input one product.
"""
