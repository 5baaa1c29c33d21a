"""The command line: python -m microfloat."""

import sys

from microfloat.cli import main

if __name__ == "__main__":
    sys.exit(main())
