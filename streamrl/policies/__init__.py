"""Several policies on one stream: further trainers, which policy is served, and which workers sample for each.

Trainer, coordinator and dispatcher ask about policies through ports whose defaults know one policy. This folder has the
answers for several; ``role.py`` registers them.
"""
