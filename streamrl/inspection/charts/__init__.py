"""The charts of the dashboard and of reports: unmodified uPlot, and our own modules on top of it."""
