"""Looks at runs from outside, past and present: audit, replay, dead letters, exports, reports, displays."""
