"""What it costs a run to be looked at: demos with and without metrics at once, and viewers who look by turns."""
