"""Shared by both GPT examples: options, text, the loop over runs, the report; and a model for each framework."""

from importlib.util import find_spec

from microfloat.errors import missing_package

for _package in ("matplotlib", "rich", "safetensors"):
    if find_spec(_package) is None:
        raise missing_package(_package, "This example", "examples")
