"""How pytest-xdist hands out groups of tests when one of its processes has ended before its time."""

from xdist.scheduler import LoadGroupScheduling


class Groups(LoadGroupScheduling):
    """`--dist loadgroup` whose run ends when a process was replaced.

    pytest-xdist 3.8 gives a process one group at a time and comes back when that has run a test. After a crash it may
    give it a group of which every test has run already, or of which a single one is left (a process starts a test when
    it knows the next): either waits for ever.
    """

    def _reschedule(self, node) -> None:
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            super()._reschedule(node)  # one group more, or the end when there is none
