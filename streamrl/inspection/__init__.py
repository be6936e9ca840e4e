"""Inspects running and past runs from outside: audit, replay, dead letters, exports, reports, displays."""
