"""Models for serving: quantized in place, loaded and saved."""
