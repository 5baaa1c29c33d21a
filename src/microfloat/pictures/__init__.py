"""Pictures of formats, checkpoints, errors and speed: data in, a matplotlib Figure out, one style for all.

The functions take arrays and names, and nothing of a framework. matplotlib is imported when a picture is made (extra
`plot`), and without pyplot, so no window system is needed and no global state changes.
"""

from microfloat.pictures.comparison import compare
from microfloat.pictures.formats import number_lines, relative_gaps
from microfloat.pictures.speed import roofline
from microfloat.pictures.style import new_figure, save

__all__ = ["compare", "new_figure", "number_lines", "relative_gaps", "roofline", "save"]
