"""What was measured of a machine: decode curve, training and transfer times; read by dispatch, plan and emulation."""
