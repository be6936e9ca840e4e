"""Coordinator and dispatcher of several policies, as their own tests run them of one policy."""

from functools import partial

from streamrl.policies.coordinating import SeveralPolicyControl
from tests.coordinator import running_coordinator

running = partial(running_coordinator.running, policies=SeveralPolicyControl)
"""A coordinator that is ready; see ``tests/coordinator/running_coordinator.py``."""
