"""Coordinator and dispatcher of several policies, as the scenes of their own tests run them of one."""

from functools import partial

from streamrl.policies.coordinating import SeveralPolicyControl
from tests.coordinator import scene

running = partial(scene.running, policies=SeveralPolicyControl)
"""A coordinator that is ready; see ``tests/coordinator/scene.py``."""
