"""Doors for other packages; each module needs the package of its name, and is loaded only when it is imported."""

from importlib.util import find_spec

from microfloat.errors import missing_package

if find_spec("torch") is None:
    raise missing_package("torch", "microfloat.integrations", "torch")
