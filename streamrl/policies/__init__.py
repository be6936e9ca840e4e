"""Several policies on one stream: trainers beside the served one, which of them is served, and who samples for each.

Trainer, coordinator and dispatcher ask about policies at ports of their own, whose defaults know one; what is here
answers for several, and ``role.py`` says so.
"""
