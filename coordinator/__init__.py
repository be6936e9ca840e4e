"""Turns a trained step into control: version ledger, membership, flow, and the relay that serves weights."""
