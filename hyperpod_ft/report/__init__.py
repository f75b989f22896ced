"""The report: one HTML page about a run, or about several side by side. `gather` reads runs, `page` makes the page."""
