"""Where the workers are: one interface, and the three ways to know.

The rest of the router sees nothing but sets of `Found`; it cannot tell which way they came.
"""

from lockstep_router.discovery.choice import choose_discovery
from lockstep_router.discovery.found import Discovery, Found
from lockstep_router.discovery.report import Report

__all__ = ["Discovery", "Found", "Report", "choose_discovery"]
