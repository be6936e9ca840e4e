"""The policy that every contender starts from: the demo's model, taught a little of every task."""
