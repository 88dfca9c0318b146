"""The suite against the reference: what it expects is possible, and it is not vacuous."""

from tests.unit.native.naive import NaivePlacement
from tests.unit.native.placement_suite import PlacementSuite


class TestNaive(PlacementSuite):
    open = staticmethod(NaivePlacement)
