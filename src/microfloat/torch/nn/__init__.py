"""Modules: nn layers whose GEMMs run under a recipe, and compositions of them; all are names of `microfloat.torch`."""
