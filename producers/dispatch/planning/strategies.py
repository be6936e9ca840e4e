"""The strategies by name. All are pure functions of the items, the workers and the decode curve."""

from producers.dispatch.planning.baselines import least_loaded, lpt, round_robin
from producers.dispatch.planning.paper import paper_max, paper_sum
from producers.dispatch.planning.plans import Strategy
from producers.dispatch.planning.skewness import skewness_aware

STRATEGIES: dict[str, Strategy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "lpt": lpt,
    "skewness_aware": skewness_aware,
    "paper_sum": paper_sum,
    "paper_max": paper_max,
}
