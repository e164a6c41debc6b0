"""A page about a run: one HTML file that needs nothing else, for a browser, a printer or a notebook."""
