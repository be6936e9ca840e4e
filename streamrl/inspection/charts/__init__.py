"""The charts of the dashboard and of reports: uPlot as it was published, and what we draw with it."""
