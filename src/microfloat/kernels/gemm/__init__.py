"""GEMMs: FP8 blocks on Hopper, few rows by stored codes; epilogues and scale layouts of the vendors' GEMMs."""
