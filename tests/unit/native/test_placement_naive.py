"""The suite against the reference: what it expects is possible, and it is not vacuous."""

from naive import NaivePlacement
from placement_suite import PlacementSuite


class TestNaive(PlacementSuite):
    open = staticmethod(NaivePlacement)
