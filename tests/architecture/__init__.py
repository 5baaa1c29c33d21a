"""The house's rules as tests: layers, import weight, environment reads, public API, sizes, packaging, hygiene."""
