from streamrl.schemas.control import Control, control_key
from tests.schemas.examples import examples


def test_compaction_keeps_the_last_order_of_each_subject() -> None:
    keys = {name: control_key(message) for name, message in examples().items() if isinstance(message, Control)}
    assert keys == {
        "control-weights-ready": "weights/policy",
        "control-weights-ready-full": "weights/policy",
        "control-flow": "flow",
        "control-drain-worker": "drain/worker-1",
        "control-worker-claimed": "worker/worker-1",
        "control-run-finished": "finished",
        "control-flow-full": "flow",
        "control-drain-worker-full": "drain/worker-1",
        "control-fleet-target": "fleet",
        "control-weights-ready-promoted": "weights/policy",
        "control-served": "served",
        "control-served-full": "served",
        "control-split": "split",
        "control-split-full": "split",
        "control-arm-weights": "weights/arm/rloo",
        "control-instance": "instance/rloo",
        "control-instance-full": "instance/rloo",
    }
