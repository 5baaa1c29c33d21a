"""A process in which some packages are not installed: they cannot be found, imported, or asked for their version."""

import sys
from importlib.machinery import PathFinder


def hide(*packages):
    """Make packages, by the names under which they are imported, absent from this process; none is imported yet."""
    assert not {name.split(".")[0] for name in sys.modules}.intersection(packages)

    def is_hidden(name):
        return name.split(".")[0].lower().replace("-", "_") in packages

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            return None if is_hidden(fullname) else PathFinder.find_spec(fullname, path, target)

        @classmethod
        def find_distributions(cls, *arguments, **options):
            for found in PathFinder.find_distributions(*arguments, **options):
                if not is_hidden(found.metadata["Name"]):
                    yield found

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
