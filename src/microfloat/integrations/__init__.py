"""Doors for other packages; each module needs the package of its name, and is loaded only when it is imported."""
