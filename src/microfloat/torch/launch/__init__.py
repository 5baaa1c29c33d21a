"""What runs on a GPU: passes bound to launches, GEMMs and their choice, casts fused with what produces their input."""
