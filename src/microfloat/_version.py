"""The one place that states the version; the build reads it from here, so it is known without installed metadata."""

__version__ = "0.1.0"
