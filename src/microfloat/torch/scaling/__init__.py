"""Delayed scaling: amax histories and scales, the regions at whose ends they update, and amaxes over ranks."""
